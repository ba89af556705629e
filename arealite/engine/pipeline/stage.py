"""`StageModel`: one pipeline stage, which runs packed micro-batches one after the other.

Every rank of a pipeline has the same micro-batches, so only hidden states travel. torch's stages have buffers of one
size: states are padded to the longest micro-batch of the step before they are sent, and cut after they are received. A
stage computes real tokens only.

L length of the buffers, H hidden size.
"""

from collections.abc import Callable, Iterator
from itertools import repeat

import torch
from torch import nn
from transformers import PreTrainedModel

from arealite.api.cli_args import TrainEngineConfig
from arealite.api.io_struct import Batch
from arealite.engine.fsdp.micro_batches import MicroBatch
from arealite.engine.fsdp.model import PackedModel
from arealite.engine.fsdp.parallel import Layout
from arealite.engine.fsdp.passes import PassSettings
from arealite.engine.fsdp.ring import piece_multiple
from arealite.engine.fsdp.routing import Routing
from arealite.engine.pipeline.split import Skipped

# Makes a loss of the results for a micro-batch, on the last stage.
Finish = Callable[[Batch, MicroBatch], torch.Tensor]


class StageModel(PackedModel):
    """The layers of one stage. Its forward pass takes the next micro-batch of those given to `begin`."""

    def __init__(
        self,
        view: PreTrainedModel,
        entry: Skipped | None,
        config: TrainEngineConfig,
        layout: Layout,
        routing: Routing,
        index: int,
        is_last: bool,
    ):
        super().__init__(view, config, layout, routing)
        self.entry, self.index, self.is_last = entry, index, is_last
        self._queue: Iterator[tuple[MicroBatch, PassSettings]] = iter(())
        self._length = 0
        self._finish: Finish | None = None

    def begin(self, micro_batches: list[MicroBatch], settings: PassSettings, length: int, finish: Finish) -> None:
        """Prepare for passes over these micro-batches in this order."""
        self._queue = zip(micro_batches, repeat(settings), strict=False)
        self._length, self._finish = length, finish

    def forward(self, *received: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the loss on the last stage, else the hidden states `[L, H]` for the next one."""
        mb, (temperature, with_entropy) = next(self._queue)
        states = None
        if self.entry is not None:
            states = received[0][: self.piece_length(mb)]
            self.entry.states = states[None]
        hidden, piece = self.hidden_states(mb.data, mb.lengths, mb.prefixes, states)
        if self.entry is not None:
            self.entry.states = None
        if not self.is_last:
            return nn.functional.pad(hidden, (0, 0, 0, self._length - len(hidden)))
        outputs = self.results(hidden, piece, mb.data, temperature, with_entropy, mb.prefixes)
        assert self._finish is not None, "call begin() first"
        return self._finish(outputs, mb)

    def piece_length(self, mb: MicroBatch) -> int:
        """Return how many tokens of a micro-batch this rank computes: all, or an equal piece."""
        size = 1 if self.context_group is None else self.context_group.size()
        multiple = piece_multiple(size, self.ring)
        return -(-mb.num_computed // multiple) * (multiple // size)
