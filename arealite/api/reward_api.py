"""The contract of reward functions: one completion in, one number out.

A reward is a plain top-level function (so that a worker process can import it):

    def reward(prompt: str, completion: str, prompt_ids: list[int], completion_ids: list[int], **data) -> float

`data` holds the columns of the dataset row. The function runs in a pool of processes with a deadline: if it hangs or
crashes, only its own episode fails. Make a function that waits for a remote service a coroutine function
(`async def reward(…)`): it is awaited on the event loop, any number at the same time, and needs no process. An object
with `__call__` works as a function does, if it can be pickled.

A reward of several parts returns `{"reward": total, "part": value, …}`; the parts become statistics of the run.

An answer with a reward of 1 is solved (pass@k). An object whose rewards have no such value, such as a reward model, has
the attribute `is_score = True`; its evaluations compare the mean reward instead. An object that passes its row on to
other rewards has them in `reward_fns`, so that the columns of those are checked before the run.
"""

import inspect
from collections.abc import Awaitable, Mapping
from typing import Any, Protocol, Self

from arealite.api.errors import DatasetError

# What every reward gets besides the columns of its row.
_GIVEN = ("prompt", "completion", "prompt_ids", "completion_ids")
# Columns that workflows read and rewards do not get.
FOR_WORKFLOWS = ("messages", "input_ids", "seed", "images", "image")
WITHHELD = "a column that the workflow reads and rewards do not get: put what it needs into a column of another name"
# An answer with at least this reward is right: partial credit is no pass. Rewards pass through float32.
SOLVED = 1.0 - 1e-4
# Batches hold rewards in float32.
MAX_REWARD = 3.4e38


class RewardFn(Protocol):
    """A function, or coroutine function, that scores one completion."""

    def __call__(
        self, prompt: str, completion: str, prompt_ids: list[int], completion_ids: list[int], **data: Any
    ) -> float | Mapping[str, float] | Awaitable[float | Mapping[str, float]]: ...


class Score(float):
    """A reward with the parts that it was made of: a number everywhere else."""

    parts: dict[str, float]

    def __new__(cls, value: float, parts: dict[str, float]) -> Self:
        score = super().__new__(cls, value)
        score.parts = parts
        return score


def check_columns(fn: Any, row: Mapping[str, Any]) -> None:
    """Raise `DatasetError` if a reward needs what it does not get, or does not take what it gets."""
    for inner in getattr(fn, "reward_fns", ()):
        check_columns(inner, row)
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        # Some callables, such as those of extensions, do not say what they take.
        return
    name = getattr(fn, "__name__", type(fn).__name__)
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    needed = [p.name for p in named if p.default is p.empty]
    if withheld := [key for key in needed if key in FOR_WORKFLOWS]:
        raise DatasetError(f"the reward {name} needs {withheld[0]!r}, {WITHHELD}")
    missing = [key for key in needed if key not in (*_GIVEN, *row)]
    if "completions" in missing:
        raise DatasetError(
            f"the reward {name} takes `completions`, a list as in TRL. A reward that a configuration names scores one "
            "answer: take `completion` and return a number, or pass the function to `arealite.GRPOTrainer`"
        )
    if missing:
        raise DatasetError(
            f"the reward {name} needs {', '.join(map(repr, missing))}, and a row has the columns "
            f"{', '.join(map(str, row))}: set columns.{missing[0]} to one of them, or change the reward"
        )
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return
    taken = {p.name for p in named} | set(FOR_WORKFLOWS)
    unused = [key for key in dict.fromkeys((*_GIVEN, *row)) if key not in taken]
    if unused:
        raise DatasetError(
            f"the reward {name} does not take {', '.join(map(repr, unused))}, which every call passes by name: end its "
            "parameters with **row"
        )


def is_score(fn: Any) -> bool:
    """Whether a reward is a score of which no value counts as solved, such as that of a reward model."""
    return bool(getattr(fn, "is_score", False))


def is_async(fn: Any) -> bool:
    """Whether a reward or an agent is a coroutine function, or an object that is called as one."""
    return inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(type(fn).__call__)
