"""Zig-zag pieces of context-parallel ranks in a ring: equal work, and the attention of one rank."""

import pytest
import torch

from arealite.engine.fsdp.packed_attention import Buckets
from arealite.engine.fsdp.ring import _piece, is_uneven, plan_ring
from arealite.engine.fsdp.shared_prefix import SegmentPlan
from tests.engine.test_pipeline import check_like_one_rank


def _work(plan):
    """Keys of all queries of a plan."""
    return sum(s.length * s.prefix_length + s.length * (s.length + 1) // 2 for s in plan.segments)


@pytest.mark.parametrize(("lengths", "most"), [([128], 1.01), ([100, 28], 1.15), ([60, 4, 64], 1.15)])
def test_pieces_of_long_sequences_have_equal_work(lengths, most):
    assert is_uneven(lengths, 4)
    pieces = [_piece(lengths, 4, rank, ring=True) for rank in range(4)]
    tokens = [token for piece in pieces for part in piece.ranges for token in part]
    assert sorted(tokens) == list(range(128))
    work = torch.tensor([float(_work(plan_ring(lengths, 4, rank)[0])) for rank in range(4)])
    assert work.sum() == sum(n * (n + 1) / 2 for n in lengths)
    assert work.max() < most * work.mean()


def test_short_sequences_keep_one_range_and_few_hops():
    lengths = [8] * 16
    assert not is_uneven(lengths, 4)
    assert len(_piece(lengths, 4, 1, ring=True).ranges) == 1
    assert plan_ring(lengths, 4, 1)[1] == 0
    # Ranks that trade heads have equal work with one range.
    assert len(_piece([128], 4, 1, ring=False).ranges) == 1


def test_rows_of_tokens_in_a_piece():
    piece = _piece([16], 2, 0, ring=True)
    assert piece.take(torch.arange(16)).tolist() == [0, 1, 2, 3, 12, 13, 14, 15]
    rows, kept = piece.rows(torch.tensor([13, 5, 0, 12]))
    assert rows.tolist() == [5, 0, 4] and kept.tolist() == [0, 2, 3]


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("lengths", [[32], [20, 5, 7], [3, 29]])
def test_ranks_together_compute_the_attention_of_one(lengths, window):
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 32, 3, 8)
    expected = Buckets(SegmentPlan.of_rows(lengths)).attend(query, key, value, None, window)
    size = 4
    assert is_uneven(lengths, size)
    pieces = [_piece(lengths, size, rank, ring=True) for rank in range(size)]
    for rank, piece in enumerate(pieces):
        plan, hops = plan_ring(lengths, size, rank)
        # A ring brings the keys of the ranks after this one, in their order.
        ranks = [(rank + step) % size for step in range(1 + hops)]
        keys, values = (torch.cat([pieces[r].take(x) for r in ranks]) for x in (key, value))
        found = Buckets(plan).attend(piece.take(query), keys, values, None, window)
        torch.testing.assert_close(found, piece.take(expected))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("kind", "layout"), [("three_heads", "d2c2"), ("three_heads_window", "c4"), ("three_heads", "p2c2")]
)
def test_ring_ranks_train_like_one(four_ranks, model_dirs, tmp_path, kind, layout):
    check_like_one_rank(four_ranks, model_dirs[kind], layout, 1, tmp_path)
