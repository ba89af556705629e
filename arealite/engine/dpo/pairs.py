"""Preference pairs in packed micro-batches: checks them and matches chosen with rejected rows.

`pair_ids` is positive for the rows of a pair, 0 for a filler and −1 for a mismatched row; `is_chosen` is the side. For
KTO a pair may have one row only.
"""

import torch

from arealite.api.errors import DatasetError
from arealite.api.io_struct import Batch
from arealite.utils.data import concat_padded, select_rows


def check_pairs(batch: Batch) -> None:
    """Raise `DatasetError` unless every pair has one chosen and one rejected row."""
    ids, chosen = batch["pair_ids"], batch["is_chosen"].bool()
    good, bad = ids[chosen].sort().values, ids[~chosen].sort().values
    if len(ids) and int(ids.min()) < 1:
        raise DatasetError("pair_ids must be 1 or larger: 0 marks filler rows")
    if len(good.unique()) != len(good) or not torch.equal(good, bad):
        raise DatasetError(
            f"preference rows do not pair up: {len(good)} chosen and {len(bad)} rejected rows; every pair_id needs one "
            "of each"
        )


def with_mismatched(batch: Batch, max_length: int | None = None) -> Batch:
    """Add rows for KTO's baseline: each prompt with the answer of the next row (`pair_ids` −1).

    In a batch with pairs it is the next row of the same side: that of the other side may answer the same prompt.
    A long prompt with a long answer is cut to `max_length`, or to the longest row if a row is longer: memory and the
    positions of the model may suffice for no more.
    """
    limit = None if max_length is None else max(max_length, int(batch["attention_mask"].sum(dim=1).max()))
    rows, real = [], batch["pair_ids"] > 0
    has_pairs = len(batch["pair_ids"][real].unique()) < int(real.sum())
    groups = batch["is_chosen"] if has_pairs else torch.zeros_like(batch["is_chosen"])
    for group in groups.unique().tolist():
        members = ((groups == group) & real).nonzero().flatten()
        for row, other in zip(members.tolist(), members.roll(-1).tolist(), strict=True):
            if row != other:
                rows.append(_joined(batch, row, other, limit))
    return concat_padded([batch, *rows]) if rows else batch


def _joined(batch: Batch, prompt_row: int, answer_row: int, limit: int | None) -> Batch:
    """Return a batch of one row: the prompt of one and the answer of another, cut to `limit` tokens."""
    one, other = (select_rows(batch, [row]) for row in (prompt_row, answer_row))
    # Between trained turns an answer may have other messages.
    prompt, start = (int(row["loss_mask"][0].argmax()) for row in (one, other))
    tokens, mask = (other[key][:, start:] for key in ("input_ids", "loss_mask"))
    ids = torch.cat([one["input_ids"][:, :prompt], tokens], dim=1)
    trained = torch.cat([torch.zeros_like(ids[:, :prompt]), mask], dim=1)
    ids, trained = ids[:, :limit], trained[:, :limit]
    new = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "loss_mask": trained}
    return {k: new.get(k, v) for k, v in one.items()} | {"pair_ids": torch.full((1,), -1)}


def num_pairs(mb: Batch) -> torch.Tensor:
    return ((mb["pair_ids"] > 0) & mb["is_chosen"].bool()).sum()


def split_pairs(values: torch.Tensor, mb: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Split `values [B]` into chosen and rejected, `[P]` each, with pairs in the same order."""
    rows = mb["pair_ids"].argsort()
    rows = rows[mb["pair_ids"][rows] > 0]
    chosen = mb["is_chosen"].bool()[rows]
    return values[rows[chosen]], values[rows[~chosen]]
