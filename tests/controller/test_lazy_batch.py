"""A script uses a batch in the object store like a dict, and fetches only the columns that it reads."""

from pathlib import Path

import pytest
import torch

from arealite.api.alloc_mode import ParallelStrategy
from arealite.controller.controllers import Controller
from arealite.controller.lazy import Layer, LazyBatch, LazyList, LazyTensor
from arealite.controller.messages import select
from arealite.controller.runtime import Runtime


class EndedCall:
    """A call that has ended, with two shares of columns. Records in `fetched` which columns are fetched."""

    order = None

    def __init__(self, shares, fetched):
        self.refs, self.fetched = shares, fetched

    def columns(self):
        return tuple(self.refs[0])

    def fetch(self, column):
        self.fetched.append(column)
        return [share[column] for share in self.refs]

    def put(self, column):
        rows = len(self.refs[0]["rewards"])
        return EndedCall([{"": column[:rows]}, {"": column[rows:]}], self.fetched)

    def value(self):
        return [{"loss": 1.0}, {"loss": 2.0}]


@pytest.fixture
def fetched():
    return []


@pytest.fixture
def batch(fetched):
    first = {"versions": torch.ones(1, 2), "rewards": torch.tensor([1.0])}
    second = {"versions": torch.ones(2, 3), "rewards": torch.tensor([2.0, 3.0])}
    return LazyBatch([Layer(EndedCall([first, second], fetched))])


def prediction(fetched, name=""):
    return LazyTensor(EndedCall([{name: torch.zeros(1, 2)}, {name: torch.ones(2, 3)}], fetched), name)


def test_keys_and_assignment_fetch_nothing(batch, fetched):
    batch["prox_logp"] = prediction(fetched)
    batch.update(values=prediction(fetched, "values"))
    assert list(batch) == ["versions", "rewards", "prox_logp", "values"] and len(batch) == 4
    assert "values" in batch and "returns" not in batch and fetched == []
    del batch["values"]
    assert "values" not in batch
    with pytest.raises(KeyError):
        batch["returns"]


def test_reading_a_column_fetches_only_it_and_only_once(batch, fetched):
    rewards = batch["rewards"]
    assert rewards.float().tolist() == [1, 2, 3] and float(rewards.mean()) == 2
    assert torch.unique(rewards).tolist() == [1, 2, 3] and len(rewards) == 3 and rewards.shape == (3,)
    assert (rewards - 1).tolist() == (rewards * 1 - torch.ones(3)).tolist() == [0, 1, 2]
    assert (torch.ones(3) + rewards).tolist() == [2, 3, 4] and bool((rewards > 0).all())
    assert fetched == ["rewards"]
    assert batch["versions"].tensor().tolist() == [[1, 1, -1], [1, 1, 1], [1, 1, 1]], "padded to one length"


def test_predictions_do_not_wait_for_each_other(batch, fetched):
    batch["prox_logp"] = prediction(fetched)
    batch["rewards"] = batch["rewards"].tensor() * 2  # computed by the script: no prediction
    batch.layers.append(Layer(prediction(fetched, "advantages")._call))
    assert len(batch.layers) == 4 and len(batch.observed()) == 3
    assert batch["rewards"].tolist() == [2, 4, 6], "the last layer wins"


def test_columns_added_by_a_prediction_are_in_the_batch(batch, fetched):
    shares = [{"": torch.zeros(1), "+final": torch.zeros(1)}, {"": torch.ones(2), "+final": torch.ones(2)}]
    call = EndedCall(shares, fetched)
    batch.add(Layer(call, added=True), predicted=True)
    batch["values"] = LazyTensor(call, "")
    assert [*batch] == ["versions", "rewards", "final", "values"] and len(batch.observed()) == 1
    assert batch["final"].tolist() == [0, 1, 1] and select(["", "+final"], "") == {"": ""}


def test_column_of_a_running_forward_pass_needs_no_wait(fetched):
    class Running(EndedCall):
        def columns(self):
            raise AssertionError("waited")

    result = LazyBatch([Layer(Running([{"logp": torch.zeros(1, 1)}], fetched))])
    assert isinstance(result["logp"], LazyTensor)


def test_statistics_are_a_sequence(batch):
    stats = LazyList(batch.layers[0].call)
    assert len(stats) == 2 and stats[1] == {"loss": 2.0} and not isinstance(stats, list)
    stats += [{"critic/loss": 3.0}]
    assert stats == [{"loss": 1.0}, {"loss": 2.0}, {"critic/loss": 3.0}]


class Store:
    """The part of Ray that stores objects."""

    def put(self, value):
        return value

    def get(self, values):
        return values


def test_batch_of_the_script_keeps_its_order_and_padding():
    """Split over two ranks by pairs, with more padding than any share needs."""
    runtime = Runtime(Store(), Path("logs"))
    runtime.num_shares = 2
    controller = Controller(runtime, object, "actor", [], None, ParallelStrategy())
    mask = torch.arange(9) < torch.tensor([3, 2, 5, 6, 4, 1])[:, None]
    ids = torch.arange(54).view(6, 9) * mask
    pairs = torch.tensor([1, 2, 1, 2, 3, 3])
    batch = {"input_ids": ids, "attention_mask": mask.long(), "pair_ids": pairs}
    lazy = controller._put(batch)
    assert torch.equal(lazy["input_ids"].tensor(), ids)
    assert torch.equal(lazy["pair_ids"].tensor(), pairs)
    lazy["advantages"] = ids * 2.0  # columns that the script adds
    lazy["rewards"] = torch.arange(6.0)
    assert torch.equal(lazy["advantages"].tensor(), ids * 2.0)
    assert lazy["rewards"].tensor().tolist() == list(range(6))
    copied = controller._put(dict(lazy) | {"weights": pairs * 1.0})
    assert torch.equal(copied["weights"].tensor(), pairs * 1.0)
    assert torch.equal(copied["input_ids"].tensor(), ids)
