"""What is on disk at the end of a step, and in which order it gets there."""

import json

from arealite.api.cli_args import GRPOConfig, PPOActorConfig
from arealite.api.io_struct import FinetuneSpec
from arealite.engine.ppo.actor import FSDPPPOActor
from arealite.trainer.run import Run
from tests.engine.engine_testing import engine_config


def test_a_step_that_a_checkpoint_holds_has_its_statistics_wherever_a_kill_falls(model_path, tmp_path):
    actor = FSDPPPOActor(engine_config(str(model_path), PPOActorConfig))
    config = GRPOConfig(experiment_name="e", trial_name="t", actor=actor.config)
    config.cluster.fileroot = str(tmp_path)
    actor.initialize(FinetuneSpec(1, 100, 1))
    with Run(config, FinetuneSpec(1, 100, 1), actor) as run:
        seen = []
        run.recover.maybe_save = lambda info: seen.append(run.stats.path.read_text().count("\n"))
        for step, _ in zip(run.steps(), range(3), strict=False):
            run.commit(step, {"loss": 1.0, "wait_s": 1e9 * step})
    assert seen == [1, 2, 3]  # lines of stats.jsonl
    lines = [json.loads(line) for line in run.stats.path.read_text().splitlines()]
    assert [line["idle/trainer"] for line in lines] == [0, 1, 1]  # though no phase was timed
