"""Orders of rows: mixtures by weight, curricula by pass rate, windows of blocks; all resume exactly."""

import asyncio
from collections import Counter

import pytest
import torch

from arealite.api.cli_args import CurriculumConfig, DatasetConfig
from arealite.api.errors import ConfigError, DatasetError
from arealite.api.io_struct import STATS_PREFIX
from arealite.api.workflow_api import RolloutWorkflow
from arealite.core.row_stream import RowStream
from arealite.dataset import StatefulDataLoader
from arealite.dataset.order import Mixture, epoch_order
from arealite.workflow.by_source import BySource

SETS = {"small": [{"r": f"s{i}"} for i in range(5)], "large": [{"r": f"l{i}"} for i in range(35)]}


def make(rows, size=4, shuffle=True, curriculum=None) -> StatefulDataLoader:
    return StatefulDataLoader(rows, DatasetConfig("d", batch_size=size, shuffle=shuffle, curriculum=curriculum), seed=3)


def take(loader, count):
    batches = loader.cycle()
    return [[row["r"] for row in next(batches)] for _ in range(count)]


def test_a_weight_that_gives_a_set_no_row_is_refused():
    with pytest.raises(DatasetError, match="small would have none of the 40 rows of an epoch: raise"):
        Mixture(SETS, {"small": 1.0, "large": 1000.0})


@pytest.mark.parametrize(("weights", "share"), [(None, 5 / 40), ({"small": 1.0, "large": 1.0}, 0.5)])
@pytest.mark.parametrize("shuffle", [True, False])
def test_a_mixture_has_the_given_shares_and_visits_all_rows_alike(weights, share, shuffle):
    mixture = Mixture(SETS, weights)
    seen = Counter(r for batch in take(make(mixture, shuffle=shuffle), 70) for r in batch)
    small = [seen[f"s{i}"] for i in range(5)]
    large = [seen[f"l{i}"] for i in range(35)]
    assert len(mixture) == 40 and sum(small) == 7 * 40 * share
    assert max(small) - min(small) <= 1 and max(large) - min(large) <= 1
    assert mixture[4] == {"r": "s4", "data_source": "small"} and mixture[5] == {"r": "l0", "data_source": "large"}


def test_rows_of_a_mixture_keep_a_data_source_of_their_own():
    class Echo(RolloutWorkflow):
        def __init__(self, name):
            self.name = name

        def check_row(self, data):
            assert data["name"] == self.name and "_training_set" not in data

        async def arun_episode(self, engine, data):
            self.check_row(data)
            return {"rewards": torch.tensor([1.0 if data["data_source"] == "openai/gsm8k" else 0.0])}

    sets = {"verl": [{"name": "verl", "data_source": "openai/gsm8k"}], "own": [{"name": "own"}]}
    mixture, workflow = Mixture(sets), BySource({name: Echo(name) for name in sets})
    for row, (name, reward) in zip(mixture, (("verl", 1.0), ("own", 0.0)), strict=True):
        workflow.check_row(row)
        batch = asyncio.run(workflow.arun_episode(None, row))
        assert batch[f"{STATS_PREFIX}reward/{name}"].tolist() == [reward]


@pytest.mark.parametrize("done", [0, 3, 10, 25])
def test_a_mixture_resumes_exactly(done):
    weights = {"small": 3.0, "large": 1.0}
    straight = take(make(Mixture(SETS, weights)), 30)
    first = make(Mixture(SETS, weights))
    before = take(first, done)
    second = make(Mixture(SETS, weights))
    second.load_state_dict(first.state_dict())
    assert before + take(second, 30 - done) == straight
    assert straight[:10] != straight[10:20]


class Blocks(list):
    blocks = (10,) * 30


def test_blocks_are_shuffled_a_few_at_a_time():
    order = list(epoch_order(Blocks(range(300)), 1, 0, True))
    assert sorted(order) == list(range(300)) and order != sorted(order)
    # Rows of a window come from at most eight blocks.
    windows = [{i // 10 for i in order[start : start + 80]} for start in range(0, 240, 80)]
    assert all(len(window) == 8 for window in windows)
    assert order != list(epoch_order(Blocks(range(300)), 1, 1, True))


def test_a_curriculum_prefers_rows_within_the_band():
    rows = [{"r": i} for i in range(30)]
    loader = make(rows, size=5, curriculum=CurriculumConfig(low=0.2, high=0.8, outside=0.05))
    batches, number, seen = loader.cycle(), 0, Counter()
    for step in range(120):
        for row in next(batches):
            # A third is too easy, a third too hard.
            loader.record_result(number, (0.0, 0.5, 1.0)[row["r"] % 3])
            seen[row["r"] % 3] += step >= 6
            number += 1
    assert seen[1] > 0.8 * seen.total() and seen[0] and seen[2]
    assert loader.stats() == {"curriculum/known": 1.0, "curriculum/within": pytest.approx(1 / 3)}


def test_rates_change_with_the_last_answers():
    loader = make([{"r": 0}, {"r": 1}], size=2, shuffle=False, curriculum=CurriculumConfig())
    next(loader.cycle())
    for rate in (0.0, 1.0, 1.0, 1.0, 1.0):
        loader.record_result(1, rate)
    assert loader.curriculum.rates == {1: 0.9375}


def play(stream, count, results):
    """Read rows and report them, as the executor does; the last ones stay unfinished."""
    for _ in range(count):
        number, row = stream.next_row()
        results.append((number, row["r"]))
        if number % 3:
            stream.report(number, (row["r"] % 5) / 4)


@pytest.mark.parametrize("lag", [0, 3, 11, 30])
def test_a_curriculum_resumes_with_the_rows_that_were_drawn(lag):
    rows = [{"r": i} for i in range(24)]
    config = CurriculumConfig(low=0.2, high=0.8)
    first, drawn = make(rows, curriculum=config), []
    stream = RowStream(first)
    play(stream, 70, drawn)
    # A row that had not ended is as far back as `lag`: the stream goes back there and skips the others.
    position, done = 70 - lag, {70 - i for i in range(1, lag)}
    state = first.state_dict()
    second, again = make(rows, curriculum=config), []
    second.load_state_dict(state)
    other = RowStream(second)
    other.seek(position, done)
    play(other, 40, again)
    play(stream, 40 - (1 if lag else 0), drawn)
    assert again == [pair for pair in drawn if pair[0] >= position and pair[0] not in done]


def test_states_that_do_not_fit_are_refused():
    rows = [{"r": i} for i in range(24)]
    with pytest.raises(DatasetError, match="curriculum was off"):
        make(rows, curriculum=CurriculumConfig()).load_state_dict(make(rows).state_dict())
    with pytest.raises(ConfigError, match=r"low=0\.9 is more than high=0.1"):
        CurriculumConfig(low=0.9, high=0.1).check()
