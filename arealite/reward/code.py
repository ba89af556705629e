"""Reward for code: the share of a row's tests that the program in an answer passes, in the sandbox.

Rows have tests in one of three layouts:

    HumanEval     `test` (defines `check(candidate)`), `entry_point`, and the start of the program in `code_prompt`
                  or `prompt`
    MBPP          `test_list` or `tests` (assertions), `test_setup_code` or `test_setup`
    programs      `test_cases`: a list of {"input": …, "output": …}, or `input_output`: {"inputs": […], "outputs": […]};
                  the program reads stdin, its stdout is compared without regard to spaces at the end of lines

The tests of the first two run in a process of their own (`code_runner.py`), which the solution cannot reach.
"""

import builtins
import json
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from arealite.api.errors import DatasetError
from arealite.reward.sandbox import Level, Result, run_python

_LANGUAGES = ("python", "py", "python3")
_NUMBER_OF_DIGITS = 10


@dataclass(frozen=True)
class CodeReward:
    """Scores code by a row's tests: 1.0 if all pass, else 0.0, or the share that passes with `partial`.

    `timeout_s` and `memory_mb` are for all tests of an answer together, or for each run of a program on `test_cases`.
    `allow_weak` and `python_path` are those of `sandbox.run_python`.
    """

    partial: bool = False
    timeout_s: float = 10.0
    memory_mb: int = 512
    python_path: Sequence[str] = ()
    allow_weak: bool = False
    level: Level | None = None

    def __call__(self, prompt: str = "", completion: str = "", *ids: Any, **data: Any) -> float:
        entry_point = data.get("entry_point") or ""
        code = extract_code(completion, entry_point)
        if cases := _test_cases(data):
            results = [self._run(code, given).stdout for given, _ in cases]
            passed = sum(_same_lines(stdout, wanted) for stdout, (_, wanted) in zip(results, cases, strict=True))
            return self._score(passed, len(cases))
        tests, setup, tested = _assertions(data, prompt)
        if "test" in data:
            code = _complete(_starter(data, prompt, entry_point), code, entry_point)
        source = code.encode(errors="replace").decode()
        token = secrets.token_hex(16)
        request = json.dumps(dict(tests=tests, setup=setup, tested=tested, token=token))
        given = f"{len(source.encode()):0{_NUMBER_OF_DIGITS}}{source}{request}"
        # A set: only a verdict for each test counts.
        verdicts = {line for line in self._run(_runner(), given).stdout.splitlines() if line.startswith(token)}
        return self._score(len(verdicts), len(tests))

    def _run(self, code: str, stdin: str) -> Result:
        return run_python(
            code, stdin, timeout_s=self.timeout_s, memory_mb=self.memory_mb, python_path=self.python_path,
            allow_weak=self.allow_weak, level=self.level,
        )  # fmt: skip

    def _score(self, passed: int, count: int) -> float:
        return passed / count if self.partial else float(passed == count)


code_reward = CodeReward()


def extract_code(text: str, name: str = "") -> str:
    """Return the last fenced block of Python that defines `name`, or the last one, or the text itself.

    A block that is not closed ends with the text: the answer was cut.
    """
    blocks = []
    for block in text.split("```")[1::2]:
        language, newline, code = block.partition("\n")
        if newline and language.strip().lower() in ("", *_LANGUAGES):
            blocks.append(code)
    defining = [block for block in blocks if name and _defines(block, name)]
    return (defining or blocks or [text])[-1]


def _defines(code: str, name: str) -> bool:
    return re.search(rf"^def\s+{re.escape(name)}\b|^{re.escape(name)}\s*=", code, re.M) is not None


def _starter(data: dict[str, Any], prompt: str, entry_point: str) -> str:
    """Return the start of a HumanEval program, from the row or, if it is plain code, from the prompt."""
    if starter := data.get("code_prompt"):
        return str(starter)
    return prompt if _defines(prompt, entry_point) and "<|" not in prompt else ""


def _complete(starter: str, code: str, entry_point: str) -> str:
    """Return a whole program: the starter, and a new definition or the rest of the one that it begins."""
    separator = "\n\n" if _defines(code, entry_point) or not starter else ""
    return f"{starter}{separator}{code}"


def _assertions(data: dict[str, Any], prompt: str) -> tuple[list[str], str, list[str]]:
    """Return the tests of a row, what runs before each, and names that only the solution may define."""
    if "test" in data and data.get("entry_point"):
        entry_point = str(data["entry_point"])
        # Names that tests use besides, such as a helper in the prompt.
        return [f"{data['test']}\ncheck({entry_point})"], _starter(data, prompt, entry_point), [entry_point]
    if tests := data.get("test_list") or data.get("tests"):
        called = set(re.findall(r"\b([A-Za-z_]\w*)\s*\(", "\n".join(map(str, tests))))
        # Tests that call nothing else test a function with the name of a builtin one.
        tested = [] if called - set(dir(builtins)) else sorted(called)
        return [str(test) for test in tests], str(data.get("test_setup_code") or data.get("test_setup") or ""), tested
    raise DatasetError(
        "code_reward needs the columns `test` and `entry_point`, `tests`, `test_cases` or `input_output`; the row "
        f"has {sorted(data)}"
    )


def _test_cases(data: dict[str, Any]) -> list[tuple[str, str]]:
    """Return pairs of input and output for a program, if the row has them."""
    if data.get("test_cases"):
        return [(str(case["input"]), str(case["output"])) for case in data["test_cases"]]
    given = data.get("input_output")
    if not given:
        return []
    given = json.loads(given) if isinstance(given, str) else given
    return [(str(a), str(b)) for a, b in zip(given["inputs"], given["outputs"], strict=True)]


def _same_lines(given: str, wanted: str) -> bool:
    lines = [[line.rstrip() for line in text.rstrip().splitlines()] for text in (given, wanted)]
    return lines[0] == lines[1]


@lru_cache(maxsize=1)
def _runner() -> str:
    return Path(__file__).with_name("code_runner.py").read_text()
