"""Adapters: environments of gymnasium, reasoning-gym and verifiers as an `Environment`.

`AgenticWorkflow(functools.partial(GymnasiumEnvironment, "FrozenLake-v1", to_action=…), config.gconfig, tokenizer)`.
"""

import inspect
import numbers
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from arealite.api.errors import ConfigError, DatasetError
from arealite.api.named_code import load_object
from arealite.api.rollout_api import Environment, Step


class GymnasiumEnvironment(Environment):
    """A gymnasium environment, by its id or as an object, whose observations and actions become text.

    `to_text(observation, env)` describes an observation; `to_action(text, env)` reads the action in a reply, and raises
    `ValueError` if there is none. Then the agent is told so, and loses a step of the workflow's `max_turns`; the same
    for a number that is no action of a discrete space. Both may be names, `package.module:function`.
    """

    def __init__(
        self,
        env: Any,
        to_text: Callable[[Any, Any], str] | str | None = None,
        to_action: Callable[[str, Any], Any] | str | None = None,
        invalid_reward: float = 0.0,
        **kwargs: Any,
    ):
        if isinstance(env, str):
            try:
                import gymnasium
            except ImportError as error:
                raise ConfigError(
                    f"the environment {env} needs gymnasium ({error}): pip install 'arealite[gym]'"
                ) from None
            env = gymnasium.make(env, **kwargs)
        if hasattr(env, "num_envs"):
            raise ConfigError(
                f"{type(env).__name__} plays {env.num_envs} episodes at once: give an environment of one; the workflow "
                "plays many at the same time, each in an environment of its own"
            )
        self.env = env
        self.to_text = load_object(to_text, "to_text") if isinstance(to_text, str) else to_text
        self.to_action = load_object(to_action, "to_action") if isinstance(to_action, str) else to_action
        self.invalid_reward = invalid_reward

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        observation, info = self.env.reset(seed=seed, options=options)
        return self._describe(observation), info

    def step(self, action: Any) -> Step:
        space = getattr(self.env, "action_space", None)
        if self.to_action is None and isinstance(action, str) and _has_numbers(space):
            raise ConfigError(f"the environment takes actions of {space}, and a reply is text: give to_action")
        try:
            chosen = action if self.to_action is None else self.to_action(action, self.env)
            _check_discrete(chosen, space)
        except ValueError as error:
            return f"This is no valid action: {error}", self.invalid_reward, False, False, {}
        observation, reward, terminated, truncated, info = self.env.step(chosen)
        return self._describe(observation), float(reward), terminated, truncated, info

    def close(self) -> None:
        self.env.close()

    def _describe(self, observation: Any) -> str:
        return str(observation) if self.to_text is None else self.to_text(observation, self.env)


class QuestionEnvironment(Environment):
    """One question, one answer: a dataset with `score_answer(answer, entry)`, as reasoning-gym has.

    A row chooses the entry by `index`; else the seed does.
    """

    def __init__(self, dataset: Any, read_answer: Callable[[str], str] = str.strip):
        self.dataset, self.read_answer = dataset, read_answer
        self.entry: Any = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        index = (options or {}).get("index", seed or 0)
        self.entry = self.dataset[index % len(self.dataset)]
        return self.entry["question"], {}

    def step(self, action: Any) -> Step:
        score = self.dataset.score_answer(answer=self.read_answer(action), entry=self.entry)
        return "", float(score), True, False, {}


class VerifiersEnvironment(Environment):
    """A conversation as in `verifiers`: `env_response`, `is_completed`, a rubric of weighted functions.

    Rows have `prompt` (messages), and `answer`, `task` and `info` if the rubric needs them.
    """

    def __init__(self, env: Any):
        self.env = env
        self.row: dict[str, Any] = {}
        self.completion: list[Any] = []
        self.state: dict[str, Any] = {}

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        self.row, self.completion = dict(options or {}), []
        if "prompt" not in self.row:
            raise DatasetError(f"a row has the columns {sorted(self.row)}; a verifiers environment needs `prompt`")
        self.state = {"turn": 0, "prompt": self.row["prompt"], "completion": self.completion, **self.row}
        return self.row["prompt"], {}

    async def step(self, action: Any) -> Step:
        self.completion.append({"role": "assistant", "content": action})
        self.state["turn"] += 1
        messages = [*self.row["prompt"], *self.completion]
        if await _result(self.env.is_completed(messages, self.state)):
            return "", await self._score(), True, False, {}
        response = await _result(self.env.env_response(messages, self.state))
        # Older versions return the state too.
        reply, self.state = response if isinstance(response, tuple) else (response, self.state)
        self.completion += reply
        return reply, 0.0, False, False, {}

    async def _score(self) -> float:
        rubric = self.env.rubric
        given = {
            **self.row,
            "completion": self.completion,
            "state": self.state,
            "parser": getattr(rubric, "parser", None),
        }
        total = 0.0
        for fn, weight in zip(rubric.get_reward_funcs(), rubric.get_reward_weights(), strict=True):
            total += weight * float(await _result(fn(**_accepted(fn, given))))
        return total


def _has_numbers(space: Any) -> bool:
    """Return whether actions of a gymnasium space are numbers, arrays or collections, and no text."""
    dtype = getattr(space, "dtype", None)
    return hasattr(space, "spaces") or (dtype is not None and np.issubdtype(dtype, np.number))


def _check_discrete(chosen: Any, space: Any) -> None:
    """Raise `ValueError` for a number that is no action of a gymnasium `Discrete` space.

    The environment would raise, which costs the episode, or count a negative number from the end.
    """
    is_discrete = hasattr(space, "n") and hasattr(space, "start")
    if is_discrete and isinstance(chosen, numbers.Integral) and not space.contains(chosen):
        raise ValueError(f"{chosen} is not from {space.start} to {space.start + space.n - 1}")


def _accepted(fn: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    parameters = inspect.signature(fn).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return {key: value for key, value in given.items() if takes_all or key in parameters}


async def _result(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value
