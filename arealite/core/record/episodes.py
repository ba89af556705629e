"""Episodes in a record: data row, seed and generation requests, as JSON.

Answers that a trajectory holds are not written twice: a sample then refers to a row of the step's batch, and says where
its tokens begin and how many there are.
"""

import base64
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from arealite.api.generation_args import GenerationHyperparameters
from arealite.api.io_struct import ROUTED_EXPERTS, Batch, ModelResponse
from arealite.core.episode import Episode
from arealite.utils.request_log import LoggedRequest

# Marks of what JSON does not have.
_BYTES, _TUPLE = "__bytes__", "__tuple__"
# Columns of a batch that hold an answer.
_ANSWER = ("input_ids", "logprobs", "versions")
_USUAL = vars(GenerationHyperparameters())


class RecordedRequest(NamedTuple):
    """A request of a recorded episode, and what was answered."""

    episode: str
    prompt: list[int]
    seed: int | None
    is_group: bool
    responses: list[ModelResponse]
    # Why it was refused; empty if it was answered.
    error: str = ""
    # What `describe_sampling` says about it; None in records of older versions.
    sampling: dict[str, Any] | None = None


def describe_sampling(gconfig: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sampling parameters that are not the defaults. A request has as many samples as answers."""
    return {key: value for key, value in gconfig.items() if value != _USUAL.get(key) and key != "n_samples"}


class _Row(NamedTuple):
    """Tokens and log-probs of a row of a batch."""

    index: int
    ids: list[int]
    versions: list[int]
    logprobs: np.ndarray

    def holds(self, response: ModelResponse) -> bool:
        start, tokens = len(response.input_tokens), response.output_tokens
        part = slice(start, start + len(tokens))
        return (
            self.ids[part] == tokens
            and self.versions[part] == response.output_versions
            and self.ids[:start] == response.input_tokens
            and np.array_equal(self.logprobs[part], np.array(response.output_logprobs, np.float32))
        )


class TrainedRows:
    """The rows of a batch, without padding. Its columns are read once, not for each episode."""

    def __init__(self, batch: Batch):
        self._lengths = batch["attention_mask"].sum(1).tolist()
        self._ids, self._versions = (batch[key].numpy(force=True) for key in ("input_ids", "versions"))
        # Double, because NumPy has no bfloat16.
        self._logprobs = batch["logprobs"].double().numpy(force=True)

    def take(self, first: int, count: int) -> list[_Row]:
        """Return `count` rows from `first` on."""
        part = slice(first, first + count)
        ids, versions = self._ids[part].tolist(), self._versions[part].tolist()
        lengths = enumerate(self._lengths[part])
        return [_Row(first + i, ids[i][:n], versions[i][:n], self._logprobs[first + i, :n]) for i, n in lengths]


def encode_episode(episode: Episode, seed: int, batch: TrainedRows | None, first_row: int = 0) -> dict[str, Any]:
    """Describe an episode. Its rows in `batch`, if it was trained, begin at `first_row`."""
    result = episode.result
    num_rows = 0 if batch is None or result is None else result.num_samples
    rows = deque(() if batch is None else batch.take(first_row, num_rows))
    data, problem = encode_row(episode.data) if episode.workflow is not None else (None, "restored from a checkpoint")
    return {
        "id": str(episode.id),
        "group": episode.id.group_id,
        "start": episode.start_version,
        "rows": num_rows,
        "seed": episode.data.get("seed", seed),
        "data": data,
        "problem": problem,
        "requests": [_encode_request(each, rows) for each in episode.log or ()],
    }


def encode_row(row: dict[str, Any]) -> tuple[Any, str]:
    """Return a data row as JSON; or None, and why that is not possible."""
    try:
        return _encode(row), ""
    except TypeError as error:
        return None, str(error)


def _encode(value: Any) -> Any:
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _encode(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_encode(item) for item in value]
    if isinstance(value, tuple):
        return {_TUPLE: [_encode(item) for item in value]}
    if isinstance(value, bytes):
        return {_BYTES: base64.b64encode(value).decode()}
    if value is None or isinstance(value, str | int | float):
        return value
    what = "dict whose keys are no text" if isinstance(value, dict) else type(value).__name__
    raise TypeError(f"its row holds a {what}, which cannot be recorded")


def decode_row(value: Any) -> Any:
    """Return the row of `encode_row`."""
    if isinstance(value, dict):
        if value.keys() == {_BYTES}:
            return base64.b64decode(value[_BYTES])
        if value.keys() == {_TUPLE}:
            return tuple(decode_row(item) for item in value[_TUPLE])
        return {key: decode_row(item) for key, item in value.items()}
    return [decode_row(item) for item in value] if isinstance(value, list) else value


def _encode_request(logged: LoggedRequest, rows: deque[_Row]) -> dict[str, Any]:
    samples = [_encode_sample(response, rows) for response in logged.responses]
    encoded: dict[str, Any] = {"seed": logged.seed, "samples": samples}
    if logged.is_group:
        encoded["is_group"] = True
    if logged.error:
        encoded["error"] = logged.error
    if logged.gconfig is not None:
        encoded["sampling"] = describe_sampling(logged.gconfig)
    if not any("at" in sample for sample in samples):
        encoded["prompt"] = logged.prompt
    return encoded


def _encode_sample(response: ModelResponse, rows: deque[_Row]) -> dict[str, Any]:
    """Describe an answer.

    The row that holds it becomes the last of `rows`: mostly the row after it holds the next answer.
    """
    sample: dict[str, Any] = {"stop": response.stop_reason}
    if response.num_interruptions:
        sample["interruptions"] = response.num_interruptions
    number = next((i for i, row in enumerate(rows) if row.holds(response)), None)
    if number is not None:
        row = rows[number]
        rows.rotate(-number - 1)
        return sample | {"at": [row.index, len(response.input_tokens), len(response.output_tokens)]}
    tokens = {"tokens": response.output_tokens, "logprobs": response.output_logprobs}
    return sample | tokens | {"versions": response.output_versions}


def decode_requests(episode: dict[str, Any], batch: Batch | None) -> list[RecordedRequest]:
    """Return the requests of an episode of `encode_episode`, whose batch is `batch`."""
    return [_decode_request(episode["id"], each, batch) for each in episode["requests"]]


def _decode_request(episode: str, encoded: dict[str, Any], batch: Batch | None) -> RecordedRequest:
    found = next((sample["at"] for sample in encoded["samples"] if "at" in sample), None)
    if found is None:
        prompt = encoded["prompt"]
    else:
        assert batch is not None
        prompt = batch["input_ids"][found[0], : found[1]].tolist()
    responses = []
    for sample in encoded["samples"]:
        routed = None
        if "at" in sample:
            assert batch is not None
            row, start, count = sample["at"]
            part = slice(start, start + count)
            tokens, logprobs, versions = (batch[key][row, part].tolist() for key in _ANSWER)
            if ROUTED_EXPERTS in batch:
                # The last token has none.
                routed = batch[ROUTED_EXPERTS][row, : start + count - 1].numpy()
        else:
            tokens, logprobs, versions = sample["tokens"], sample["logprobs"], sample["versions"]
        interruptions = sample.get("interruptions", 0)
        responses.append(ModelResponse(prompt, tokens, logprobs, versions, sample["stop"], interruptions, routed))
    is_group, error = encoded.get("is_group", False), encoded.get("error", "")
    return RecordedRequest(episode, prompt, encoded["seed"], is_group, responses, error, encoded.get("sampling"))
