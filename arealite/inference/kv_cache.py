"""Bookkeeping of KV cache blocks: reference counts, and a prefix cache of full blocks.

Owned by the scheduler. Block 0 takes the padding and is never allocated. The key of a full block is (node of the block
before it, its tokens and the hashes of the images that they stand for), so a lookup follows the prefix exactly. An
unused block stays in the prefix cache until its memory is needed (least recently used first).
"""

from collections import OrderedDict
from collections.abc import Callable

import numpy as np

Salt = Callable[[int, int], bytes]


class BlockPool:
    """Reference-counted blocks with prefix sharing."""

    def __init__(self, num_blocks: int, block_size: int):
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.epoch = 0  # incremented by `flush`: older KV must not be shared any more
        self.spoilt: set[int] = set()  # in use, may hold non-finite numbers: not shared any more
        self._dirty: list[int] = []  # were spoilt and are free now: to be zeroed
        self._refs = [0] * num_blocks
        self._free = list(range(num_blocks - 1, 0, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()  # in the prefix cache, unused
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
        """Allocate an exclusive block. The caller has checked `num_free`."""
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._idle.popitem(last=False)
            self._forget(block)
        self._refs[block] = 1
        return block

    def share(self, blocks: list[int]) -> None:
        """Add a user to each of `blocks`."""
        for block in blocks:
            if self._refs[block] == 0:
                del self._idle[block]
            self._refs[block] += 1

    def release(self, blocks: list[int]) -> None:
        """Remove a user from each of `blocks`, the last block first: a prefix outlives its continuation."""
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
        """Remove blocks that may hold non-finite numbers from the prefix cache. Their users keep them."""
        for block in blocks:
            if block in self._key_of:
                self._forget(block)
        self.spoilt.update(blocks)

    def take_dirty(self) -> list[int]:
        """Blocks to zero before the next step: NaN in masked keys would survive the mask."""
        dirty, self._dirty = self._dirty, []
        return dirty

    def match(self, tokens: np.ndarray, salt: Salt | None = None) -> tuple[list[int], int]:
        """Share the longest cached prefix of `tokens`; returns its full blocks and its last node.

        `salt(start, end)` tells what else distinguishes these tokens: the images that they stand for.
        """
        blocks, parent = [], 0
        for start in range(0, len(tokens) - self.block_size + 1, self.block_size):
            found = self._node_of.get((parent, _content(tokens, start, start + self.block_size, salt)))
            if found is None:
                break
            parent, block = found
            blocks.append(block)
        self.share(blocks)
        return blocks, parent

    def register(self, blocks: list[int], tokens: np.ndarray, start: int, parent: int, salt: Salt | None = None) -> int:
        """Add full `blocks[start:]` to the prefix cache; returns the last node. `tokens` begin at block 0."""
        size = self.block_size
        for index in range(start, len(blocks)):
            key = (parent, _content(tokens, index * size, (index + 1) * size, salt))
            found = self._node_of.get(key)
            if found is None:
                block = blocks[index]
                if block in self._key_of:  # move it from its old prefix
                    self._forget(block)
                found = self._node_of[key] = (self._next_node, block)
                self._key_of[block] = key
                self._next_node += 1
            parent = found[0]
        return parent

    def flush(self) -> None:
        """Empty the prefix cache. Blocks in use stay with their users but are not shared any more."""
        self.epoch += 1
        self._node_of.clear()
        self._key_of.clear()
        self._free.extend(self._idle)
        self._idle.clear()

    def _forget(self, block: int) -> None:
        del self._node_of[self._key_of.pop(block)]


def _content(tokens: np.ndarray, start: int, end: int, salt: Salt | None) -> bytes:
    """What a block holds, as a part of its key. All tokens have the same size, so nothing is ambiguous."""
    content = tokens[start:end].tobytes()
    return content if salt is None else content + salt(start, end)
