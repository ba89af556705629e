"""GRPO on the demo's task with the ready trainer: a run needs a config, a reward function and rows.

`demo.py` starts this file through the launcher. gsm8k_grpo.py shows the same loop line by line.
"""

from reverse import make_rows, reverse_reward

from arealite.api.cli_args import GRPOConfig
from arealite.dataset import load_tokenizer
from arealite.trainer.ppo import PPOTrainer
from arealite.utils.config import load_config, run_main
from arealite.workflow.rlvr import RLVRWorkflow


def main(argv: list[str]) -> None:
    config = load_config(argv, GRPOConfig)
    tokenizer = load_tokenizer(config.actor.path)
    # Comparing two strings is fast: the reward can run on the event loop instead of in a process pool.
    workflow = RLVRWorkflow(reverse_reward, config.gconfig, tokenizer, reward_inline=True)
    rows = make_rows(8192, seed=1)
    valid_rows = make_rows(128, seed=2, held_out=True) if config.valid_dataset else None
    PPOTrainer(config, rows, tokenizer, valid_rows).train(workflow)


if __name__ == "__main__":
    run_main(main)
