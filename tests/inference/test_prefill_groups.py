"""The CPU runner pads chunks of a prefill to a common length."""

from arealite.inference.cpu.runner import group_chunks
from arealite.inference.scheduler import Chunk


def padded(groups: list[list[Chunk]]) -> int:
    return sum(len(group) * max(chunk.end - chunk.start for chunk in group) for group in groups)


def test_a_long_first_chunk_does_not_pad_the_short_ones_behind_it():
    """Prompts that share a long prefix: the first computes it, the others only their ends."""
    chunks = [Chunk(0, 0, 202)] + [Chunk(slot, 176, 201 + slot % 2) for slot in range(1, 32)]
    groups = group_chunks(chunks)
    assert [chunk for group in groups for chunk in group] == chunks
    assert padded(groups) <= 1.25 * sum(chunk.end - chunk.start for chunk in chunks)


def test_chunks_of_growing_length_are_divided():
    chunks = [Chunk(slot, 0, size) for slot, size in enumerate((10, 11, 12, 40, 44, 200))]
    groups = group_chunks(chunks)
    assert [[chunk.end for chunk in group] for group in groups] == [[10, 11, 12], [40, 44], [200]]


def test_tiny_chunks_share_one_group():
    chunks = [Chunk(slot, 0, size) for slot, size in enumerate((1, 1, 2, 5))]
    assert len(group_chunks(chunks)) == 1
