"""Copies what a step has sampled to the host, without a wait at launch."""

import numpy as np
import torch

from arealite.inference.cpu.sampler import top_logprobs
from arealite.inference.runner import StepResult


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Start a copy to the host."""
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return copy.copy_(tensor, non_blocking=True)


def read_result(
    places: tuple[np.ndarray, np.ndarray, np.ndarray],
    out: torch.Tensor,
    top: torch.Tensor | None,
    event: torch.cuda.Event | None,
) -> StepResult:
    """Wait for a step; copies its tokens and log-probs `out` [3, S] at (slots, tickets, positions)."""
    if event is not None:
        event.synchronize()
    count = len(places[0])
    tokens, logprobs, raw = out.numpy()[:, :count]
    tops = None if top is None else top.numpy()[:count].copy()
    return StepResult(*places, tokens.copy(), logprobs.view(np.float32).copy(), raw.view(np.float32).copy(), tops)


def read_accepted(
    places: tuple[np.ndarray, np.ndarray], width: int, out: torch.Tensor, event: torch.cuda.Event | None
) -> StepResult | None:
    """Wait for a step with drafts (`verify`) of (slots, tickets); returns a chain of results.

    Each has at most one token of a sequence. `out` has tokens and log-probs, `width` of each sequence, and numbers of
    kept tokens, first positions and numbers of drafted tokens.
    """
    if event is not None:
        event.synchronize()
    (slots, tickets), values = places, out.numpy()
    tokens, logprobs = values[0], values[1].view(np.float32)
    kept, start, drafted = values[2:, : len(slots)]
    result = None
    for i in reversed(range(int(kept.max()))):
        index = np.flatnonzero(kept > i)
        at, line = start[index].astype(np.int64) + i, index * width + i
        rows = slots[index], tickets[index], at, tokens[line], logprobs[line]
        result = StepResult(*rows, None, following=result)
    if result is not None:
        result.num_drafted = int(drafted.sum())
    return result


def likeliest(
    logits: torch.Tensor, temperature: torch.Tensor, tokens: torch.Tensor, logprobs: torch.Tensor, count: int
) -> torch.Tensor:
    """Likeliest tokens of the rows just sampled. Not part of a graph: few steps have such a row."""
    scaled = logits / torch.where(temperature == 0, 1.0, temperature)[:, None]
    return top_logprobs(scaled, tokens, logprobs, count)
