"""The contracts of rollouts: workflows, agents, environments, and a factory for workflows.

`AgenticWorkflow` plays agents against environments. An environment has the methods of gymnasium's `Env`; observations
and actions are text, chat messages, or anything that agent and environment agree on.
"""

import abc
import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeAlias

from arealite.api.engine_api import RolloutWorkflow
from arealite.api.errors import ConfigError
from arealite.api.named_code import call_with, load_object

__all__ = ["Agent", "Environment", "RolloutWorkflow", "Step", "check_workflows", "find_workflow", "load_workflow"]

# Observation, reward, terminated, truncated, info.
Step: TypeAlias = tuple[Any, float, bool, bool, dict[str, Any]]
Start: TypeAlias = tuple[Any, dict[str, Any]]


class Agent(abc.ABC):
    """Decides what to do in one episode: turns observations into actions, usually by asking the model."""

    @abc.abstractmethod
    async def act(self, observation: Any) -> Any:
        """Return the action that answers an observation. Await what takes time, never block."""


class Environment(abc.ABC):
    """What an agent acts in. Methods may be coroutines, which run on the event loop and must not block.

    Plain methods run in a worker process with a deadline, so that they may block, hang or crash.
    """

    @abc.abstractmethod
    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Start | Awaitable[Start]:
        """Begin an episode; returns its first observation, and info. `options` has the columns of the row."""

    @abc.abstractmethod
    def step(self, action: Any) -> Step | Awaitable[Step]:
        """Act; returns observation, reward, terminated, truncated, info.

        `terminated`: the episode has ended. `truncated`: it was cut off, for example after too many steps.
        """

    def close(self) -> Awaitable[None] | None:
        """Free what the environment holds. Called for environments on the event loop, after each episode.

        A worker process keeps its environment for later episodes and is killed with all that it has started.
        """
        return None


def find_workflow(name: str) -> Callable[..., Any]:
    """Import what makes the workflow that a configuration names: `package.module:Class`, or a function.

    Raises `ConfigError` for a class that is not a complete `RolloutWorkflow`. What a function makes is checked later.
    """
    found = load_object(name, "workflow")
    if inspect.isclass(found):
        if not issubclass(found, RolloutWorkflow):
            raise ConfigError(f"workflow={name} is a class, but not a RolloutWorkflow: {_derive(found)}")
        if missing := sorted(found.__abstractmethods__):
            raise ConfigError(f"workflow={name} does not define {', '.join(missing)}: {_derive(found)}")
    return found


def load_workflow(name: str, arguments: dict[str, Any] | None = None, **offered: Any) -> RolloutWorkflow:
    """Make the workflow that a configuration names, as in `find_workflow`.

    It gets those of the `offered` values that its constructor takes (`gconfig`, `tokenizer`, `reward_fn`, …), and all
    `arguments`.
    """
    workflow = call_with(find_workflow(name), name, arguments or {}, offered, "workflow")
    if not isinstance(workflow, RolloutWorkflow):
        raise ConfigError(f"workflow={name} made a {type(workflow).__name__}; it must be a RolloutWorkflow")
    return workflow


def check_workflows(
    workflow: RolloutWorkflow | None, evaluating: RolloutWorkflow | Mapping[str, RolloutWorkflow] | None = None
) -> RolloutWorkflow:
    """Return the workflow that a trainer was given; raises `ConfigError` if it is something else.

    The same for the workflows of validation sets, which are all `evaluating`, or one for each name.
    """
    if workflow is None:
        raise ConfigError("there is no workflow: pass one to train(), or make the trainer with from_config()")
    _check_workflow(workflow, "workflow")
    several = evaluating.values() if isinstance(evaluating, Mapping) else [evaluating]
    for each in several if evaluating is not None else ():
        _check_workflow(each, "eval_workflow")
    return workflow


def _check_workflow(given: object, argument: str) -> None:
    if isinstance(given, RolloutWorkflow):
        return
    if not inspect.isclass(given):
        kind = type(given)
        raise ConfigError(f"{argument} is a {kind.__name__}, which is not a RolloutWorkflow: {_derive(kind)}")
    if not issubclass(given, RolloutWorkflow):
        raise ConfigError(f"{argument} is the class {given.__name__}, which is not a RolloutWorkflow: {_derive(given)}")
    raise ConfigError(f"{argument} is the class {given.__name__}: pass an object, {given.__name__}(…)")


def _derive(kind: type) -> str:
    """Say how to make a class a workflow."""
    name = kind.__name__ if kind.__module__ != "builtins" else "MyWorkflow"
    return (
        f"write `class {name}(RolloutWorkflow)` (of arealite.api.workflow_api) with "
        "`async def arun_episode(self, engine, data)` (docs/workflows.md)"
    )
