"""Runs planned steps on the CPU: prefills chunks, copies blocks, decodes and samples.

The work is done when `launch` returns. Deterministic mode computes every token alone, so that its bits depend on its
own sequence only.
"""

import os
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from arealite.api.cli_args import ServerConfig
from arealite.api.generation_args import FEW_RUNNING
from arealite.inference.cpu.attention import PagedBatch, Tile
from arealite.inference.cpu.dense_cache import DenseCache, Shelf
from arealite.inference.cpu.lean_model import LeanDecoder
from arealite.inference.cpu.memory import lazy_zeros
from arealite.inference.cpu.sampler import make_batch, sample
from arealite.inference.llama_like import is_llama_like
from arealite.inference.loading import ModelShape
from arealite.inference.routing import RoutingRecord
from arealite.inference.runner import Runner, Step, StepResult, count_blocks, keep_accepted
from arealite.inference.scheduler import Chunk, StepPlan
from arealite.inference.slots import SlotTable
from arealite.inference.vision import VisionDecoder, is_served
from arealite.inference.weights import Pairs
from arealite.utils.memory.estimate import CPU_CACHE_BYTES

VisionInputs = tuple[torch.Tensor, torch.Tensor]  # embeddings [N, hidden] and positions [3, N]


class CpuRunner(Runner):
    """The model and its paged KV cache on the CPU."""

    def __init__(self, model: PreTrainedModel, shape: ModelShape, config: ServerConfig):
        self.model, self.shape, self.config = model, shape, config
        weight = next(model.parameters())
        self.device, self.dtype, self.block_size = weight.device, weight.dtype, config.block_size
        self.num_slots = config.max_running_requests or FEW_RUNNING
        blocks = count_blocks(config, shape, self.dtype, self._free_bytes(), self.num_slots)
        self.num_blocks = blocks + 1  # block 0 takes the padding
        size = (self.num_blocks, config.block_size, shape.num_kv_heads, shape.head_dim)
        # Zeros: NaN in masked keys would survive the mask.
        caches = [lazy_zeros((2, *size), self.dtype) for _ in range(shape.num_layers)]
        self.keys, self.values = ([cache[i] for cache in caches] for i in range(2))
        if config.record_routing:
            self.routing = RoutingRecord(model, self.num_blocks, config.block_size)
        self.dense = DenseCache(self.keys, self.values, 2 * blocks * config.block_size)
        self.slots: SlotTable  # set by `attach`
        self.lean: LeanDecoder | None = None
        self.vision = VisionDecoder(model) if is_served(model.config) else None

    def attach(self, slots: SlotTable) -> None:
        """Read sequences from this table, and run the model once to check that it works."""
        self.slots = slots
        if self.vision is None and is_llama_like(self.model):
            self.lean = LeanDecoder(self.model, slots.max_len)
        zero = np.zeros((1, 1), np.int64)
        self._forward(zero, [self._blocks_tile(0, zero, zero)], zero)

    def load(self, pairs: Pairs) -> None:
        super().load(pairs)
        if self.vision is not None:
            self.vision.reload()

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Step:
        if plan.chunks:
            self._prefill(plan.chunks)
        if plan.copies:
            source, target = torch.tensor(plan.copies).unbind(1)
            for cache in (*self.keys, *self.values, *([] if self.routing is None else [self.routing.blocks])):
                cache[target] = cache[source]
        result = self._decode(plan.slots) if len(plan.slots) else None
        return lambda: result

    def clear_blocks(self, blocks: list[int]) -> None:
        """Zero cache blocks that hold non-finite numbers and that no sequence uses any more."""
        for cache in (*self.keys, *self.values):
            cache[torch.tensor(blocks)] = 0
        self.dense.clear()

    def _prefill(self, chunks: list[Chunk]) -> None:
        if self.vision is not None:
            found = [self.slots.sequence[chunk.slot].request.images for chunk in chunks]
            self.vision.compute([images for images in found if images is not None], self.config.deterministic)
        if self.config.deterministic:
            for chunk in chunks:
                for position in range(chunk.start, chunk.end):
                    self._run_chunks([Chunk(chunk.slot, position, position + 1)])
            return
        for group in group_chunks(sorted(chunks, key=self._prefill_order(chunks))):
            self._run_chunks(group)

    def _prefill_order(self, chunks: list[Chunk]) -> Callable[[Chunk], tuple[int, int]]:
        """Sort key: by size, but after the chunk that computes the preceding blocks in the same step."""
        table, size = self.slots.block_table, self.block_size
        new = {b for c in chunks for b in table[c.slot, c.start // size : c.end // size].tolist()}

        def order(chunk: Chunk) -> tuple[int, int]:
            waits = chunk.start > 0 and int(table[chunk.slot, chunk.start // size - 1]) in new
            return chunk.start if waits else 0, chunk.end - chunk.start

        return order

    def _run_chunks(self, chunks: list[Chunk]) -> None:
        """Compute the KV of chunks of about the same length as one padded tile."""
        slots = self.slots
        t = max(chunk.end - chunk.start for chunk in chunks)
        nb = max(-(-chunk.end // self.block_size) for chunk in chunks)
        ids, positions, write = np.zeros((3, len(chunks), t), np.int64)
        rows = np.array([chunk.slot for chunk in chunks])
        for i, chunk in enumerate(chunks):
            where, n = np.arange(chunk.start, chunk.end), chunk.end - chunk.start
            ids[i, :n] = slots.tokens[chunk.slot, chunk.start : chunk.end]
            positions[i, :n] = where
            write[i, :n] = self._cache_index(chunk.slot, where)
        if t > 1 and all(chunk.start == 0 for chunk in chunks):
            tile = Tile(0, torch.from_numpy(positions), t, partial(_new_tokens, t), causal=True)
        else:
            tile = self._blocks_tile(0, positions, slots.block_table[rows, :nb])
        inputs = None if self.vision is None else self._image_inputs(self.vision, chunks, ids, positions)
        self._forward(ids, [tile], write, logits=False, inputs=inputs)

    def _image_inputs(
        self, vision: VisionDecoder, chunks: list[Chunk], ids: np.ndarray, positions: np.ndarray
    ) -> VisionInputs:
        """Embeddings with images and positions of chunks; their `ids` and `positions` are [b, t], padded."""
        embeddings = vision.embed(torch.from_numpy(ids))
        rope = np.broadcast_to(positions, (3, *positions.shape)).copy()
        for i, chunk in enumerate(chunks):
            images = self.slots.sequence[chunk.slot].request.images
            if images is not None:
                n = chunk.end - chunk.start
                vision.insert(embeddings[i, :n], images, chunk.start)
                found = images.positions(chunk.start, chunk.end)
                if found is not None:
                    rope[:, i, :n] = found
        return embeddings.flatten(0, 1), torch.from_numpy(rope.reshape(3, -1))

    def _decode(self, rows: np.ndarray) -> StepResult:
        slots = self.slots
        if self.config.deterministic:
            num_top = int(slots.num_top[rows].max())
            alone = [self._decode_group([(rows[i : i + 1], None)], num_top) for i in range(len(rows))]
            parts: Any = [None if part[0] is None else np.concatenate(part) for part in zip(*alone, strict=True)]
        else:
            parts = self._decode_group(self.dense.arrange(slots, rows))
        rows, positions, *sampled = parts
        result = StepResult(rows, slots.ticket[rows], positions, *sampled)
        return keep_accepted(result, slots) if slots.num_drafts[rows].any() else result

    def _decode_group(self, groups: Iterable[tuple[np.ndarray, Shelf | None]], num_top: int = 0) -> tuple:
        """One forward pass; returns slots, positions and what `sample` returns, as arrays."""
        slots = self.slots
        tiles, rows = self._decode_tiles(groups)
        at = np.concatenate([tile.positions.numpy().reshape(-1) for tile in tiles])
        ids = slots.tokens[rows, at].astype(np.int64)
        batch = make_batch(slots, rows, self.shape.vocab_size, self.shape.eos_ids, at + 1)
        if self.config.deterministic:  # all rows must have the same columns
            batch.want_raw, batch.num_top = True, num_top
        inputs = None
        if self.vision is not None:
            rope = np.broadcast_to(at + slots.rope_delta[rows], (3, len(rows))).copy()
            inputs = self.vision.embed(torch.from_numpy(ids)), torch.from_numpy(rope)
        logits = self._forward(ids, tiles, self._cache_index(rows, at), inputs=inputs)
        return rows, at + 1, *(t if t is None else t.numpy() for t in sample(logits, batch))

    def _decode_tiles(self, groups: Iterable[tuple[np.ndarray, Shelf | None]]) -> tuple[list[Tile], np.ndarray]:
        """Tiles of the last token and the draft of each sequence, and the slot of each of their tokens."""
        slots, tiles, rows, first = self.slots, [], [], 0
        for members, shelf in groups:
            start = 0
            # Neighbours with drafts of the same length share a tile, so that nothing is padded.
            for part in np.split(members, np.flatnonzero(np.diff(slots.num_drafts[members])) + 1):
                at = slots.length[part, None] - 1 + np.arange(int(slots.num_drafts[part[0]]) + 1)
                if shelf is None:
                    needed = int(at.max()) // self.block_size + 1
                    tile = self._blocks_tile(first, at, slots.block_table[part, :needed])
                else:
                    tile = _shelf_tile(first, at, shelf, start)
                tiles.append(tile)
                rows.append(np.repeat(part, at.shape[1]))
                start += len(part)
                first += at.size
        return tiles, rows[0] if len(rows) == 1 else np.concatenate(rows)

    def _forward(
        self,
        ids: np.ndarray,
        tiles: list[Tile],
        write: np.ndarray,
        logits: bool = True,
        inputs: VisionInputs | None = None,
    ) -> torch.Tensor:
        """Logits of the step's tokens; with `logits=False` only their last hidden states."""
        positions = torch.cat([tile.positions.reshape(-1) for tile in tiles])
        write_to = torch.from_numpy(write.reshape(-1))
        paged = PagedBatch(self.keys, self.values, write_to, positions, tiles)
        tokens = torch.from_numpy(ids.reshape(-1))
        if self.lean is not None:
            return (self.lean.logits if logits else self.lean.hidden)(tokens, paged)
        if self.vision is not None and inputs is not None:
            return (self.vision.logits if logits else self.vision.hidden)(*inputs, paged)
        run = self.model if logits else self.model.base_model
        with nullcontext() if self.routing is None else self.routing.writing(write_to):
            out = run(input_ids=tokens[None], position_ids=positions[None], use_cache=False, paged=paged)
        return (out.logits if logits else out[0])[0]

    def _blocks_tile(self, first: int, positions: np.ndarray, table: np.ndarray) -> Tile:
        """A tile that gathers the blocks `table` [b, nb] of its sequences."""
        blocks = torch.from_numpy(np.ascontiguousarray(table)).reshape(-1)
        span = table.shape[1] * self.block_size

        def gather(cache: torch.Tensor) -> torch.Tensor:
            return cache.index_select(0, blocks).view(len(table), span, *cache.shape[2:])

        def read(layer: int, *new: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return gather(self.keys[layer]), gather(self.values[layer])

        return Tile(first, torch.from_numpy(positions), span, read)

    def _cache_index(self, rows: np.ndarray | int, positions: np.ndarray) -> np.ndarray:
        """Flat token positions in the cache of `positions` of the sequences in `rows`."""
        block, offset = np.divmod(positions, self.block_size)
        return self.slots.block_table[rows, block].astype(np.int64) * self.block_size + offset

    def _free_bytes(self) -> int:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        # Two thirds are left to the `DenseCache`.
        return min(int(self.config.mem_fraction * free) // 3, CPU_CACHE_BYTES)


def group_chunks(chunks: list[Chunk]) -> list[list[Chunk]]:
    """Divide chunks, in their order, into groups.

    Padding a group to its longest chunk adds a quarter at most.
    """
    groups: list[list[Chunk]] = []
    total = longest = 0
    for chunk in chunks:
        size = chunk.end - chunk.start
        longest = max(longest, size)
        if not groups or (len(groups[-1]) + 1) * longest > 1.25 * (total + size) + 16:
            groups.append([])
            total, longest = 0, size
        groups[-1].append(chunk)
        total += size
    return groups


def _new_tokens(t: int, layer: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The new keys and values themselves, for prompts from their start."""
    return key.view(-1, t, *key.shape[1:]), value.view(-1, t, *value.shape[1:])


def _shelf_tile(first: int, positions: np.ndarray, shelf: Shelf, start: int) -> Tile:
    """A tile of the sequences in the rows of a shelf from `start` on."""
    span, end = int(positions.max()) + 1, start + len(positions)
    write_to = torch.from_numpy((np.arange(start, end)[:, None] * shelf.width + positions).reshape(-1))
    read = partial(shelf.read, slice(start, end), write_to, span)
    aligned = int(positions.min()) + 1 == span
    return Tile(first, torch.from_numpy(positions), span, read, aligned=aligned)
