"""Replays the training of a run whose script is not known: the ready-made loop on recorded batches.

`arealite replay --trainer-only` uses it for runs that were started from Python or without a launcher.
"""

from arealite.api.cli_args import GRPOConfig
from arealite.api.engine_api import InferenceEngine
from arealite.api.errors import ConfigError
from arealite.api.io_struct import Batch
from arealite.api.workflow_api import RolloutWorkflow
from arealite.dataset import load_tokenizer
from arealite.engine.replay.plan import environment_of
from arealite.engine.replay.replaying import current_replay
from arealite.trainer.ppo import PPOTrainer
from arealite.utils.config import load_config, run_main


class _NoWorkflow(RolloutWorkflow):
    async def arun_episode(self, engine: InferenceEngine, data: dict) -> Batch | None:
        raise ConfigError("only the training of this run can be replayed: its script is not known")


def main(argv: list[str]) -> None:
    """Train on every rank; `arealite replay` starts it."""
    config, replay = load_config(argv, GRPOConfig), current_replay()
    assert replay is not None
    spec = environment_of(replay.folder, replay.plan.first)["spec"]
    tokenizer = load_tokenizer(config.tokenizer_path or config.actor.path)
    # The loop counts the rows; the record has the batches.
    PPOTrainer(config, [{}] * spec["dataset_size"], tokenizer).train(_NoWorkflow())


if __name__ == "__main__":
    run_main(main)
