"""A black-box agent on GSM8K: code with the official `openai` client is trained without changing it.

    pip install openai
    python -m arealite.launcher.local examples/arealite/openai_agent.py \
        --config examples/arealite/configs/openai_agent.yaml actor.path=/path/to/model

The agent solves a problem, looks at its own solution once more, and is rewarded for the final answer. It knows nothing
of training: the endpoint that it gets records every call token for token. docs/agents.md has other agents.
"""

import asyncio
import ssl
from typing import Any

from arealite.api.cli_args import GRPOConfig
from arealite.api.errors import ConfigError
from arealite.dataset import get_gsm8k_rl, load_tokenizer
from arealite.reward.gsm8k import gsm8k_reward
from arealite.trainer.ppo import PPOTrainer
from arealite.utils.config import load_config, run_main
from arealite.workflow.openai import AgentWorkflow

try:
    import openai
except ImportError as error:
    MISSING: ImportError | None = error
else:
    MISSING = None

# A client would make one of its own, which takes 20 ms or more and stops the event loop.
TLS = ssl.create_default_context()
CHECK = "Check your solution step by step. Then give the final answer again within \\boxed{}."


async def solve_and_check(row: dict[str, Any], base_url: str, api_key: str) -> float:
    """Solve the problem of a row in two turns; returns the reward of the last answer."""
    http = openai.DefaultAsyncHttpxClient(verify=TLS)
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0, http_client=http) as client:
        messages = list(row["messages"])
        for question in ({"role": "user", "content": CHECK}, None):
            answer = await client.chat.completions.create(model="policy", messages=messages)
            messages.append(answer.choices[0].message.model_dump())
            messages += [question] if question else []
    text = messages[-1]["content"] or ""
    # Algebra on what a model has written may take long: not on the event loop.
    return await asyncio.to_thread(gsm8k_reward, "", text, [], [], answer=row["answer"])


def main(argv: list[str]) -> None:
    if MISSING is not None:
        raise ConfigError(f"this example needs the client of OpenAI ({MISSING}): pip install openai")
    config = load_config(argv, GRPOConfig)
    tokenizer = load_tokenizer(config.tokenizer_path or config.actor.path, for_chat=True)
    rows = list(get_gsm8k_rl(config.train_dataset, tokenizer))
    # A turn that leads to a right answer sooner is worth more.
    workflow = AgentWorkflow(solve_and_check, config.gconfig, tokenizer, turn_discount=0.95)
    PPOTrainer(config, rows, tokenizer).train(workflow)


if __name__ == "__main__":
    run_main(main)
