"""Rows that are generated: countdown, and the tasks of reasoning-gym.

Rows depend only on `options` (size, seed, parameters of the task). Without a seed, training and validation have
different ones.
"""

import difflib
import random
from collections.abc import Callable
from typing import Any

from arealite.api.dataset_args import DataSourceConfig
from arealite.api.errors import DatasetError
from arealite.dataset.columns import Row

_SIZE = 1000
_MAX_SIZE = 10_000_000


def generate_rows(config: DataSourceConfig) -> list[Row]:
    """Return the rows of `reasoning_gym:TASK` or `generate:NAME`."""
    kind, _, name = config.path.partition(":")
    options = {"size": _SIZE, "seed": 2 if config.is_validation else 1, **config.options}
    for key in ("size", "seed"):
        if type(options[key]) is not int or not 0 <= options[key] <= _MAX_SIZE:
            raise DatasetError(f"options.{key} of {config.path} must be a whole number up to {_MAX_SIZE}")
    if kind == "reasoning_gym":
        return _reasoning_gym(name, options, config.path)
    if name not in GENERATORS:
        raise DatasetError(f"there is no generator {name!r} (path={config.path}): use {', '.join(GENERATORS)}")
    try:
        return GENERATORS[name](**options)
    except (TypeError, ValueError) as error:
        raise DatasetError(f"options of {config.path}: {error}") from error


def make_countdown(
    size: int, seed: int, min_numbers: int = 3, max_numbers: int = 4, max_number: int = 99, max_target: int = 99
) -> list[Row]:
    """Return solvable tasks: `nums`, `target`, and a `solution` that uses every number once."""
    if not 2 <= min_numbers <= max_numbers <= 8 or max_number < max_numbers or max_target < 1:
        raise ValueError("2 ≤ min_numbers ≤ max_numbers ≤ 8, max_numbers ≤ max_number and 1 ≤ max_target are needed")
    draw = random.Random(f"countdown/{seed}")
    rows = []
    while len(rows) < size:
        numbers = [draw.randint(1, max_number) for _ in range(draw.randint(min_numbers, max_numbers))]
        target, solution = _combine(numbers, draw)
        if 1 <= target <= max_target:
            rows.append({"nums": numbers, "target": target, "solution": solution})
    return rows


def _combine(numbers: list[int], draw: random.Random) -> tuple[int, str]:
    """Join numbers at random to one expression; returns its value, or 0 if it is not whole."""
    terms = [(number, str(number)) for number in numbers]
    while len(terms) > 1:
        draw.shuffle(terms)
        (a, left), (b, right) = terms.pop(), terms.pop()
        sign = draw.choice("+-*/")
        if sign == "/" and (b == 0 or a % b):
            sign = "-"
        value = {"+": a + b, "-": a - b, "*": a * b, "/": a // b if b else 0}[sign]
        terms.append((value, f"({left} {sign} {right})"))
    value, text = terms[0]
    return value, text.removeprefix("(").removesuffix(")")


def _reasoning_gym(task: str, options: dict[str, Any], path: str) -> list[Row]:
    """Return rows with `question`, `answer`, `entry` (for the verifier) and `threshold`."""
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise DatasetError(f"{path} needs reasoning-gym: pip install 'arealite[reasoning]'") from error
    if task not in DATASETS:
        near = difflib.get_close_matches(task, DATASETS, n=3) or sorted(DATASETS)
        raise DatasetError(f"reasoning-gym has no task {task!r} (path={path}); there are: {', '.join(near)}")
    threshold = options.pop("threshold", 0.999)
    if threshold is not None and not isinstance(threshold, int | float):
        raise DatasetError(f"options.threshold of {path} must be a number or null, got {threshold!r}")
    try:
        entries = reasoning_gym.create_dataset(task, **options)
    # Tasks check their parameters with `assert`.
    except (TypeError, ValueError, AssertionError) as error:
        raise DatasetError(f"options of {path}: {error}") from error
    return [
        {"question": entry["question"].strip(), "answer": entry["answer"], "entry": entry, "threshold": threshold}
        for entry in entries
    ]


GENERATORS: dict[str, Callable[..., list[Row]]] = {"countdown": make_countdown}
