"""GRPO on countdown: reach a target with given numbers, each used once. Rows are generated, answers verified exactly.

    python -m arealite.launcher.local examples/arealite/countdown.py \
        --config examples/arealite/configs/countdown.yaml actor.path=/path/to/model

`arealite train trainer.type=grpo train_dataset.path=generate:countdown` trains the same task without a script; this one
shows how rows and rewards of your own look.
"""

import random
from collections.abc import Sequence
from typing import Any

from arealite.api.cli_args import GRPOConfig
from arealite.dataset import load_tokenizer
from arealite.reward.countdown import find_expression, solves
from arealite.trainer.ppo import PPOTrainer
from arealite.utils.config import load_config, run_main
from arealite.workflow.rlvr import RLVRWorkflow

PROMPT = (
    "Use the numbers {numbers} with + - * / and parentheses, each number exactly once, to reach {target}. "
    "Write the expression in <answer> tags."
)
# Numbers, a target and a solution. A small model copies the form, and can begin with what it gets right by chance.
SHOWN = (((2, 7, 3), 6, "7 + 2 - 3"), ((5, 2, 8), 18, "5 * 2 + 8"))


def ask(numbers: Sequence[int], target: int) -> dict[str, str]:
    return {"role": "user", "content": PROMPT.format(numbers=", ".join(map(str, numbers)), target=target)}


def make_rows(count: int, seed: int) -> list[dict[str, Any]]:
    """Return puzzles that have a solution: the target is the value of a random expression."""
    shown: list[dict[str, str]] = []
    for numbers, target, solution in SHOWN:
        shown += [ask(numbers, target), {"role": "assistant", "content": f"<answer>{solution}</answer>"}]
    rng, rows = random.Random(seed), []
    while len(rows) < count:
        numbers = [rng.randint(1, 10) for _ in range(3)]
        target = numbers[0]
        for number in numbers[1:]:
            target = rng.choice((target + number, target + number, target - number, target - number, target * number))
        if 0 < target <= 100:
            question = ask(rng.sample(numbers, len(numbers)), target)
            rows.append({"messages": [*shown, question], "numbers": numbers, "target": target})
    return rows


def reward(prompt: str, completion: str, prompt_ids: list[int], completion_ids: list[int], **row: Any) -> float:
    """Return 1 for a solution, and a tenth for an answer in the right form."""
    expression = find_expression(completion)
    return 1.0 if solves(expression, row["numbers"], row["target"]) else 0.1 * ("<answer>" in completion)


def main(argv: list[str]) -> None:
    config = load_config(argv, GRPOConfig)
    tokenizer = load_tokenizer(config.tokenizer_path or config.actor.path)
    workflow = RLVRWorkflow(reward, config.gconfig, tokenizer)
    valid_rows = make_rows(256, seed=2) if config.valid_dataset else None
    PPOTrainer(config, make_rows(16_384, seed=1), tokenizer, valid_rows).train(workflow)


if __name__ == "__main__":
    run_main(main)
