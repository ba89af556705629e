"""The contracts of rollouts: workflows, agents, environments, and a factory for workflows.

`AgenticWorkflow` plays agents against environments. An environment has the methods of gymnasium's `Env`; observations
and actions are text, chat messages, or anything that agent and environment agree on.
"""

import abc
from collections.abc import Awaitable
from typing import Any, TypeAlias

from arealite.api.engine_api import RolloutWorkflow
from arealite.api.errors import ConfigError
from arealite.api.named_code import call_with, load_object

__all__ = ["Agent", "Environment", "RolloutWorkflow", "Step", "load_workflow"]

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
        """Free what the environment holds."""
        return None


def load_workflow(name: str, arguments: dict[str, Any] | None = None, **offered: Any) -> RolloutWorkflow:
    """Make the workflow that a configuration names: `package.module:Class`, or a function.

    It gets those of the `offered` values that its constructor takes (`gconfig`, `tokenizer`, `reward_fn`, …), and all
    `arguments`.
    """
    workflow = call_with(load_object(name, "workflow"), name, arguments or {}, offered, "workflow")
    if not isinstance(workflow, RolloutWorkflow):
        raise ConfigError(f"workflow={name} made a {type(workflow).__name__}; it must be a RolloutWorkflow")
    return workflow
