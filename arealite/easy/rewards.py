"""Rewards of a Python caller: functions of any module, of a notebook or script, lambdas and closures.

Two signatures are understood. arealite's scores one completion: `def reward(completion, answer, **data) -> float`.
TRL's scores the completions of one prompt: `def reward(completions, **kwargs) -> list[float]`. A function of the first
kind that other processes can import runs in a pool of processes. All others run on threads of this process: they are
not killed at their deadline, and several may run at the same time.
"""

import asyncio
import functools
import inspect
import pickle
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from arealite.api.errors import ConfigError, RewardError
from arealite.api.reward_api import FOR_WORKFLOWS, WITHHELD, Score, is_async, is_score
from arealite.reward.pool import RewardPool, check_rewards, gather_or_cancel
from arealite.utils.beside import run_beside
from arealite.utils.pools.process_pool import never_import_script

Row = dict[str, Any]
# The column with a row's prompt as the dataset has it, for functions of TRL's kind.
ASKED = "arealite_prompt"
_MAX_THREADS = 8
# Of functions that are not awaited.
_TIMEOUT_S = 60.0
# On a thread, before the next answers of a group have a deadline of their own.
_MAX_TURN_S = 0.05
_MAX_TEXT = 10_000
_MAX_FRAMES = 5
_OF_ONE = {"prompt", "completion", "prompt_ids"}
_OF_GROUP = {"prompts", "completions"}
# Functions that TRL passes to rewards.
_LOGGING = ("log_extra", "log_metric")
# What a function of each kind may ask for besides the columns of the dataset.
_GIVEN = {
    False: {"prompt", "completion", "prompt_ids", "completion_ids"},
    True: _OF_GROUP | {"completion_ids", "trainer_state"},
}


@dataclass(frozen=True)
class RewardPart:
    """One reward function: its name in statistics, its weight, and how it is called.

    `keys`: the keyword arguments that it takes; None for all.
    """

    name: str
    weight: float
    fn: Callable[..., Any]
    takes_group: bool
    is_importable: bool
    keys: frozenset[str] | None

    @property
    def label(self) -> str:
        """Its name in messages: that of the function, also if statistics cannot have it (`reward`)."""
        own = getattr(self.fn, "__name__", "")
        return own if own.isidentifier() else self.name

    def pick(self, values: Row) -> Row:
        """Return the arguments that the function takes."""
        return values if self.keys is None else {k: v for k, v in values.items() if k in self.keys}


def read_rewards(functions: Any, weights: Sequence[float] | None) -> list[RewardPart]:
    """Return the parts of one reward function or of several; raises `ConfigError` for what is none."""
    several = list(functions) if isinstance(functions, list | tuple) else [functions]
    if not several:
        raise ConfigError("there is no reward function: pass reward_fn")
    if weights is not None and len(weights) != len(several):
        raise ConfigError(f"reward_weights has {len(weights)} numbers for {len(several)} reward functions")
    parts: list[RewardPart] = []
    for number, fn in enumerate(several):
        weight = 1.0 if weights is None else float(weights[number])
        parts.append(_read_reward(fn, weight, [part.name for part in parts]))
    return parts


def _read_reward(fn: Any, weight: float, taken: list[str]) -> RewardPart:
    if not callable(fn) or hasattr(fn, "state_dict"):
        raise ConfigError(
            f"the reward {_show(fn)} is not a function: give a function, or a list of them. For a reward model give "
            "its folder, as text"
        )
    name = getattr(fn, "__name__", type(fn).__name__)
    name = name if name.isidentifier() and name != "reward" else f"reward{len(taken) + 1}"
    while name in taken:
        name += "_"
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the signature of the reward {_show(fn)} is not known: wrap it into a function") from error
    takes_group = _takes_group(fn, signature)
    has_any = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    keys = None if has_any else frozenset(signature.parameters)
    return RewardPart(name, weight, fn, takes_group, _is_importable(fn), keys)


def _takes_group(fn: Any, signature: inspect.Signature) -> bool:
    names = {n for n, p in signature.parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    one, group = sorted(names & _OF_ONE), sorted(names & _OF_GROUP)
    if bool(one) == bool(group):
        found = f"names both {one[0]} and {group[0]}" if one else "names neither `completion` nor `completions`"
        raise ConfigError(
            f"the reward {_show(fn)}{signature} {found}: with the parameter `completion` it scores one answer and "
            "returns a number, with `completions` it scores a list of answers and returns a list (as in TRL)"
        )
    return bool(group)


def check_columns(parts: Sequence[RewardPart], columns: Sequence[str], dataset: str = "train_dataset") -> None:
    """Raise `ConfigError` if a function needs a column that the dataset does not have."""
    for part in parts:
        known = {*columns, *_GIVEN[part.takes_group]}
        for name, parameter in inspect.signature(part.fn).parameters.items():
            is_named = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
            if not is_named or parameter.default is not parameter.empty:
                continue
            if name in FOR_WORKFLOWS:
                raise ConfigError(f"the reward {_show(part.fn)} needs `{name}`, {WITHHELD}")
            if name in _LOGGING and name not in known:
                raise ConfigError(
                    f"the reward {_show(part.fn)} needs `{name}`, which there is not here: give it the default None, "
                    "and return several rewards to have statistics of each"
                )
            if name not in known:
                raise ConfigError(
                    f"the reward {_show(part.fn)} needs `{name}`, but rows of {dataset} have the columns "
                    f"{', '.join(columns) or '(none)'}: add the column, or give the parameter a default"
                )


def check_sendable(parts: Sequence[RewardPart], num_workers: int) -> None:
    """Raise `ConfigError` for a function that rollout workers, if there are any, cannot import."""
    own = [part.label for part in parts if not part.is_importable]
    if num_workers and own:
        raise ConfigError(
            f"rollout workers cannot import the reward {', '.join(own)}: put it into a module of its own, or set "
            "rollout.num_workers=0"
        )


def _is_importable(fn: Any) -> bool:
    """Whether another process can import the function: one of a script or notebook it cannot."""
    try:
        text = pickle.dumps(fn)
    # Objects of users may raise anything.
    except Exception:
        return False
    return b"__main__" not in text and b"__mp_main__" not in text


class Rewards(RewardPool):
    """The weighted sum of reward functions. A workflow uses it both as its reward and as its pool."""

    def __init__(self, parts: Sequence[RewardPart], timeout_s: float | None):
        super().__init__(timeout_s=timeout_s)
        self.timeout_s = timeout_s or _TIMEOUT_S
        never_import_script()
        self.parts = list(parts)
        self.__name__ = self.__qualname__ = "+".join(part.name for part in parts)
        self.is_score = any(is_score(part.fn) for part in parts)
        self._turns: asyncio.Semaphore | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """In a rollout worker it is the same rewards, and never imports the script either."""
        return (Rewards, (self.parts, self._given_timeout_s))

    @property
    def in_threads(self) -> list[str]:
        """Names of the functions that run on threads of this process."""
        return [p.label for p in self.parts if not is_async(p.fn) and (p.takes_group or not p.is_importable)]

    def warm_up(self, fn: Callable[..., Any]) -> None:
        """Start the processes of functions that run in them."""
        for part in self.parts:
            if part.is_importable and not part.takes_group:
                super().warm_up(part.fn)

    def __call__(self, *args: Any, **row: Any) -> float:
        raise TypeError("rewards are computed by run()")

    async def run(self, fn: Callable[..., Any], rows: list[Row]) -> list[float]:
        """Return the rewards of all answers to one prompt; other functions run as in any pool."""
        if fn is not self:
            return await super().run(fn, rows)
        values = await gather_or_cancel(*(self._run_part(part, rows) for part in self.parts))
        if len(self.parts) == 1:
            if None in values[0]:
                raise RewardError(f"reward {self.parts[0].label} returned None, and there is no other reward")
            return values[0]
        return check_rewards(self, [self._add(row) for row in zip(*values, strict=True)], len(rows))

    def _add(self, values: Sequence[Any]) -> dict[str, float]:
        """Return the weighted sum and its parts. As in TRL, None is a reward that does not apply to a row."""
        given = [(part, value) for part, value in zip(self.parts, values, strict=True) if value is not None]
        if not given:
            raise RewardError(f"all rewards ({self.__name__}) returned None for one answer")
        shown = {part.name: float(value) for part, value in given}
        scores = [(part.name, value.parts) for part, value in given if isinstance(value, Score)]
        own = {f"{name}/{key}": number for name, parts in scores for key, number in parts.items()}
        return {"reward": sum(part.weight * shown[part.name] for part, _ in given), **shown, **own}

    async def _run_part(self, part: RewardPart, rows: list[Row]) -> list[Any]:
        if part.takes_group:
            arguments = part.pick(_as_lists(rows))
            values = await self._call(part, functools.partial(part.fn, **arguments))
            return _check_group(part, values, len(rows))
        own = [part.pick({k: v for k, v in row.items() if k != ASKED}) for row in rows]
        if part.is_importable or is_async(part.fn):
            return _check(part, await self.run_unchecked(part.fn, own))
        values: list[Any] = []
        # The deadline is that of one answer, not of all: a call may wait for a service.
        while len(values) < len(own):
            values += await self._call(part, functools.partial(_score_some, part.fn, own[len(values) :]))
        return _check(part, values)

    async def _call(self, part: RewardPart, call: Callable[[], Any]) -> Any:
        """Call a function on a thread, or await it, with a deadline."""
        if self._turns is None:
            self._turns = asyncio.Semaphore(_MAX_THREADS)
        timeout_s = self.await_timeout_s if is_async(part.fn) else self.timeout_s
        try:
            async with self._turns, asyncio.timeout(timeout_s) as deadline:
                return await (call() if is_async(part.fn) else run_beside(call))
        # Reward code may raise anything, also a TimeoutError of its own.
        except Exception as error:
            if isinstance(error, TimeoutError) and deadline.expired():
                raise RewardError(
                    f"reward {part.label} did not return within {timeout_s:g} s (reward_timeout_s)"
                ) from error
            raise RewardError(f"reward {part.label} raised {_trace_of(part.fn, error)[:_MAX_TEXT]}") from error


def _score_some(fn: Callable[..., Any], rows: list[Row]) -> list[Any]:
    """Return the rewards of the first rows: of all if they are fast, of one if it is slow."""
    values, began = [], time.monotonic()
    for row in rows:
        values.append(fn(**row))
        if time.monotonic() - began > _MAX_TURN_S:
            break
    return values


def _trace_of(fn: Callable[..., Any], error: Exception) -> str:
    """Return an error with the lines of the reward function that led to it, and no others."""
    frames = list(traceback.walk_tb(error.__traceback__))
    code = getattr(inspect.unwrap(fn), "__code__", None)
    start = next((i for i, (frame, _) in enumerate(frames) if frame.f_code is code), len(frames) - 1)
    lines = traceback.StackSummary.extract(iter(frames[start:])).format()[-_MAX_FRAMES:]
    return "".join(traceback.format_exception_only(error)) + "".join(lines).rstrip()


def _as_lists(rows: list[Row]) -> Row:
    """Return the keyword arguments of a function of TRL's kind: lists with one value per answer."""
    asked = [row[ASKED] for row in rows]
    answers = [row["completion"] for row in rows]
    is_chat = isinstance(asked[0], list)
    completions = [[{"role": "assistant", "content": text}] for text in answers] if is_chat else answers
    own = {"prompt", "completion", "prompt_ids", ASKED}
    columns = {name: [row[name] for row in rows] for name in rows[0] if name not in own}
    # TRL passes functions that log and the state of its trainer; there is none here.
    return {"prompts": asked, "completions": completions, **columns, "trainer_state": None}


def _check_group(part: RewardPart, values: Any, count: int) -> list[Any]:
    if isinstance(values, str | Mapping) or not hasattr(values, "__len__"):
        raise RewardError(
            f"reward {part.label} returned {_show(values)} for {count} completions; it must return a list with one "
            "number for each"
        )
    numbers = [value.item() if hasattr(value, "item") else value for value in values]
    if len(numbers) != count:
        raise RewardError(f"reward {part.label} returned {len(numbers)} values for {count} completions")
    return _check(part, numbers)


def _check(part: RewardPart, values: list[Any]) -> list[float | None]:
    """Return checked rewards. None is a reward that does not apply to a row."""
    known = [value for value in values if value is not None]
    checked = iter(check_rewards(part.fn, known, len(known)))
    return [None if value is None else next(checked) for value in values]


def _show(value: Any) -> str:
    return str(getattr(value, "__qualname__", None) or repr(value))[:200]
