"""Collectives on real ranks: what rank 0 gives is what each rank gets, bit for bit."""

import torch
from engine_testing import random_batch

from arealite.api.io_struct import Stat
from arealite.utils import distributed
from arealite.utils.data import select_rows


def _exchange(rank):
    distributed.init_process_group("cpu")
    distributed.set_replica_size(1)
    batch = random_batch([4, 9, 3])
    batch["truncated"] = torch.tensor([True, False, True])
    shares = [select_rows(batch, [0, 2]), select_rows(batch, [1])]
    mine = distributed.scatter_batches(shares if rank == 0 else None)
    same = all(
        torch.equal(mine[k], v) and mine[k].dtype == v.dtype for k, v in shares[rank].items()
    )
    word = distributed.broadcast_json({"from": rank, "text": "é"})
    rows, start = distributed.all_gather_rows(torch.arange(rank + 1) + 10 * rank)
    stats = distributed.all_reduce_stats(
        {
            "mean": Stat(torch.tensor(3.0 * rank), 1.0),
            "top/max": Stat(torch.tensor(float(rank))),
            "low/min": Stat(torch.tensor(float(rank))),
            "nothing": Stat(torch.tensor(0.0), 0.0),
        }
    )
    return same, list(mine) == list(batch), word, rows.tolist(), start, stats


def test_collectives_between_two_ranks(two_ranks):
    for rank, answer in enumerate(two_ranks.run(_exchange)):
        same, ordered, word, rows, start, stats = answer
        assert same and ordered and word == {"from": 0, "text": "é"}
        assert rows == [0, 10, 11] and start == rank
        assert stats == {"mean": 1.5, "top/max": 1.0, "low/min": 0.0}


def _same_data(rank):
    """Two ranks that hold one replica together."""
    distributed.init_process_group("cpu")
    distributed.set_replica_size(2)
    batch = random_batch([4, 9, 3])
    mine = distributed.scatter_batches([batch] if rank == 0 else None)
    distributed.set_replica_size(1)
    return mine["input_ids"].tolist() == batch["input_ids"].tolist()


def test_ranks_of_one_replica_get_the_same_data(two_ranks):
    assert two_ranks.run(_same_data) == [True, True]


def test_one_process_needs_no_group():
    batch = random_batch([4, 9])
    assert distributed.scatter_batches([batch]) is batch
    assert distributed.broadcast_json([1]) == [1]
    assert distributed.all_reduce_stats({"a": Stat(torch.tensor(4.0), 2.0)}) == {"a": 2.0}
