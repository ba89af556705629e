"""What a run says, and does not stop for: rewards that teach nothing, servers that are asked in vain."""

from arealite.api.cli_args import GRPOConfig, PPOActorConfig
from arealite.api.errors import WaitTimeout
from arealite.api.io_struct import FinetuneSpec
from arealite.engine.ppo.actor import FSDPPPOActor
from arealite.trainer.run import NO_SIGNAL_STEPS, Run, _Busy
from tests.engine.engine_testing import engine_config, random_batch


def test_equal_rewards_for_many_steps_are_told_once(model_path, tmp_path, capfd):
    actor = FSDPPPOActor(engine_config(str(model_path), PPOActorConfig))
    config = GRPOConfig(experiment_name="no", trial_name="signal", actor=actor.config)
    config.cluster.fileroot = str(tmp_path)
    actor.initialize(FinetuneSpec(1, 100, 1))

    def told_after(run, steps, reward):
        for step in steps:
            batch = random_batch([6, 7, 8, 9])
            batch["prox_logp"] = batch["logprobs"].clone()
            batch["rewards"][:] = reward(batch["rewards"])
            actor.compute_advantages(batch)
            with run.phase("update"):
                stats = actor.ppo_update(batch)
            run.commit(step, stats)
        return "".join(capfd.readouterr()).count("no signal")

    with Run(config, FinetuneSpec(1, 100, 1), actor) as run:
        steps = run.steps()
        almost = [next(steps) for _ in range(NO_SIGNAL_STEPS - 1)]
        assert told_after(run, almost, lambda rewards: 1.0) == 0
        assert told_after(run, [next(steps)], lambda rewards: rewards) == 0  # it counts anew
        assert told_after(run, [next(steps) for _ in almost], lambda rewards: 1.0) == 0
        again = [next(steps) for _ in range(NO_SIGNAL_STEPS)]
        assert told_after(run, again, lambda rewards: 0.0) == 1


def test_servers_that_cannot_be_asked_in_time_stop_no_run(caplog):
    """A workflow may keep the event loop busy for longer than the question may take."""

    class Blocked:
        def server_info(self):
            raise WaitTimeout("server_info has waited 7 s")

    assert _Busy(Blocked()).take() == {}  # pyright: ignore
    assert "idle/server is not known" in caplog.text
