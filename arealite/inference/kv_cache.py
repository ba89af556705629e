"""Which KV cache blocks are used by whom, and which full blocks can be shared by a common prefix.

Owned by the scheduler. Block 0 is a bin for padding and is never given out. Full blocks are known by
`(identity of the block before, their tokens)`, so a lookup walks the prefix exactly, with no hash collisions. A
block nobody uses stays known until its room is needed (least recently used first).
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np


class BlockPool:
    """Reference-counted blocks with prefix sharing."""

    def __init__(self, num_blocks: int, block_size: int):
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.epoch = 0  # raised by `flush`: older KV must not be shared any more
        self.spoilt: set[int] = set()  # in use, perhaps not finite: shared no further
        self._dirty: list[int] = []  # spoilt once, given back since
        self._refs = [0] * num_blocks
        self._free = list(range(num_blocks - 1, 0, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()  # known to the cache, used by nobody
        self._key_of: dict[int, tuple[int, bytes]] = {}
        self._node_of: dict[tuple[int, bytes], tuple[int, int]] = {}  # key -> (node id, block)
        self._next_node = 1

    @property
    def num_usable(self) -> int:
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        return len(self._free) + len(self._idle)

    def allocate(self) -> int:
        """A block of one's own. The caller has checked `num_free`."""
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._idle.popitem(last=False)
            self._forget(block)
        self._refs[block] = 1
        return block

    def share(self, blocks: list[int]) -> None:
        """One more user of each of `blocks`."""
        for block in blocks:
            if self._refs[block] == 0:
                del self._idle[block]
            self._refs[block] += 1

    def release(self, blocks: list[int]) -> None:
        """One user less. The last block goes first, so that a prefix outlives what follows it."""
        for block in reversed(blocks):
            self._refs[block] -= 1
            assert self._refs[block] >= 0, f"block {block} released twice"
            if self._refs[block] == 0:
                if block in self._key_of:
                    self._idle[block] = None
                    continue
                self._free.append(block)
                if block in self.spoilt:
                    self.spoilt.remove(block)
                    self._dirty.append(block)

    def spoil(self, blocks: list[int]) -> None:
        """What these hold may not be finite: nobody finds them any more. Who shares them already keeps them as they are."""
        for block in blocks:
            if block in self._key_of:
                self._forget(block)
        self.spoilt.update(blocks)

    def take_dirty(self) -> list[int]:
        """Blocks to zero before the next step: masked keys still meet the queries, and NaN would survive the mask."""
        dirty, self._dirty = self._dirty, []
        return dirty

    def match(self, tokens: np.ndarray) -> tuple[list[int], int]:
        """The longest known prefix of `tokens` in full blocks (now shared with the caller), and its last node."""
        blocks, parent = [], 0
        for start in range(0, len(tokens) - self.block_size + 1, self.block_size):
            found = self._node_of.get((parent, tokens[start : start + self.block_size].tobytes()))
            if found is None:
                break
            parent, block = found
            blocks.append(block)
        self.share(blocks)
        return blocks, parent

    def register(self, blocks: list[int], tokens: np.ndarray, start: int, parent: int) -> int:
        """Make the full blocks `blocks[start:]` findable; `tokens` begin at block 0. Returns the last node."""
        size = self.block_size
        for index in range(start, len(blocks)):
            key = (parent, tokens[index * size : (index + 1) * size].tobytes())
            found = self._node_of.get(key)
            if found is None:
                block = blocks[index]
                if block in self._key_of:  # its old prefix was forgotten: it moves to the new one
                    self._forget(block)
                found = self._node_of[key] = (self._next_node, block)
                self._key_of[block] = key
                self._next_node += 1
            parent = found[0]
        return parent

    def flush(self) -> None:
        """Forget every prefix; blocks in use stay with their users but are shared no further."""
        self.epoch += 1
        self._node_of.clear()
        self._key_of.clear()
        self._free.extend(self._idle)
        self._idle.clear()

    def _forget(self, block: int) -> None:
        del self._node_of[self._key_of.pop(block)]
