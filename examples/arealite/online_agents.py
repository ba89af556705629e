"""Online training: the episodes are sessions that agents start from outside, on this machine or others.

    export AREALITE_ADMIN_TOKEN=$(openssl rand -hex 32)
    python -m arealite.launcher.local examples/arealite/online_agents.py \
        --config examples/arealite/configs/online_agents.yaml actor.path=/path/to/model

The trainer opens a gateway (`workflow_args.host`, `workflow_args.port`). A client starts a session with the admin
token, chats through any OpenAI or Anthropic client, gives a reward and ends it. docs/agents.md has such a client.
"""

import os

from arealite.api.cli_args import GRPOConfig
from arealite.api.errors import ConfigError
from arealite.dataset import load_tokenizer
from arealite.trainer.ppo import PPOTrainer
from arealite.utils.config import load_config, run_main
from arealite.workflow.online import OnlineWorkflow

TOKEN_ENV = "AREALITE_ADMIN_TOKEN"
# A row is a place for one episode; an epoch has so many.
NUM_ROWS = 4096


def main(argv: list[str]) -> None:
    config = load_config(argv, GRPOConfig)
    if config.rollout.num_workers:
        raise ConfigError(
            f"rollout.num_workers={config.rollout.num_workers}: the gateway is one port in one process, so set "
            "rollout.num_workers=0"
        )
    if not os.environ.get(TOKEN_ENV):
        raise ConfigError(f"set {TOKEN_ENV} to a secret: clients start sessions with it")
    tokenizer = load_tokenizer(config.tokenizer_path or config.actor.path)
    workflow = OnlineWorkflow(config.gconfig, tokenizer, os.environ[TOKEN_ENV], **config.workflow_args)
    PPOTrainer(config, [{"slot": i} for i in range(NUM_ROWS)], tokenizer).train(workflow)


if __name__ == "__main__":
    run_main(main)
