import json
import time

from arealite.trainer.trace import Trace


def test_phases_become_numbers_and_spans(tmp_path):
    trace = Trace(tmp_path / "trace.json")
    with trace.phase("rollout"):
        time.sleep(0.01)
    with trace.phase("update"), trace.phase("inner"):
        pass
    times = trace.take()
    assert times["time/rollout"] >= 0.01 and times["time/update"] >= times["time/inner"]
    assert times["time/step"] >= times["time/rollout"]
    assert set(trace.take()) == {"time/step"}, "a phase counts once"
    trace.close()
    events = json.loads((tmp_path / "trace.json").read_text())
    spans = [e for e in events if e["ph"] == "X"]
    assert [e["name"] for e in spans] == ["rollout", "inner", "update"]
    assert spans[0]["dur"] >= 10_000 and all({"ts", "pid", "tid"} <= set(e) for e in spans)


def test_a_phase_that_raises_is_still_timed_and_no_file_is_needed():
    trace = Trace()
    try:
        with trace.phase("update"):
            raise ValueError
    except ValueError:
        pass
    assert "time/update" in trace.take()
    trace.close()
