"""PPO with a critic on GSM8K. gsm8k_grpo.py shows the loop line by line.

    python -m arealite.launcher.local examples/arealite/gsm8k_ppo.py \
        --config examples/arealite/configs/gsm8k_ppo.yaml actor.path=/path/to/model
"""

from arealite.api.cli_args import GRPOConfig
from arealite.dataset import get_gsm8k_rl, load_tokenizer
from arealite.reward.gsm8k import gsm8k_reward
from arealite.trainer.ppo import PPOTrainer
from arealite.utils.config import load_config, run_main
from arealite.workflow.rlvr import RLVRWorkflow


def main(argv: list[str]) -> None:
    config = load_config(argv, GRPOConfig)
    tokenizer = load_tokenizer(config.tokenizer_path or config.actor.path)
    workflow = RLVRWorkflow(gsm8k_reward, config.gconfig, tokenizer)
    rows = get_gsm8k_rl(config.train_dataset, tokenizer)
    valid_rows = {name: get_gsm8k_rl(data, tokenizer) for name, data in config.validation_sets.items()}
    PPOTrainer(config, rows, tokenizer, valid_rows).train(workflow)


if __name__ == "__main__":
    run_main(main)
