"""The contracts of engines and workflows.

`TrainEngine` updates a model, `InferenceEngine` generates with it, `RolloutWorkflow` turns a data row into
trajectories. Engines are used the same way on one device and on many: every rank calls the same methods in the same
order (SPMD).

Decorators such as `@returns_column` mark what a method returns. They set an attribute and nothing else. Controller
mode, where engines live in other processes, reads it to decide what stays there and when the script waits.
"""

from __future__ import annotations

import abc
import asyncio
import enum
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, TypeVar

import torch

from arealite.api.io_struct import (
    Batch,
    FinetuneSpec,
    ModelRequest,
    ModelResponse,
    SaveLoadMeta,
    Stat,
    Stats,
    WeightUpdateMeta,
)

# Called once per packed micro-batch with the model's outputs ({"logp": [N], "entropy": [N]}, or {"values": [N]})
# and the micro-batch itself. Returns the SUM of the loss over the micro-batch, and statistics.
LossFn = Callable[[Batch, Batch], tuple[torch.Tensor, dict[str, Stat]]]
# The weight of a (micro-)batch. The summed loss is divided by the sum of weights over all micro-batches and ranks.
LossWeightFn = Callable[[Batch], torch.Tensor]

Method = TypeVar("Method", bound=Callable[..., Any])


class Result(enum.Enum):
    """What a method returns, and whether the script of controller mode waits for it."""

    VALUE = "a plain value; the script waits for it"
    BATCH = "a batch, which stays on the ranks"
    COLUMN = "a tensor with one row for each row of the batch, which stays on the ranks"
    ADDED_COLUMNS = "nothing; adds columns to the batch that it was given, which stay on the ranks"
    STATS = "a list of statistics; the script waits when it reads them"
    NOTHING = "nothing; the script does not wait"


def _marker(result: Result) -> Callable[[Method], Method]:
    def mark(method: Method) -> Method:
        method.__dict__["result"] = result
        return method

    return mark


returns_batch = _marker(Result.BATCH)
returns_column = _marker(Result.COLUMN)
adds_columns = _marker(Result.ADDED_COLUMNS)
returns_stats = _marker(Result.STATS)
returns_nothing = _marker(Result.NOTHING)


def result_of(cls: type, method: str) -> Result:
    """Return the mark of a method. An override without a mark has that of the method it overrides."""
    marks = (getattr(base.__dict__.get(method), "result", None) for base in cls.__mro__)
    return next((mark for mark in marks if isinstance(mark, Result)), Result.VALUE)


class TrainEngine(abc.ABC):
    """A model and its optimizer, sharded over ranks."""

    @abc.abstractmethod
    @returns_nothing
    def initialize(self, ft_spec: FinetuneSpec | None = None) -> None:
        """Load and shard the model, create the optimizer. `ft_spec` sets the length of the schedule."""

    @abc.abstractmethod
    def destroy(self) -> None:
        """Free the model; idempotent."""

    @returns_nothing
    def warm_up(self) -> None:
        """Compile ahead, so that the first batch need not wait for it. Changes no result of training.

        All ranks call it together, when the first episodes run.
        """

    @abc.abstractmethod
    def train_batch(self, batch: Batch, loss_fn: LossFn, loss_weight_fn: LossWeightFn) -> Stats:
        """Make one optimizer step on this rank's padded `batch`. Returns statistics reduced over all ranks.

        The gradient is that of Σ loss_fn / Σ loss_weight_fn over all micro-batches of all ranks. A non-finite
        gradient skips the step and is counted in `bad_steps`.
        """

    @abc.abstractmethod
    def eval_batch(self, batch: Batch, loss_fn: LossFn, loss_weight_fn: LossWeightFn) -> Stats:
        """Compute the statistics of `train_batch` without a gradient or a step."""

    @abc.abstractmethod
    @returns_batch
    def forward(self, batch: Batch) -> Batch:
        """Return model outputs `{"logp": [B, T]}`, padded like `batch`. Token 0 of a sequence has 0."""

    @abc.abstractmethod
    def update_weights(self, meta: WeightUpdateMeta) -> None:
        """Publish the current weights as `meta` describes. Called by all ranks."""

    @abc.abstractmethod
    def save(self, meta: SaveLoadMeta) -> None:
        """Write a checkpoint to a temporary folder, then rename it: a crash leaves the previous one."""

    @abc.abstractmethod
    def load(self, meta: SaveLoadMeta) -> None:
        """Load a checkpoint of `save`, on any number of ranks."""

    def weight_sums(self) -> dict[str, tuple[int, float]]:
        """Return checksum and mean of a sample of each trained tensor, of all ranks; every rank calls it."""
        return {}

    @abc.abstractmethod
    @returns_nothing
    def step_lr_scheduler(self) -> None:
        """Advance the learning-rate schedule by one training step."""

    @abc.abstractmethod
    @returns_nothing
    def set_lr_scale(self, scale: float) -> None:
        """Multiply all learning rates of the schedule by `scale` from now on."""

    @abc.abstractmethod
    def get_version(self) -> int:
        """Return the version of the weights."""

    @abc.abstractmethod
    @returns_nothing
    def set_version(self, version: int) -> None:
        """Set the version of the weights."""


class RolloutWorkflow(abc.ABC):
    """Plays episodes. Subclass it in your own script; it runs on the executor's event loop.

    Many episodes run at the same time on one thread: await what takes time (generation, rewards, tools), never block.
    """

    @abc.abstractmethod
    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Batch | None:
        """Play one episode. Returns its `n` trajectories as a padded batch, or None to reject it.

        A batch of nothing but `rewards [n]` rejects it too, and tells a curriculum how the answers were.

        Required keys: `input_ids`, `attention_mask`, `loss_mask`, `logprobs`, `versions` (all `[n, T]`) and
        `rewards [n]`. The executor adds `group_ids`. An exception fails this episode only.
        """

    def check_row(self, data: dict[str, Any]) -> None:
        """Raise `DatasetError` or `ConfigError` if no episode can be played with a row like this one.

        Trainers call it with the first row before they generate, and so does `--dry-run`.
        """


class InferenceEngine(abc.ABC):
    """Generation, and the asynchronous collection of training batches on top of it."""

    # Whether there are servers to which weights are published.
    takes_weights = True

    @abc.abstractmethod
    @returns_nothing
    def initialize(self, addrs: list[str] | None = None, train_batch_size: int | None = None) -> None:
        """Connect to the servers (`addrs`, or those the launcher started) and start the executor on rank 0."""

    @abc.abstractmethod
    def destroy(self) -> None:
        """Stop episodes and disconnect; idempotent."""

    @abc.abstractmethod
    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        """Continue one prompt. Generation that a weight update interrupts resumes by itself."""

    async def agenerate_group(self, request: ModelRequest) -> list[ModelResponse]:
        """Continue one prompt `gconfig.n_samples` times. Engines that can share its prefill override this."""
        single, rid, seed = replace(request.gconfig, n_samples=1), request.rid, request.seed
        seeds = [None if seed is None else seed + i for i in range(request.gconfig.n_samples)]
        own = [dict(gconfig=single, rid=f"{rid}-{i}", seed=s) for i, s in enumerate(seeds)]
        return await asyncio.gather(*(self.agenerate(replace(request, **each)) for each in own))

    @abc.abstractmethod
    @returns_nothing
    def submit(self, data: dict[str, Any], workflow: RolloutWorkflow) -> None:
        """Queue one episode (rank 0). After a resume, queue again those that had not ended."""

    @abc.abstractmethod
    @returns_batch
    def wait(self, count: int, timeout_s: float | None = None) -> Batch:
        """Return the next `count` accepted episodes as one padded batch (rank 0), oldest first."""

    @abc.abstractmethod
    @returns_batch
    def rollout_batch(self, data: list[dict[str, Any]], workflow: RolloutWorkflow) -> Batch:
        """Run these episodes and return this rank's share, in the order of `data`."""

    @abc.abstractmethod
    @returns_batch
    def prepare_batch(self, dataloader: Iterable[list[dict[str, Any]]], workflow: RolloutWorkflow) -> Batch:
        """Keep episodes running up to the staleness limit, and return this rank's share of the next batch."""

    @abc.abstractmethod
    def update_weights(self, meta: WeightUpdateMeta) -> None:
        """Make every server load the weights that the trainer published as `meta.version`."""

    def begin_update(self, meta: WeightUpdateMeta) -> None:
        """Prepare the servers for the update `meta` before the trainer publishes it."""

    def server_info(self) -> list[dict[str, Any]]:
        """Return what each server says about itself (rank 0); empty if servers cannot be asked."""
        return []

    def has_other_weights(self) -> bool:
        """Whether a server holds another version than this run is at, as one of another run does (rank 0)."""
        return False

    def read_probe(self, path: str) -> list[str]:
        """Return what each server reads in shared memory at `path` (rank 0); empty if none can be asked."""
        return []

    @abc.abstractmethod
    @returns_nothing
    def pause(self) -> None:
        """Admit no new episodes."""

    @abc.abstractmethod
    @returns_nothing
    def resume(self) -> None:
        """Admit episodes again."""

    @abc.abstractmethod
    def get_version(self) -> int:
        """Return the version of the weights."""

    @abc.abstractmethod
    @returns_nothing
    def set_version(self, version: int) -> None:
        """Set the version of the weights."""
