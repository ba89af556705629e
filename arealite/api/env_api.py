"""What an environment promises to an agentic workflow: gymnasium's reset/step, awaited."""

from __future__ import annotations

import abc
from typing import Any


class Environment(abc.ABC):
    """One episode's world. Observations and actions are whatever agent and environment agree on."""

    @abc.abstractmethod
    async def areset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict]:
        """Start an episode; returns the first observation and extra information."""

    @abc.abstractmethod
    async def astep(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        """Act; returns observation, reward, terminated, truncated, extra information."""

    async def aclose(self) -> None:
        """Free what the episode holds."""
