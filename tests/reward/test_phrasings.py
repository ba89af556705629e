"""Every answer of a dataset, in several phrasings: right against itself, wrong against another answer.

`answers.json` holds a sample of the answers of GSM8K, MAWPS and MATH. If the environment variable AREALITE_TEST_DATA
names a folder with these datasets (`gsm8k/`, `mathword/`, `math/`, each with .jsonl files), a slow test checks all
answers.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from arealite.reward.math import last_boxed, math_reward

SAMPLE: dict[str, list[str]] = json.loads((Path(__file__).parent / "answers.json").read_text())
NUMBERS = [
    "{}",
    "So she has $\\boxed{{{}}}$ apples.",
    "The answer is {}.",
    "The answer is ${}.",
    "Final answer: {} dollars",
    "He pays 3 * 4 and then 2 more, so the total is {}.",
    "**Answer:** {}",
    "7 + 8 = 15. So the result is **{}**.",
    "3 + 5 = 8.\n#### {}",
    "The final answer is {}. I hope it is correct.",
    "She needs 12 eggs. 3 are left, so the answer is {}.",
    "Step 1: 4 times 5 is 20.\n\n### Final Answer\n\n{}",
]
FORMULAS = [
    "Therefore, the answer is $\\boxed{{{}}}$.",
    "\\boxed{{{}}}",
    "The answer is ${}$.",
    "The final answer is ${}$. I hope it is correct.",
    "**Final Answer:** ${}$",
    "Adding the 2 equations gives\n\\[{}\\]",
    "So after 3 steps we obtain ${}$.",
    "There are 2 cases.\n#### ${}$",
    "Answer: \\( {} \\)",
    "#### {}",
    "The answer is {}.",
]
PHRASINGS = {"gsm8k": NUMBERS, "mawps": NUMBERS, "math": FORMULAS}


def find_errors(answers: list[str], phrasings: list[str]) -> Iterator[str]:
    for i, answer in enumerate(answers):
        other = next(a for a in answers[i + 1 :] + answers if letters(a) != letters(answer))
        for phrasing in phrasings:
            for spelling in {answer, with_commas(answer)}:
                completion = phrasing.format(spelling)
                if math_reward("", completion, [], [], answer=answer) != 1.0:
                    yield f"{completion!r} is {answer!r}"
        completion = phrasings[2].format(other)
        if math_reward("", completion, [], [], answer=answer) != 0.0:
            yield f"{completion!r} is not {answer!r}"


def letters(answer: str) -> str:
    """What makes an answer different from another: without units, number bases, kinds of fraction and punctuation."""
    return re.sub(r"\\(?:text|mbox)\{.*?\}|_\{?\d+\}?|\.0$|(?<=\\)[dt](?=frac)|\W|circ", "", answer) or answer


def with_commas(answer: str) -> str:
    return f"{int(answer):,}" if re.fullmatch(r"-?\d+", answer) else answer


@pytest.mark.parametrize("dataset", SAMPLE)
def test_sample(dataset):
    assert list(find_errors(SAMPLE[dataset], PHRASINGS[dataset])) == []


def read(folder: Path, dataset: str) -> list[str]:
    """The distinct answers of a dataset, in the order of its rows."""
    files = sorted(path for path in folder.rglob("*.jsonl") if dataset in path.name or dataset in path.parent.name)
    rows = (json.loads(line) for path in files for line in path.read_text().splitlines())
    answer_of = {
        "gsm8k": lambda row: row["answer"].rsplit("####", 1)[1].strip(),
        "mawps": lambda row: str(row["target"]),
        "math": lambda row: last_boxed(row["solution"]),
    }
    return list(dict.fromkeys(answer_of[dataset](row) for row in rows))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("dataset", SAMPLE)
def test_all_answers_of_the_datasets(dataset):
    folder = Path(os.environ.get("AREALITE_TEST_DATA", ""))
    folders = {"gsm8k": "gsm8k", "mawps": "mathword", "math": "math"}
    if not os.environ.get("AREALITE_TEST_DATA") or not (folder / folders[dataset]).is_dir():
        pytest.skip(f"AREALITE_TEST_DATA names no folder with {folders[dataset]}/")
    assert list(find_errors(read(folder / folders[dataset], dataset), PHRASINGS[dataset])) == []
