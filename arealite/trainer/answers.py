"""Answers of evaluations: a JSONL file for each evaluation and validation set, and their comparison.

`evaluations/step000100/gsm8k.jsonl` in the run directory has the answers after 100 steps. To see what changed since:

    print(compare_answers(run_dir.answers_path(100, "gsm8k"), run_dir.answers_path(200, "gsm8k")))
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from math import lcm
from pathlib import Path
from typing import Any

from arealite.algo.eval_metrics import paired_p_value
from arealite.api.errors import DatasetError
from arealite.api.reward_api import SOLVED
from arealite.utils.rundir import write_file


@dataclass(slots=True)
class Answer:
    """One answer to a question of a validation set.

    `question` is the row's column `id`, or its number in the set. `version` is that of the weights that generated the
    answer; `last_version` differs if they were updated meanwhile. `length` is in tokens.
    """

    question: Any
    sample: int
    answer: str
    reward: float
    length: int
    is_truncated: bool
    version: int
    last_version: int
    # The same for equal answers to one question.
    vote: int

    @property
    def is_solved(self) -> bool:
        return self.reward >= SOLVED


def write_answers(path: Path, answers: Iterable[Answer]) -> None:
    """Write a file of answers, as a whole: readers never see a part of it. Dates and bytes become text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(asdict(answer), ensure_ascii=False, default=str) + "\n" for answer in answers)
    write_file(path, text.encode(errors="replace"), private=False)


def read_answers(path: str | Path) -> list[Answer]:
    """Read a file of answers."""
    try:
        with Path(path).open(encoding="utf-8") as lines:
            return [Answer(**json.loads(line)) for line in lines]
    except (OSError, ValueError, TypeError) as error:
        raise DatasetError(f"cannot read the answers {path}: {error}") from error


@dataclass
class AnswerComparison:
    """Two evaluations of the same questions.

    `changed` maps each question whose share of solved answers differs to that share before and after.
    """

    before: float
    after: float
    p_value: float
    num_questions: int
    changed: dict[Any, tuple[float, float]]

    def __str__(self) -> str:
        better = [q for q, (old, new) in self.changed.items() if new > old]
        worse = [q for q, (old, new) in self.changed.items() if new < old]
        return (
            f"solved {self.before:.1%} -> {self.after:.1%} of {self.num_questions} questions (p = {self.p_value:.3g})\n"
            f"better ({len(better)}): {better}\nworse ({len(worse)}): {worse}"
        )


def compare_answers(before: str | Path, after: str | Path) -> AnswerComparison:
    """Compare two files of answers question by question, with the exact test of `paired_p_value`.

    Questions that only one of them has answered are left out.
    """
    old, new = _solved_by_question(before), _solved_by_question(after)
    questions = [question for question in old if question in new]
    if not questions:
        raise DatasetError(f"{before} and {after} have no question in common: compare evaluations of the same set")
    shares = {q: (sum(old[q]) / len(old[q]), sum(new[q]) / len(new[q])) for q in questions}
    # In whole numbers, so that the test is exact.
    unit = lcm(*(len(solved[q]) for solved in (old, new) for q in questions))
    differences = [round((new_share - old_share) * unit) for old_share, new_share in shares.values()]
    return AnswerComparison(
        before=sum(share for share, _ in shares.values()) / len(shares),
        after=sum(share for _, share in shares.values()) / len(shares),
        p_value=paired_p_value(differences),
        num_questions=len(shares),
        changed={question: pair for question, pair in shares.items() if pair[0] != pair[1]},
    )


def _solved_by_question(path: str | Path) -> dict[Any, list[bool]]:
    solved: dict[Any, list[bool]] = {}
    for answer in read_answers(path):
        solved.setdefault(answer.question, []).append(answer.is_solved)
    return solved
