"""Runs micro-batches through a model that every rank has as a whole or in shards.

`arealite.engine.pipeline.passes` does the same for a model that is divided into pipeline stages.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from arealite.api.engine_api import LossWeightFn
from arealite.api.errors import TrainingError
from arealite.api.io_struct import Batch, Stat
from arealite.engine.fsdp.micro_batches import MicroBatch, MicroBatchCount
from arealite.engine.fsdp.model import PackedModel
from arealite.engine.fsdp.sharding import keep_gathered
from arealite.utils.data import unpack
from arealite.utils.trace import tracing

# Makes the scaled loss of a micro-batch of its results, and records statistics.
LossOf = Callable[[Batch, MicroBatch], torch.Tensor]


class PassSettings(NamedTuple):
    temperature: float
    with_entropy: bool


class WholePasses:
    """Passes through a `PackedModel`, one micro-batch after the other."""

    def __init__(self, module: PackedModel):
        self.module = module
        self.count = MicroBatchCount()

    def backward(self, micro_batches: Sequence[MicroBatch], settings: PassSettings, loss_of: LossOf) -> dict[str, Stat]:
        """Add the gradients of all micro-batches to the parameters. Returns statistics of the passes."""
        with keep_gathered(self.module) as weights:
            for number, mb in enumerate(micro_batches, start=1):
                # On a GPU, the time in which the host launches it.
                with tracing.span("trainer", "micro-batches", f"micro-batch {number}", tokens=sum(mb.lengths)):
                    loss = loss_of(self._outputs(mb, settings), mb)
                    if number == len(micro_batches):
                        weights.last_pass()
                    loss.backward()
        return {}

    def outputs(self, micro_batches: Sequence[MicroBatch], settings: PassSettings) -> Iterator[Batch]:
        """Yield the results of each micro-batch.

        They have no graph: with one, activations of a micro-batch would be kept while the next one is computed.
        """
        with keep_gathered(self.module):
            for mb in micro_batches:
                yield {name: values.detach() for name, values in self._outputs(mb, settings).items()}

    def _outputs(self, mb: MicroBatch, settings: PassSettings) -> Batch:
        return self.module(mb.data, mb.lengths, *settings, mb.prefixes)


def total_weight(
    micro_batches: list[MicroBatch], loss_weight_fn: LossWeightFn, dp_group: dist.ProcessGroup | None
) -> float:
    """Return the weight of the loss summed over micro-batches and data-parallel ranks."""
    weight = sum(float(loss_weight_fn(mb.data)) for mb in micro_batches)
    if dp_group is not None:
        total = torch.tensor([weight], dtype=torch.float64)
        # The first collective of an update: it waits for the slowest rank.
        with tracing.span("trainer", "collectives", "wait: other ranks"):
            dist.all_reduce(total, group=dp_group)
        weight = float(total)
    if not weight > 0:
        size = 1 if dp_group is None else dist.get_world_size(dp_group)
        raise TrainingError(
            f"the batch has no trained token (weight {weight} over {size} ranks): loss_mask is 0 "
            "everywhere. Check that max_length does not cut off the answers, and that the workflow sets loss_mask"
        )
    return weight


def join_rows(outputs: Sequence[Batch], micro_batches: Sequence[MicroBatch], mask: torch.Tensor) -> Batch:
    """Return the packed outputs as rows of a padded batch with `mask [B, T]`, on the host."""
    result: Batch = {}
    for values, mb in zip(outputs, micro_batches, strict=True):
        for key, value in values.items():
            if key not in result:
                result[key] = torch.zeros(mask.shape, dtype=value.dtype)
            if mb.rows:
                result[key][mb.rows] = unpack(value.cpu(), mask[mb.rows])
    return result


def merge_stats(stats: dict[str, Stat], new: dict[str, Stat]) -> None:
    """Add the statistics of a micro-batch to those of the batch."""
    for key, (total, weight) in new.items():
        if key not in stats:
            stats[key] = Stat(torch.as_tensor(total).detach(), weight)
        elif key.endswith("/max"):
            stats[key] = Stat(torch.maximum(stats[key].total, total), weight)
        elif key.endswith("/min"):
            stats[key] = Stat(torch.minimum(stats[key].total, total), weight)
        else:
            stats[key] = Stat(stats[key].total + total, stats[key].weight + weight)
