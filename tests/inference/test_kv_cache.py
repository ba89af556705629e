"""Tests of the block pool: sharing, eviction, flushing, and conservation of blocks."""

from __future__ import annotations

import numpy as np

from arealite.inference.kv_cache import BlockPool


def tokens(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def test_released_prefix_is_cached_until_evicted():
    pool = BlockPool(num_blocks=4, block_size=2)
    blocks = [pool.allocate(), pool.allocate()]
    pool.register(blocks, tokens(1, 2, 3, 4), start=0, parent=0)
    pool.release(blocks)
    assert pool.num_free == pool.num_usable == 3
    assert pool.match(tokens(1, 2, 3, 4, 5))[0] == blocks
    assert pool.match(tokens(1, 2, 9, 9))[0] == blocks[:1]
    assert pool.match(tokens(2, 1))[0] == []
    pool.release(blocks)
    pool.release(blocks[:1])
    taken = [pool.allocate() for _ in range(2)]  # the free block, then the last one of the prefix
    assert taken[1] == blocks[1]
    assert pool.match(tokens(1, 2, 3, 4))[0] == blocks[:1]


def test_equal_blocks_after_different_prefixes_are_distinct():
    pool = BlockPool(num_blocks=8, block_size=1)
    first, second = [pool.allocate(), pool.allocate()], [pool.allocate(), pool.allocate()]
    pool.register(first, tokens(1, 7), 0, 0)
    pool.register(second, tokens(2, 7), 0, 0)
    assert pool.match(tokens(2, 7))[0] == second


def test_flush_empties_the_prefix_cache_and_keeps_blocks_in_use():
    pool = BlockPool(num_blocks=4, block_size=1)
    used, idle = pool.allocate(), pool.allocate()
    pool.register([used], tokens(1), 0, 0)
    pool.register([idle], tokens(2), 0, 0)
    pool.release([idle])
    pool.flush()
    assert pool.match(tokens(1))[0] == [] and pool.match(tokens(2))[0] == []
    assert pool.num_free == 2
    pool.release([used])
    assert pool.num_free == 3


def test_spoilt_block_is_not_shared_and_zeroed_after_its_last_user():
    pool = BlockPool(num_blocks=4, block_size=1)
    blocks = [pool.allocate(), pool.allocate()]
    pool.register(blocks, tokens(1, 2), 0, 0)
    pool.share(blocks[:1])  # another sequence uses the first block
    pool.spoil(blocks)
    pool.release(blocks)
    assert pool.match(tokens(1, 2))[0] == []
    assert pool.take_dirty() == blocks[1:] and pool.take_dirty() == []
    pool.release(blocks[:1])
    assert pool.take_dirty() == blocks[:1]
    assert pool.num_free == pool.num_usable and not pool.spoilt


def test_random_use_conserves_blocks():
    random = np.random.default_rng(0)
    pool = BlockPool(num_blocks=20, block_size=2)
    held: list[list[int]] = []
    for _ in range(3000):
        if held and (random.random() < 0.5 or pool.num_free < 4):
            pool.release(held.pop(random.integers(len(held))))
            continue
        sequence = random.integers(0, 2, 8).astype(np.int32)
        shared, parent = pool.match(sequence)
        if pool.num_free < 4 - len(shared):
            pool.release(shared)
            continue
        blocks = shared + [pool.allocate() for _ in range(4 - len(shared))]
        assert len(set(blocks)) == 4 and 0 not in blocks
        pool.register(blocks, sequence, len(shared), parent)
        held.append(blocks)
    for blocks in held:
        pool.release(blocks)
    assert pool.num_free == pool.num_usable
