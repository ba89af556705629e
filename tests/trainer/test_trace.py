import json

from arealite.trainer.trace import Trace
from arealite.utils.trace import tracing
from arealite.utils.trace.trace_file import older_path, read_trace


def test_phases_become_numbers_and_spans(tmp_path):
    trace = Trace(tmp_path / "trace.json")
    with trace.phase("rollout"):
        pass
    with trace.phase("update"), trace.phase("inner"):
        pass
    trace.span("actor.forward", 1000.5, 0.25, "actor rank 1")
    times = trace.take()
    assert times["time/rollout"] >= 0 and times["time/update"] >= times["time/inner"]
    assert times["time/step"] >= times["time/rollout"]
    assert set(trace.take()) == {"time/step", "cpu/trainer", "cpu/rollout", "cpu/cores"}, "a phase counts once"
    trace.close()
    events = json.loads((tmp_path / "trace.json").read_text())
    spans = [e for e in events if e["ph"] == "X"]
    assert [e["name"] for e in spans] == ["rollout", "inner", "update", "actor.forward"]
    assert all({"ts", "dur", "pid", "tid"} <= set(e) for e in spans)
    lanes = {lane.name: lane for lane in read_trace(tmp_path / "trace.json")}
    assert {span[2] for span in lanes["steps"].spans} == {"rollout", "update", "inner"}
    assert lanes["actor rank 1"].group == "trainer" and lanes["actor rank 1"].spans == [
        [1000.5, 0.25, "actor.forward", {}]
    ]


def test_a_phase_that_raises_is_still_timed_and_no_file_is_needed():
    trace = Trace()
    try:
        with trace.phase("update"):
            raise ValueError
    except ValueError:
        pass
    assert "time/update" in trace.take()
    trace.close()


def test_a_second_attempt_keeps_the_trace_of_the_first(tmp_path):
    for name in ("first", "second", "third"):
        trace = Trace(tmp_path / "trace.json")
        with trace.phase(name):
            pass
        # The first was killed: its file has no end.
        trace.flush() if name == "first" else trace.close()
    tracing.stop()
    assert json.loads(older_path(tmp_path / "trace.json").read_text())
    (lane,) = read_trace(tmp_path / "trace.json")
    assert [span[2] for span in lane.spans] == ["second", "third"]


def test_a_path_that_cannot_be_written_stops_the_trace_only(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    trace = Trace(tmp_path / "file" / "trace.json")
    with trace.phase("update"):
        pass
    assert "time/update" in trace.take() and "tracing stops" in caplog.text
    trace.close()
