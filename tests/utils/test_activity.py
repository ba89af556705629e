"""What a process says while it works or waits: with a clock of the test's own, and with a stage that never ends."""

import queue

import pytest

from arealite.utils.activity import Activity
from arealite.utils.startup import startup_phase


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("arealite.utils.activity.time.monotonic", lambda: now[0])
    return now


def test_a_line_is_due_after_the_interval_without_output(clock):
    lines = []
    activity = Activity(10.0, lines.append)
    with activity.doing("starting"), activity.doing(lambda: "loading"):
        for seconds in (9, 1, 5, 5):
            clock[0] += seconds
            activity.tick()
        assert lines == ["… loading (10 s)", "… loading (20 s)"]
        clock[0] += 9
        activity.note_output()
        clock[0] += 9
        activity.tick()
        assert len(lines) == 2
        clock[0] += 1
        activity.tick()
        assert lines[2:] == ["… loading (39 s)"]
    clock[0] += 10
    activity.tick()
    assert len(lines) == 3 and activity.now() == ""


def test_the_outer_activity_speaks_where_the_inner_one_has_nothing_to_say(clock):
    activity = Activity(10.0)
    with activity.doing("starting"), activity.doing(lambda: ""):
        clock[0] += 3
        assert activity.now() == "starting (3 s)"


def test_nothing_is_printed_beside_a_live_table(clock):
    lines = []
    activity = Activity(None, lines.append)
    with activity.doing("waiting"):
        clock[0] += 100
        activity.tick()
    assert lines == []


def test_a_slow_stage_is_named_until_it_ends():
    """The stage ends only after it was named several times."""
    lines = queue.Queue()
    activity = Activity(0.001, lines.put)
    activity.watch()
    try:
        with activity.doing("loading the model"):
            shown = [lines.get(timeout=60) for _ in range(3)]
    finally:
        activity.close()
    assert all(line.startswith("… loading the model (") for line in shown)


def test_other_ranks_are_silent(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    activity = Activity(0.001)
    activity.watch()
    assert activity._thread is None


def test_a_phase_of_the_start_is_named_at_its_begin_and_as_long_as_it_lasts(monkeypatch, capsys):
    lines = queue.Queue()
    activity = Activity(0.001, lines.put)
    monkeypatch.setattr("arealite.utils.startup.activity", activity)
    try:
        with startup_phase("load", "loading a-model"):
            assert lines.get(timeout=60).startswith("… loading a-model")
    finally:
        activity.close()
    assert capsys.readouterr().out == "loading a-model\n"
