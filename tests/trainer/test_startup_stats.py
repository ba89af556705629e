"""Where the time between a command and its first update went."""

import pytest

from arealite.trainer import startup
from arealite.trainer.startup import take_startup_stats
from arealite.trainer.trace import Trace
from arealite.utils.startup import Phase


def test_time_between_phases_is_named_by_the_phase_after_it(monkeypatch, capfd):
    phases = [
        Phase("launch", 100.0, 0.5), Phase("imports", 100.5, 4.0), Phase("load", 106.0, 2.0),
        Phase("servers", 108.0, 1.0), Phase("trial", 110.0, 3.0),
    ]  # fmt: skip
    monkeypatch.setattr(startup, "take_startup_phases", lambda: phases)
    monkeypatch.setattr(startup.time, "time", lambda: 116.0)
    found = take_startup_stats(Trace(None), {"time/step": 5.5, "time/rollout": 4.0, "time/update": 1.5})
    found = {name.removeprefix("time/startup/"): seconds for name, seconds in found.items()}
    # Of the step the trial has three seconds, and waiting for the batch after it one.
    expected = {"launch": 0.5, "imports": 4.0, "before_load": 1.5, "load": 2.0, "servers": 1.0, "trial": 3.0}
    assert found == pytest.approx(expected | {"other": 1.5, "total": 16.0})
    assert "before load 1.5, load 2.0, servers 1.0, trial 3.0, other 1.5, rollout 1.0" in capfd.readouterr().out
