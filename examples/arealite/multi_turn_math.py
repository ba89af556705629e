"""GRPO on GSM8K with a second chance: a wrong answer may be corrected once, for half the reward.

    python -m arealite.launcher.local examples/arealite/multi_turn_math.py \
        --config examples/arealite/configs/multi_turn_math.yaml actor.path=/path/to/model
"""

from arealite.api.cli_args import GRPOConfig
from arealite.dataset import get_gsm8k_rl, load_tokenizer
from arealite.reward.gsm8k import gsm8k_reward
from arealite.trainer.ppo import PPOTrainer
from arealite.utils.config import load_config, run_main
from arealite.workflow.multi_turn import MultiTurnWorkflow


def main(argv: list[str]) -> None:
    config = load_config(argv, GRPOConfig)
    tokenizer = load_tokenizer(config.tokenizer_path or config.actor.path)
    workflow = MultiTurnWorkflow(gsm8k_reward, config.gconfig, tokenizer, max_turns=2, turn_discount=0.5)
    rows = get_gsm8k_rl(config.train_dataset, tokenizer)
    valid_rows = {name: get_gsm8k_rl(data, tokenizer) for name, data in config.validation_sets.items()}
    PPOTrainer(config, rows, tokenizer, valid_rows).train(workflow)


if __name__ == "__main__":
    run_main(main)
