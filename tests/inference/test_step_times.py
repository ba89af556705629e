"""Seconds of steps by their sequences: counted, and measured before the first request."""

import copy

import pytest

from arealite.api.cli_args import ServerConfig
from arealite.inference.engine import Engine
from arealite.inference.sequence import Request, SamplingParams
from arealite.inference.timing import step_trial
from arealite.inference.timing.step_times import StepTimes
from arealite.inference.timing.step_trial import measure_steps
from tests.inference.conftest import make_model


def test_steps_are_added_by_powers_of_two_of_their_sequences():
    times = StepTimes()
    for sequences, prompt_tokens, seconds, cpu_s in (
        (0, 50, 1.0, 0.5),
        (2, 0, 0.25, 0.25),
        (3, 7, 0.5, 0.25),
        (4, 0, 1.0, 1.0),
    ):
        times.add(sequences, prompt_tokens, seconds, cpu_s)
    times.add(4, 0, 2.0, 2.0, steps=3)
    assert times.rows() == [[1, 0, 50, 1.0, 0.5], [1, 2, 0, 0.25, 0.25], [1, 3, 7, 0.5, 0.25], [4, 16, 0, 3.0, 3.0]], (
        "steps with prompts have rows of their own"
    )


@pytest.fixture
def engine():
    made = Engine(
        ServerConfig(max_total_tokens=4096, block_size=4, device="cpu"), model=copy.deepcopy(make_model("qwen2"))
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
    assert [row[1] / row[0] for row in rows] == [1 << i for i in range(len(rows))] and all(row[3] > 0 for row in rows)
    stats = engine.stats()
    assert (stats["generated_tokens"], stats["prompt_tokens"], stats["running"]) == (8, 3, 0)
    assert stats["free_blocks"] == stats["total_blocks"]
    assert answer(engine) == after


def test_without_a_trial_nothing_is_measured(engine, monkeypatch):
    monkeypatch.setitem(step_trial._MAX_SECONDS, "cpu", 0.0)
    times = StepTimes()
    measure_steps(engine.core, times)
    assert times.rows() == [], "the time was over"
    engine.start()
    answer(engine)
    assert engine.stats()["trial_times"] == []
