"""Order, epochs and resuming of the data loader."""

import pytest

from arealite.api.cli_args import DatasetConfig, SFTConfig, TrainEngineConfig
from arealite.api.errors import DatasetError
from arealite.dataset import StatefulDataLoader
from arealite.dataset.order import Mixture


def make(rows=10, size=3, shuffle=True, **kwargs) -> StatefulDataLoader:
    config = DatasetConfig(path="d", batch_size=size, shuffle=shuffle)
    return StatefulDataLoader([{"i": i} for i in range(rows)], config, **kwargs)


def take(batches, count):
    return [[row["i"] for row in next(batches)] for _ in range(count)]


def test_an_epoch_yields_each_row_at_most_once_and_drops_the_remainder():
    loader = make()
    assert len(loader) == 3
    seen = [row["i"] for batch in loader for row in batch]
    assert len(seen) == 9 and len(set(seen)) == 9
    assert [[r["i"] for r in b] for b in make(shuffle=False)] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]


def test_order_depends_only_on_seed_and_epoch():
    assert take(make(seed=3).cycle(), 12) == take(make(seed=3).cycle(), 12)
    assert take(make(seed=3).cycle(), 3) != take(make(seed=4).cycle(), 3)
    two_epochs = take(make(seed=3).cycle(), 6)
    assert two_epochs[:3] != two_epochs[3:]


@pytest.mark.parametrize("done", range(8))
def test_resume_is_exact_at_every_position(done):
    straight = take(make(seed=5).cycle(), 12)
    first = make(seed=5)
    before = take(first.cycle(), done)
    second = make(seed=5)
    second.load_state_dict(first.state_dict())
    assert before + take(second.cycle(), 12 - done) == straight


def test_too_few_rows_are_an_error():
    with pytest.raises(DatasetError, match="has no rows"):
        make(rows=0)
    with pytest.raises(DatasetError, match="has 2 rows, fewer than one batch: lower batch_size=3"):
        make(rows=2)


def test_batch_size_counts_replicas_not_ranks(monkeypatch):
    config = SFTConfig(
        experiment_name="e",
        trial_name="t",
        allocation_mode="d2t4",
        train_dataset=DatasetConfig(path="d", batch_size=4),
        model=TrainEngineConfig(path="m"),
    )
    # Only the config checks the number of data-parallel ranks.
    config.check()
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert len(make(size=config.train_dataset.batch_size)) == 2


def test_a_changed_dataset_cannot_be_resumed():
    with pytest.raises(DatasetError, match="num_rows was 10 and is 11"):
        make(rows=11).load_state_dict(make().state_dict())


def test_another_order_cannot_be_resumed():
    with pytest.raises(DatasetError, match="read in another order"):
        make(shuffle=False).load_state_dict(make().state_dict())
    with pytest.raises(DatasetError, match="read in another order"):
        make().load_state_dict(make(shuffle=False).state_dict())


def test_another_mixture_cannot_be_resumed():
    def mix(**weights: float) -> StatefulDataLoader:
        sets = {name: [{"i": f"{name}{i}"} for i in range(6)] for name in ("a", "b")}
        return StatefulDataLoader(Mixture(sets, weights), DatasetConfig(path="d", batch_size=3))

    first = mix(a=1.0, b=1.0)
    mix(a=2.0, b=2.0).load_state_dict(first.state_dict())
    with pytest.raises(DatasetError, match="read in another order"):
        mix(a=1.0, b=3.0).load_state_dict(first.state_dict())


def test_other_rows_of_the_same_number_are_resumed_with_a_warning(capsys):
    first, other = make(), make()
    next(first.cycle())
    other.rows = [{"i": row["i"], "tokens": {3}} for row in other.rows]
    make().load_state_dict(first.state_dict())
    assert "warning" not in capsys.readouterr().out
    other.load_state_dict(first.state_dict())
    assert "but other ones" in capsys.readouterr().out
    # What JSON cannot hold is the same in each process.
    next(other.cycle())
    make_like = make()
    make_like.rows = other.rows
    make_like.load_state_dict(other.state_dict())
    assert "warning" not in capsys.readouterr().out


def test_a_checkpoint_without_checksums_is_resumed(capsys):
    first = make()
    take(first.cycle(), 2)
    state = first.state_dict()
    del state["sums"]
    second = make(shuffle=False)
    second.load_state_dict(state)
    assert second.position == 2 and "warning" not in capsys.readouterr().out
