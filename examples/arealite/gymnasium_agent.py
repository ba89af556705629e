"""GRPO in an environment of gymnasium: the model walks over a frozen lake, one move in each turn.

    pip install 'arealite[gym]'
    python -m arealite.launcher.local examples/arealite/gymnasium_agent.py \
        --config examples/arealite/configs/gymnasium_agent.yaml actor.path=/path/to/model

`to_text` and `to_action` are all that another environment needs.
"""

import functools
from typing import Any

from arealite.api.cli_args import GRPOConfig
from arealite.dataset import load_tokenizer
from arealite.env.adapters import GymnasiumEnvironment
from arealite.trainer.ppo import PPOTrainer
from arealite.utils.config import load_config, run_main
from arealite.workflow.agentic import AgenticWorkflow, ChatAgent

MOVES = {"left": 0, "down": 1, "right": 2, "up": 3}
RULES = "Walk from S to G over frozen fields F, and avoid holes H. Reply with left, down, right or up and nothing else."


def to_text(observation: Any, env: Any) -> str:
    """Return the map with the player in brackets."""
    fields = env.unwrapped.desc.astype(str)
    width = fields.shape[1]
    lines = [
        "".join(
            f"[{field}]" if int(observation) == row * width + column else f" {field} "
            for column, field in enumerate(line)
        )
        for row, line in enumerate(fields)
    ]
    return "\n".join(lines)


def to_action(text: str, env: Any) -> int:
    words = text.lower().split()
    if not words or words[-1].strip(".!") not in MOVES:
        raise ValueError(f"end with one of {', '.join(MOVES)}")
    return MOVES[words[-1].strip(".!")]


def main(argv: list[str]) -> None:
    config = load_config(argv, GRPOConfig)
    tokenizer = load_tokenizer(config.tokenizer_path or config.actor.path, for_chat=True)
    lake = functools.partial(GymnasiumEnvironment, "FrozenLake-v1", to_text, to_action, is_slippery=False)
    lake().close()  # an environment that cannot be made ends the run here, not each of its episodes
    agent = functools.partial(ChatAgent, system_prompt=RULES)
    workflow = AgenticWorkflow(lake, config.gconfig, tokenizer, make_agent=agent, max_turns=12)
    # A row has the seed of its map's player; all rows of this lake begin at the same field.
    PPOTrainer(config, [{"number": i} for i in range(4096)], tokenizer).train(workflow)


if __name__ == "__main__":
    run_main(main)
