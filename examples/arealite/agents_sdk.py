"""An agent of the OpenAI Agents SDK on GSM8K, with a calculator as its tool: trained by its `base_url` alone.

    pip install 'arealite[agents]'
    python -m arealite.launcher.local examples/arealite/agents_sdk.py \
        --config examples/arealite/configs/agents_sdk.yaml actor.path=/path/to/model

The SDK runs its own loop of calls and tools. It knows nothing of training: the endpoint that it gets records every call
token for token.
"""

import ast
import asyncio
import operator
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
    from agents import Agent, MaxTurnsExceeded, ModelBehaviorError, OpenAIChatCompletionsModel, RunConfig, Runner
    from agents import function_tool as make_tool
    from openai import AsyncOpenAI, DefaultAsyncHttpxClient
except ImportError as error:
    MISSING: ImportError | None = error
else:
    MISSING = None

MAX_TURNS = 4
# A client would make one of its own, which takes 20 ms or more and stops the event loop.
TLS = ssl.create_default_context()
INSTRUCTIONS = "Compute with the calculator. Give the final answer within \\boxed{}."
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def calculate(expression: str) -> str:
    """Compute an expression of numbers, + - * / and parentheses.

    Args:
        expression: for example (3 + 4) * 12
    """
    try:
        return f"{_value(ast.parse(expression[:200].strip(), mode='eval').body):.15g}"
    except (ArithmeticError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return f"error: {error}"


def _value(node: ast.expr) -> float:
    match node:
        case ast.Constant(value=int() | float() as value):
            return float(value)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            return OPERATORS[type(op)](_value(left), _value(right))
    raise ValueError("use numbers, + - * / and parentheses only")


async def solve(row: dict[str, Any], base_url: str, api_key: str) -> float:
    """Run the SDK's agent on the problem of a row; returns the reward of its final answer."""
    http = DefaultAsyncHttpxClient(verify=TLS)
    async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0, http_client=http) as client:
        model = OpenAIChatCompletionsModel("policy", client)
        agent = Agent("solver", instructions=INSTRUCTIONS, model=model, tools=[make_tool(calculate)])
        config = RunConfig(tracing_disabled=True, tool_not_found_behavior="return_error_to_model")
        try:
            result = await Runner.run(agent, list(row["messages"]), max_turns=MAX_TURNS, run_config=config)
        except (MaxTurnsExceeded, ModelBehaviorError):
            # The model can cause these: a low reward teaches, a lost attempt does not.
            return 0.0
    # Algebra on what a model has written may take long: not on the event loop.
    return await asyncio.to_thread(gsm8k_reward, "", str(result.final_output), [], [], answer=row["answer"])


def main(argv: list[str]) -> None:
    if MISSING is not None:
        raise ConfigError(f"this example needs the OpenAI Agents SDK ({MISSING}): pip install 'arealite[agents]'")
    config = load_config(argv, GRPOConfig)
    tokenizer = load_tokenizer(config.tokenizer_path or config.actor.path, for_chat=True)
    rows = list(get_gsm8k_rl(config.train_dataset, tokenizer))
    PPOTrainer(config, rows, tokenizer).train(AgentWorkflow(solve, config.gconfig, tokenizer))


if __name__ == "__main__":
    run_main(main)
