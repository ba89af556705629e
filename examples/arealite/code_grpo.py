"""GRPO on programming tasks: the tests of each row run in a sandbox.

    python -m arealite.launcher.local examples/arealite/code_grpo.py \
        --config examples/arealite/configs/code_grpo.yaml actor.path=/path/to/model

Rows are those of MBPP or HumanEval, from the hub or a local file (`train_dataset.path`), or of your own with the same
columns. Answers earn the share of tests that they pass, and a little for one closed block of code.
"""

from arealite.api.cli_args import GRPOConfig
from arealite.dataset import load_tokenizer
from arealite.reward.code import CodeReward
from arealite.reward.combined import CombinedReward
from arealite.reward.format import PatternReward
from arealite.reward.sandbox import isolation
from arealite.trainer.ppo import PPOTrainer
from arealite.trainer.tasks import load_rl
from arealite.utils.config import load_config, run_main
from arealite.utils.console import show_message
from arealite.utils.process import rank
from arealite.workflow.rlvr import RLVRWorkflow

reward = CombinedReward(
    {
        "tests": (1.0, CodeReward(partial=True, timeout_s=10.0)),
        "block": (0.1, PatternReward(r"[^`]*```python\n[^`]+```[^`]*")),
    }
)


def main(argv: list[str]) -> None:
    config = load_config(argv, GRPOConfig)
    if rank() == 0:
        show_message(f"isolation of the code that the model writes: {isolation()}")
    tokenizer = load_tokenizer(config.tokenizer_path or config.actor.path)
    # Longer than the deadline of one answer's tests.
    workflow = RLVRWorkflow(reward, config.gconfig, tokenizer, reward_timeout_s=30.0)
    rows = load_rl(config.train_dataset, tokenizer)
    valid_rows = {name: load_rl(data, tokenizer) for name, data in config.validation_sets.items()}
    PPOTrainer(config, rows, tokenizer, valid_rows).train(workflow)


if __name__ == "__main__":
    run_main(main)
