"""Reward for code: the share of a row's tests that the program in an answer passes, in the sandbox.

Rows have tests in one of three layouts:

    HumanEval     `test` (defines `check(candidate)`), `entry_point`, and the start of the program in `code_prompt`
                  or `prompt`
    MBPP          `test_list` or `tests` (assertions), `test_setup_code` or `test_setup`
    programs      `test_cases`: a list of {"input": …, "output": …}, or `input_output`: {"inputs": […], "outputs": […]};
                  the program reads stdin, its stdout is compared without regard to spaces at the end of lines; as in
                  programming contests it must end in time, and with exit code 0; with `fn_name` in
                  `input_output`, that function is called instead, or this method of a class `Solution`

Tests that call functions run in a process of their own (`code_runner.py`), which the solution cannot reach.
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
from arealite.reward.extraction import behind_thinking
from arealite.reward.sandbox import Level, Result, run_python

_LANGUAGES = ("python", "py", "python3")
_NUMBER_OF_DIGITS = 10
_CLASS = "Solution"
# APPS has tuples as lists, and some results in a list of one.
_SAME = """
def plain(value):
    return [plain(each) for each in value] if isinstance(value, (list, tuple)) else value

def same(value, wanted):
    assert plain(value) == wanted or [plain(value)] == wanted
"""


# LeetCode, where rows with `fn_name` come from, imports these: its starters name `List` without an import. Not all of
# `math`, whose `pow` would hide the builtin one.
_IMPORTED = """
import bisect, collections, functools, heapq, itertools, math, operator, random, re, string, sys
from typing import *
from bisect import *
from collections import *
from functools import *
from heapq import *
from itertools import *
from math import ceil, comb, floor, gcd, inf, lcm, log, sqrt
"""
_FUTURE_IMPORTS = re.compile(r"\A(?:.*^from __future__ import [^\n]*\n)?", re.M | re.S)


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
        if cases := _test_cases(data):
            code = extract_code(completion)
            results = [self._run(code, given) for given, _ in cases]
            passed = sum(_is_right(result, wanted) for result, (_, wanted) in zip(results, cases, strict=True))
            return self._score(passed, len(cases))
        tests, setup, tested = _assertions(data, prompt)
        code = _with_function(extract_code(completion, *(tested or _called(tests)), _CLASS), data)
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


def extract_code(text: str, *names: str) -> str:
    """Return the last fenced block of Python that defines one of `names`, or the last one.

    Fences are three backticks or more; without such a block, tildes. Without any block it is the text itself. A block
    that is not closed ends with the text: the answer was cut. What stands before `</think>` is no answer.
    """
    # A draft in the thinking may leave a fence open.
    text = behind_thinking(text)
    blocks = _fenced("`", text) or _fenced("~", text)
    defining = [block for block in blocks if any(_defines(block, name) for name in names)]
    return (defining or blocks or [text])[-1]


def _fenced(sign: str, text: str) -> list[str]:
    """Return the blocks of Python between fences of one sign."""
    blocks = []
    parts = re.split(sign + "{3,}", text)
    for before, block in zip(parts[::2], parts[1::2], strict=False):
        language, newline, code = block.partition("\n")
        # Behind the language there may be a title or options.
        if newline and (language.lower().split() or [""])[0] in ("", *_LANGUAGES):
            # In a list the whole block is indented.
            indent = re.search(r"[ \t]*\Z", before)
            blocks.append(re.sub(rf"^{indent[0]}", "", code, flags=re.M) if indent and indent[0] else code)
    return blocks


def _defines(code: str, name: str) -> bool:
    name = re.escape(name)
    return bool(name) and re.search(rf"^(?:(?:async\s+)?def|class)\s+{name}\b|^{name}\s*=", code, re.M) is not None


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
    given = _input_output(data)
    if name := given.get("fn_name"):
        pairs = zip(given["inputs"], given["outputs"], strict=True)
        return [f"same({name}(*{args!r}), {wanted!r})" for args, wanted in pairs], _SAME, [name]
    if tests := data.get("test_list") or data.get("tests"):
        called = _called(tests)
        # Tests that call nothing else test a function with the name of a builtin one.
        tested = [] if called - set(dir(builtins)) else sorted(called)
        return [str(test) for test in tests], str(data.get("test_setup_code") or data.get("test_setup") or ""), tested
    raise DatasetError(
        "code_reward needs the columns `test` and `entry_point`, `tests`, `test_cases` or `input_output`; the row "
        f"has {sorted(data)}"
    )


def _called(tests: Sequence[Any]) -> set[str]:
    return set(re.findall(r"\b([A-Za-z_]\w*)\s*\(", "\n".join(map(str, tests))))


def _test_cases(data: dict[str, Any]) -> list[tuple[str, str]]:
    """Return pairs of input and output for a program, if the row has them."""
    if data.get("test_cases"):
        return [(_as_text(case["input"]), _as_text(case["output"])) for case in data["test_cases"]]
    given = _input_output(data)
    if not given or given.get("fn_name"):
        return []
    return [(_as_text(a), _as_text(b)) for a, b in zip(given["inputs"], given["outputs"], strict=True)]


def _as_text(value: Any) -> str:
    """Return what a program reads or prints; APPS has some of it as a list of lines."""
    return "\n".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _input_output(data: dict[str, Any]) -> dict[str, Any]:
    given = data.get("input_output") or {}
    return json.loads(given) if isinstance(given, str) else given


def _with_function(code: str, data: dict[str, Any]) -> str:
    """Return a solution with the function that `input_output` names and the imports that it may expect."""
    name = _input_output(data).get("fn_name")
    if not name:
        return code
    alias = "" if _defines(code, name) else f"\n\n{name} = {_CLASS}().{name}\n"
    return _FUTURE_IMPORTS.sub(lambda found: f"{found[0]}{_IMPORTED}", code, count=1) + alias


def _is_right(result: Result, wanted: str) -> bool:
    """Whether a program ended by itself with exit code 0, and printed what is wanted."""
    lines = [[line.rstrip() for line in text.rstrip().splitlines()] for text in (result.stdout, wanted)]
    return result.exit_code == 0 and result.stopped_by is None and lines[0] == lines[1]


@lru_cache(maxsize=1)
def _runner() -> str:
    return Path(__file__).with_name("code_runner.py").read_text()
