"""Batches: joining, packing and cutting keep every token where it belongs."""

import pytest
import torch

from arealite.utils.data import (
    concat_padded,
    pack,
    partition_balanced,
    select_rows,
    seq_lengths,
    sequence_sums,
    split_micro_batches,
    split_minibatches,
    unpack,
)


def batch_of(lengths, start=1):
    longest = max(lengths)
    mask = (torch.arange(longest) < torch.tensor(lengths)[:, None]).long()
    ids = (torch.arange(len(lengths) * longest).view(len(lengths), longest) + start) * mask
    rewards = torch.arange(len(lengths)).float() + start
    return {"input_ids": ids, "attention_mask": mask, "rewards": rewards}


def test_concat_pads_to_the_longest_and_keeps_rows():
    joined = concat_padded([batch_of([2, 3]), batch_of([5], start=100)])
    assert joined["input_ids"].shape == (3, 5)
    assert joined["rewards"].tolist() == [1.0, 2.0, 100.0]
    assert seq_lengths(joined).tolist() == [2, 3, 5]
    assert joined["input_ids"][0].tolist() == [1, 2, 0, 0, 0]


def test_concat_refuses_batches_with_different_keys():
    other = batch_of([2])
    del other["rewards"]
    with pytest.raises(ValueError, match="rewards"):
        concat_padded([batch_of([2]), other])


def test_select_rows_cuts_padding():
    chosen = select_rows(batch_of([2, 7, 3]), [2, 0])
    assert chosen["input_ids"].shape == (2, 3)
    assert chosen["rewards"].tolist() == [3.0, 1.0]


def test_pack_and_unpack_are_inverse():
    batch = batch_of([2, 5, 1])
    packed = pack(batch)
    assert packed["cu_seqlens"].tolist() == [0, 2, 7, 8] and int(packed["max_seqlen"]) == 5
    assert packed["position_ids"].tolist() == [0, 1, 0, 1, 2, 3, 4, 0]
    assert packed["rewards"].tolist() == [1, 2, 3]
    assert torch.equal(unpack(packed["input_ids"], batch["attention_mask"]), batch["input_ids"])


def test_packed_rows_are_the_packed_selection():
    batch = batch_of([2, 5, 1, 4])
    batch["routed"] = torch.rand(4, 5, 3)
    for rows in ([3, 0], [1], [2, 1, 0, 3]):
        packed, selected = pack(batch, rows), pack(select_rows(batch, rows))
        assert packed.keys() == selected.keys()
        assert all(torch.equal(packed[key], selected[key]) for key in packed), rows


def test_concat_widens_types_as_torch_does():
    short, long = batch_of([2]), batch_of([4])
    short["values"], long["values"] = torch.tensor([[1, 2]]), torch.tensor([[0.5, 1.5, 2.5, 3.5]])
    joined = concat_padded([short, long])["values"]
    assert joined.tolist() == [[1.0, 2.0, 0.0, 0.0], [0.5, 1.5, 2.5, 3.5]]


def test_sequence_sums():
    sums = sequence_sums(torch.arange(6.0), torch.tensor([0, 1, 4, 6]))
    assert sums.tolist() == [0, 6, 9]


def test_micro_batches_respect_the_budget_and_lose_nothing():
    lengths = torch.randint(1, 50, (100,), generator=torch.Generator().manual_seed(0)).tolist()
    groups = split_micro_batches(lengths, 120)
    assert sorted(i for g in groups for i in g) == list(range(100))
    assert all(sum(lengths[i] for i in g) <= 120 for g in groups)
    assert len(groups) <= -(-sum(lengths) // 120) + 1
    assert groups == split_micro_batches(lengths, 120)


def test_micro_batches_have_nearly_equal_sizes():
    """First-fit would leave 10 tokens for the last group."""
    groups = split_micro_batches([10] * 25, 120)
    assert sorted(len(group) for group in groups) == [8, 8, 9]
    # The longest rows spread first (70 + 40, 50 + 50 + 30) would pass the budget.
    assert split_micro_batches([70, 50, 50, 40, 30], 120) == [[0, 1], [2, 3, 4]]


def test_micro_batches_at_least_min_count_and_long_rows_alone():
    assert len(split_micro_batches([4, 4, 4, 4], 100, min_count=3)) == 3
    assert split_micro_batches([500, 3], 100) == [[0], [1]]
    assert [len(g) for g in split_micro_batches([5], 100, min_count=3)].count(0) == 2


@pytest.mark.parametrize("parts", [1, 3, 7])
def test_partition_is_balanced_complete_and_deterministic(parts):
    lengths = torch.randint(1, 1000, (64,), generator=torch.Generator().manual_seed(1)).tolist()
    groups = partition_balanced(lengths, parts)
    tokens = [sum(lengths[i] for i in g) for g in groups]
    assert sorted(i for g in groups for i in g) == list(range(64))
    assert max(tokens) - min(tokens) < 1000 and all(groups)
    assert groups == partition_balanced(lengths, parts)
    assert all(partition_balanced([0] * parts, parts))


def test_minibatches_keep_groups_together_and_share_the_signal():
    lengths = [5, 9, 3, 7] * 6
    batch = batch_of(lengths)
    batch["group_ids"] = torch.arange(12).repeat_interleave(2)
    batch["advantages"] = torch.zeros(24, 9)
    batch["advantages"][[0, 7, 14, 21], 1] = 1.0
    parts = split_minibatches(batch, 2)
    assert sorted(row for rows in parts for row in rows) == list(range(24))
    for rows in parts:
        assert {row ^ 1 for row in rows} == set(rows)
        assert len(rows) == 12 and len({0, 7, 14, 21} & set(rows)) == 2
        assert abs(sum(lengths[row] for row in rows) - sum(lengths) / 2) <= 4
    batch["advantages"][7:] = 0.0  # one group with a signal is left
    assert split_minibatches(batch, 2) == partition_balanced(lengths, 2)
