"""Tests of the dense cache: its rows equal the paged blocks while sequences start, grow and finish."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import pytest
import torch

from arealite.inference.cpu.dense_cache import DenseCache, Shelf
from arealite.inference.cpu.memory import lazy_zeros
from arealite.inference.slots import SlotTable
from tests.inference.conftest import make_model, prompts, submit

BLOCK, NUM_BLOCKS, MAX_LEN = 4, 600, 200


def paged_cache(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(NUM_BLOCKS, BLOCK, 2, 3, generator=generator) for _ in range(2)]


@pytest.mark.parametrize("max_tokens", [NUM_BLOCKS * BLOCK, 300, 0])
def test_rows_equal_paged_blocks(max_tokens):
    keys, values = paged_cache(0), paged_cache(1)
    dense = DenseCache(keys, values, max_tokens)
    slots = SlotTable(24, MAX_LEN, BLOCK)
    rng = np.random.default_rng(0)
    running: dict[int, int] = {}  # slot -> length
    num_dense = 0
    for ticket in range(1, 200):
        slot = int(rng.integers(24))
        if slot in running and rng.random() < 0.5:
            del running[slot]
        elif slot not in running:
            running[slot] = int(rng.integers(1, 60))
            slots.ticket[slot] = ticket
            slots.block_table[slot] = rng.integers(1, NUM_BLOCKS, slots.block_table.shape[1])
        running = {s: min(n + 1, MAX_LEN) for s, n in running.items()}
        for s, length in running.items():
            slots.length[s], slots.num_blocks[s] = length, -(-length // BLOCK)
        rows = np.array(sorted(running), np.int64)
        groups = list(dense.arrange(slots, rows)) if running else []
        assert sorted(np.concatenate([[], *(part for part, _ in groups)])) == sorted(running)
        sizes = [len(part) * shelf.width for part, shelf in groups if shelf is not None]
        assert sum(sizes) <= max_tokens
        for part, shelf in groups:
            if shelf is not None:
                check_step(shelf, slots, part, keys, values)
                num_dense += len(part)
    assert (num_dense > 0) == (max_tokens > 0)


def check_step(shelf: Shelf, slots: SlotTable, rows: np.ndarray, keys, values) -> None:
    """Write the newest token as a step does, and compare all tokens with the paged blocks."""
    at = slots.length[rows] - 1
    block, offset = slots.block_table[rows, at // BLOCK], at % BLOCK
    write_to = torch.from_numpy(np.arange(len(rows)) * shelf.width + at)
    for layer in range(2):
        new = (cache[layer][block, offset] for cache in (keys, values))
        found = shelf.read(slice(0, len(at)), write_to, int(at.max()) + 1, layer, *new)
        for dense, paged in zip(found, (keys, values), strict=True):
            for i, slot in enumerate(rows):
                expected = paged[layer][slots.block_table[slot]].flatten(0, 1)[: at[i] + 1]
                assert torch.equal(dense[i, : at[i] + 1], expected)


def test_memory_is_kept_while_there_is_room():
    keys, values = paged_cache(0), paged_cache(1)

    def shelf_of(dense: DenseCache, count: int) -> Shelf:
        slots = SlotTable(24, MAX_LEN, BLOCK)
        slots.ticket[:count], slots.num_blocks[:count] = np.arange(1, count + 1), 1
        ((_, shelf),) = dense.arrange(slots, np.arange(count))
        assert shelf is not None
        return shelf

    roomy, narrow = DenseCache(keys, values, 24 * 4 * BLOCK + 200), DenseCache(keys, values, 24 * 4 * BLOCK)
    for dense in (roomy, narrow):
        first = shelf_of(dense, 24)
        assert (shelf_of(dense, 2) is first) == (dense is roomy)
        assert shelf_of(dense, 24).capacity == 32


def test_zeros_occupy_memory_only_where_they_are_written():
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    before = resident()
    zeros = lazy_zeros((1 << 14, 1 << 12), torch.float32)  # 256 MiB
    zeros[-1] = 1.0
    assert zeros[0].sum() == 0 and zeros[-1].sum() == 1 << 12
    assert resident() - before < 64 << 20
    assert lazy_zeros((0, 4), torch.bfloat16).shape == (0, 4)


def test_size_of_the_dense_cache_does_not_change_tokens(make_engine):
    model = make_model()
    results = []
    for max_tokens in (4096, 100, 0):
        engine = make_engine(model)
        engine.core.runner.dense.max_tokens = max_tokens
        futures = [
            submit(engine, prompt, max_new_tokens=10 * (i + 1), sampling_seed=i, ignore_eos=True)
            for i, prompt in enumerate(prompts(8))
        ]
        results.append([future.result(60)[0].token_ids for future in futures])
    assert results[0] == results[1] == results[2]
