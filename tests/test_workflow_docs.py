"""The code of docs/workflows.md runs."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from arealite.api.cli_args import GenerationHyperparameters
from tests.chat_templates import make_chat_tokenizer
from tests.workflow.scripted import ScriptedEngine, run

PAGE = (Path(__file__).parents[1] / "docs" / "workflows.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
CONFIG = SimpleNamespace(gconfig=GenerationHyperparameters(n_samples=1))


def names_of(word: str) -> dict[str, Any]:
    (block,) = [block for block in BLOCKS if word in block]
    names: dict[str, Any] = {"__name__": __name__}
    exec(compile(block, "workflows.md", "exec"), names)
    # Worker processes import what they run by its name.
    globals().update({key: value for key, value in names.items() if getattr(value, "__module__", "") == __name__})
    return names


# Workers import this module: then the definitions of the page must be here.
names_of("def convert"), names_of("class Guess")


def test_every_block_is_run_by_a_test():
    words = ("class Doubt", "MultiTurnWorkflow(", "ToolWorkflow(", "class Guess")
    assert [sum(word in block for word in words) for block in BLOCKS] == [1] * len(BLOCKS)


def test_own_workflow(tokenizer):
    workflow = names_of("class Doubt")["Doubt"](CONFIG.gconfig, tokenizer)
    batch = run(workflow, ScriptedEngine(tokenizer, ["3", "4"]), {"question": "2+2?", "answer": "4", "seed": 1})
    assert (batch["rewards"].tolist(), batch["stats/changed"].tolist()) == ([1], [1])


def test_several_turns(tokenizer):
    workflow = names_of("MultiTurnWorkflow(")["make_workflow"](CONFIG, tokenizer)
    workflow.reward_inline = True
    row = {"messages": [{"role": "user", "content": "2+2?"}], "answer": "4", "hint": "pens"}
    batch = run(workflow, ScriptedEngine(tokenizer, ["3", "it is 4"]), row)
    assert batch["rewards"].tolist() == pytest.approx([0.8])


def test_tools():
    tokenizer = make_chat_tokenizer("qwen25")
    names = names_of("def convert")
    workflow = names["make_tool_workflow"](CONFIG, tokenizer, lambda completion, **row: float(completion == "ok"))
    workflow.reward_inline = True
    calls = [
        '<tool_call>{"name": "convert", "arguments": {"value": 1, "unit": "mi"}}</tool_call>',
        '<tool_call>{"name": "search", "arguments": {"query": "capital of Italy"}}</tool_call>',
    ]
    engine = ScriptedEngine(tokenizer, ["\n".join(calls), "ok"])
    batch = run(workflow, engine, {"messages": [{"role": "user", "content": "How far?"}]})
    assert "1609.344 m" in engine.prompts[1] and "Rome is the capital" in engine.prompts[1]
    assert batch["rewards"].tolist() == [1] and batch["stats/tool_failures"].tolist() == [0]


def test_agents(tokenizer):
    workflow = names_of("class Guess")["make_agent_workflow"](CONFIG, tokenizer)
    engine = ScriptedEngine(tokenizer, ["hm", "50", "it is smaller", "20"])
    batch = run(workflow, engine, {"number": 20})
    assert batch["rewards"].tolist() == pytest.approx([0.95]) and batch["stats/steps"].tolist() == [2]
