"""Counts the floating-point operations of a batch, for the model FLOPs utilization (MFU).

Two operations per weight and token of every matrix product, attention over the causal half, twice as many for the
backward pass. Recomputation (gradient checkpointing, log-prob chunks) is not counted.
"""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from arealite.api.io_struct import Stat
from arealite.engine.fsdp.low_bit import num_weights
from arealite.engine.fsdp.micro_batches import MicroBatch
from arealite.utils.routing import num_experts

# Dense bf16 peak of one device in FLOP/s, by a part of its name.
_PEAKS = {
    "H200": 989e12, "H100": 989e12, "H800": 989e12, "A100": 312e12, "A800": 312e12, "L40S": 362e12, "B200": 2250e12,
}  # fmt: skip


def peak_flops(device: str) -> float | None:
    """Return the peak FLOP/s of the current device, or None if unknown (no MFU is reported then)."""
    if device != "cuda":
        return None
    name = torch.cuda.get_device_name()
    return next((peak for part, peak in _PEAKS.items() if part in name), None)


class FlopCounter:
    """Counts the operations of a training step of one model."""

    def __init__(self, model: PreTrainedModel):
        text = model.config.get_text_config()
        head: Any = model.get_output_embeddings()
        embedding: Any = model.get_input_embeddings()
        self.head = head.weight.numel() if head is not None else 0
        tied = head is not None and head.weight is embedding.weight
        total = num_weights(model)
        self.body = total - embedding.weight.numel() - (0 if tied else self.head)
        if experts := num_experts(model.config):
            taken = getattr(text, "num_experts_per_tok", None) or getattr(text, "top_k_experts", None)
            active = (taken or experts) / experts
            routed = sum(p.numel() for n, p in model.named_parameters() if ".experts." in n)
            self.body -= int(routed * (1.0 - active))
        # Some families have layers of several widths.
        layers = getattr(text, "per_layer_config", None) or [text] * text.num_hidden_layers
        self.attention = 2 * sum(
            layer.num_attention_heads
            * (getattr(layer, "head_dim", None) or text.hidden_size // layer.num_attention_heads)
            for layer in layers
        )

    def count(self, micro_batch: MicroBatch) -> float:
        """Count a step over a micro-batch; shared prefixes count once."""
        segments = micro_batch.segments
        # Queries of a segment attend to the keys of its prefix too.
        pairs = sum(s.length * (s.length + 2 * s.prefix_length) for s in segments)
        plan = micro_batch.prefixes
        targets = micro_batch.data["target_positions"] if plan is None else plan.targets
        forward = 2.0 * (self.body * micro_batch.num_computed + self.head * len(targets)) + self.attention * pairs
        return 3.0 * forward

    def work(self, micro_batches: Sequence[MicroBatch], dp_size: int) -> dict[str, Stat]:
        """Return the tokens and operations of a step, without fillers, to be summed over data-parallel ranks."""
        tokens, computed, flops = 0, 0, 0.0
        for mb in micro_batches:
            if mb.rows:
                tokens += sum(mb.lengths)
                computed += mb.num_computed
                flops += self.count(mb)
        return {
            "num_tokens": Stat(torch.tensor(float(tokens)), 1.0 / dp_size),
            "num_computed_tokens": Stat(torch.tensor(float(computed)), 1.0 / dp_size),
            "flops": Stat(torch.tensor(flops, dtype=torch.float64), 1.0 / dp_size),
        }
