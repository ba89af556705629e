"""`arealite plan --from RUN_DIR`: a simulation of a recorded run takes the time that the run took.

`data/` holds what two short runs of benchmark/async_task.py on a CPU have recorded.
"""

import json
import sqlite3
from pathlib import Path
from statistics import mean

import pytest
import yaml

from arealite.api.errors import ConfigError
from arealite.cli import plan as command
from arealite.core.foresee.recording import PlayedEpisode, RecordingError, read_recording
from arealite.core.foresee.rerun import Simulation
from arealite.core.ledger.store import EpisodeRow, Ledger, ServerSample, TimesRow
from arealite.plan.match import own_setup
from arealite.plan.recorded import read_run, warm_steps
from arealite.plan.recorded_episodes import SampleTokens, in_steps, make_shapes, with_unfinished
from arealite.plan.simulate import simulate
from arealite.utils.activity import activity
from arealite.utils.rundir import RunDir

DATA = Path(__file__).parent / "data"


def write_run(folder, name):
    """Write the run directory of a recorded run; returns its statistics."""
    run = json.loads((DATA / f"{name}.json").read_text())
    (folder / "config.yaml").write_text(yaml.safe_dump(run["config"]))
    (folder / "stats.jsonl").write_text("".join(json.dumps(line) + "\n" for line in run["stats"]))
    ledger, rollouts = Ledger(folder / "run.sqlite"), []
    for number, state, version, step, samples, tokens, began, ended, finished, parts, lengths in run["episodes"]:
        numbers = version, version, step, samples, tokens
        ledger.record(EpisodeRow(number, state, None, *numbers, 0.0, began, ended))
        ledger.record_times(TimesRow(number, finished, json.dumps(parts)))
        rollouts += [("stream", number, sample, *pair) for sample, pair in enumerate(lengths)]
    for at, version, running, waiting, generated, busy_s in run["servers"]:
        ledger.sample([ServerSample(at, "server:1", version, True, running, waiting, 0.0, 0, 0, generated, busy_s)])
    ledger.close()
    with sqlite3.connect(folder / "run.sqlite") as database:
        query = "INSERT INTO rollouts(source, episode, sample, tokens, answer_tokens) VALUES (?, ?, ?, ?, ?)"
        database.executemany(query, rollouts)
    database.close()
    return run["stats"]


@pytest.mark.parametrize(("name", "eta", "cores"), [("synchronous", 0, 8), ("hidden_generation", 1, 2)])
def test_a_run_simulated_at_its_own_settings_takes_its_own_time(tmp_path, monkeypatch, name, eta, cores):
    monkeypatch.setattr("arealite.plan.recorded.num_cores", lambda: cores)
    stats = write_run(tmp_path, name)
    setup = own_setup(read_run(tmp_path, stats))
    assert (setup.eta, setup.rollout.adaptive_lead, setup.workload.prompts, setup.workload.samples) == (eta, True, 8, 8)
    found = simulate(setup)
    took_s = mean(line["wait_s"] + line["time/step"] - line["time/rollout"] for line in stats[2:])
    assert found.step_s == pytest.approx(took_s, rel=0.15)
    wait_s = mean(line["wait_s"] for line in stats[2:])
    assert found.mean("wait_s") == pytest.approx(wait_s, rel=0.25)
    trained = mean(line["num_seqs"] * line["seq_len"] for line in stats[2:])
    assert found.mean("tokens") == pytest.approx(trained, rel=0.2)


@pytest.fixture
def activity_lines(monkeypatch):
    """A thread that prints what the process waits for, as often as it can: an engine of a run starts it."""
    monkeypatch.setattr(activity, "interval_s", 0.001)
    activity.watch()
    yield
    activity.close()


@pytest.mark.usefixtures("activity_lines")
def test_the_run_s_own_limits_are_the_default_of_a_prediction(tmp_path, capsys):
    write_run(tmp_path, "synchronous")
    command.main(["--from", str(tmp_path), "--steps", "4", "--json"])
    own = json.loads(capsys.readouterr().out)
    command.main(["--from", str(tmp_path), "--steps", "4", "--json", "--lengths", "constant:200"])
    longer = json.loads(capsys.readouterr().out)
    assert longer["step_s"] > 1.5 * own["step_s"]


def test_a_run_that_others_have_disturbed_is_named(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("arealite.cli.predict.describe_load", lambda recording: f"{len(recording.steps)} busy steps")
    stats = write_run(tmp_path, "synchronous")
    for more in ([], ["--sweep", "eta=0"]):
        command.main(["--from", str(tmp_path), "--steps", "4", *more])
        assert f"note: {len(stats)} busy steps" in capsys.readouterr().out


def test_runs_that_tell_too_little_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="there is no run directory"):
        read_run(tmp_path / "missing", [])
    (tmp_path / "config.yaml").write_text("")
    with pytest.raises(ConfigError, match="at least 5 are needed"):
        read_run(tmp_path, [{"step": 0}])
    with pytest.raises(RecordingError, match=r"has no run.sqlite"):
        read_run(tmp_path, [{"step": step} for step in range(6)])


def test_steps_that_fill_the_pipeline_of_a_resumed_run_do_not_count(tmp_path):
    steps = [{"step": step} for step in range(-1, 9)]
    assert [step["step"] for step in warm_steps(RunDir(tmp_path), steps, 0)] == [2, 3, 4, 5, 6, 7, 8]
    assert [step["step"] for step in warm_steps(RunDir(tmp_path), steps, 4)] == [6, 7, 8]
    with pytest.raises(ConfigError, match="has 4 steps since it was resumed; at least 5"):
        warm_steps(RunDir(tmp_path), steps, 5)


def episode(number, tokens, parts, samples=2):
    return PlayedEpisode(number, "trained", 0, 0, samples, tokens, 0.0, 10.0, tuple(parts))


def test_samples_keep_their_lengths_and_turns_their_waits():
    parts = [("workflow", 0.25), ("generate", 3.0), ("tool", 2.0), ("generate", 1.0), ("reward", 0.5)]
    known = {7: [SampleTokens(30, 20), SampleTokens(50, 40)]}
    first, second = make_shapes([episode(7, 80, parts), episode(8, 140, [("generate", 1.0)])], known, None)
    assert first.prompt == 10 and first.answers == [[15, 30], [5, 10]] and first.kept == [1, 1]
    assert first.tools == [0, 2] and first.reward_s == 0.75
    # No text was kept of it: samples differ as those of the other episode do.
    assert second.prompt == 10 and second.answers == [[40, 80]]


def test_counted_answers_are_played_as_they_were():
    known = {7: [SampleTokens(30, 20), SampleTokens(50, 40)]}
    parts = [("generate", 3.0), ("workflow", 2e-4), ("generate", 1.0), ("tool", 2.0), ("generate", 1.0)]
    counted = episode(7, 80, parts)._replace(answers=((20, 40), (60, 60), (1, 2, 3, 4)))
    # Servers have counted more, and the times of generations say something else: these no longer matter.
    (shape,) = make_shapes([counted], known, 1e6, computed=5.0)
    # The third turn had two answers of each sample, one after the other.
    assert shape.answers == [[20, 40], [60, 60], [4, 6]] and shape.tools == [0, 2e-4, 2.0]
    assert shape.kept == pytest.approx([20 / 84, 40 / 106]) and shape.computed == 5
    # A request that failed has no answer.
    (shape,) = make_shapes([counted._replace(answers=((20, 40), (), ()))], known, None)
    assert shape.answers == [[20, 40], [0, 0], [0, 0]] and shape.kept == [1, 1]


def test_samples_without_text_are_like_those_of_a_similar_episode():
    known = {1: [SampleTokens(20, 10), SampleTokens(40, 30)], 2: [SampleTokens(90, 80), SampleTokens(110, 100)]}
    rows = [episode(number, tokens, [("generate", 1.0)]) for number, tokens in ((3, 56), (4, 190), (5, 220), (6, 300))]
    shapes = make_shapes(rows, known, None, limit=120)
    assert [mean(shape.answers[0]) for shape in shapes] == pytest.approx([18, 85, 100, 140])
    # Shorter ones by a factor; of longer ones, what is missing to the limit.
    assert shapes[0].answers == [pytest.approx([9, 27])]
    assert shapes[1].answers == [pytest.approx([85 * 80 / 90, 85 * 100 / 90])]
    assert shapes[2].answers == [pytest.approx([120 - 40 * 2 / 3, 120 - 20 * 2 / 3])]
    assert shapes[3].answers == [[140, 140]], "an average beyond the limit is that of all"


def test_generation_outside_of_trajectories_has_its_length():
    known = {number: [SampleTokens(20, 10)] * 2 for number in (1, 2)}
    rows = [episode(1, 40, [("generate", 1.0)]), episode(2, 40, [("generate", 3.0)])]
    one, three = make_shapes(rows, known, 2 * (20 + 60))
    assert one.answers == [pytest.approx([20, 20])] and one.kept == pytest.approx([0.5, 0.5])
    assert three.answers == [pytest.approx([60, 60])]
    assert make_shapes(rows, known, 42)[0].kept == [1, 1]


def generating(number, state, seconds):
    return PlayedEpisode(number, state, 0, None, 1, 10, 0.0, seconds, (("workflow", 0.0), ("generate", seconds)))


def test_episodes_that_had_not_ended_are_like_longer_ones():
    ended = [generating(0, "trained", 1.0), generating(2, "trained", 4.0), generating(4, "failed", 9.0)]
    running = [generating(number, "running", seconds) for number, seconds in ((1, 3.0), (3, 0.5))]
    started = sorted((*ended, *running), key=lambda episode: episode.number)
    found = with_unfinished(started, ended[:2], ["short", "long"])
    assert found == ["short", "long", "long", "short"], "in their order, without the one that failed"


def test_generation_is_counted_in_steps(tmp_path):
    stats = write_run(tmp_path, "synchronous")
    recording = read_recording(tmp_path, stats)
    found, works = in_steps(recording), Simulation(recording).works.episodes
    assert [[seconds for _, seconds in episode.parts] for episode in found] == works
    assert [episode.number for episode in found] == [episode.number for episode in recording.started]
