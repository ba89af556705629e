"""GRPO on GSM8K with a Python tool: the model may compute, in a sandbox, before it answers.

    python -m arealite.launcher.local examples/arealite/tool_math.py \
        --config examples/arealite/configs/tool_math.yaml actor.path=/path/to/model

Tools are plain functions. Their names, docstrings and parameters describe them to the model.
"""

from arealite.api.cli_args import GRPOConfig
from arealite.dataset import get_gsm8k_rl, load_tokenizer
from arealite.env.python_tool import python
from arealite.reward.gsm8k import gsm8k_reward
from arealite.trainer.ppo import PPOTrainer
from arealite.utils.config import load_config, run_main
from arealite.workflow.tools import ToolWorkflow


def main(argv: list[str]) -> None:
    config = load_config(argv, GRPOConfig)
    tokenizer = load_tokenizer(config.tokenizer_path or config.actor.path, for_chat=True)
    workflow = ToolWorkflow(gsm8k_reward, config.gconfig, tokenizer, tools=[python], max_turns=4)
    rows = get_gsm8k_rl(config.train_dataset, tokenizer)
    valid_rows = {name: get_gsm8k_rl(data, tokenizer) for name, data in config.validation_sets.items()}
    PPOTrainer(config, rows, tokenizer, valid_rows).train(workflow)


if __name__ == "__main__":
    run_main(main)
