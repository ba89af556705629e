"""Rewards for the length of an answer in tokens: a penalty for long ones, a cosine schedule."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from arealite.api.errors import ConfigError
from arealite.api.reward_api import RewardFn


@dataclass(frozen=True)
class OverlongPenalty:
    """0.0 up to `max_tokens - buffer_tokens`, from there linearly to -1.0 at `max_tokens` and beyond.

    The soft overlong punishment of DAPO (https://arxiv.org/abs/2503.14476), equation 13.
    """

    max_tokens: int
    buffer_tokens: int

    def __post_init__(self) -> None:
        if not 0 < self.buffer_tokens <= self.max_tokens:
            raise ConfigError(f"buffer_tokens must be 1 to max_tokens={self.max_tokens}, got {self.buffer_tokens}")

    def __call__(
        self,
        prompt: str = "",
        completion: str = "",
        prompt_ids: Sequence[int] = (),
        completion_ids: Sequence[int] = (),
        **data: Any,
    ) -> float:
        over = len(completion_ids) - (self.max_tokens - self.buffer_tokens)
        return -min(max(over / self.buffer_tokens, 0.0), 1.0)


@dataclass(frozen=True)
class CosineReward:
    """Scales a reward of 0 or 1 by length: right answers gain by being short, wrong ones by being long.

    From `right[0]` (length 0) to `right[1]` (`max_tokens`) for answers that `reward_fn` gives at least 0.5, from
    `wrong[0]` to `wrong[1]` for others, along half a cosine; `too_long` from `max_tokens` on
    (https://arxiv.org/abs/2502.03373).
    """

    reward_fn: RewardFn
    max_tokens: int
    right: tuple[float, float] = (2.0, 1.0)
    wrong: tuple[float, float] = (-10.0, 0.0)
    too_long: float = -10.0

    @property
    def reward_fns(self) -> tuple[RewardFn]:
        return (self.reward_fn,)

    def __call__(
        self, prompt: str, completion: str, prompt_ids: list[int], completion_ids: list[int], **data: Any
    ) -> dict[str, float]:
        value = self.reward_fn(prompt, completion, prompt_ids, completion_ids, **data)
        assert isinstance(value, int | float), "CosineReward scales a reward that is one number"
        first, last = self.right if value >= 0.5 else self.wrong
        share = len(completion_ids) / self.max_tokens
        scaled = last + 0.5 * (first - last) * (1 + math.cos(share * math.pi))
        return {"reward": scaled if share < 1 else self.too_long, "unscaled": float(value)}
