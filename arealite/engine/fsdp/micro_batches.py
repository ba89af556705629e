"""Cuts this rank's padded batch into packed micro-batches of at most `max_tokens_per_mb` tokens.

Used by `FSDPEngine` for every pass. All data-parallel ranks get the same number of micro-batches, because sharded
layers need every rank in every pass. Rows of a preference pair stay together; rows of a group stay together while they
fit, so that they can share their prompt.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from arealite.algo.logprobs import target_positions
from arealite.api.errors import TrainingError
from arealite.api.io_struct import Batch, Stat
from arealite.engine.fsdp.shared_prefix import PrefixPlan, plan_prefixes
from arealite.engine.fsdp.vision import take_vision
from arealite.utils.data import IMAGE_INDEX, is_per_token, pack, select_rows, seq_lengths, split_micro_batches
from arealite.utils.decoders import has_vision


class MicroBatch(NamedTuple):
    # Rows of the padded batch; empty for a filler.
    rows: list[int]
    data: Batch
    lengths: list[int]
    # Prompts that rows of a group share, computed once.
    prefixes: PrefixPlan | None


def make_micro_batches(
    batch: Batch,
    model: PreTrainedModel,
    max_tokens: int,
    device: str,
    dp_group: dist.ProcessGroup | None,
    share_prefix: bool,
) -> list[MicroBatch]:
    """Pack `batch` into micro-batches on `device`; `dp_group` is None if there is one data-parallel rank.

    A rank with fewer rows than micro-batches fills up with single tokens that have no loss.
    """
    _check_rows(batch, model.config.get_text_config().vocab_size)
    with_images = has_vision(model.config)
    micro_batches = []
    for rows in _split_rows(batch, max_tokens, dp_group):
        part = select_rows(batch, rows) if rows else _filler_row(batch)
        data = pack(part)
        del data["max_seqlen"]
        lengths = data["cu_seqlens"].diff().tolist()
        # Found on the host: on the device it would synchronize.
        data["target_positions"] = target_positions(data["cu_seqlens"], data.get("loss_mask"))
        prefixes = None
        if share_prefix and not with_images:
            prefixes = _shared_prefixes(part, data["input_ids"], lengths, device)
        data = take_vision(model, part, data) if with_images else data
        data = {k: v.to(device, non_blocking=True) for k, v in data.items()}
        micro_batches.append(MicroBatch(rows, data, lengths, prefixes))
    return micro_batches


def _check_rows(batch: Batch, vocab_size: int) -> None:
    mask, ids = batch["attention_mask"], batch["input_ids"]
    if mask.shape[1] > 1 and bool((mask[:, 1:] > mask[:, :-1]).any()):
        raise ValueError("attention_mask is not right-padded: a token follows padding")
    unknown = ids[(ids < 0) | (ids >= vocab_size)]
    if len(unknown):
        raise TrainingError(
            f"the batch has token id {int(unknown[0])}, but the model's vocabulary has {vocab_size} tokens: use the "
            "tokenizer of this model, and check the ids that the workflow returns"
        )


def _split_rows(batch: Batch, max_tokens: int, dp_group: dist.ProcessGroup | None) -> list[list[int]]:
    """Return the rows of each micro-batch. All ranks get as many as the rank that needs most."""
    units = _inseparable_rows(batch, max_tokens)
    tokens = seq_lengths(batch).tolist()
    lengths = [sum(tokens[row] for row in unit) for unit in units]
    groups = split_micro_batches(lengths, max_tokens)
    if dp_group is not None:
        most = torch.tensor([len(groups)])
        dist.all_reduce(most, dist.ReduceOp.MAX, dp_group)
        groups = split_micro_batches(lengths, max_tokens, min_count=int(most))
    return [sorted(row for unit in group for row in units[unit]) for group in groups]


def _inseparable_rows(batch: Batch, max_tokens: int) -> list[list[int]]:
    """Return rows that stay together: those of a pair always, those of a group while they fit."""
    key = "pair_ids" if "pair_ids" in batch else "group_ids"
    if key not in batch:
        return [[row] for row in range(len(batch["attention_mask"]))]
    members: dict[int, list[int]] = {}
    for row, owner in enumerate(batch[key].tolist()):
        # A filler, or an answer to another prompt.
        is_alone = key == "pair_ids" and owner <= 0
        members.setdefault(-1 - row if is_alone else owner, []).append(row)
    if key == "pair_ids":
        return list(members.values())
    tokens, units = seq_lengths(batch).tolist(), []
    for rows in members.values():
        filled = max_tokens + 1
        for row in rows:
            if filled + tokens[row] > max_tokens:
                units.append([])
                filled = 0
            units[-1].append(row)
            filled += tokens[row]
    return units


def _filler_row(batch: Batch) -> Batch:
    """Return one row of one token; all else is zero, also its loss mask."""
    filler = {}
    for key, value in batch.items():
        shape = (1, 1, *value.shape[2:]) if is_per_token(batch, key) else (1, *value.shape[1:])
        filler[key] = value.new_zeros(shape)
    filler["attention_mask"][:] = 1
    if IMAGE_INDEX in filler:
        filler[IMAGE_INDEX][:] = -1
    return filler


def _shared_prefixes(rows: Batch, ids: torch.Tensor, lengths: list[int], device: str) -> PrefixPlan | None:
    if "group_ids" not in rows or "loss_mask" not in rows:
        return None
    trained = rows["loss_mask"].bool()
    first = torch.where(trained.any(1), trained.int().argmax(1), trained.shape[1])
    plan = plan_prefixes(ids, lengths, rows["group_ids"].tolist(), first.tolist())
    return None if plan is None else plan.to(device)


def merge_stats(stats: dict[str, Stat], new: dict[str, Stat]) -> None:
    """Add the statistics of a micro-batch to those of the batch."""
    for key, (total, weight) in new.items():
        if key not in stats:
            stats[key] = Stat(torch.as_tensor(total).detach(), weight)
        elif key.endswith("/max"):
            stats[key] = Stat(torch.maximum(stats[key].total, total), weight)
        elif key.endswith("/min"):
            stats[key] = Stat(torch.minimum(stats[key].total, total), weight)
        else:
            stats[key] = Stat(stats[key].total + total, stats[key].weight + weight)
