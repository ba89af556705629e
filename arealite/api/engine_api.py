"""What engines promise: `TrainEngine` updates a model, `InferenceEngine` generates with it.

Both are used the same way on one device and on many: every rank calls the same methods in the same order (SPMD).
"""

from __future__ import annotations

import abc
import asyncio
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

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
from arealite.api.workflow_api import RolloutWorkflow

# Called once per packed micro-batch with the model's outputs ({"logp": [N], "entropy": [N]}, or {"values": [N]})
# and the micro-batch itself. Returns the SUM of the loss over the micro-batch, and statistics.
LossFn = Callable[[Batch, Batch], tuple[torch.Tensor, dict[str, Stat]]]
# The weight of a (micro-)batch: what the summed loss is divided by, over all micro-batches and ranks.
LossWeightFn = Callable[[Batch], torch.Tensor]


class TrainEngine(abc.ABC):
    """A model, its optimizer, and how they are spread over ranks."""

    @abc.abstractmethod
    def initialize(self, ft_spec: FinetuneSpec | None = None) -> None:
        """Load the model, shard it, make the optimizer. `ft_spec` sets the length of the schedule."""

    @abc.abstractmethod
    def destroy(self) -> None:
        """Free the model; idempotent."""

    @abc.abstractmethod
    def train_batch(self, batch: Batch, loss_fn: LossFn, loss_weight_fn: LossWeightFn) -> Stats:
        """One optimizer step on this rank's padded `batch`. Returns statistics reduced over all ranks.

        The gradient is that of Σ loss_fn / Σ loss_weight_fn over all micro-batches of all ranks. A non-finite
        gradient skips the step and is counted in `bad_steps`.
        """

    @abc.abstractmethod
    def eval_batch(self, batch: Batch, loss_fn: LossFn, loss_weight_fn: LossWeightFn) -> Stats:
        """As `train_batch`, without gradient and step."""

    @abc.abstractmethod
    def forward(self, batch: Batch) -> Batch:
        """Model outputs in the padded shape of `batch`: {"logp": [B, T]} (token 0 of a sequence has 0)."""

    @abc.abstractmethod
    def update_weights(self, meta: WeightUpdateMeta) -> None:
        """Publish the current weights in the way `meta` says. Called by all ranks."""

    @abc.abstractmethod
    def save(self, meta: SaveLoadMeta) -> None:
        """Write a checkpoint beside its final place, then rename: a crash leaves the previous one."""

    @abc.abstractmethod
    def load(self, meta: SaveLoadMeta) -> None:
        """Load what `save` wrote, on any number of ranks."""

    @abc.abstractmethod
    def step_lr_scheduler(self) -> None:
        """Advance the learning-rate schedule by one training step."""

    @abc.abstractmethod
    def get_version(self) -> int: ...

    @abc.abstractmethod
    def set_version(self, version: int) -> None: ...


class InferenceEngine(abc.ABC):
    """Generation, and the asynchronous collection of training batches on top of it."""

    @abc.abstractmethod
    def initialize(self, addrs: list[str] | None = None, train_batch_size: int | None = None) -> None:
        """Connect to the servers (`addrs`, or those the launcher started) and start the executor on rank 0."""

    @abc.abstractmethod
    def destroy(self) -> None:
        """Stop episodes and disconnect; idempotent."""

    @abc.abstractmethod
    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        """Continue one prompt. Survives weight updates: interrupted generation goes on by itself."""

    async def agenerate_group(self, request: ModelRequest) -> list[ModelResponse]:
        """`gconfig.n_samples` continuations of one prompt. Engines that can share the prompt override this."""
        single, rid, seed = replace(request.gconfig, n_samples=1), request.rid, request.seed
        seeds = [None if seed is None else seed + i for i in range(request.gconfig.n_samples)]
        own = [dict(gconfig=single, rid=f"{rid}-{i}", seed=s) for i, s in enumerate(seeds)]
        return await asyncio.gather(*(self.agenerate(replace(request, **each)) for each in own))

    @abc.abstractmethod
    def submit(self, data: dict[str, Any], workflow: RolloutWorkflow) -> None:
        """Queue one episode (rank 0). After a resume the caller submits again what had not ended at the checkpoint."""

    @abc.abstractmethod
    def wait(self, count: int, timeout_s: float | None = None) -> Batch:
        """The next `count` accepted episodes as one padded batch (rank 0), oldest first."""

    @abc.abstractmethod
    def rollout_batch(self, data: list[dict[str, Any]], workflow: RolloutWorkflow) -> Batch:
        """Run these episodes and return this rank's share, in the order of `data`."""

    @abc.abstractmethod
    def prepare_batch(self, dataloader: Iterable[list[dict[str, Any]]], workflow: RolloutWorkflow) -> Batch:
        """Keep episodes running up to the staleness limit; return this rank's share of the next batch."""

    @abc.abstractmethod
    def update_weights(self, meta: WeightUpdateMeta) -> None:
        """Make every server load what the trainer published, and take `meta.version`."""

    @abc.abstractmethod
    def pause(self) -> None:
        """Admit no new episodes."""

    @abc.abstractmethod
    def resume(self) -> None:
        """Admit episodes again."""

    @abc.abstractmethod
    def get_version(self) -> int: ...

    @abc.abstractmethod
    def set_version(self, version: int) -> None: ...
