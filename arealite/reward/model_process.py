"""`ModelProcess`: a reward model in a process of its own, which scores waiting answers together.

Answers that arrive while the process scores others become its next job. It sorts them by length and scores them in
batches. Nothing of it runs on the event loop, and a run has one copy of the model, not one for each reward worker.
"""

import asyncio
import pickle
from collections.abc import AsyncGenerator, Iterator, Sequence
from functools import lru_cache
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from arealite.api.errors import ConfigError, RewardError
from arealite.utils.pools.job_pool import JobPool
from arealite.utils.pools.process_pool import WorkerLost

# For one job, and for loading the model before the first one.
_TIMEOUT_S = 1800.0
_MAX_JOB_ROWS = 256
# In the folder of an adapter.
ADAPTER = "adapter_config.json"
# Tokens of a batch, with padding.
_BATCH_TOKENS = {"cuda": 16_384, "cpu": 4_096}


class ModelSpec(NamedTuple):
    """A model, its device (`auto`: a GPU if there is one), and how many tokens of an answer it reads."""

    path: str
    device: str
    max_tokens: int


# The texts of prompt and completion, or their tokens.
Answer = tuple[str, str] | list[int]


class ModelProcess(JobPool):
    """One process that scores answers; it starts with the first of them."""

    def __init__(self, spec: ModelSpec):
        super().__init__(1, answer_job, "arealite-reward-model")
        self.spec = spec
        self._queue: list[tuple[Answer, asyncio.Future[float]]] = []
        self._sender: asyncio.Task[None] | None = None
        # Why there is no model: loading it again would take as long and fail again.
        self._refusal: str | None = None
        self._lifetime = self._close_with_loop()

    async def score(self, answer: Answer) -> float:
        """Return the score of an answer; raises `RewardError`."""
        if self._sender is None:
            await anext(self._lifetime)
        future = asyncio.get_running_loop().create_future()
        self._queue.append((answer, future))
        if self._sender is None or self._sender.done():
            self._sender = asyncio.create_task(self._send_queue(), name="reward model")
        return await future

    async def _send_queue(self) -> None:
        while self._queue:
            sent, self._queue = self._queue[:_MAX_JOB_ROWS], self._queue[_MAX_JOB_ROWS:]
            try:
                scores = await self._ask([answer for answer, _ in sent])
            # Whatever it is, nobody else would tell those who wait.
            except Exception as error:
                text = str(error) if isinstance(error, RewardError) else repr(error)
                for _, future in sent:
                    if not future.done():
                        future.set_exception(RewardError(text))
                continue
            for (_, future), score in zip(sent, scores, strict=True):
                if not future.done():
                    future.set_result(score)

    async def _ask(self, answers: list[Answer]) -> list[float]:
        if self._refusal is not None:
            raise RewardError(self._refusal)
        worker = await self._acquire(__name__)
        worker.channel.send((self.spec, answers))
        try:
            kind, payload = await worker.receive(_TIMEOUT_S)
        except WorkerLost as lost:
            self._replace(worker)
            raise RewardError(f"the process of the reward model {self.spec.path} {lost}") from None
        self._on_ready(worker)
        if kind == "refused":
            self._refusal = payload
        if kind != "done":
            raise RewardError(payload)
        return payload

    def _start_error(self, lost: WorkerLost) -> RewardError:
        return RewardError(f"the process of the reward model {self.spec.path} did not start: it {lost}")

    async def _close_with_loop(self) -> AsyncGenerator[None, None]:
        """End the process when the event loop ends: whoever ends a loop also ends its generators."""
        try:
            yield
        finally:
            self.close()
            _processes.pop((asyncio.get_running_loop(), self.spec), None)


_processes: dict[tuple[asyncio.AbstractEventLoop, ModelSpec], ModelProcess] = {}


def shared_process(spec: ModelSpec) -> ModelProcess:
    """Return the process of a model, the same one for everything that runs on an event loop."""
    key = asyncio.get_running_loop(), spec
    if key not in _processes:
        _processes[key] = ModelProcess(spec)
    return _processes[key]


def answer_job(owner: Connection, job: Any) -> bytes:
    """Return the scores of the answers of a job, or why there are none, in the process of the model."""
    spec, answers = job
    try:
        tokenizer, model = load_model(spec.path, spec.device)
        result = "done", score_answers(tokenizer, model, answers, spec.max_tokens)
    except ConfigError as error:
        result = "refused", str(error)
    # Models and their files may raise anything; the run needs the reason.
    except Exception as error:
        result = "error", f"the reward model {spec.path}: {type(error).__name__}: {str(error).strip()[:2000]}"
    return pickle.dumps(result)


@lru_cache(maxsize=1)
def load_model(path: str, device: str) -> tuple[Any, Any]:
    """Return the tokenizer and the model of a folder, or of a name of the hub; raises `ConfigError`."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype: Any = torch.float32 if device == "cpu" else "auto"
    # The config.json of an adapter is that of the model under it, which may be a language model.
    own = {"num_labels": 1} if Path(path, ADAPTER).is_file() else {}
    try:
        model = AutoModelForSequenceClassification.from_pretrained(path, dtype=dtype, **own)
        tokenizer = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot load a reward model from {path}: {str(error).strip().splitlines()[0]}") from error
    if model.config.num_labels != 1:
        raise ConfigError(f"{path} has {model.config.num_labels} labels; a reward model has one")
    _compute_scores_in_float32(model)
    return tokenizer, model.eval().to(device)


def _compute_scores_in_float32(model: Any) -> None:
    """Let the layer that makes the score compute in float32.

    In bfloat16 scores above 1 are multiples of 1/128. Answers to one prompt often differ by less, and GRPO divides by
    their standard deviation.
    """
    backbone = set(model.base_model.modules())
    for module in model.modules():
        if isinstance(module, torch.nn.Linear) and module.out_features == 1 and module not in backbone:
            module.float()
            module.register_forward_pre_hook(lambda _, inputs: tuple(value.float() for value in inputs))


def score_answers(tokenizer: Any, model: Any, answers: Sequence[Answer], max_tokens: int) -> list[float]:
    """Return the score of each answer, in their order."""
    # For a folder without a tokenizer transformers makes one that knows special tokens only.
    if any(isinstance(a, tuple) for a in answers) and len(tokenizer) - len(set(tokenizer.all_special_ids)) < 2:
        raise ConfigError(f"{tokenizer.name_or_path} holds a reward model without a tokenizer")
    rows = [(_encode(tokenizer, *a) if isinstance(a, tuple) else a)[-max_tokens:] for a in answers]
    scores = [0.0] * len(rows)
    limit = _BATCH_TOKENS["cpu" if model.device.type == "cpu" else "cuda"]
    for batch in _split(rows, limit):
        for i, score in zip(batch, _forward(model, [rows[i] for i in batch]), strict=True):
            scores[i] = score
    return scores


def _encode(tokenizer: Any, prompt: str, completion: str) -> list[int]:
    # Separately, as in training: no token spans the border between them.
    ids = [token for text in (prompt, completion) for token in tokenizer.encode(text, add_special_tokens=False)]
    end = tokenizer.eos_token_id
    return ids if end is None or ids[-1:] == [end] else [*ids, end]


def _split(rows: Sequence[Sequence[int]], limit: int) -> Iterator[list[int]]:
    """Yield batches of row numbers: rows of similar length, at most `limit` tokens with padding."""
    batch: list[int] = []
    for i in sorted(range(len(rows)), key=lambda i: len(rows[i])):
        if batch and (len(batch) + 1) * len(rows[i]) > limit:
            yield batch
            batch = []
        batch.append(i)
    yield batch


@torch.inference_mode()
def _forward(model: Any, rows: Sequence[Sequence[int]]) -> list[float]:
    lengths, used = torch.tensor([len(row) for row in rows]), {token for row in rows for token in row}
    config = model.config.get_text_config()
    # Models score the last token that is no padding: a token that is in no row, unlike the tokenizer's, which may be
    # the one that ends answers.
    padding = next(token for token in count() if token not in used)
    is_even = bool((lengths == lengths[0]).all())
    if not is_even and padding >= config.vocab_size:
        return [score for row in rows for score in _forward(model, [row])]
    config.pad_token_id = None if len(rows) == 1 else padding
    tokens = torch.full((len(rows), int(lengths.max())), 0 if is_even else padding)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = torch.tensor(row)
    mask = torch.arange(tokens.shape[1]) < lengths[:, None]
    outputs = model(tokens.to(model.device), attention_mask=mask.long().to(model.device))
    return outputs.logits[:, 0].float().tolist()
