"""Reward models: served by SGLang or vLLM, or loaded in the process that computes rewards."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from arealite.api.errors import ConfigError, RewardError
from arealite.reward.endpoint import Endpoint
from arealite.utils.text import clean


class ServedRewardModel:
    """The score of a reward model behind `/classify` (SGLang) or `/pooling` (vLLM).

    It is sent the text of prompt and completion, and `end_token`: the text of the token with which answers ended in the
    training of the reward model (`eos_token` of its tokenizer for those that `trainer.type=rw` trains; empty for none).
    Limits are those of `Endpoint`.
    """

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

    It is loaded once in each process that computes rewards: give the workflow `RewardPool(num_workers=1)`, or pass
    `reward_inline=True`. With `uses_ids` the tokens are scored as they are; the policy must then have the tokenizer of
    the reward model. Otherwise the text, with the special tokens that the prompt has, is encoded anew and ended as in
    training. Only the last `max_tokens` are read.
    """

    def __init__(self, path: str, device: str = "cpu", uses_ids: bool = False, max_tokens: int = 4096):
        self.path, self.device, self.uses_ids, self.max_tokens = path, device, uses_ids, max_tokens

    def __call__(
        self,
        prompt: str = "",
        completion: str = "",
        prompt_ids: Sequence[int] = (),
        completion_ids: Sequence[int] = (),
        **data: Any,
    ) -> float:
        tokenizer, model = _load(self.path, self.device)
        ids = [*prompt_ids, *completion_ids] if self.uses_ids else _encode(tokenizer, prompt + completion)
        with torch.inference_mode():
            batch = torch.tensor([ids[-self.max_tokens :]], device=self.device)
            return float(model(batch, attention_mask=torch.ones_like(batch)).logits[0, 0])


def _encode(tokenizer: Any, text: str) -> list[int]:
    ids, end = tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id
    return ids if end is None or ids[-1:] == [end] else [*ids, end]


@lru_cache(maxsize=2)
def _load(path: str, device: str) -> tuple[Any, Any]:
    try:
        model = AutoModelForSequenceClassification.from_pretrained(path, dtype="auto")
        tokenizer = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot load a reward model from {path}: {str(error).strip().splitlines()[0]}") from error
    if model.config.num_labels != 1:
        raise ConfigError(f"{path} has {model.config.num_labels} labels; a reward model has one")
    return tokenizer, model.eval().to(device)
