"""`CombinedReward`: a weighted sum of rewards, with each of them in the statistics."""

import inspect
from collections.abc import Mapping
from typing import Any

from arealite.api.errors import ConfigError
from arealite.api.reward_api import RewardFn, is_async, is_score
from arealite.reward.pool import check_rewards, gather_or_cancel


class CombinedReward:
    """Adds rewards: `CombinedReward({"right": (1.0, math_reward), "form": (0.2, TagsReward())})`.

    The name of each part is shown with its own, unweighted value (`rollout/right`, `rollout/form`). If a part has
    parts, they are shown too (`rollout/right/…`). Parts may not be coroutine functions: `AsyncCombinedReward` is
    for those.
    """

    def __init__(self, parts: Mapping[str, tuple[float, RewardFn]]):
        self.parts = dict(parts)
        if not self.parts or "reward" in self.parts:
            raise ConfigError(f"a combined reward needs parts with names other than `reward`, got {list(self.parts)}")
        slow = [name for name, (_, fn) in self.parts.items() if is_async(fn)]
        if slow and not is_async(self):
            raise ConfigError(f"{', '.join(slow)} must be awaited: use AsyncCombinedReward")
        self.reward_fns = [fn for _, fn in self.parts.values()]
        self.is_score = any(map(is_score, self.reward_fns))
        # Of the first part that has one: a process forks its workers from one server.
        self.worker_module = next(filter(None, (getattr(fn, "worker_module", None) for fn in self.reward_fns)), None)

    def __call__(self, *args: Any, **row: Any) -> dict[str, float]:
        return self._add({name: fn(*args, **row) for name, (_, fn) in self.parts.items()})

    def _add(self, values: dict[str, Any]) -> dict[str, float]:
        total, shown = 0.0, {}
        for name, value in values.items():
            weight, fn = self.parts[name]
            (score,) = check_rewards(fn, [value], 1)
            total += weight * score
            shown[name] = float(score)
            shown |= {f"{name}/{inner}": number for inner, number in getattr(score, "parts", {}).items()}
        return {"reward": total, **shown}


class AsyncCombinedReward(CombinedReward):
    """As `CombinedReward`, with parts that are awaited, such as a judge. It runs on the event loop.

    Parts that are plain functions run there too: they must be fast.
    """

    async def __call__(self, *args: Any, **row: Any) -> dict[str, float]:
        values = await gather_or_cancel(*(self._value(fn, args, row) for _, fn in self.parts.values()))
        return self._add(dict(zip(self.parts, values, strict=True)))

    @staticmethod
    async def _value(fn: RewardFn, args: tuple[Any, ...], row: dict[str, Any]) -> Any:
        value = fn(*args, **row)
        return await value if inspect.isawaitable(value) else value
