"""Preference pairs in packed micro-batches: checking them, matching chosen with rejected, sums over answers.

Rows say explicitly which pair they belong to (`pair_ids > 0`; 0 marks a filler) and which side they are (`is_chosen`).
"""

from __future__ import annotations

import torch

from arealite.api.errors import DatasetError
from arealite.api.io_struct import Batch


def check_pairs(batch: Batch) -> None:
    """Every pair has exactly one chosen and one rejected row."""
    ids, chosen = batch["pair_ids"], batch["is_chosen"].bool()
    good, bad = ids[chosen].sort().values, ids[~chosen].sort().values
    if len(ids) and int(ids.min()) < 1:
        raise DatasetError("pair_ids must be 1 or larger: 0 marks rows without meaning")
    if len(good.unique()) != len(good) or not torch.equal(good, bad):
        raise DatasetError(
            f"preference rows do not pair up: {len(good)} chosen and {len(bad)} rejected rows; every pair_id needs one of "
            "each"
        )


def num_pairs(mb: Batch) -> torch.Tensor:
    return ((mb["pair_ids"] > 0) & mb["is_chosen"].bool()).sum()


def split_pairs(values: torch.Tensor, mb: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Per-row `values [B]` as those of the chosen and of the rejected, `[P]` each, in the same order."""
    ids, chosen = mb["pair_ids"], mb["is_chosen"].bool()
    real = ids > 0
    sides = []
    for side in (chosen & real, ~chosen & real):
        rows = side.nonzero(as_tuple=True)[0]
        sides.append(values[rows[ids[rows].argsort()]])
    return sides[0], sides[1]
