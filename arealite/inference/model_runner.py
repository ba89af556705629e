"""Runs the model for one plan of the scheduler on the CPU: prefill chunks, copy blocks, decode and sample.

Owned by the engine. `launch` starts a step and returns a `Step` whose `collect` gives the sampled tokens; here the work is done
when `launch` returns. Deterministic mode computes every token alone, so that its bits depend on its own sequence only.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel

from arealite.api.cli_args import ServerConfig
from arealite.api.errors import ConfigError
from arealite.inference.attention import PagedBatch, Tile, make_tile
from arealite.inference.loading import ModelShape
from arealite.inference.sampler import make_batch, sample
from arealite.inference.scheduler import Chunk, Plan
from arealite.inference.slots import SlotTable
from arealite.inference.weights import copy_weights

_CPU_CACHE_BYTES = 2 << 30  # a trainer usually lives in the same memory


@dataclass
class StepResult:
    """Sampled tokens of one step; row i belongs to `slots[i]` if the slot still holds `tickets[i]`."""

    slots: np.ndarray
    tickets: np.ndarray
    positions: np.ndarray  # where in the sequence the token goes
    tokens: np.ndarray
    logprobs: np.ndarray
    raw_logprobs: np.ndarray | None


class Step:
    """A step whose results are already here."""

    def __init__(self, result: StepResult | None):
        self._result = result

    def collect(self) -> StepResult | None:
        return self._result


class ModelRunner:
    """The model and its paged KV cache on the CPU."""

    max_in_flight = 1

    def __init__(self, model: PreTrainedModel, shape: ModelShape, config: ServerConfig):
        self.model = model
        self.shape = shape
        self.config = config
        self.device = next(model.parameters()).device
        self.dtype = next(model.parameters()).dtype
        self.block_size = config.block_size
        blocks = count_blocks(config, shape, self.dtype, self._free_bytes())
        self.num_blocks = blocks + 1  # block 0 takes the padding
        size = (self.num_blocks, config.block_size, shape.num_kv_heads, shape.head_dim)
        # Zeros, not garbage: masked keys still meet the queries, and NaN would survive the mask.
        self.keys = [self._zeros(size) for _ in range(shape.num_layers)]
        self.values = [self._zeros(size) for _ in range(shape.num_layers)]
        self.slots: SlotTable | None = None

    def attach(self, slots: SlotTable) -> None:
        """Read sequences from this table; then prove that the model runs at all."""
        self.slots = slots
        self._forward(np.zeros((1, 1), np.int64), [(np.zeros((1, 1), np.int64), self._bin(1))])

    # --------------------------------------------------------------------------------------------- one step

    @torch.inference_mode()
    def launch(self, plan: Plan) -> Step:
        if plan.chunks:
            self._prefill(plan.chunks)
        if plan.copies:
            source, target = torch.tensor(plan.copies).unbind(1)
            for cache in (*self.keys, *self.values):
                cache[target] = cache[source]
        return Step(self._decode(plan.slots) if len(plan.slots) else None)

    def stage(self, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> list:
        """Prepare new weights off the engine's thread; here there is nothing to prepare."""
        return pairs

    def load(self, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        copy_weights(pairs)

    def clear_blocks(self, blocks: list[int]) -> None:
        """Forget what a sequence with non-finite numbers left behind."""
        for cache in (*self.keys, *self.values):
            cache[torch.tensor(blocks)] = 0

    def _prefill(self, chunks: list[Chunk]) -> None:
        if self.config.deterministic:
            for chunk in chunks:
                for position in range(chunk.start, chunk.end):
                    self._run_chunks([Chunk(chunk.slot, position, position + 1)])
            return
        group: list[Chunk] = []
        total = 0
        for chunk in sorted(chunks, key=lambda c: c.end - c.start):
            size = chunk.end - chunk.start
            # Padding every chunk of the group to this one's size may waste a quarter at most.
            if group and (len(group) + 1) * size > 1.25 * (total + size) + 16:
                self._run_chunks(group)
                group, total = [], 0
            group.append(chunk)
            total += size
        self._run_chunks(group)

    def _run_chunks(self, chunks: list[Chunk]) -> None:
        """Compute the KV of chunks of about the same length as one padded tile."""
        slots = self.slots
        t = max(chunk.end - chunk.start for chunk in chunks)
        nb = max(-(-chunk.end // self.block_size) for chunk in chunks)
        ids = np.zeros((len(chunks), t), np.int64)
        positions = np.zeros((len(chunks), t), np.int64)
        write = np.zeros((len(chunks), t), np.int64)
        rows = np.array([chunk.slot for chunk in chunks])
        for i, chunk in enumerate(chunks):
            where, n = np.arange(chunk.start, chunk.end), chunk.end - chunk.start
            ids[i, :n] = slots.tokens[chunk.slot, chunk.start : chunk.end]
            positions[i, :n] = where
            write[i, :n] = self._cache_index(chunk.slot, where)
        self._forward(ids, [(positions, slots.block_table[rows, :nb])], write, logits=False)

    def _decode(self, rows: np.ndarray) -> StepResult:
        slots = self.slots
        rows, tiles = self._decode_tiles(rows)
        at = slots.length[rows] - 1
        ids = slots.tokens[rows, at].astype(np.int64)
        write = self._cache_index(rows, at)
        if self.config.deterministic:
            parts = [
                self._decode_alone(rows[i : i + 1], ids[i], at[i], write[i])
                for i in range(len(rows))
            ]
            tokens, logprobs, raw = (np.concatenate(part) for part in zip(*parts, strict=True))
        else:
            batch = make_batch(slots, rows, self.shape.vocab_size, self.shape.eos_ids)
            logits = self._forward(ids, tiles, write)
            tokens, logprobs, raw = (t if t is None else t.numpy() for t in sample(logits, batch))
        return StepResult(rows, slots.ticket[rows], at + 1, tokens, logprobs, raw)

    def _decode_alone(
        self, row: np.ndarray, token: int, at: int, write: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        table = self.slots.block_table[row, : at // self.block_size + 1]
        logits = self._forward(np.array([token]), [(np.array([[at]]), table)], np.array([write]))
        batch = make_batch(self.slots, row, self.shape.vocab_size, self.shape.eos_ids)
        batch.want_raw = True
        return tuple(t.numpy() for t in sample(logits, batch))

    def _decode_tiles(self, rows: np.ndarray) -> tuple[np.ndarray, list]:
        """Order rows by length and cut where the padded width doubles, so short sequences do not pay for long ones."""
        needed = -(-self.slots.length[rows] // self.block_size)
        if needed.max() > 2 * needed.min():
            order = np.argsort(needed, kind="stable")
            rows, needed = rows[order], needed[order]
        tiles, start = [], 0
        while start < len(rows):
            if needed.max() <= 2 * needed.min():
                stop = len(rows)
            else:
                stop = int(np.searchsorted(needed, 2 * needed[start], side="right"))
            part = rows[start:stop]
            table = self.slots.block_table[part, : needed[start:stop].max()]
            tiles.append((self.slots.length[part, None] - 1, table))
            start = stop
        return rows, tiles

    # ------------------------------------------------------------------------------------------- plumbing

    def _forward(
        self,
        ids: np.ndarray,
        tiles: list[tuple[np.ndarray, np.ndarray]],
        write: np.ndarray | None = None,
        logits: bool = True,
    ) -> torch.Tensor | None:
        made: list[Tile] = []
        first = 0
        for positions, table in tiles:
            made.append(make_tile(first, positions, table))
            first += positions.size
        positions = torch.cat([tile.positions.reshape(-1) for tile in made])
        index = np.zeros(first, np.int64) if write is None else write.reshape(-1)
        paged = PagedBatch(self.keys, self.values, self.block_size, torch.from_numpy(index), made)
        run = self.model if logits else self.model.base_model
        out = run(
            input_ids=torch.from_numpy(ids).reshape(1, -1),
            position_ids=positions[None],
            use_cache=False,
            paged=paged,
        )
        return out.logits[0] if logits else None

    def _cache_index(self, rows: np.ndarray | int, positions: np.ndarray) -> np.ndarray:
        """Flat token positions in the cache of `positions` of the sequences in `rows`."""
        block, offset = np.divmod(positions, self.block_size)
        return self.slots.block_table[rows, block].astype(np.int64) * self.block_size + offset

    def _bin(self, rows: int) -> np.ndarray:
        return np.zeros((rows, 1), np.int32)

    def _zeros(self, size: tuple[int, ...]) -> torch.Tensor:
        return torch.zeros(size, dtype=self.dtype, device=self.device)

    def _free_bytes(self) -> int:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return int(min(self.config.mem_fraction * free, _CPU_CACHE_BYTES))


def count_blocks(
    config: ServerConfig, shape: ModelShape, dtype: torch.dtype, free_bytes: int
) -> int:
    """Blocks of the KV cache: as configured, else what fits, but no more than can ever be used."""
    if config.max_total_tokens is not None:
        tokens = config.max_total_tokens
    else:
        wanted = config.max_running_requests * shape.context_length
        tokens = min(wanted, free_bytes // shape.kv_bytes_per_token(dtype))
    if tokens < 2 * config.block_size:
        raise ConfigError(
            f"the KV cache has room for {tokens} tokens, it needs at least {2 * config.block_size}: "
            "raise max_total_tokens or mem_fraction, or use a smaller model"
        )
    return tokens // config.block_size
