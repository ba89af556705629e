"""A run that has gone back to a good checkpoint is replayed bit for bit, from every start."""

import shutil
from unittest import mock

import pytest

from arealite.api.cli_args import RecoverConfig
from arealite.api.errors import RecordError
from arealite.core.record.step_file import StepRecord, read_info, read_step, recorded_steps, write_step
from arealite.engine.replay.compare import Difference
from arealite.engine.replay.plan import choose_steps
from arealite.trainer.alarms import Alarms
from arealite.trainer.guard import Guard
from arealite.utils.rundir import RunDir
from tests.engine.replay.recorded_loop import as_replay, make_config, replay, train

# Checkpoints are due after every second step. The run collapses in steps 3 and 7 (counted from 0).
NUM_STEPS, COLLAPSES = 9, (3, 7)


def small_config(model_path, folder, **changes):
    config = make_config(model_path, folder, **changes)
    config.gconfig.max_new_tokens = 4
    return config


def record_run(config, tokenizer, is_good, between=None):
    """Train with collapses; checkpoints with this number of steps are good to go back to."""
    config.on_collapse = "rollback"
    done = [0]

    def check(guard, stats, step):
        done.append(step + 1)
        return {}

    with (
        mock.patch.object(Alarms, "is_healthy", mock.PropertyMock(side_effect=lambda: is_good(done[-1]))),
        mock.patch.object(Guard, "take_collapse", lambda guard: "forced" if done[-1] - 1 in COLLAPSES else ""),
        mock.patch.object(Guard, "check", check),
    ):
        return train(config, tokenizer, between=between, num_steps=NUM_STEPS)


@pytest.fixture(scope="module")
def recorded(model_path, tokenizer, tmp_path_factory):
    config = small_config(model_path, tmp_path_factory.mktemp("run"))
    record_run(config, tokenizer, lambda num_steps: num_steps in (2, 6))
    return config


def test_rollbacks_are_in_the_record(recorded):
    folder = RunDir(recorded).record
    infos = [read_info(folder, step) for step in recorded_steps(folder)]
    assert [info["lr_scale"] for info in infos] == [1.0] * 4 + [0.5] * 4 + [0.25]
    assert {i: info["rollback"]["step"] for i, info in enumerate(infos) if "rollback" in info} == {4: 2, 8: 6}
    assert infos[4]["rollback"]["weights"] == infos[1]["weights"] != infos[3]["weights"]


@pytest.mark.parametrize("mode", ["trainer-only", "rollout-only", "whole"])
def test_a_run_with_rollbacks_is_replayed(recorded, tokenizer, tmp_path, mode):
    plan = {"mode": mode, "last": NUM_STEPS - 1}
    result = replay(recorded, tokenizer, tmp_path, plan, num_steps=NUM_STEPS)
    assert result["difference"] is None and result["num_steps"] == NUM_STEPS and result["changes"] == []
    assert not (tmp_path / "states").exists()


@pytest.mark.parametrize(
    ("first", "uses_servers"),
    [(6, False), (8, False), *(pytest.param(first, True, marks=pytest.mark.slow) for first in (0, 6, 8))],
)
def test_a_replay_starts_before_at_and_after_a_rollback(recorded, tokenizer, tmp_path, first, uses_servers):
    checkpoint = RunDir(recorded).recover / f"step{first:06d}"
    plan = {"first": first, "last": NUM_STEPS - 1, "uses_servers": uses_servers}
    plan |= {"checkpoint": str(checkpoint) if first else None}
    result = replay(recorded, tokenizer, tmp_path, plan, num_steps=NUM_STEPS)
    assert result["difference"] is None and result["num_steps"] == NUM_STEPS - first


@pytest.mark.slow
def test_a_run_that_was_resumed_at_a_rollback_is_replayed(model_path, tokenizer, tmp_path):
    def die(step, actor):
        if step == 4:
            raise KeyboardInterrupt

    config = small_config(model_path, tmp_path / "run")
    with pytest.raises(KeyboardInterrupt):
        record_run(config, tokenizer, lambda _: False, die)
    run = record_run(config, tokenizer, lambda num_steps: num_steps == 6)
    infos = [read_info(run.record, step) for step in range(NUM_STEPS)]
    assert infos[3]["attempt"] != infos[4]["attempt"] and infos[4]["rollback"]["step"] == 0
    plan = {"last": NUM_STEPS - 1, "uses_servers": True}
    result = replay(config, tokenizer, tmp_path, plan, num_steps=NUM_STEPS)
    assert result["difference"] is None and result["num_steps"] == NUM_STEPS


def test_another_state_after_a_rollback_is_named(recorded, tokenizer, tmp_path):
    record = tmp_path / "record"
    shutil.copytree(RunDir(recorded).record, record)
    info, batches = read_step(record, 4)
    info["rollback"]["step"] = 3
    write_step(record, 4, StepRecord(info, batches))
    config = small_config(recorded.actor.path, tmp_path / "r", record=0)
    config.recover = RecoverConfig()
    plan = {"mode": "trainer-only", "last": 5}
    result = as_replay(record, tmp_path / "r", plan, lambda: train(config, tokenizer, num_steps=NUM_STEPS))
    text = Difference(**result["difference"]).describe(result["changes"])
    assert text.startswith("step 5: weights restored by the rollback before it: actor: "), text
    assert "the checkpoint that the rollback restores" in text and result["num_steps"] == 4


def test_a_start_is_chosen_from_which_every_rollback_can_be_repeated(tmp_path):
    for step in range(12):
        rollback = {"rollback": {"step": 4}} if step == 8 else {}
        write_step(tmp_path, step, StepRecord({"attempt": "attempt000000-x", **rollback}, []))
    paths = {step: tmp_path / str(step) for step in (2, 4, 6, 8)}
    some = lambda *steps: [(step, paths[step]) for step in steps]  # noqa: E731
    # The checkpoint to go back to is there, or the start is not after it.
    assert choose_steps(tmp_path, some(4, 6), 6, None, True) == (6, 11, paths[6])
    assert choose_steps(tmp_path, some(2, 6), 6, None, True) == (2, 11, paths[2])
    assert choose_steps(tmp_path, some(6), 6, None, True) == (0, 11, None)
    assert choose_steps(tmp_path, some(6), 6, 7, True) == (6, 7, paths[6])
    assert choose_steps(tmp_path, some(6, 8), 9, None, True) == (8, 11, paths[8])
    for step in range(6):
        (tmp_path / f"step{step:06d}.rec").unlink()
    with pytest.raises(RecordError, match=r"before step 9 .* went back to its checkpoint step000004.*\(--to 8\)"):
        choose_steps(tmp_path, some(6, 8), 6, None, True)
