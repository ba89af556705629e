"""What a run does when its policy collapses: `on_collapse` of warn, stop and rollback."""

import copy
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from arealite.api.cli_args import GRPOConfig, PPOActorConfig
from arealite.api.errors import CheckpointError, CollapseError, ConfigError
from arealite.api.io_struct import FinetuneSpec
from arealite.engine.fsdp.parallel import local
from arealite.engine.ppo.actor import FSDPPPOActor
from arealite.trainer.evaluator import BlockingEvaluator
from arealite.trainer.guard import MAX_ROLLBACKS, Guard
from arealite.trainer.recover import Recover
from arealite.trainer.run import Run
from arealite.utils.config import COLLAPSED, run_main
from tests.engine.engine_testing import Ranks, engine_config

NUM_STEPS = 80
SPEC = FinetuneSpec(1, NUM_STEPS, 1)
LR = 1e-2


@pytest.fixture
def config(model_path, tmp_path):
    config = GRPOConfig(experiment_name="e", trial_name="t")
    config.actor = engine_config(str(model_path), PPOActorConfig, lr=LR)
    config.cluster.fileroot = str(tmp_path)
    config.recover.mode, config.recover.freq_steps = "auto", 4
    return config


def make_actor(config) -> FSDPPPOActor:
    actor = FSDPPPOActor(config.actor)
    actor.initialize(SPEC)
    return actor


def weight(actor) -> torch.Tensor:
    return next(actor.model.parameters()).detach()


def train(
    config, rewards, num_steps=NUM_STEPS, evaluator=None, more=None, resume_from=None
) -> tuple[Run, dict[int, float]]:
    """Run a loop in which each step adds 1 to a weight; `rewards` is a function of the step. Returns the weights.

    `more` has other statistics, each a function of the step.
    """
    actor, weights = make_actor(config), {}
    with Run(config, SPEC, actor, evaluator=evaluator, resume_from_checkpoint=resume_from) as run:
        start = weight(actor)[0, 0].item()
        for step in run.steps():
            weights[step] = round(weight(actor)[0, 0].item() - start)
            with torch.no_grad():
                weight(actor)[0, 0] += 1
            actor.step_lr_scheduler()
            actor.set_version(step + 1)
            lr = actor.optimizer.param_groups[0]["lr"]
            stats = {key: value(step) for key, value in (more or {}).items()}
            run.commit(step, {"reward": rewards(step), "lr": lr, "version": float(actor.get_version()), **stats})
            if step + 1 == num_steps:
                break
    return run, weights


def read_stats(run) -> list[dict]:
    lines = map(json.loads, run.stats.path.read_text().splitlines())
    return [line for line in lines if "reward" in line]


def falls_at_20(step: int) -> float:
    return 0.5 if step < 20 else 0.0


def test_a_warning_is_shown_once_and_recorded(config, capfd):
    run, weights = train(config, falls_at_20, 40)
    assert len(weights) == 40
    stats = read_stats(run)
    (alarm,) = [s["step"] for s in stats if s["alarms"]]
    assert 20 <= alarm <= 25 and stats[alarm]["alarm/reward"] == 1
    lines = [line for line in capfd.readouterr().out.splitlines() if line.startswith("alarm: ")]
    assert len(lines) == 1 and "the reward fell from 0.5" in lines[0] and "What to do: " in lines[0]


def test_alarms_are_events_with_their_step(tmp_path):
    events = []
    guard = Guard("warn", SimpleNamespace(folder=tmp_path, optional_parts={}), 0)  # type: ignore[arg-type]
    guard.on_event = lambda *event: events.append(event)
    for step in range(4):
        guard.check({"behav_kl/k3": 0.2}, step)
    ((kind, text, step, level),) = events
    assert (kind, step, level) == ("alarm", 1, "alarm") and text.startswith("behav_kl/k3: KL between")


def test_stop_saves_the_model_and_ends_with_an_exit_code_of_its_own(config, capsys):
    config.on_collapse = "stop"
    with pytest.raises(SystemExit) as ended:
        run_main(lambda _: train(config, falls_at_20), [])
    assert ended.value.code == COLLAPSED == 3
    error = capsys.readouterr().err
    assert "stopped after step 2" in error and "the reward fell from 0.5" in error
    (path,) = [word.rstrip(".") for word in error.split() if "checkpoints/step0000" in word]
    config.actor.path = path
    assert make_actor(config).model is not None


def test_rollback_restores_a_good_checkpoint_with_half_the_rate(config, capfd):
    config.on_collapse, config.rollout.max_head_offpolicyness = "rollback", 1
    run, weights = train(config, lambda step: 0.0 if 20 <= step < 23 else 0.5)
    stats = read_stats(run)
    (alarm,) = [s["step"] for s in stats if s["alarms"]]
    assert "rollback 1 of at most 3: went back to step000020" in capfd.readouterr().out
    # The weights before the next step are those after step 20, and then training goes on from there.
    assert 20 < alarm < 23 and weights[alarm] == alarm
    assert weights[alarm + 1] == 20 and weights[NUM_STEPS - 1] == 20 + NUM_STEPS - alarm - 2
    assert [s["lr"] for s in stats] == [LR] * (alarm + 1) + [LR / 2] * (NUM_STEPS - alarm - 1)
    # Steps and versions go on.
    assert [s["version"] for s in stats] == list(range(1, NUM_STEPS + 1))
    assert stats[-1]["rollbacks"] == 1


@pytest.mark.parametrize("is_killed", [False, True])
def test_the_schedule_of_the_rate_goes_on_after_a_rollback(config, is_killed):
    config.on_collapse, config.actor.optimizer.lr_scheduler_type = "rollback", "linear"
    config.actor.optimizer.warmup_steps_proportion = 0.0
    collapsing = lambda step: 0.0 if 20 <= step < 23 else 0.5  # noqa: E731
    run, _ = train(config, collapsing, 40 if is_killed else NUM_STEPS)
    if is_killed:
        run, _ = train(config, collapsing)
    stats = read_stats(run)
    (alarm,) = [s["step"] for s in stats if s["alarms"]]
    # The rate of the step after this one, as `train` reads it after the step.
    expected = [LR * (1 - (step + 1) / NUM_STEPS) * (1 if step <= alarm else 0.5) for step in range(NUM_STEPS)]
    assert [s["lr"] for s in stats] == pytest.approx(expected) and stats[-1]["lr"] == 0


def test_a_collapse_before_the_first_checkpoint_goes_back_to_the_start(config):
    config.on_collapse, config.recover.freq_steps = "rollback", 1000
    _, weights = train(config, lambda step: 0.0 if 6 <= step < 15 else 0.5, 20)
    assert min(step for step in range(1, 20) if weights[step] == 0) in range(8, 14)


def test_rollbacks_are_bounded(config):
    config.on_collapse = "rollback"
    # Falls again some steps after each rollback.
    rewards = [0.5] * 12 + [0.0] * 6
    with pytest.raises(CollapseError, match=f"collapsed again after {MAX_ROLLBACKS} rollbacks: the reward fell"):
        train(config, lambda step: rewards[step % len(rewards)])


def test_a_run_that_resumes_keeps_rate_checkpoint_and_history(config, tmp_path):
    config.on_collapse = "rollback"
    collapsing = lambda step: 0.0 if 20 <= step < 23 else 0.5  # noqa: E731
    train(config, collapsing, 32)
    # The newest checkpoint is that of step 32, and the one to go back to is kept beside it.
    run, weights = train(config, lambda step: 0.0 if 44 <= step < 47 else 0.5, 56)
    assert min(weights) == 32
    stats = read_stats(run)
    assert {s["lr"] for s in stats[32:44]} == {LR / 2} and stats[-1]["lr"] == LR / 4
    assert stats[-1]["rollbacks"] == 2
    (tmp_path / "e" / "t" / "recover" / "guard.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"guard\.json is damaged"):
        train(config, collapsing)


class _Killed(BaseException):
    """Ends a run as a kill does: nothing of it is handled."""


@pytest.mark.parametrize(
    ("moment", "freq_steps"),
    [
        ("before the checkpoint", 1),
        ("before the checkpoint", 4),
        ("while it replaces another", 1),
        ("before guard.json", 4),
        ("after", 4),
    ],
)
def test_a_kill_at_any_moment_of_a_rollback_resumes_before_or_after_it(config, monkeypatch, moment, freq_steps):
    config.on_collapse, config.recover.freq_steps = "rollback", freq_steps
    collapsing = lambda step: 0.0 if 20 <= step < 23 else 0.5  # noqa: E731
    whole, expected = train(_renamed(config, "whole"), collapsing, 28)
    assert read_stats(whole)[-1]["rollbacks"] == 1

    def kill(*_: object) -> None:
        raise _Killed

    def arm(guard: Guard, name: str) -> None:
        """Kill at the chosen moment of a rollback."""
        restore(guard.recover, name)
        if moment == "before the checkpoint":
            monkeypatch.setattr(guard.recover, "save", kill)
        elif moment == "while it replaces another":
            monkeypatch.setattr(Path, "rename", lambda path, to: kill() if path.name == "writing" else rename(path, to))
        elif moment == "before guard.json":
            monkeypatch.setattr(guard, "_write", kill)
        else:
            monkeypatch.setattr(guard, "on_event", kill)

    rename, restore = Path.rename, Recover.restore_engines
    guards: list[Guard] = []
    init = Guard.__init__
    with monkeypatch.context() as patch:
        patch.setattr(Guard, "__init__", lambda self, *args: (guards.append(self), init(self, *args))[1])
        patch.setattr(Recover, "restore_engines", lambda recover, name: arm(guards[-1], name))
        with pytest.raises(_Killed):
            train(config, collapsing, 28)
    monkeypatch.undo()
    run, weights = train(config, collapsing, 28)
    alarm = next(s["step"] for s in read_stats(run) if s["alarms"])
    is_complete = moment in ("before guard.json", "after")
    # Every step has a checkpoint, or the last one before the collapse is that of step 20.
    assert min(weights) == (alarm + 1 if is_complete or freq_steps == 1 else 20)
    # From there on nothing differs from a run that was not killed.
    assert weights == {step: expected[step] for step in weights}
    columns = ("lr", "rollbacks", "alarms")
    lines, others = ([[s[c] for c in columns] for s in read_stats(r)] for r in (run, whole))
    assert lines[alarm + 1 :] == others[alarm + 1 :] and lines[-1][:2] == [LR / 2, 1]


def _renamed(config, name: str):
    made = copy.deepcopy(config)
    made.trial_name = name
    return made


def test_a_run_that_continues_the_checkpoint_of_another_one_goes_back_to_it(config, tmp_path):
    train(config, lambda step: 0.5, 8)
    config.trial_name, config.on_collapse = "other", "rollback"
    named = str(tmp_path / "e" / "t" / "recover" / "step000008")
    _, weights = train(config, falls_at_20, 40, resume_from=named)
    assert min(weights) == 8 and weights[8] == 8, "it continues"
    rolled_back = next(step for step in weights if step > 8 and weights[step] < weights[step - 1])
    assert rolled_back > 20 and weights[rolled_back] >= 8


def test_the_best_validation_is_what_a_rollback_goes_back_to(config):
    config.on_collapse, config.evaluator.freq_steps, config.recover.freq_steps = "rollback", 7, 1000
    config.evaluator.at_start_and_end = False
    results = iter([0.1, 0.4, 0.3, 0.2, 0.2, 0.2, 0.2, 0.2])
    evaluator = BlockingEvaluator(lambda: {"eval/valid/pass@1": next(results)})
    run, weights = train(config, lambda step: 0.0 if 20 <= step < 23 else 0.5, 40, evaluator)
    after = next(s["step"] for s in read_stats(run) if s["alarms"]) + 1
    # The second of all validations was the best.
    assert weights[after] == 14
    assert (run.dir.checkpoints / "best").resolve().name == "step000014"


def test_a_validation_that_ends_while_an_alarm_is_active_is_not_what_a_rollback_goes_back_to(config):
    config.on_collapse, config.evaluator.freq_steps, config.recover.freq_steps = "rollback", 21, 1000
    config.evaluator.at_start_and_end = False
    evaluator = BlockingEvaluator(lambda: {"eval/valid/pass@1": 0.9})
    # The alarm is raised one step before the validation has its result, the collapse later.
    run, weights = train(config, falls_at_20, 30, evaluator, {"behav_kl/k3": lambda step: 0.001 if step < 18 else 0.2})
    assert next(s["step"] for s in read_stats(run) if s.get("alarm/behav_kl/k3")) == 19
    assert (run.dir.checkpoints / "best").resolve().name == "step000021"
    after = next(s["step"] for s in read_stats(run) if s.get("alarm/reward")) + 1
    assert weights[after] == 0


def test_a_validation_set_that_falls_raises_an_alarm_once_also_after_a_resume(config, capfd):
    config.evaluator.freq_steps, config.evaluator.at_start_and_end = 2, False
    config.recover.freq_steps = 2
    accuracy = iter([0.66, 0.42, 0.42, 0.42])

    def evaluate() -> dict[str, float]:
        now, key = next(accuracy), "eval/addsub/pass@1"
        return {key: now, f"{key}/low": now - 0.05, f"{key}/high": now + 0.05}

    run, _ = train(config, lambda step: 0.5, 4, BlockingEvaluator(evaluate))
    marks = [json.loads(line) for line in run.stats.path.read_text().splitlines() if "alarm/eval/addsub" in line]
    assert [mark["step"] for mark in marks] == [3]
    train(config, lambda step: 0.5, 8, BlockingEvaluator(evaluate))
    lines = [line for line in capfd.readouterr().out.splitlines() if line.startswith("alarm: ")]
    assert len(lines) == 1 and "fell from 66.0% to 42.0%" in lines[0]


class LateEvaluator(BlockingEvaluator):
    """The evaluation before the first step has its result after the second step, as one beside training."""

    num_takes = 0

    def take(self, wait: bool = False):
        self.num_takes += 1
        return None if self.num_takes < 3 else super().take(wait)


def test_a_result_of_the_model_before_training_makes_no_trained_model_the_best(config):
    results = iter([0.9, 0.2])
    evaluator = LateEvaluator(lambda: {"eval/valid/pass@1": next(results)})
    config.evaluator.freq_steps = 4
    run, _ = train(config, lambda step: 0.5, 4, evaluator)
    found = [json.loads(line) for line in run.stats.path.read_text().splitlines()]
    assert [(line["step"], line["eval/valid/pass@1"]) for line in found if "eval/valid/pass@1" in line] == [
        (-1, 0.9),
        (3, 0.2),
    ]
    best = json.loads((run.dir.checkpoints / "best.json").read_text())
    assert (best["value"], best["folder"]) == (0.2, "step000004")


def test_rollback_needs_recover_checkpoints(config):
    config.on_collapse, config.recover.mode = "rollback", "disabled"
    config.train_dataset.path, config.actor.path = "d", "m"
    with pytest.raises(ConfigError, match=r"set recover\.mode=auto recover\.freq_steps"):
        config.check()


def _roll_back_on_rank(rank, path, folder):
    """Return the learning rates of a run that collapses, and whether its weights went back."""
    config = GRPOConfig(experiment_name="e", trial_name="t", on_collapse="rollback")
    config.actor = engine_config(path, PPOActorConfig, lr=LR)
    config.cluster.fileroot, config.allocation_mode = folder, "d2"
    config.recover.mode, config.recover.freq_steps = "auto", 4
    config.stats_logger.console = False
    actor, rates, sums = make_actor(config), [], []
    with Run(config, SPEC, actor) as run:
        for step in run.steps():
            sums.append(float(local(weight(actor)).sum()))
            with torch.no_grad():
                local(weight(actor)).add_(1)
            actor.step_lr_scheduler()
            actor.set_version(step + 1)
            # Only rank 0 sees the collapse: it decides for all.
            run.commit(step, {"reward": 0.0 if 20 <= step < 23 and rank == 0 else 0.5})
            rates.append(actor.optimizer.param_groups[0]["lr"])
            if step == 30:
                break
    return rates, sums.index(sums[20], 21) if sums[20] in sums[21:] else None


def test_all_ranks_roll_back_together(model_path, tmp_path):
    ranks = Ranks(2)
    try:
        first, second = ranks.run(_roll_back_on_rank, str(model_path), str(tmp_path))
    finally:
        ranks.close()
    assert first == second and first[0][-1] == LR / 2 and first[1] is not None
