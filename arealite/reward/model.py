"""Reward models: served by SGLang or vLLM, or loaded in a process of the run."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from arealite.api.errors import ConfigError, RewardError
from arealite.reward import model_process
from arealite.reward.endpoint import Endpoint
from arealite.reward.model_process import ADAPTER, ModelSpec, shared_process
from arealite.utils.text import clean


class ServedRewardModel:
    """The score of a reward model behind `/classify` (SGLang) or `/pooling` (vLLM).

    It is sent the text of prompt and completion, and `end_token`: the text of the token with which answers ended in the
    training of the reward model (`eos_token` of its tokenizer for those that `trainer.type=rw` trains; empty for none).
    Limits are those of `Endpoint`.
    """

    is_score = True

    def __init__(
        self,
        url: str,
        model: str,
        *,
        end_token: str,
        backend: Literal["sglang", "vllm"] = "sglang",
        api_key_env: str = "",
        **limits: Any,
    ):
        if backend not in ("sglang", "vllm"):
            raise ConfigError(f"a reward model is served by sglang or vllm, not {backend!r}")
        path = "classify" if backend == "sglang" else "pooling"
        self.endpoint = Endpoint(f"{url.rstrip('/')}/{path}", api_key_env, **limits)
        self.model, self.backend, self.end_token = model, backend, end_token

    async def __call__(self, prompt: str = "", completion: str = "", *ids: Any, **data: Any) -> float:
        text = (prompt + completion.removesuffix(self.end_token) + self.end_token).encode(errors="replace").decode()
        field = "text" if self.backend == "sglang" else "input"
        answer = await self.endpoint.post({"model": self.model, field: text})
        try:
            first = answer[0] if isinstance(answer, list) else answer
            values = first["embedding"] if self.backend == "sglang" else first["data"][0]["data"]
            # A score, or one for each token: the last is that of the whole text.
            while isinstance(values, list):
                values = values[-1]
            return float(values)
        except (KeyError, IndexError, TypeError, ValueError):
            text = clean(str(answer)[:200])
            raise RewardError(f"{self.endpoint.url} answered something without a score: {text}") from None


class LocalRewardModel:
    """The score of a sequence classifier of Hugging Face, such as `trainer.type=rw` trains.

    `path` is a folder, which may hold an adapter of PEFT, or a name of the hub. A process of its own loads it with the
    first answer, on the trainer's GPU if there is one (`device`), and scores the answers that wait together. Each
    rollout worker has such a process. With `uses_ids` the tokens are scored as they are; the policy must then have the
    tokenizer of the reward model. Otherwise the text, with the special tokens that the prompt has, is encoded anew and
    ended as in training. Only the last `max_tokens` are read.
    """

    is_score = True
    worker_module = model_process.__name__

    def __init__(self, path: str, device: str = "auto", uses_ids: bool = False, max_tokens: int = 4096):
        self.uses_ids, self.spec = uses_ids, ModelSpec(_check_folder(path), device, max_tokens)

    def __repr__(self) -> str:
        return f"LocalRewardModel({self.spec.path!r})"

    async def __call__(
        self,
        prompt: str = "",
        completion: str = "",
        prompt_ids: Sequence[int] = (),
        completion_ids: Sequence[int] = (),
        **data: Any,
    ) -> float:
        answer = [*prompt_ids, *completion_ids] if self.uses_ids else (prompt, completion)
        return await shared_process(self.spec).score(answer)


def _check_folder(path: str) -> str:
    """Return an absolute folder, or the name of a model of the hub; raises `ConfigError` for others."""
    folder = Path(path)
    if not folder.is_dir():
        if folder.is_absolute() or path.startswith((".", "~")) or path.count("/") != 1:
            raise ConfigError(f"there is no reward model in {path}: give a folder, or a name of the hub (owner/name)")
        return path
    if (folder / ADAPTER).is_file():
        _check_adapter(folder)
    else:
        _check_classifier(folder)
    return str(folder.resolve())


def _check_classifier(folder: Path) -> None:
    config = _read_json(folder / "config.json")
    kinds = config.get("architectures") or ["no model"]
    if not kinds[0].endswith("ForSequenceClassification"):
        raise ConfigError(
            f"{folder} holds {kinds[0]}; a reward model is a sequence classifier with one output, such as "
            "trainer.type=rw trains"
        )
    # Without names the number is that of transformers, and known only when the model is loaded.
    labels = config.get("id2label") or [""]
    if len(labels) != 1:
        raise ConfigError(f"{folder} has {len(labels)} labels; a reward model has one")


def _check_adapter(folder: Path) -> None:
    if "score" not in (_read_json(folder / ADAPTER).get("modules_to_save") or []):
        raise ConfigError(
            f"{folder} holds an adapter without a scalar head; that of a reward model has one, such as trainer.type=rw "
            "trains"
        )


def _read_json(file: Path) -> dict[str, Any]:
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot load a reward model from {file.parent}: {error}") from None
