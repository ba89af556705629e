"""`MultiTurnWorkflow`: feedback, retries and the discount of later turns."""

import math

import pytest

from arealite.api.cli_args import GenerationHyperparameters
from arealite.workflow.multi_turn import DEFAULT_FEEDBACK, MultiTurnWorkflow
from tests.workflow.scripted import ScriptedEngine, run


def exact(prompt, completion, answer, **row):
    return float(completion == answer)


def in_parts(prompt, completion, answer, **row):
    right = float(completion == answer)
    return {"reward": right, "right": right, "length": len(completion)}


def test_reward_parts_of_all_answers_are_statistics(tokenizer):
    engine = ScriptedEngine(tokenizer, ["4", "31", "5", "4"])
    row = {"messages": [{"role": "user", "content": "two?"}], "answer": "4"}
    gconfig = GenerationHyperparameters(n_samples=2)
    workflow = MultiTurnWorkflow(in_parts, gconfig, tokenizer, reward_inline=True, max_turns=3, turn_discount=0.5)
    batch = run(workflow, engine, row)
    stats = {key.removeprefix("stats/"): value.tolist() for key, value in batch.items() if key.startswith("stats/")}
    assert batch["rewards"].tolist() == [1.0, 0.25]
    # Those of the last answer, and those of each turn; NaN where an episode has no such turn.
    assert list(stats)[:2] == ["turns", "success"]
    assert (stats["right"], stats["length"]) == ([1, 1], [1, 1])
    assert (stats["turn1/right"], stats["turn1/length"]) == ([1, 0], [1, 2])
    assert math.isnan(stats["turn2/length"][0]) and stats["turn2/length"][1] == 1 and stats["turn3/right"][1] == 1


def make(tokenizer, n_samples=1, **kwargs):
    return MultiTurnWorkflow(
        exact, GenerationHyperparameters(n_samples=n_samples), tokenizer, reward_inline=True, **kwargs
    )


def test_later_answers_earn_less(tokenizer):
    engine = ScriptedEngine(tokenizer, ["4", "3", "5", "4"])
    row = {"messages": [{"role": "user", "content": "two?"}], "answer": "4", "seed": 3}
    batch = run(make(tokenizer, n_samples=2, max_turns=3, turn_discount=0.5), engine, row)
    assert batch["rewards"].tolist() == [1.0, 0.25]
    assert batch["stats/turns"].tolist() == [1, 3] and batch["stats/success"].tolist() == [1, 1]
    assert [r.seed for r in engine.requests] == [3, 3, 4, 4]
    last = tokenizer.decode(batch["input_ids"][1])
    retry = f"<eos>\n<user>{DEFAULT_FEEDBACK}\n<assistant>"
    assert last == f"<user>two?\n<assistant>3{retry}5{retry}4<eos>"
    trained = batch["input_ids"][1][batch["loss_mask"][1].bool()]
    assert tokenizer.decode(trained) == "3<eos>5<eos>4<eos>"


def test_feedback_may_be_a_function_and_prompts_plain_text(tokenizer):
    engine = ScriptedEngine(tokenizer, ["3", "9"])
    workflow = make(tokenizer, feedback=lambda row, text, reward: f" not {text}, like {row['hint']}: ")
    batch = run(workflow, engine, {"prompt": "2+2=", "answer": "4", "hint": "5"})
    assert tokenizer.decode(batch["input_ids"][0]) == "2+2=3<eos> not 3, like 5: 9<eos>"
    assert batch["rewards"].tolist() == [0] and batch["stats/success"].tolist() == [0]


def test_a_conversation_that_fills_the_context_ends(tokenizer):
    engine = ScriptedEngine(tokenizer, lambda prompt: "3", max_tokens=100)
    batch = run(make(tokenizer, max_turns=50), engine, {"prompt": "2+2=", "answer": "4"})
    assert batch["truncated"].tolist() == [True] and batch["stats/turns"].item() == len(engine.requests)
    with pytest.raises(ValueError, match="at least 1"):
        make(tokenizer, max_turns=0)
