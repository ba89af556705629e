"""The table of a step's milliseconds, made of statistics with known times."""

import json

import pytest

from benchmark.step_table import count_minibatches, measure, read_steps, rows_of


def write_run(folder, steps, minibatches=2):
    folder.mkdir()
    # A line of an evaluation stands between those of steps.
    lines = [*steps[:2], {"step": 1, "eval/reward": 0.5}, *steps[2:]]
    (folder / "stats.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "config.yaml").write_text(f"actor:\n  ppo_n_minibatches: {minibatches}\n")
    return folder


def step(number, seconds=1.0, **more):
    times = {"time/step": seconds, "time/rollout": 0.1 * seconds, "time/update": 0.6 * seconds}
    speeds = {"num_tokens": 1000, "train_tokens_per_s": 5000, "tokens_per_s": 2000, "idle/trainer": 0.25}
    return {"step": number, **times, **speeds, "time/startup/load": 3.0, **more}


def test_first_and_long_steps_are_not_counted(tmp_path, capsys):
    steps = [step(0, 20.0), *(step(n) for n in range(1, 6)), step(6, 9.0)]
    kept = read_steps(write_run(tmp_path / "run", steps), skip=1)
    assert [row["step"] for row in kept] == [1, 2, 3, 4, 5]
    assert "1 of 6 steps took longer than 3.0 s" in capsys.readouterr().out
    # A run that is shorter than `skip` is counted as a whole.
    assert len(read_steps(write_run(tmp_path / "short", [step(0), step(1)]), skip=5)) == 2


def test_a_file_without_steps_is_an_error(tmp_path):
    (tmp_path / "stats.jsonl").write_text('{"step": 0, "eval/reward": 0.5}\n')
    with pytest.raises(SystemExit, match="no finished step"):
        read_steps(tmp_path, skip=0)


def test_parts_of_a_step_add_up_to_it(tmp_path):
    run = write_run(tmp_path / "run", [step(0), step(1, **{"time/audit": 0.2})])
    found = measure(run, skip=0)
    assert found["num_steps"] == 2 and found["step"] == pytest.approx(1000.0)
    assert sum(found[name] for name in ("rollout", "update", "audit", "other")) == pytest.approx(1000.0)
    # A phase that one of two steps has counts half.
    assert found["audit"] == pytest.approx(100.0) and "startup/load" not in found
    # Two minibatches of 1,000 tokens at 5,000 tokens/s.
    assert found["update/passes"] == pytest.approx(400.0) and found["update/around"] == pytest.approx(200.0)


def test_minibatches_are_unknown_without_a_configuration(tmp_path):
    run = write_run(tmp_path / "run", [step(0), step(1)], minibatches=3)
    assert count_minibatches(run) == 3
    assert count_minibatches(run / "stats.jsonl") == 0
    assert "update/passes" not in measure(run / "stats.jsonl", skip=0)


def test_two_runs_stand_beside_each_other(tmp_path):
    one = measure(write_run(tmp_path / "one", [step(0), step(1)]) / "stats.jsonl", skip=0)
    two = measure(write_run(tmp_path / "two", [step(0, 0.5, mfu=0.4), step(1, 0.5, mfu=0.4)]), skip=0)
    rows = {row[0]: row[1:] for row in rows_of({"one": one, "two": two})}
    assert rows["step"] == ["1000", "100%", "500", "100%"]
    assert rows["wait for rollouts"] == ["100", "10%", "50", "10%"]
    # The first run does not say how many minibatches it had, nor its share of the peak.
    assert rows["  its passes"] == ["", "", "400", "80%"]
    assert rows["update: share of the GPU's peak"] == ["", "", "", "40%"]
    assert rows["trained tokens/s"] == ["2,000", "", "2,000", ""]
    assert list(rows).index("  its passes") == list(rows).index("advantages and update") + 1
