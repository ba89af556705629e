"""Collectives on real ranks deliver the same bits."""

import time
from datetime import timedelta
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from arealite.api.cli_args import InferenceEngineConfig
from arealite.api.errors import WaitTimeout
from arealite.api.io_struct import Stat
from arealite.engine.remote import collecting
from arealite.engine.remote.collecting import CollectingEngine, scatter_batches
from arealite.utils import distributed
from arealite.utils.config import run_main
from arealite.utils.data import select_rows
from tests.engine.engine_testing import random_batch


def _exchange(rank):
    distributed.init_process_group("cpu")
    distributed.set_replica_size(1)
    batch = random_batch([4, 9, 3])
    batch["truncated"] = torch.tensor([True, False, True])
    shares = [select_rows(batch, [0, 2]), select_rows(batch, [1])]
    mine = scatter_batches(shares if rank == 0 else None)
    same = all(torch.equal(mine[k], v) and mine[k].dtype == v.dtype for k, v in shares[rank].items())
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
    """Two ranks hold one replica."""
    distributed.init_process_group("cpu")
    distributed.set_replica_size(2)
    batch = random_batch([4, 9, 3])
    mine = scatter_batches([batch] if rank == 0 else None)
    distributed.set_replica_size(1)
    return mine["input_ids"].tolist() == batch["input_ids"].tolist()


def test_ranks_of_one_replica_get_the_same_data(two_ranks):
    assert two_ranks.run(_same_data) == [True, True]


def test_one_process_needs_no_group():
    batch = random_batch([4, 9])
    assert scatter_batches([batch]) is batch
    assert distributed.broadcast_json([1]) == [1]
    assert distributed.all_reduce_stats({"a": Stat(torch.tensor(4.0), 2.0)}) == {"a": 2.0}


def _first_is_late(rank):
    distributed.init_process_group("cpu")
    impatient = dist.new_group(timeout=timedelta(seconds=1))
    if rank == 0:
        time.sleep(2.0)
    distributed.wait_for_first(60.0, impatient)
    return distributed.broadcast_json(rank, group=impatient)


def test_waiting_for_a_batch_may_take_longer_than_other_collectives(two_ranks):
    assert two_ranks.run(_first_is_late) == [0, 0]


def _first_hangs(rank):
    """Return the errors of rank 1: of waiting for a batch, and of another collective."""
    distributed.init_process_group("cpu")
    groups = [dist.new_group(timeout=timedelta(seconds=1)) for _ in range(2)]
    waiting = partial(distributed.wait_for_first, group=groups[0])
    errors = []
    if rank == 1:
        with (
            mock.patch.object(CollectingEngine, "__abstractmethods__", frozenset()),
            mock.patch.object(collecting, "_GRACE_S", 0.5),
            mock.patch.object(distributed, "wait_for_first", waiting),
            pytest.raises(WaitTimeout) as timeout,
        ):
            CollectingEngine(InferenceEngineConfig(batch_timeout_s=0.5))._share(None)
        errors.append(str(timeout.value))
        with pytest.raises(RuntimeError) as raised:
            dist.all_reduce(torch.zeros(1), group=groups[1])
        errors.append(str(raised.value))
    distributed.barrier()
    return errors


def test_a_hanging_rank_is_reported(two_ranks, capsys):
    none, (of_batch, of_exchange) = two_ranks.run(_first_hangs)
    assert none == [] and "rank 0 hangs" in of_batch
    assert "rank 1 has waited 1." in of_batch and "rollout.batch_timeout_s" in of_batch

    def main(argv):
        raise RuntimeError(of_exchange)

    with pytest.raises(SystemExit) as ended:
        run_main(main, [])
    assert ended.value.code == 1
    assert "waited for another rank until the deadline" in capsys.readouterr().err
