"""Interface of model runners on any device: launch planned steps, load weights, clear cache blocks.

`cpu.runner.CpuRunner` and `cuda.runner.CudaRunner` implement it.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from arealite.api.cli_args import ServerConfig
from arealite.api.errors import ConfigError
from arealite.api.generation_args import FEW_RUNNING, MOST_RUNNING
from arealite.inference.loading import ModelShape
from arealite.inference.routing import RoutingRecord
from arealite.inference.scheduler import StepPlan
from arealite.inference.slots import SlotTable
from arealite.inference.weights import Pairs

# Tokens of a sequence for which the KV cache has room, if more than the fewest are decoded at once.
_TOKENS_EACH = 1024


@dataclass
class StepResult:
    """Sampled tokens of one step. Row i belongs to `slots[i]` if that slot still holds `tickets[i]`."""

    slots: np.ndarray
    tickets: np.ndarray
    positions: np.ndarray  # of the token in its sequence
    tokens: np.ndarray
    logprobs: np.ndarray
    raw_logprobs: np.ndarray | None
    # [B, 2, K] likeliest tokens and the bits of their log-probs, for the largest K asked for; None: nobody asks
    top: np.ndarray | None = None
    # The next token of those sequences whose draft was right so far
    following: StepResult | None = None
    num_drafted: int = 0  # tokens that the device proposed in this step

    def take(self, index: np.ndarray) -> StepResult:
        """Return the rows `index`."""
        raw, top = (None if values is None else values[index] for values in (self.raw_logprobs, self.top))
        slots, tickets, positions = self.slots[index], self.tickets[index], self.positions[index]
        return StepResult(slots, tickets, positions, self.tokens[index], self.logprobs[index], raw, top)


def keep_accepted(result: StepResult, slots: SlotTable) -> StepResult:
    """Keep the tokens of each sequence up to the first that differs from its draft, and that one.

    `result` has one row more for a sequence than its draft has tokens, in order of position. Returns a chain of results
    with at most one token of each sequence.
    """
    agrees = result.tokens == slots.tokens[result.slots, result.positions]
    index = np.flatnonzero(result.positions == slots.length[result.slots])
    first = last = result.take(index)
    left = slots.num_drafts[first.slots]
    while True:
        accepted = agrees[index] & (left > 0)
        index, left = index[accepted] + 1, left[accepted] - 1
        if len(index) == 0:
            return first
        last.following = result.take(index)
        last = last.following


# A launched step: call it to wait for its tokens; None if it samples none.
Step = Callable[[], StepResult | None]

# Share of the free memory that the KV cache may take if other processes have taken much of the device.
_MOST_OF_FREE = 0.9


class Runner(abc.ABC):
    """The model and its paged KV cache on one device."""

    max_in_flight = 1  # steps that may be launched before the first one is collected
    num_blocks: int  # block 0 takes the padding
    num_slots: int  # sequences decoded at once
    device: torch.device
    routing: RoutingRecord | None = None  # with `record_routing`

    @abc.abstractmethod
    def attach(self, slots: SlotTable) -> None:
        """Read sequences from this slot table from now on, and check that the model runs."""

    @abc.abstractmethod
    def launch(self, plan: StepPlan) -> Step:
        """Start a step."""

    def measure_drafts(self) -> np.ndarray:
        """Return by which share a step with drafts takes longer, by the number of sequences.

        Only of runners with several steps in flight, which look up drafts themselves.
        """
        raise NotImplementedError

    def stage(self, pairs: Pairs) -> Pairs:
        """Bring new weights to the device. Any thread may call it while steps run."""
        return pairs

    @torch.no_grad()
    def load(self, pairs: Pairs) -> None:
        """Copy staged weights into the parameters, between two steps."""
        for target, value in pairs:
            target.copy_(value)

    def read_routing(self, blocks: np.ndarray, num_tokens: int) -> np.ndarray:
        """Return the experts of the first tokens in these blocks of the cache, `[num_tokens, L · K]`."""
        assert self.routing is not None, "Engine.check refuses such requests"
        return self.routing.read(blocks, num_tokens)

    def close(self) -> None:
        """Leave the model to another runner."""
        if self.routing is not None:
            self.routing.close()

    @abc.abstractmethod
    def clear_blocks(self, blocks: list[int]) -> None:
        """Zero cache blocks that hold non-finite numbers and that no sequence uses any more."""


def count_slots(config: ServerConfig, num_blocks: int) -> int:
    """Number of sequences that a GPU decodes at once: as configured, else by the size of the KV cache."""
    fitting = num_blocks * config.block_size // _TOKENS_EACH
    return config.max_running_requests or max(FEW_RUNNING, min(MOST_RUNNING, fitting))


def count_blocks(config: ServerConfig, shape: ModelShape, dtype: torch.dtype, free_bytes: int, slots: int) -> int:
    """Number of KV cache blocks: as configured, else what fits, but no more than the slots can use."""
    if config.max_total_tokens is not None:
        tokens = config.max_total_tokens
    else:
        wanted = slots * shape.context_length
        tokens = min(wanted, free_bytes // shape.kv_bytes_per_token(dtype))
    if tokens < 2 * config.block_size:
        raise ConfigError(
            f"the KV cache has room for {tokens} tokens, it needs at least {2 * config.block_size}: "
            "raise max_total_tokens or mem_fraction, or use a smaller model"
        )
    return tokens // config.block_size


def cache_bytes(free: int, total: int, own: int, share: float) -> int:
    """Return the size of the KV cache: a share of the device's memory besides `own`, that of the weights.

    A trainer that loads its model on the same device meanwhile changes nothing, unless little is left.
    """
    return int(min(share * (total - own), max(share, _MOST_OF_FREE) * free))
