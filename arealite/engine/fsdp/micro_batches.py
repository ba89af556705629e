"""Cuts this rank's padded batch into packed micro-batches of at most `max_tokens_per_mb` tokens.

Used by `FSDPEngine` for every pass. All data-parallel ranks get the same number of micro-batches, because sharded
layers need every rank in every pass. Rows of a preference pair stay together. Where sharing prefixes pays, only the
tokens that are computed count, and rows with a common prefix are neighbours.
"""

import logging
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from transformers import PreTrainedConfig, PreTrainedModel

from arealite.algo.logprobs import target_positions
from arealite.api.errors import TrainingError
from arealite.api.io_struct import Batch
from arealite.engine.fsdp.model import FILLER, random_settings
from arealite.engine.fsdp.shared_prefix import (
    PrefixPlan,
    Segment,
    SegmentPlan,
    cut_sorted,
    plan_prefixes,
    shared_lengths,
    sort_rows,
)
from arealite.engine.fsdp.vision import take_vision
from arealite.utils import distributed
from arealite.utils.data import IMAGE_INDEX, is_per_token, pack, select_rows, seq_lengths, split_micro_batches
from arealite.utils.decoders import has_vision

logger = logging.getLogger("arealite.engine")

# If sharing prefixes saves a smaller share of the tokens, gathering keys and values costs more than that.
_MIN_SAVED_SHARE = 0.1
# Micro-batches of fewer tokens do not fill a device.
_FEW_TOKENS = 1024


class MicroBatch(NamedTuple):
    # Rows of the padded batch; empty for a filler.
    rows: list[int]
    data: Batch
    lengths: list[int]
    # Tokens that rows share are computed once; None if nothing is shared.
    prefixes: PrefixPlan | None

    @property
    def segments(self) -> list[Segment]:
        """The computed tokens of each row."""
        if self.prefixes is not None:
            return self.prefixes.attention.segments
        return SegmentPlan.of_rows(self.lengths).segments

    @property
    def num_computed(self) -> int:
        """Number of tokens that are computed: without those of shared prefixes that other rows compute."""
        return sum(segment.length for segment in self.segments)


class MicroBatchCount(NamedTuple):
    """How many micro-batches a batch is cut into if fewer would fit."""

    least: int = 1
    # As many, unless they would have few tokens.
    wanted: int = 1
    multiple: int = 1

    def of_rank(self, tokens: int) -> int:
        """Return the least number for a rank with so many tokens."""
        return max(self.least, min(self.wanted, tokens // _FEW_TOKENS))

    def rounded(self, count: int) -> int:
        return -(-count // self.multiple) * self.multiple


def can_share_prefix(model: PreTrainedModel, ring: bool) -> bool:
    """Return whether this model can compute a shared prefix once; log the reason if not.

    `ring`: context-parallel ranks pass keys around, because they cannot divide the heads.
    """
    reason = None
    if ring:
        reason = "context-parallel ranks that cannot divide the heads pass on keys of whole sequences"
    elif has_vision(model.config):
        reason = "equal tokens of a vision-language model may stand for different images"
    elif any(value > 0.0 for *_, value in random_settings(model)):
        reason = "dropout is different in each row"
    if reason is not None and distributed.rank() == 0:
        logger.info("prefixes that rows share are computed for each row: %s", reason)
    return reason is None


def make_micro_batches(
    batch: Batch,
    model: PreTrainedModel,
    max_tokens: int,
    device: str,
    dp_group: dist.ProcessGroup | None,
    share_prefix: bool,
    count: MicroBatchCount,
) -> list[MicroBatch]:
    """Pack `batch` into micro-batches on `device`; `dp_group` is None if there is one data-parallel rank.

    A rank with fewer rows than micro-batches fills up with single tokens that have no loss.
    """
    _check_rows(batch, model.config.get_text_config().vocab_size)
    with_images = has_vision(model.config)
    micro_batches = []
    key_cost = _key_cost(model.config) if share_prefix else None
    parts, share_prefix = _split_rows(batch, max_tokens, dp_group, key_cost, count)
    for rows in parts:
        # Image sets are not rows: those of the chosen rows are found first.
        part = (select_rows(batch, rows) if with_images else batch) if rows else _filler_row(batch)
        data = pack(part, rows if part is batch else None)
        del data["max_seqlen"]
        lengths = data["cu_seqlens"].diff().tolist()
        # Found on the host: on the device it would synchronize.
        targets = target_positions(data["cu_seqlens"], data.get("loss_mask"))
        prefixes = plan_prefixes(data["input_ids"], lengths, targets) if share_prefix else None
        data = take_vision(model, part, data) if with_images else data
        data |= {"target_positions": targets} if rows else {"target_positions": targets, FILLER: torch.tensor(True)}
        data = {k: v.to(device, non_blocking=True) for k, v in data.items()}
        micro_batches.append(MicroBatch(rows, data, lengths, None if prefixes is None else prefixes.to(device)))
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


def _key_cost(config: PreTrainedConfig) -> float:
    """Return the share of keys and values in what a computed token keeps for the backward pass."""
    text = config.get_text_config()
    # Some families have layers of several widths: the first one is near enough.
    layer: Any = (getattr(text, "per_layer_config", None) or [text])[0]
    heads = layer.num_attention_heads
    head_size = getattr(layer, "head_dim", None) or text.hidden_size // heads
    inner = getattr(layer, "intermediate_size", None) or 4 * text.hidden_size
    keys = 2 * (getattr(layer, "num_key_value_heads", None) or heads) * head_size
    return keys / (keys + 2 * heads * head_size + 2 * text.hidden_size + 3 * inner)


def _split_rows(
    batch: Batch, max_tokens: int, dp_group: dist.ProcessGroup | None, key_cost: float | None, count: MicroBatchCount
) -> tuple[list[list[int]], bool]:
    """Return the rows of each micro-batch and whether they share prefixes; never if `key_cost` is None.

    Both are decided for all ranks together: prefixes are shared if that saves enough, and all ranks get as many
    micro-batches as the rank that needs most.
    """
    tokens, blocks = seq_lengths(batch).tolist(), _inseparable_rows(batch)
    sizes = [sum(tokens[row] for row in block) for block in blocks]
    tree = None if key_cost is None else _PrefixOrder(batch, tokens, blocks, key_cost)
    # Tokens saved, tokens, micro-batches with and without sharing.
    least = count.of_rank(sum(tokens))
    needs = [0, sum(tokens), 0, max(least, len(split_micro_batches(sizes, max_tokens)))]
    if tree is not None:
        needs[0], needs[2] = sum(tree.saved), max(least, len(tree.split(max_tokens)))
    ranks = [needs]
    if dp_group is not None:
        table = torch.zeros(dist.get_world_size(dp_group), 4, dtype=torch.long)
        table[dist.get_rank(dp_group)] = torch.tensor(needs)
        dist.all_reduce(table, group=dp_group)
        ranks = table.tolist()
    saved, total, with_sharing, without = zip(*ranks, strict=True)
    if tree is not None and sum(saved) > _MIN_SAVED_SHARE * sum(total):
        number = count.rounded(max(with_sharing))
        parts = tree.split(max_tokens, number)
        return parts + [[]] * (number - len(parts)), True
    groups = split_micro_batches(sizes, max_tokens, min_count=count.rounded(max(without)))
    return [sorted(row for block in group for row in blocks[block]) for group in groups], False


def _inseparable_rows(batch: Batch) -> list[list[int]]:
    """Return rows that stay together: those of a preference pair."""
    if "pair_ids" not in batch:
        return [[row] for row in range(len(batch["attention_mask"]))]
    members: dict[int, list[int]] = {}
    for row, owner in enumerate(batch["pair_ids"].tolist()):
        # A filler, or an answer to another prompt, is alone.
        members.setdefault(owner if owner > 0 else -1 - row, []).append(row)
    return list(members.values())


class _PrefixOrder:
    """The rows of a batch in an order in which neighbours share prefixes; rows of a block are neighbours."""

    def __init__(self, batch: Batch, tokens: list[int], blocks: list[list[int]], key_cost: float):
        ids = batch["input_ids"].numpy()
        rows = [ids[row, :length] for row, length in enumerate(tokens)]
        block_of = {row: number for number, block in enumerate(blocks) for row in block}
        # A block stands where its first row does.
        self.rows = [r for b in dict.fromkeys(block_of[row] for row in sort_rows(rows)) for r in blocks[b]]
        self.lengths = [tokens[row] for row in self.rows]
        shared = shared_lengths([rows[row] for row in self.rows])
        # Each row that computes tokens holds a copy of the keys of its prefix.
        self.saved = [s if s == n else int(s * (1 - key_cost)) for s, n in zip(shared, self.lengths, strict=True)]
        self.blocks = [block_of[row] for row in self.rows]

    def split(self, max_tokens: int, count: int = 0) -> list[list[int]]:
        """Return the rows of each micro-batch; `count` as in `cut_sorted`."""
        cuts = cut_sorted(self.lengths, self.saved, self.blocks, max_tokens, count)
        return [sorted(self.rows[a:b]) for a, b in pairwise([*cuts, len(self.rows)])]


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
