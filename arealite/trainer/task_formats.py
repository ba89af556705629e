"""Formats of the built-in tasks: columns of their datasets, what is asked, what the reward gets.

`arealite.trainer.tasks` puts a format and a reward together. A format has an `adapt`, which turns the layouts in which
a dataset is published into one, and raises `ValueError` for a row that has none of them.
"""

import json
import random
import re
from typing import Any

from arealite.dataset.columns import Messages, Row, require_text
from arealite.dataset.gsm8k import INSTRUCTION
from arealite.dataset.preference import split_dialogues
from arealite.dataset.prompts import QUESTION, PromptFormat
from arealite.reward.extraction import last_boxed

_TAGS = "\nGive only the final answer within <answer> and </answer> tags."
_TURN = re.compile(r"\n\n(Human|Assistant): ?")
_ROLES = {"Human": "user", "Assistant": "assistant"}
_LETTERS = "ABCDEFGH"


def _first(row: Row, *names: str) -> Any:
    """Return the first of these columns that a row has."""
    found = next((row[name] for name in names if row.get(name) is not None), None)
    if found is None:
        raise ValueError(
            f"it needs one of the columns {', '.join(names)}, and has {', '.join(map(str, row)) or 'none'}. Set "
            "`columns` to what they are called here"
        )
    return found


def _math(row: Row) -> Row:
    """MATH has `problem` and a `solution` with a boxed answer; MATH-500 and others also have `answer`."""
    solution = row.get("solution")
    answer = row.get("answer")
    if answer is None and isinstance(solution, str):
        answer = last_boxed(solution)
    if answer is None:
        raise ValueError("it has no column `answer`, and its `solution` has no \\boxed{} answer")
    return {"question": _first(row, "problem", "question"), "answer": str(answer), "solution": solution or str(answer)}


def _countdown(row: Row) -> Row:
    """`nums` (or `numbers`) and `target`."""
    numbers, target = _first(row, "nums", "numbers"), _first(row, "target")
    if not isinstance(numbers, list) or not all(type(n) is int for n in [*numbers, target]):
        raise ValueError(f"`nums` must be a list of whole numbers and `target` one, got {numbers} and {target}")
    question = (
        f"Using all of the numbers {numbers}, write an expression that equals {target}. Use +, -, * and /, and each "
        "number exactly once."
    )
    solution = row.get("solution")
    answer = None if solution is None else f"<answer>{solution}</answer>"
    return {"question": question, "numbers": numbers, "target": target, "answer": answer}


def _tldr(row: Row) -> Row:
    """`prompt` or the `content` of a post, and a summary under one of several names."""
    prompt = row["prompt"] if isinstance(row.get("prompt"), str) else f"{_first(row, 'content', 'post')}\n\nTL;DR:"
    return {"prompt": prompt, "answer": str(_first(row, "completion", "label", "summary", "chosen")).strip()}


def _hh_rlhf(row: Row) -> Row:
    """Two whole dialogues, `chosen` and `rejected`, which share their beginning."""
    require_text(row, "chosen", "rejected")
    prompt, chosen, _ = split_dialogues(row["chosen"], row["rejected"])
    messages, answer = to_messages(prompt), chosen.strip()
    dialogue = [*messages, {"role": "assistant", "content": answer}]
    return {"prompt": prompt, "messages": messages, "answer": answer, "dialogue": dialogue}


def to_messages(dialogue: str) -> Messages:
    """Return the turns of a `\\n\\nHuman: …\\n\\nAssistant:` dialogue; an empty last one is left out."""
    head, *parts = _TURN.split(dialogue.removesuffix(" ") + " " if dialogue.endswith("Assistant:") else dialogue)
    turns = [(_ROLES[who], text.strip()) for who, text in zip(parts[::2], parts[1::2], strict=True)]
    if head.strip() or not turns:
        raise ValueError("it does not begin with `\\n\\nHuman: `")
    return [{"role": role, "content": text} for role, text in turns if text]


def _humaneval(row: Row) -> Row:
    require_text(row, "prompt", "test", "entry_point")
    question = f"Complete this Python function. Answer with the whole function in one code block.\n\n{row['prompt']}"
    solution = row["prompt"] + row.get("canonical_solution", "")
    return {**row, "question": question, "code_prompt": row["prompt"], "solution": solution}


def _mbpp(row: Row) -> Row:
    tests = _first(row, "test_list")
    if not isinstance(tests, list) or not all(isinstance(test, str) for test in tests):
        raise ValueError("`test_list` must be a list of texts")
    question = _first(row, "text", "prompt")
    setup = row.get("test_setup_code") or "\n".join(row.get("test_imports") or [])
    asked = f"{question}\nYour code should pass these tests:\n\n" + "\n".join(tests)
    return {"question": asked, "tests": tests, "test_setup": setup, "solution": row.get("code", "")}


def _search_qa(row: Row) -> Row:
    """A `question` and one or several accepted answers; SQuAD has them in `answers`."""
    require_text(row, "question")
    answers = _first(row, "answer", "answers", "golden_answers")
    if isinstance(answers, dict):
        answers = answers.get("text") or answers.get("aliases") or answers.get("value")
    answers = [answers] if isinstance(answers, str) else answers
    if not isinstance(answers, list) or not answers or not all(isinstance(each, str) for each in answers):
        raise ValueError(f"its answer must be text or a list of texts, got {json.dumps(answers, default=str)[:80]}")
    return {"question": row["question"], "answer": answers}


def _sciq(row: Row) -> Row:
    """`correct_answer` and three `distractor`s, in an order that depends on the question."""
    names = ("correct_answer", "distractor1", "distractor2", "distractor3")
    require_text(row, "question", *names)
    choices = [row[name] for name in names]
    random.Random(row["question"]).shuffle(choices)
    listed = "\n".join(f"{letter}. {text}" for letter, text in zip(_LETTERS, choices, strict=False))
    answer = _LETTERS[choices.index(row["correct_answer"])]
    return {"question": f"{row['question']}\n{listed}", "answer": answer, "choices": choices}


def _images(row: Row) -> Row:
    """`images`, a `problem` and an `answer`, as CLEVR-count and Geometry3K have them."""
    answer = re.sub(r"</?answer>", "", str(_first(row, "answer"))).strip().strip("[]")
    problem = require_text(row, "problem")["problem"].replace("<image>", "").strip()
    return {"question": problem, "answer": answer, "images": _first(row, "images")}


_ASKED = {"prompt": "question", "answer": "answer"}
MATH = PromptFormat(_ASKED, _math, instruction=INSTRUCTION, plain=QUESTION)
MATH_SFT = PromptFormat({"prompt": "question", "response": "solution"}, _math)
COUNTDOWN = PromptFormat(
    {**_ASKED, "numbers": "numbers", "target": "target"}, _countdown, instruction=_TAGS, plain=QUESTION
)
COUNTDOWN_SFT = PromptFormat({"prompt": "question", "response": "answer"}, _countdown)
REASONING_GYM = PromptFormat(
    {"prompt": "question", "answer": "answer", "entry": "entry", "threshold": "threshold"},
    instruction=_TAGS, plain=QUESTION,
)  # fmt: skip
REASONING_GYM_SFT = PromptFormat({"prompt": "question", "response": "answer"})
TLDR = PromptFormat({"prompt": "prompt", "answer": "answer"}, _tldr)
TLDR_SFT = PromptFormat({"prompt": "prompt", "response": "answer"}, _tldr)
HH_RLHF = PromptFormat({"prompt": "prompt", "messages": "messages", "answer": "answer"}, _hh_rlhf)
HH_RLHF_SFT = PromptFormat({"prompt": "prompt", "messages": "dialogue", "response": "answer"}, _hh_rlhf)
HUMANEVAL = PromptFormat(
    {"prompt": "question", "code_prompt": "code_prompt", "test": "test", "entry_point": "entry_point"}, _humaneval
)
HUMANEVAL_SFT = PromptFormat({"prompt": "question", "response": "solution"}, _humaneval)
MBPP = PromptFormat({"prompt": "question", "tests": "tests", "test_setup": "test_setup"}, _mbpp)
MBPP_SFT = PromptFormat({"prompt": "question", "response": "solution"}, _mbpp)
SEARCH_QA = PromptFormat(_ASKED, _search_qa, instruction=_TAGS, plain=QUESTION)
SEARCH_QA_SFT = PromptFormat({"prompt": "question", "response": "answer.0"}, _search_qa)
SCIQ = PromptFormat(
    {**_ASKED, "choices": "choices"}, _sciq,
    instruction="\nGive only the letter of the right answer within <answer> and </answer> tags.", plain=QUESTION,
)  # fmt: skip
SCIQ_SFT = PromptFormat({"prompt": "question", "response": "answer"}, _sciq)
CLEVR_COUNT = PromptFormat({**_ASKED, "images": "images"}, _images, instruction=INSTRUCTION)
GEOMETRY3K = CLEVR_COUNT
