"""Seconds of steps by their sequences: counted, and measured before the first request."""

import copy

import numpy as np
import pytest

from arealite.api.cli_args import ServerConfig
from arealite.inference.engine import Engine
from arealite.inference.sequence import Request, SamplingParams
from arealite.inference.timing import step_trial
from arealite.inference.timing.step_times import StepTimes, context_of
from arealite.inference.timing.step_trial import measure_steps
from arealite.utils.step_context import StepContext
from tests import warm_python
from tests.inference.conftest import make_model
from tests.server_process import server_process


def test_steps_are_added_by_powers_of_two_of_their_sequences_and_lengths():
    times = StepTimes()
    for sequences, prompt_tokens, seconds, cpu_s in ((0, 50, 1.0, 0.5), (2, 0, 0.25, 0.25), (3, 7, 0.5, 0.25)):
        times.add(sequences, prompt_tokens, seconds, cpu_s)
    times.add(4, 0, 1.0, 1.0, StepContext(40, 1.0))
    times.add(4, 0, 2.0, 2.0, StepContext(44, 2.0), steps=3)
    times.add(4, 0, 1.5, 1.5, StepContext(40, 11.0))
    times.add(4, 0, 2.0, 2.0, StepContext(400, 0.0))
    assert times.rows() == [
        [1, 0, 50, 1.0, 0.5, 0, 0.0],
        [1, 2, 0, 0.25, 0.25, 0, 0.0],
        # Steps with prompts have rows of their own, and so have those with other lengths, or different ones.
        [1, 3, 7, 0.5, 0.25, 0, 0.0],
        [4, 16, 0, 3.0, 3.0, 172, 7.0],
        [1, 4, 0, 1.5, 1.5, 40, 11.0],
        [1, 4, 0, 2.0, 2.0, 400, 0.0],
    ]


def test_the_context_of_sequences():
    assert context_of(np.array([10, 10, 10])) == (30, 0.0) and context_of(np.zeros(0, np.int64)) == (0, 0.0)
    found = context_of(np.array([10, 30]))
    assert found.tokens == 40 and found.spread == pytest.approx(2 * 10.0)


@pytest.fixture
def engine():
    made = Engine(
        ServerConfig(max_total_tokens=32768, block_size=4, device="cpu"), model=copy.deepcopy(make_model("qwen2"))
    )
    yield made
    made.close()


def answer(engine):
    request = Request([5, 6, 7], SamplingParams(max_new_tokens=8, ignore_eos=True, sampling_seed=1))
    (output,) = engine.submit(request).result(timeout=60)
    return output.token_ids, output.logprobs


def test_a_trial_measures_steps_and_keeps_no_state(engine):
    engine.start(with_trial=True)
    after = answer(engine)
    rows = engine.stats()["trial_times"]
    loads = [row[1] / row[0] for row in rows]
    assert loads[:2] == [1.0, 4.0] and loads == sorted(loads) and all(row[3] > 0 and row[5] > 0 for row in rows)
    stats = engine.stats()
    assert (stats["generated_tokens"], stats["prompt_tokens"], stats["running"]) == (8, 3, 0)
    assert stats["free_blocks"] == stats["total_blocks"]
    assert answer(engine) == after


def test_a_trial_measures_long_sequences_and_different_ones(engine, monkeypatch):
    monkeypatch.setitem(step_trial._MAX_SECONDS, "cpu", 60.0)
    times = StepTimes()
    measure_steps(engine.core, times)
    # Load, mean length, and whether lengths differ.
    found = [(row[1] / row[0], row[5] / row[1], row[6] > row[5] / 4) for row in times.rows() if row[1] >= 16 * row[0]]
    loads = [(load, differ) for load, _, differ in found]
    assert loads == [(16, 0), (64, 0), (64, 1), (64, 0), (256, 0), (256, 1)]
    assert found[1][1] < 25 and found[3][1] > 2 * found[2][1] and found[5][1] == pytest.approx(found[2][1], rel=0.1)


def test_a_server_measures_steps_before_it_serves(model_path, monkeypatch):
    monkeypatch.setenv(warm_python.TRIAL_ENV, "1")
    with server_process(model_path) as server:
        assert [row[1] / row[0] for row in server.get("server_info")["trial_times"]][:2] == [1.0, 4.0]


def test_without_a_trial_nothing_is_measured(engine, monkeypatch):
    monkeypatch.setitem(step_trial._MAX_SECONDS, "cpu", 0.0)
    times = StepTimes()
    measure_steps(engine.core, times)
    assert times.rows() == [], "the time was over"
    engine.start()
    answer(engine)
    assert engine.stats()["trial_times"] == []
