"""Packs the chunks of a prefill into the inputs of its CUDA graph. Used by the CUDA runner."""

import numpy as np

from arealite.inference.scheduler import Chunk
from arealite.inference.slots import SlotTable


def pack_chunks(slots: SlotTable, chunks: list[Chunk], n: int, tiles: int, tile_tokens: int) -> np.ndarray:
    """Ids, rows and positions of `n` tokens, then first token and number of tokens of each tile.

    Tiles with long contexts come first, so that none of them starts when others have ended.
    """
    data = np.zeros(3 * n + 2 * tiles, np.int32)
    ids, rows, positions = data[: 3 * n].reshape(3, n)
    first, count = data[3 * n :].reshape(2, tiles)
    rows[:] = slots.num_slots
    offset = tile = 0
    for chunk in chunks:
        size = chunk.end - chunk.start
        part = slice(offset, offset + size)
        ids[part] = slots.tokens[chunk.slot, chunk.start : chunk.end]
        rows[part] = chunk.slot
        positions[part] = np.arange(chunk.start, chunk.end)
        starts = np.arange(0, size, tile_tokens)
        first[tile : tile + len(starts)] = offset + starts
        count[tile : tile + len(starts)] = np.minimum(tile_tokens, size - starts)
        tile += len(starts)
        offset += size
    order = np.argsort(-positions[first[:tile]], kind="stable")
    first[:tile], count[:tile] = first[:tile][order], count[:tile][order]
    return data
