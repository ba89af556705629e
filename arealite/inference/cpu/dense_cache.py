"""A contiguous copy of the keys and values of decoding sequences, so that no step gathers blocks.

Owned by the CPU runner; the paged cache stays authoritative. Rows of the same width form a shelf, and a step attends
once per shelf. A row is filled from its blocks when its sequence starts to decode and when it outgrows its shelf.
Gathering all blocks in every step would cost more than attention itself, which is bound by memory bandwidth.

Legend: R rows of a shelf, W tokens a row has room for, Hkv KV heads, D head size, S decoding sequences.
"""

from collections.abc import Iterator

import numpy as np
import torch

from arealite.inference.cpu.memory import lazy_zeros
from arealite.inference.slots import SlotTable

_MIN_BLOCKS = 4  # of the narrowest shelf


class Shelf:
    """Rows of one width; row i holds the sequence `tickets[i]`."""

    def __init__(self, like: list[torch.Tensor], num_blocks: int, capacity: int):
        self.num_blocks, self.capacity = num_blocks, capacity
        block_size, *head = like[0].shape[1:]
        self.width = num_blocks * block_size
        # Zeros: NaN in masked keys would survive the mask.
        size, dtype = (capacity, self.width, *head), like[0].dtype
        self.keys, self.values = ([lazy_zeros(size, dtype) for _ in like] for _ in range(2))
        self.tickets: list[int] = []

    def read(
        self, rows: slice, write_to: torch.Tensor, span: int, layer: int, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add new tokens [b * t, Hkv, D] to `rows`; returns their keys and values, [b, span, Hkv, D]."""
        keys, values = self.keys[layer], self.values[layer]
        keys.view(-1, *key.shape[1:]).index_copy_(0, write_to, key)
        values.view(-1, *key.shape[1:]).index_copy_(0, write_to, value)
        return keys[rows, :span], values[rows, :span]


class DenseCache:
    """Shelves of rows of 4, 8, 16 … blocks, as many as fit into `max_tokens`.

    A shelf that is longer than needed is kept while there is room: new memory costs more than a step of a small model.
    """

    def __init__(self, keys: list[torch.Tensor], values: list[torch.Tensor], max_tokens: int):
        self.keys, self.values = keys, values  # paged: per layer [num_blocks, block_size, Hkv, D]
        self.max_tokens = max_tokens
        self.clear()

    def clear(self) -> None:
        """Drop all rows."""
        self._shelves: dict[int, Shelf] = {}
        self._tickets = self._width = np.zeros(0, np.int64)  # [S] of the step before
        self._parts: list[tuple[np.ndarray, Shelf | None]] = []

    def arrange(self, slots: SlotTable, rows: np.ndarray) -> Iterator[tuple[np.ndarray, Shelf | None]]:
        """Group the slots `rows` by shelf, in the order of its rows. Shelf None: read the paged blocks."""
        tickets = slots.ticket[rows]
        same = len(tickets) == len(self._tickets) and (tickets == self._tickets).all()
        if not (same and (slots.num_blocks[rows] <= self._width).all()):
            self._tickets = tickets
            self._rearrange(slots, rows)
        for members, shelf in self._parts:
            yield rows[members], shelf

    def _rearrange(self, slots: SlotTable, rows: np.ndarray) -> None:
        needed = np.maximum(slots.num_blocks[rows], _MIN_BLOCKS)
        self._width = width = 1 << np.ceil(np.log2(needed)).astype(np.int64)
        shelves, self._shelves, self._parts = self._shelves, {}, []
        block_size, num_tokens = self.keys[0].shape[1], 0
        spare = self.max_tokens - int(width.sum()) * block_size
        for blocks in np.unique(width).tolist():
            members = np.flatnonzero(width == blocks)
            num_tokens += len(members) * blocks * block_size
            if num_tokens > self.max_tokens:
                self._parts.append((members, None))
                continue
            # Rows that were never written cost address space only.
            capacity = 1 << (len(members) - 1).bit_length()
            shelf = shelves.get(blocks)
            unused = 0 if shelf is None else (shelf.capacity - capacity) * shelf.width
            if shelf is None or unused < 0 or (shelf.capacity > 4 * capacity and unused > spare):
                shelf, unused = Shelf(self.keys, blocks, capacity), 0
            spare -= unused
            self._shelves[blocks] = shelf
            self._parts.append((members[self._place(shelf, slots, rows[members])], shelf))

    def _place(self, shelf: Shelf, slots: SlotTable, rows: np.ndarray) -> np.ndarray:
        """Move the sequences in `rows` to the shelf's first rows; returns the index of each row's sequence."""
        index_of = {ticket: i for i, ticket in enumerate(slots.ticket[rows].tolist())}
        order = [index_of.pop(ticket, -1) for ticket in shelf.tickets[: len(rows)]]
        order += [-1] * (len(rows) - len(order))
        gaps = [row for row, index in enumerate(order) if index < 0]
        for gap, index in zip(gaps, index_of.values(), strict=True):
            order[gap] = index
        if gaps:
            self._fill(shelf, slots, rows[[order[gap] for gap in gaps]], gaps)
        shelf.tickets = slots.ticket[rows[order]].tolist()
        return np.array(order)

    def _fill(self, shelf: Shelf, slots: SlotTable, rows: np.ndarray, gaps: list[int]) -> None:
        most = int(slots.num_blocks[rows].max())
        blocks = torch.from_numpy(slots.block_table[rows, :most]).reshape(-1)
        where = torch.tensor(gaps)
        for source, target in ((self.keys, shelf.keys), (self.values, shelf.values)):
            for paged, dense in zip(source, target, strict=True):
                found = paged.index_select(0, blocks)
                part = dense[:, : most * paged.shape[1]]
                part[where] = found.view(len(rows), -1, *paged.shape[2:])
