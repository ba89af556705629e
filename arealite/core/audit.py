"""Does the run train on what it samples? Length and reward of trained against dropped episodes, with an alarm.

Staleness, time-outs and filters may drop long or hard prompts more often than others, and the model then learns from a biased sample without any
error. The executor reports every episode's end here; sums fade with a half-life, so the picture is that of the last steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field

FATES = ("trained", "stale", "rejected", "failed")
HALF_LIFE_EPISODES = 512
MIN_EPISODES = 64
_GROWTH = 2 ** (1 / HALF_LIFE_EPISODES)
MAX_LOST_SHARE = 0.05
MAX_LENGTH_RATIO = 1.25


@dataclass
class Sums:
    """Faded sums over episodes of one fate; `known` are those with a result."""

    count: float = 0.0
    known: float = 0.0
    tokens: float = 0.0
    reward: float = 0.0

    def mean(self, total: float) -> float:
        return total / self.known if self.known else 0.0


@dataclass
class Audit:
    """Faded sums per fate. `lost` means stale or failed: what should have been trained on and was not."""

    sums: dict[str, Sums] = field(default_factory=lambda: {fate: Sums() for fate in FATES})
    alarmed: bool = False
    _weight: float = 1.0

    def add(self, fate: str, tokens: float | None = None, reward: float | None = None) -> None:
        """One episode ended; `tokens` per sample and mean reward where it has a result."""
        # later episodes weigh more instead of earlier ones less: one addition per episode
        self._weight *= _GROWTH
        mine, weight = self.sums[fate], self._weight
        mine.count += weight
        if tokens is not None and reward is not None:
            mine.known += weight
            mine.tokens += weight * tokens
            mine.reward += weight * reward
        if weight > 1e12:
            self._rescale()

    def _rescale(self) -> None:
        for sums in self.sums.values():
            for name, value in vars(sums).items():
                setattr(sums, name, value / self._weight)
        self._weight = 1.0

    def stats(self) -> dict[str, float]:
        trained, stale = self.sums["trained"], self.sums["stale"]
        total = sum(s.count for s in self.sums.values())
        lost = stale.count + self.sums["failed"].count
        return {
            "audit/length_trained": trained.mean(trained.tokens),
            "audit/length_stale": stale.mean(stale.tokens),
            "audit/reward_trained": trained.mean(trained.reward),
            "audit/reward_stale": stale.mean(stale.reward),
            "audit/lost_share": lost / total if total else 0.0,
            "audit/rejected_share": self.sums["rejected"].count / total if total else 0.0,
        }

    def alarm(self) -> str | None:
        """A message when losses begin to bias the training data; once, until they are normal again."""
        values = self.stats()
        total = sum(s.count for s in self.sums.values()) / self._weight
        stale, trained = values["audit/length_stale"], values["audit/length_trained"]
        many = total >= MIN_EPISODES and values["audit/lost_share"] > MAX_LOST_SHARE
        longer = stale > MAX_LENGTH_RATIO * trained > 0
        if not many:
            self.alarmed = False
            return None
        if self.alarmed:
            return None
        self.alarmed = True
        share = f"{values['audit/lost_share']:.0%} of the last episodes were dropped as stale or failed"
        if longer:
            return (
                f"{share}; the stale ones have {stale:.0f} tokens on average, the trained ones {trained:.0f}: long answers are "
                "starved. Raise rollout.max_head_offpolicyness, or lower gconfig.max_new_tokens"
            )
        return f"{share}: see their reasons in run.sqlite, table episodes"
