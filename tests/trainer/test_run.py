"""`Run`: what a training loop writes and shows at the end of each step."""

import contextlib
import json
import resource
import shutil
from types import SimpleNamespace

import pytest

from arealite.api.cli_args import GRPOConfig, InferenceEngineConfig, PPOActorConfig
from arealite.api.errors import CheckpointError, ConfigError, WaitTimeout
from arealite.api.io_struct import FinetuneSpec, WeightUpdateMeta
from arealite.core.ledger.reading import open_ledger
from arealite.core.workflow_executor import WorkflowExecutor
from arealite.engine.ppo.actor import FSDPPPOActor
from arealite.trainer.evaluator import BlockingEvaluator
from arealite.trainer.run import NO_SIGNAL_STEPS, Run
from arealite.trainer.server_counters import ServerCounters
from tests.core.conftest import Echo, StubEngine
from tests.engine.engine_testing import engine_config, random_batch

SPEC = FinetuneSpec(1, 100, 1)


@pytest.fixture
def actor(model_path):
    actor = FSDPPPOActor(engine_config(str(model_path), PPOActorConfig))
    actor.initialize(SPEC)
    return actor


@pytest.fixture
def config(actor, tmp_path):
    config = GRPOConfig(experiment_name="e", trial_name="t", actor=actor.config)
    config.cluster.fileroot = str(tmp_path)
    return config


def read_stats(run):
    return [json.loads(line) for line in run.stats.path.read_text().splitlines()]


def update(actor, rewards=None):
    batch = random_batch([6, 7, 8, 9])
    batch["prox_logp"] = batch["logprobs"].clone()
    if rewards is not None:
        batch["rewards"][:] = rewards
    actor.compute_advantages(batch)
    return actor.ppo_update(batch)


def read_events(run):
    with contextlib.closing(open_ledger(run.dir.db_path)) as database:
        return [tuple(row) for row in database.execute("SELECT kind, step, level FROM events ORDER BY time")]


def test_a_run_without_rollouts_has_a_ledger_with_its_events(actor, config):
    """As supervised training has; a new run of the same name starts with an empty one."""
    spec = FinetuneSpec(1, 2, 1)
    for _ in range(2):
        actor.initialize(spec)
        with Run(config, spec, actor) as run:
            for step in run.steps():
                run.guard.on_event("alarm", "of a test", step, "alarm")
                run.commit(step, {"loss": 1.0})
        assert read_events(run) == [("alarm", 0, "alarm"), ("alarm", 1, "alarm"), ("checkpoint", 1, "info")]


def test_statistics_are_on_disk_before_the_checkpoint_of_a_step(actor, config):
    with Run(config, SPEC, actor) as run:
        num_lines = []
        run.recover.maybe_save = lambda info: num_lines.append(run.stats.path.read_text().count("\n"))
        for step, _ in zip(run.steps(), range(3), strict=False):
            run.commit(step, {"loss": 1.0, "wait_s": 1e9 * step})
    assert num_lines == [1, 2, 3]
    # The time that the executor reports counts as idle, though no phase was timed.
    assert [line["idle/trainer"] for line in read_stats(run)] == [0, 1, 1]


def test_the_first_step_tells_where_the_time_of_the_start_went(actor, config, capfd):
    with Run(config, SPEC, actor) as run:
        for step, _ in zip(run.steps(), range(2), strict=False):
            with run.phase("rollout"):
                if step == 0:
                    actor.compile_first_layers()
            run.commit(step, {"loss": 1.0})
    first, second = read_stats(run)
    assert first["time/startup/total"] >= first["time/startup/load"] > 0 and "time/startup/compile" in first
    assert not any(key.startswith("time/startup") for key in second)
    out = capfd.readouterr().out
    assert out.count("first update after") == 1 and ", rollout " in out and "cpu/" not in out
    names = [span["name"] for span in json.loads(run.dir.trace_path.read_text())]
    assert "load" in names and "compile" in names


def test_without_a_launcher_a_second_run_of_the_same_name_is_refused(actor, config, monkeypatch):
    monkeypatch.delenv("AREALITE_ATTEMPT", raising=False)
    with Run(config, SPEC, actor) as run:
        for step in (0, 1):
            run.commit(step, {"loss": 1.0})
        with pytest.raises(ConfigError, match="another run uses"):
            Run(config, SPEC, actor)
        assert len(read_stats(run)) == 2
    assert not run.dir.is_in_use()


@pytest.mark.parametrize("failure", [KeyboardInterrupt, RuntimeError])
def test_a_run_ends_its_engines_though_its_last_checkpoint_was_not_waited_for(actor, config, monkeypatch, failure):
    monkeypatch.delenv("AREALITE_ATTEMPT", raising=False)

    def wait():
        raise failure

    with pytest.raises(failure), Run(config, SPEC, actor) as run:
        run.recover.wait = wait
    assert actor.module is None and not run.dir.is_in_use()


@pytest.fixture
def no_large_files(monkeypatch, tmp_path):
    """Return a function after which every write beyond 64 KB into a file fails, and one that ends this."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    monkeypatch.setenv("TMPDIR", str(tmp_path))

    def restore():
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (64 * 1024, hard)), restore
    restore()


def test_a_model_that_cannot_be_written_is_an_error_and_the_next_start_writes_it(actor, config, no_large_files, capfd):
    config.recover.mode, config.recover.freq_steps = "auto", 1
    spec = FinetuneSpec(1, 2, 1)
    limit, restore = no_large_files
    with (
        pytest.raises(CheckpointError, match=r"File too large.*run the same command again"),
        Run(config, spec, actor) as run,
    ):
        actor.destroy = lambda: None
        for step in run.steps():
            if step == 1:
                run.recover.wait()
                limit()
            run.commit(step, {"loss": 1.0})
    restore()
    assert [row["step"] for row in read_stats(run)] == [0, 1]
    assert not list(run.dir.checkpoints.iterdir()), "nothing incomplete is left"
    assert not list(run.dir.path.parents[1].glob("arealite-model-*"))
    # The recover checkpoint before the last step was not given up.
    with Run(config, spec, actor) as run:
        for step in run.steps():
            assert step == 1
            run.commit(step, {"loss": 1.0})
    assert f"trained model: {run.dir.checkpoints / 'step000002'}" in capfd.readouterr().out
    # The model is lost and all steps are done: it is written again from the recover checkpoint.
    shutil.rmtree(run.dir.checkpoints)
    with Run(config, spec, actor) as run:
        assert not list(run.steps())
    assert (run.dir.checkpoints / "step000002" / "model.safetensors").exists()


class LateEvaluator(BlockingEvaluator):
    """Has its result when the run waits for it, as an evaluation beside training."""

    def take(self, wait=False):
        return super().take() if wait else None


@pytest.mark.parametrize("kind", [BlockingEvaluator, LateEvaluator])
def test_a_run_that_was_killed_in_its_last_evaluation_evaluates_when_it_resumes(actor, config, kind, capfd):
    config.recover.mode, config.recover.freq_steps = "auto", 1
    spec = FinetuneSpec(1, 2, 1)
    with Run(config, spec, actor) as run:
        actor.destroy = lambda: None
        for step in run.steps():
            run.commit(step, {"loss": 1.0})
    capfd.readouterr()
    for is_first in (True, False):
        with Run(config, spec, actor, evaluator=kind(lambda: {"eval/valid/pass@1": 0.5})) as run:
            assert not list(run.steps())
        assert [(row["step"], row.get("eval/valid/pass@1")) for row in read_stats(run)] == [
            (0, None), (1, None), (1, 0.5),
        ]  # fmt: skip
        assert (run.dir.checkpoints / "best").resolve() == run.dir.checkpoints / "step000002"
        out = capfd.readouterr().out
        assert ("after step 2 has no result yet" in out) == is_first and "best model" in out


class Rollout:
    """A real executor behind the methods of an engine that `Run` calls."""

    def __init__(self):
        self.executor = WorkflowExecutor(InferenceEngineConfig(), StubEngine(), batch_size=4)
        self.executor.start()
        self.stats, self.destroy = self.executor.stats, self.executor.stop

    def server_info(self):
        return []

    def has_other_weights(self):
        return False


def test_servers_with_weights_of_another_run_are_updated_before_the_first_step(actor, config, monkeypatch):
    """Also behind a controller, which is no instance of the engine's class."""
    rollout, versions = Rollout(), []
    rollout.has_other_weights = lambda: True
    monkeypatch.setattr("arealite.trainer.run.make_weight_meta", lambda *_: WeightUpdateMeta("disk"))
    monkeypatch.setattr("arealite.trainer.run.sync_weights", lambda _actor, _to, meta: versions.append(meta.version))
    with Run(config, SPEC, actor, rollout) as run:
        assert next(run.steps()) == 0
    assert versions == [0]


def test_engines_warm_up_once_on_each_rank_when_the_first_episodes_run(actor, config, monkeypatch):
    rollout = Rollout()
    calls = []
    monkeypatch.setattr(actor, "warm_up", lambda: calls.append("warm up"))
    with Run(config, SPEC, actor, rollout) as run:
        next(run.steps())
        assert not calls
        rollout.on_first_wait()
        assert calls == ["warm up"]


def own_loss(out, batch):
    mask = batch["loss_mask"].bool()
    return -(out["logp"] * batch["advantages"])[mask].sum(), {}


def test_a_loss_of_ones_own_shows_the_reward_and_staleness_that_the_executor_knows(actor, config, capfd):
    rollout = Rollout()
    with Run(config, SPEC, actor, rollout) as run:
        step = next(run.steps())
        collected = rollout.executor.prepare_batch([[{"x": i} for i in range(4)]], Echo())
        batch = random_batch([6, 7, 8, 9])
        batch["advantages"] = batch["logprobs"].clone()
        run.commit(step, actor.train_batch(batch, own_loss, lambda batch: batch["loss_mask"].sum()))
    (stats,) = read_stats(run)
    assert stats["reward"] == collected["rewards"].mean() == 1
    assert stats["staleness/max"] == 0 and stats["tokens_per_s"] > 0
    assert "reward 1.000" in capfd.readouterr().out


def test_the_statistics_of_the_loss_take_precedence_over_those_of_the_executor(actor, config):
    with Run(config, SPEC, actor, Rollout()) as run:
        run.commit(next(run.steps()), {"reward": 0.25, "staleness/max": 3.0})
    (stats,) = read_stats(run)
    assert (stats["reward"], stats["staleness/max"]) == (0.25, 3.0)


def test_the_table_shows_how_many_groups_carry_a_signal(actor, config, capfd):
    with Run(config, SPEC, actor, Rollout()) as run:
        steps = run.steps()
        run.commit(next(steps), update(actor, rewards=1.0))
    (stats,) = read_stats(run)
    groups = f"{stats['groups']:.0f}"
    assert "loss" not in stats and stats["groups_with_signal"] == 0
    shown = capfd.readouterr().out
    assert "loss –" in shown and f"groups with signal 0/{groups}" in shown


def test_steps_without_signal_print_one_warning(actor, config, capfd):
    def count_warnings(steps, rewards):
        for step in steps:
            run.commit(step, update(actor, rewards))
        return "".join(capfd.readouterr()).count("no signal")

    with Run(config, SPEC, actor) as run:
        steps = run.steps()
        almost = [next(steps) for _ in range(NO_SIGNAL_STEPS - 1)]
        assert count_warnings(almost, 1.0) == 0
        # A step with signal starts the count again.
        assert count_warnings([next(steps)], None) == 0
        assert count_warnings([next(steps) for _ in almost], 1.0) == 0
        assert count_warnings([next(steps)], 0.0) == 1
        assert count_warnings([next(steps) for _ in range(NO_SIGNAL_STEPS - 1)], 0.0) == 0
        # The next warning comes after twice as many steps.
        assert count_warnings([next(steps)], 0.0) == 1


def test_prefix_hits_and_drafts_are_counted_between_two_steps(monkeypatch):
    infos = [
        [{"busy_s": 1.0, "prompt_tokens": 100, "cached_tokens": 90}, {"sglang": True}],
        [{"busy_s": 2.0, "prompt_tokens": 300, "cached_tokens": 190, "drafted_tokens": 8, "accepted_tokens": 6}],
        # No new prompt, and then a server that has restarted.
        [{"busy_s": 2.0, "prompt_tokens": 300, "cached_tokens": 190, "drafted_tokens": 8, "accepted_tokens": 6}],
        [{"busy_s": 0.5, "prompt_tokens": 10, "cached_tokens": 0}],
    ]
    clock = iter([0.0, 4.0, 8.0, 12.0])
    monkeypatch.setattr("arealite.trainer.server_counters.time.monotonic", lambda: next(clock))
    rollout = SimpleNamespace(server_info=lambda: infos.pop(0))
    counters = ServerCounters(rollout)  # pyright: ignore
    assert counters.take() == {}
    rates = {"rollout/prefix_hit_rate": 0.5, "rollout/draft_acceptance_rate": 0.75}
    assert counters.take() == {"idle/server": 0.75} | rates
    assert counters.take() == {"idle/server": 1.0}
    assert counters.take() == {"idle/server": 1.0}


def test_servers_that_do_not_respond_in_time_do_not_stop_the_run(caplog):
    """A workflow may block the event loop for longer than the request may take."""

    class Blocked:
        def server_info(self):
            raise WaitTimeout("server_info has waited 7 s")

    assert ServerCounters(Blocked()).take() == {}  # pyright: ignore
    assert "idle/server is not known" in caplog.text


@pytest.mark.parametrize(
    ("epochs", "max_steps", "expected"),
    [(None, None, 5), (None, 12, 12), (None, 2, 2), (2, None, 10), (2, 12, 10), (2, 3, 3)],
)
def test_steps_alone_set_the_length_of_a_run(epochs, max_steps, expected):
    assert FinetuneSpec(epochs, 21, 4, max_steps).total_train_steps == expected
