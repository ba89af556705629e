"""Reading recordings: what the executor writes, and run directories that cannot be analysed."""

import json
import sqlite3

import pytest

from arealite.core.foresee.recording import RecordingError, read_recording
from arealite.core.ledger.store import EpisodeRow, Ledger, ServerSample, TimesRow
from arealite.utils.trace import tracing
from arealite.utils.trace.episode_clock import MAX_PARTS, EpisodeClock, current_clock
from tests.core.conftest import Echo

CONFIG = "rollout: {max_head_offpolicyness: 1, adaptive_lead: false, max_concurrent_rollouts: 8}\n"


def write_run(folder, steps=3, batch=2, startup=()):
    """Write a run: every second a batch is ready, after a wait of 0.5 s. Returns its statistics."""
    (folder / "config.yaml").write_text(CONFIG)
    ledger = Ledger(folder / "run.sqlite")
    stats = []
    for step in range(steps):
        for i in range(batch):
            number, ready_at = step * batch + i, 1000.0 + step
            row = EpisodeRow(number, "trained", None, step, step, step, 2, 20, 1.0, ready_at - 0.75, ready_at)
            ledger.record(row)
            ledger.record_times(TimesRow(number, ready_at - 0.25, '[["generate",0.25],["reward",0.25]]'))
        line = {"step": step, "time/step": 1.0, "time/update": 0.25, "time/save": 0.1, "wait_s": 0.5}
        stats.append(line | ({"time/startup/total": 1.0} if step in startup else {}))
    for at in (1000.0, 1001.0):
        ledger.sample(ServerSample(at, f"s{i}", 0, True, 4, 0, 0.0, 0, 0, int(at) * 10, 0.0) for i in range(2))
    ledger.close()
    return stats


def test_a_recording_has_exact_times(tmp_path):
    recording = read_recording(tmp_path, write_run(tmp_path))
    settings = recording.settings
    assert (settings.batch_size, settings.max_head_offpolicyness, settings.lead, settings.servers) == (2, 1, 1, 2)
    assert [step.ready_at for step in recording.steps] == [1000.0, 1001.0, 1002.0]
    assert recording.steps[0][2:] == (0.5, 0.25, 0.5), "waited, until the new weights, until the next wait"
    first = recording.episodes[0]
    assert first.parts == (("generate", 0.25), ("reward", 0.25)) and first.sample_tokens == 10
    assert first.seconds == sum(seconds for _, seconds in first.parts)
    assert [(rate.seconds, rate.running, rate.tokens) for rate in recording.rates] == [(1.0, 4.0, 10)] * 2


def test_after_a_resume_only_the_last_start_is_read(tmp_path):
    recording = read_recording(tmp_path, write_run(tmp_path, 5, startup=(0, 2)))
    assert [step.number for step in recording.steps] == [2, 3, 4]
    assert recording.notes == ["the run was resumed: only steps from 3 on are analysed"]


def test_servers_and_episodes_of_an_earlier_start_do_not_count(tmp_path):
    """Two servers with other ports, an hour before the run was resumed, and an episode that failed then."""
    stats = write_run(tmp_path, 5, startup=(0, 2))
    ledger = Ledger(tmp_path / "run.sqlite")
    steps = json.dumps([[10, 40, 0, 1.0, 1.0]])
    samples = [ServerSample(at, "s0", 0, True, 4, 0, 0.0, 0, 0, int(at), 0.0, steps, 1.0) for at in (1000.0, 1001.0)]
    ledger.record(EpisodeRow(10, "failed", "", 0, None, None, started_at=990.0, ended_at=991.0))
    ledger.record_times(TimesRow(10, 991.0, '[["generate",1.0]]'))
    ledger.sample([*samples, *(row._replace(time=row.time - 3600, address="old") for row in samples)])
    ledger.close()
    with sqlite3.connect(tmp_path / "run.sqlite") as db:
        db.execute("INSERT INTO events VALUES (999.5, 'recover', 'resumed at step 2', 2, 'info')")
    recording = read_recording(tmp_path, stats)
    assert recording.settings.servers == 2
    assert [episode.number for episode in recording.episodes] == [4, 5, 6, 7, 8, 9]
    assert min(load.time for load in recording.loads) == 1000.0
    assert recording.server_use.cpu_s == 1.0 and [row.steps for row in recording.server_use.steps] == [10]


def test_steps_before_a_hole_are_left_out(tmp_path):
    stats = write_run(tmp_path, 5)
    recording = read_recording(tmp_path, [line for line in stats if line["step"] != 1])
    assert [step.number for step in recording.steps] == [2, 3, 4]
    assert "step 2 is missing" in recording.notes[0]


def test_a_step_without_its_time_counts_as_missing(tmp_path):
    stats = write_run(tmp_path, steps=5)
    # As a value that is not finite is written.
    stats[1]["time/step"] = None
    recording = read_recording(tmp_path, stats)
    assert [step.number for step in recording.steps] == [2, 3, 4]
    assert any("step 2 is missing" in note for note in recording.notes)


def test_runs_that_cannot_be_analysed_say_why(tmp_path):
    with pytest.raises(RecordingError, match=r"has no run.sqlite"):
        read_recording(tmp_path, [])
    stats = write_run(tmp_path)
    with pytest.raises(RecordingError, match=r"1 finished steps .* needs two or more"):
        read_recording(tmp_path, stats[:1])
    (tmp_path / "config.yaml").write_text("sft: {}")
    with pytest.raises(RecordingError, match="no section `rollout`"):
        read_recording(tmp_path, stats)
    (tmp_path / "config.yaml").unlink()
    with pytest.raises(RecordingError, match=r"cannot read .*config.yaml"):
        read_recording(tmp_path, stats)
    with sqlite3.connect(tmp_path / "run.sqlite") as db:
        db.execute("DROP TABLE episode_times")
    with pytest.raises(RecordingError, match="older version of arealite"):
        read_recording(tmp_path, stats)
    (tmp_path / "run.sqlite").write_bytes(b"no database" * 100)
    with pytest.raises(RecordingError, match="cannot read the ledger"):
        read_recording(tmp_path, stats)


def test_the_executor_records_the_parts_of_every_episode(executors, tmp_path):
    class Rewarded(Echo):
        async def arun_episode(self, engine, data):
            with tracing.part_of_episode("generate"):
                batch = await super().arun_episode(engine, data)
            clock = current_clock()
            assert clock is not None
            clock.add_answers([4, 6])
            with tracing.part_of_episode("reward"):
                return batch

    ledger = Ledger(tmp_path / "run.sqlite")
    executor = executors(batch_size=2, ledger=ledger)
    for x in range(2):
        executor.submit({"x": x, "yields": 3}, Rewarded())
    executor.wait(2)
    executor.stop()
    with sqlite3.connect(tmp_path / "run.sqlite") as db:
        rows = db.execute(
            "SELECT e.started_at, t.finished_at, e.ended_at, t.parts FROM episodes e JOIN episode_times t "
            "USING (source, id)"
        ).fetchall()
    assert len(rows) == 2
    for started_at, finished_at, ended_at, text in rows:
        assert started_at <= finished_at + 0.01 and finished_at <= ended_at + 0.01
        parts = [part for part in json.loads(text) if part[0] != "workflow"]
        assert [part[0] for part in parts] == ["generate", "reward"]
        assert [part[2:] for part in parts] == [[[4, 6]], []], "tokens of the answers of parts that generate"


def test_a_clock_splits_time_without_overlap(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("arealite.utils.clock.monotonic", lambda: now[0])
    clock = EpisodeClock()

    def at(seconds, call, kind):
        now[0] = seconds
        call(kind)

    at(1.0, clock.enter, "generate")
    at(2.0, clock.enter, "generate")
    at(3.0, clock.leave, "generate")
    # A reward of one sample while another is generated.
    at(4.0, clock.enter, "reward")
    at(6.0, clock.leave, "generate")
    at(7.0, clock.leave, "reward")
    now[0] = 7.5
    assert [part[:2] for part in clock.stop()] == [
        ("workflow", 1.0), ("generate", 5.0), ("reward", 1.0), ("workflow", 0.5)
    ]  # fmt: skip
    at(9.0, clock.enter, "late")
    assert len(clock.stop()) == 4, "what comes after the end is ignored"


def test_a_clock_stays_small(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("arealite.utils.clock.monotonic", lambda: now[0])
    clock = EpisodeClock()
    for _ in range(1000):
        now[0] += 1
        clock.enter("generate")
        now[0] += 2
        clock.leave("generate")
    parts = clock.stop()
    assert len(parts) == MAX_PARTS
    assert sum(s for kind, s, _ in parts if kind == "generate") == 2000 and sum(s for _, s, _ in parts) == 3000


def test_a_clock_keeps_the_tokens_of_answers_with_the_part_that_made_them(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("arealite.utils.clock.monotonic", lambda: now[0])
    clock = EpisodeClock()
    # Two requests at once, each of which is counted after it has ended; then one more.
    for call, argument in (
        (clock.enter, "generate"), (clock.enter, "generate"), (clock.leave, "generate"), (clock.add_answers, [5]),
        (clock.leave, "generate"), (clock.add_answers, [7]), (clock.enter, "tool"), (clock.leave, "tool"),
        (clock.enter, "generate"), (clock.leave, "generate"), (clock.add_answers, [2, 3]),
    ):  # fmt: skip
        now[0] += 1
        call(argument)
    parts = clock.stop()
    assert [part.answers for part in parts if part.kind == "generate"] == [(5, 7), (2, 3)]
    clock.add_answers([9])
    assert clock.stop() == parts, "what comes after the end is ignored"
    other = EpisodeClock()
    other.replace(parts)
    assert [part.answers for part in other.stop() if part.answers] == [(5, 7), (2, 3)], "from another process"


def test_tokens_of_answers_are_read_with_their_parts(tmp_path):
    stats = write_run(tmp_path)
    with sqlite3.connect(tmp_path / "run.sqlite") as database:
        parts = [["generate", 0.2, [5, 7]], ["reward", 0.1], ["generate", 0.2, [3, 3]]]
        database.execute("UPDATE episode_times SET parts = ? WHERE id = 0", (json.dumps(parts),))
    database.close()
    first, second, *_ = read_recording(tmp_path, stats).episodes
    assert first.answers == ((5, 7), (3, 3)) and [kind for kind, _ in first.parts if kind != "workflow"] == [
        "generate", "reward", "generate"
    ]  # fmt: skip
    assert not any(second.answers), "a version that did not count them"
