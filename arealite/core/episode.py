"""Episodes, running and finished, and the check of what its workflow returned.

`Episode` is a small record: tens of thousands may wait at once. `check_trajectories` turns a wrong result into an error
that names the key, the shape and what was expected. Results that pass can be joined if they have the same keys.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from safetensors.torch import save as save_tensors

from arealite.api.errors import NoResultError, TrainingError
from arealite.api.io_struct import IMAGE_FILES, IMAGE_NAMES, STATS_PREFIX, Batch
from arealite.api.reward_api import SOLVED
from arealite.api.workflow_api import RolloutWorkflow
from arealite.utils.data import IMAGE_INDEX, VISION_KEYS, concat_padded, sample_rewards, with_sample_columns
from arealite.utils.request_log import RequestLog
from arealite.utils.trace.episode_clock import Parts

Source = Literal["stream", "submitted", "direct"]
TOKEN_KEYS = ("input_ids", "attention_mask", "loss_mask", "logprobs", "versions")
_KNOWN_KEYS = {*TOKEN_KEYS, "rewards"}
# Newer than every version of the weights.
_NEWEST = 1 << 62


class TrajectoryError(ValueError):
    """A workflow returned something that is not a batch of trajectories."""


class EpisodeId(NamedTuple):
    """Where an episode comes from and its number there. Streamed episodes sort before submitted ones.

    Sources: `stream` (`prepare_batch`; the number is the row's position), `submitted` (`submit`), `direct`
    (`rollout_batch`, evaluations).
    """

    source: Source
    number: int

    @property
    def group_id(self) -> int:
        """One integer for `group_ids` and seeds: submitted episodes count down from -1, the others up from 0."""
        return -1 - self.number if self.source == "submitted" else self.number

    def __str__(self) -> str:
        return str(self.number) if self.source == "stream" else f"{self.source}-{self.number}"


@dataclass(slots=True)
class Trajectories:
    """A workflow's result with the numbers that the executor needs."""

    batch: Batch
    num_samples: int
    num_tokens: int
    oldest_version: int
    mean_reward: float


@dataclass(slots=True, eq=False)
class Episode:
    """A data row, the workflow that runs it, and its progress. `call` is set for direct episodes."""

    id: EpisodeId
    data: dict[str, Any]
    # None: restored from a checkpoint, already finished.
    workflow: RolloutWorkflow | None
    call: DirectCall | None = None
    start_version: int = -1
    started_at: float = 0.0
    task: asyncio.Task | None = None
    result: Trajectories | None = None
    # One for each sample of an episode that the workflow rejected, if it returned them.
    rejected_rewards: torch.Tensor | None = None
    has_ended: bool = False
    # Its lane in the trace; None if it is not traced.
    lane: str | None = None
    # When it ended (unix time), and what its time was spent on.
    finished_at: float | None = None
    parts: Parts | None = None
    # Its generation requests, if the run is recorded.
    log: RequestLog | None = None

    def set_result(self, returned: Any) -> None:
        """Take what the workflow returned: a batch, None, or the rewards of a rejected group alone.

        A simulation returns `Trajectories`: a check of its placeholders would take a fifth of its time.
        """
        if isinstance(returned, Trajectories):
            self.result = returned
        elif isinstance(returned, dict) and returned.keys() == {"rewards"}:
            rewards = returned["rewards"]
            if not isinstance(rewards, torch.Tensor) or rewards.ndim != 1 or not len(rewards):
                raise TrajectoryError("`rewards` of a rejected episode must be a tensor of shape [n]")
            self.rejected_rewards = rewards
        elif returned is not None:
            self.result = check_trajectories(returned)

    @property
    def pass_rate(self) -> float | None:
        """The share of samples that are solved; None if there are no rewards."""
        if self.result is not None:
            rewards = sample_rewards(self.result.batch)
        elif self.rejected_rewards is not None:
            rewards = self.rejected_rewards.tolist()
        else:
            return None
        return sum(reward >= SOLVED for reward in rewards) / len(rewards)


@dataclass(slots=True, eq=False)
class DirectCall:
    """Episodes that bypass the staleness limit: a `rollout_batch`, or an evaluation beside training.

    Guarded by the executor's lock. At most `max_running` episodes run at once, if it is set.
    """

    start_version: int
    max_running: int | None = None
    episodes: list[Episode] = field(default_factory=list)
    # Episodes that have not started, and how many have not ended.
    pending: deque[Episode] = field(default_factory=deque)
    remaining: int = 0
    first_error: BaseException | None = None
    # Why episodes failed, by number.
    reasons: dict[int, str] = field(default_factory=dict)

    def add(self, episodes: Iterable[Episode]) -> None:
        self.episodes = list(episodes)
        self.pending.extend(self.episodes)
        self.remaining = len(self.episodes)

    def take_startable(self) -> list[Episode]:
        """Remove and return the pending episodes that may start now."""
        num_waiting = len(self.pending)
        room = num_waiting if self.max_running is None else self.max_running - (self.remaining - num_waiting)
        return [self.pending.popleft() for _ in range(min(room, num_waiting))]

    def succeeded(self) -> list[Episode]:
        """Episodes with a result, in their order."""
        return [e for e in self.episodes if e.result is not None and e.id.number not in self.reasons]

    def join(self) -> Batch:
        """Join the results to one batch."""
        self.raise_if_all_failed()
        return join_trajectories(self.succeeded())

    def raise_if_all_failed(self) -> None:
        """Raise `NoResultError`, with the first cause, if no episode has a result."""
        if not self.succeeded():
            cause = next(iter(self.reasons.values()), "all were rejected")
            text = f"none of {len(self.episodes)} episodes gave a result; first cause: {cause}"
            raise NoResultError(text) from self.first_error


class FinishedEpisodes:
    """The buffer between generation and training: a heap ordered by id, guarded by the executor's lock."""

    def __init__(self) -> None:
        # Flat tuples compare faster than nested ones.
        self._heap: list[tuple[str, int, Episode]] = []
        # No token in the buffer is older than this version. Spares a scan each time the trainer wakes up.
        self._oldest_version = _NEWEST

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, episode: Episode) -> None:
        heapq.heappush(self._heap, (episode.id.source, episode.id.number, episode))
        if episode.result and episode.result.oldest_version < self._oldest_version:
            self._oldest_version = episode.result.oldest_version

    def pop_oldest(self, count: int) -> list[Episode]:
        return [heapq.heappop(self._heap)[2] for _ in range(count)]

    def pop_stale(self, oldest_allowed: int) -> list[Episode]:
        """Remove and return the episodes that have a token of a version before `oldest_allowed`."""
        if self._oldest_version >= oldest_allowed:
            return []
        stale = [e for _, _, e in self._heap if e.result and e.result.oldest_version < oldest_allowed]
        if stale:
            removed = set(stale)
            self._heap = [item for item in self._heap if item[2] not in removed]
            heapq.heapify(self._heap)
        self._oldest_version = min((e.result.oldest_version for _, _, e in self._heap if e.result), default=_NEWEST)
        return stale

    def in_order(self) -> list[Episode]:
        return [episode for *_, episode in sorted(self._heap, key=lambda item: item[:2])]


def copy_containers(value: Any) -> Any:
    """Copy dicts and lists, so that a workflow that changes its row does not change the dataset."""
    if type(value) is list:
        return [copy_containers(item) if type(item) in (dict, list) else item for item in value]
    return {k: copy_containers(v) for k, v in value.items()} if type(value) is dict else value


def check_trajectories(result: Any) -> Trajectories:
    """Check keys, shapes and values of a workflow's result; raises `TrajectoryError`."""
    if not isinstance(result, dict):
        raise TrajectoryError(
            f"arun_episode returned {type(result).__name__}; expected a dict of tensors, such as "
            "Trajectory.join([…]) makes, or None to reject"
        )
    rewards, shape = result.get("rewards"), _common_shape(result)
    if not isinstance(rewards, torch.Tensor) or rewards.shape != shape[:1]:
        actual = tuple(rewards.shape) if isinstance(rewards, torch.Tensor) else rewards
        raise TrajectoryError(f"`rewards` is {actual}; expected a tensor of shape [{shape[0]}]")
    if not math.isfinite(sum(rewards.tolist())):
        raise TrajectoryError(f"`rewards` are not finite: {rewards.tolist()}")
    if not math.isfinite(np.add.reduce(_array(result["logprobs"]), axis=None)):
        raise TrajectoryError("`logprobs` are not finite: the server or the workflow returned NaN or infinity")
    image_keys = check_images(result) if IMAGE_INDEX in result else set()
    for key in result.keys() - _KNOWN_KEYS - image_keys:
        value = result[key] if isinstance(key, str) else None
        if not isinstance(value, torch.Tensor) or value.ndim == 0 or len(value) != shape[0]:
            raise TrajectoryError(f"`{key}` must be a tensor whose first dimension is {shape[0]}")
        if key.startswith(STATS_PREFIX) and (value.ndim > 1 or not value.is_floating_point()):
            raise TrajectoryError(
                f"`{key}` is {value.dtype} {list(value.shape)}; expected floats of shape [{shape[0]}]"
            )
    _check_samples(result)
    mask = _array(result["attention_mask"])
    num_tokens = int(np.count_nonzero(mask))
    if num_tokens == 0:
        raise TrajectoryError("`attention_mask` is zero everywhere: the trajectories are empty")
    if num_tokens < mask.size and (mask[:, 1:] > mask[:, :-1]).any():
        raise TrajectoryError("`attention_mask` has a token after padding: pad rows on the right")
    values = sample_rewards(result)
    return Trajectories(
        batch=result,
        num_samples=shape[0],
        num_tokens=num_tokens,
        oldest_version=oldest_version(result["versions"]),
        mean_reward=sum(values) / len(values),
    )


def check_images(result: dict[str, Any]) -> set[str]:
    """Check that every row names an image set that exists; returns the keys of the sets."""
    keys = result.keys() & {*VISION_KEYS}
    index = result[IMAGE_INDEX]
    if not isinstance(index, torch.Tensor) or index.ndim != 1 or index.dtype.is_floating_point:
        raise TrajectoryError(f"`{IMAGE_INDEX}` must be a tensor [n] of whole numbers: the image set of each row")
    sets = [result[key] for key in sorted(keys)]
    if "pixel_values" not in keys or not all(
        isinstance(s, torch.Tensor) and s.ndim and len(s) == len(sets[0]) for s in sets
    ):
        raise TrajectoryError(f"the columns {sorted(keys)} must be tensors with one entry for each image set")
    if len(index) and (int(index.min()) < -1 or int(index.max()) >= len(sets[0])):
        raise TrajectoryError(f"`{IMAGE_INDEX}` names set {int(index.max())}, but there are {len(sets[0])} image sets")
    return keys


def _check_samples(result: Batch) -> None:
    """Check the columns that rows of several samples, and samples of several rows, bring."""
    ids, returns = result.get("sample_ids"), result.get("token_rewards")
    if ids is not None and (ids.ndim > 1 or ids.dtype != torch.long or bool((ids < 0).any())):
        raise TrajectoryError(
            f"`sample_ids` is {ids.dtype} {list(ids.shape)}; expected whole numbers from 0, one a row"
        )
    if returns is not None and (returns.shape != result["input_ids"].shape or not returns.is_floating_point()):
        raise TrajectoryError(f"`token_rewards` is {returns.dtype} {list(returns.shape)}; expected floats [n, T]")
    if returns is not None and not bool(returns.isfinite().all()):
        raise TrajectoryError("`token_rewards` are not finite")


def oldest_version(versions: torch.Tensor) -> int:
    """Return the smallest version of a generated token; a batch without any never becomes stale."""
    # Read as unsigned, -1 (not generated) is the largest number.
    unsigned = _array(versions).astype(np.int64, copy=False).view(np.uint64)
    smallest = int(np.minimum.reduce(unsigned, axis=None))
    return smallest if smallest < 1 << 63 else 1 << 30


def _array(tensor: torch.Tensor) -> np.ndarray:
    """View as NumPy, which reduces small arrays faster than torch and keeps the GIL."""
    # A sum in half precision overflows.
    if tensor.dtype in (torch.bfloat16, torch.float16):
        tensor = tensor.float()
    return tensor.numpy(force=tensor.requires_grad or tensor.is_cuda)


def _common_shape(result: dict[str, Any]) -> torch.Size:
    if not result.keys() >= _KNOWN_KEYS:
        missing = sorted(_KNOWN_KEYS - result.keys())
        raise TrajectoryError(f"the workflow's result lacks {missing}; it has {sorted(result)}")
    first = result["input_ids"]
    if not isinstance(first, torch.Tensor) or first.ndim != 2 or 0 in first.shape:
        actual = list(first.shape) if isinstance(first, torch.Tensor) else type(first).__name__
        raise TrajectoryError(f"`input_ids` must be a tensor [n, T], got {actual}")
    if first.dtype.is_floating_point:
        raise TrajectoryError(f"`input_ids` must be whole numbers, got {first.dtype}")
    for key in TOKEN_KEYS:
        value = result[key]
        if not isinstance(value, torch.Tensor) or value.shape != first.shape:
            actual = list(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
            raise TrajectoryError(
                f"`{key}` is {actual}, but `input_ids` is {list(first.shape)}: all of {TOKEN_KEYS} share one shape"
            )
    return first.shape


def to_bytes(batch: Batch) -> bytes:
    """Serialize a batch as safetensors. Tensors are copied: the format rejects those that share memory."""
    return save_tensors({k: v.detach().cpu().clone(memory_format=torch.contiguous_format) for k, v in batch.items()})


def _without_files(batches: list[Batch]) -> list[Batch]:
    """Drop encoded images, which trainers do not need, and their names unless all image sets have some.

    Image sets of a checkpoint of an older version have none.
    """
    dropped = {IMAGE_FILES}
    if any(IMAGE_INDEX in batch and IMAGE_NAMES not in batch for batch in batches):
        dropped.add(IMAGE_NAMES)
    return [{key: value for key, value in batch.items() if key not in dropped} for batch in batches]


def join_trajectories(episodes: list[Episode]) -> Batch:
    """Join the results of finished episodes to one batch; each episode is one group."""
    results = [episode.result for episode in episodes if episode.result is not None]
    try:
        batch = concat_padded(with_sample_columns(_without_files([result.batch for result in results])))
    except (ValueError, RuntimeError) as error:
        raise TrainingError(
            f"the results of episodes {episodes[0].id} to {episodes[-1].id} cannot be joined to one batch: {error}. A "
            "workflow must return the same keys for every row, with the same shapes apart from samples and tokens"
        ) from error
    pairs = zip(episodes, results, strict=True)
    batch["group_ids"] = torch.tensor([e.id.group_id for e, r in pairs for _ in range(r.num_samples)])
    return batch
