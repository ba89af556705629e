"""One episode on its way through the executor, and the check of what a workflow returned.

`Episode` is a plain record kept small (tens of thousands wait at once). `check_trajectories` turns a wrong result into a message
that names the key, the shape and what was expected; results that pass can be joined if they have the same keys.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from arealite.api.errors import TrainingError
from arealite.api.io_struct import Batch
from arealite.api.workflow_api import RolloutWorkflow
from arealite.utils.data import concat_padded

TOKEN_KEYS = ("input_ids", "attention_mask", "loss_mask", "logprobs", "versions")
_KNOWN_KEYS = {*TOKEN_KEYS, "rewards"}


class TrajectoryError(ValueError):
    """A workflow returned something that is not a batch of trajectories."""


@dataclass(slots=True)
class Trajectories:
    """A workflow's result with the few numbers the executor needs of it."""

    batch: Batch
    num_samples: int
    num_tokens: int
    oldest_version: int
    mean_reward: float


@dataclass(slots=True, eq=False)
class Episode:
    """A data row, the workflow that plays it, and how far it got. `call` is set for `rollout_batch`."""

    id: int
    data: dict[str, Any]
    workflow: RolloutWorkflow | None  # None: restored from a checkpoint, already played
    call: DirectCall | None = None
    start_version: int = -1
    started_at: float = 0.0
    task: asyncio.Task | None = None
    result: Trajectories | None = None
    has_ended: bool = False


@dataclass(slots=True, eq=False)
class DirectCall:
    """One `rollout_batch`: its episodes bypass admission by version and come back together."""

    remaining: int
    results: dict[int, Trajectories] = field(default_factory=dict)
    errors: list[BaseException] = field(default_factory=list)


def episode_seed(run_seed: int, episode_id: int) -> int:
    """The sampling seed of an episode: stable over restarts, unrelated between neighbours (splitmix64)."""
    mask = (1 << 64) - 1
    z = (run_seed * 0xD1342543DE82EF95 + (episode_id + 1) * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    # 31 bits less room for `+ sample index`: servers take a signed 32-bit seed
    return (z ^ (z >> 31)) % ((1 << 31) - (1 << 16))


def own_copy(value: Any) -> Any:
    """A row's value with dicts and lists of its own: a workflow that changes them (appends to `messages`) leaves the dataset as it was."""
    if type(value) is list:
        return [own_copy(item) if type(item) in (dict, list) else item for item in value]
    return {k: own_copy(v) for k, v in value.items()} if type(value) is dict else value


def check_trajectories(result: Any) -> Trajectories:
    """Check shapes, keys and values of a workflow's result; raises `TrajectoryError`."""
    if not isinstance(result, dict):
        raise TrajectoryError(
            f"arun_episode returned {type(result).__name__}; expected a dict of tensors, or None to reject"
        )
    rewards, shape = result.get("rewards"), _common_shape(result)
    if not isinstance(rewards, torch.Tensor) or rewards.shape != shape[:1]:
        given = tuple(rewards.shape) if isinstance(rewards, torch.Tensor) else rewards
        raise TrajectoryError(f"`rewards` is {given}; expected a tensor of shape [{shape[0]}]")
    total = sum(rewards.tolist())
    if not math.isfinite(total):
        raise TrajectoryError(f"`rewards` are not finite: {rewards.tolist()}")
    if not math.isfinite(np.add.reduce(_array(result["logprobs"]), axis=None)):
        raise TrajectoryError("`logprobs` are not finite: the server or the workflow made NaN or infinity")
    for key in result.keys() - _KNOWN_KEYS:
        value = result[key] if isinstance(key, str) else None
        if not isinstance(value, torch.Tensor) or value.ndim == 0 or len(value) != shape[0]:
            raise TrajectoryError(f"`{key}` must be a tensor whose first dimension is {shape[0]}")
    mask = _array(result["attention_mask"])
    num_tokens = int(np.count_nonzero(mask))
    if num_tokens == 0:
        raise TrajectoryError("`attention_mask` is zero everywhere: the trajectories are empty")
    if num_tokens < mask.size and (mask[:, 1:] > mask[:, :-1]).any():
        raise TrajectoryError("`attention_mask` has a token after padding: pad rows on the right")
    return Trajectories(
        batch=result,
        num_samples=shape[0],
        num_tokens=num_tokens,
        oldest_version=oldest_version(result["versions"]),
        mean_reward=total / shape[0],
    )


def oldest_version(versions: torch.Tensor) -> int:
    """Smallest version of a generated token; a batch without any counts as never stale."""
    # read as unsigned, -1 (not generated) is the largest number there is
    unsigned = _array(versions).astype(np.int64, copy=False).view(np.uint64)
    smallest = int(np.minimum.reduce(unsigned, axis=None))
    return smallest if smallest < 1 << 63 else 1 << 30


def _array(tensor: torch.Tensor) -> np.ndarray:
    """NumPy reduces small arrays faster than torch and keeps the interpreter's lock; this runs for every episode."""
    if tensor.dtype in (torch.bfloat16, torch.float16):  # a sum of half precision overflows
        tensor = tensor.float()
    return tensor.numpy(force=tensor.requires_grad or tensor.is_cuda)


def _common_shape(result: dict[str, Any]) -> torch.Size:
    if not result.keys() >= _KNOWN_KEYS:
        missing = sorted(_KNOWN_KEYS - result.keys())
        raise TrajectoryError(f"the workflow's result lacks {missing}; it has {sorted(result)}")
    first = result["input_ids"]
    if not isinstance(first, torch.Tensor) or first.ndim != 2 or 0 in first.shape:
        given = list(first.shape) if isinstance(first, torch.Tensor) else type(first).__name__
        raise TrajectoryError(f"`input_ids` must be a tensor [n, T], got {given}")
    if first.dtype.is_floating_point:
        raise TrajectoryError(f"`input_ids` must be whole numbers, got {first.dtype}")
    for key in TOKEN_KEYS:
        value = result[key]
        if not isinstance(value, torch.Tensor) or value.shape != first.shape:
            given = list(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
            raise TrajectoryError(
                f"`{key}` is {given}, but `input_ids` is {list(first.shape)}: all of {TOKEN_KEYS} share one shape"
            )
    return first.shape


def join_trajectories(ids: list[int], results: list[Trajectories]) -> Batch:
    """Results of several episodes as one batch, each with its id as `group_ids`."""
    try:
        batch = concat_padded([result.batch for result in results])
    except (ValueError, RuntimeError) as error:
        raise TrainingError(
            f"what episodes {ids[0]} to {ids[-1]} returned cannot be joined to one batch: {error}. A workflow must return the same keys for "
            "every row, and of the same shape but for samples and tokens"
        ) from error
    pairs = zip(ids, results, strict=True)
    batch["group_ids"] = torch.tensor([i for i, r in pairs for _ in range(r.num_samples)])
    return batch
