"""Compares trained and dropped episodes, and warns when the training data is biased.

Staleness, timeouts and filters may drop long or hard prompts more often than others; the model then learns from a
biased sample without any error. `EpisodeAccounts` adds every episode that ends. Sums decay with a half-life, so they
describe the last steps.
"""

from dataclasses import dataclass, field

FINAL_STATES = ("trained", "stale", "rejected", "failed")
HALF_LIFE_EPISODES = 512
MIN_EPISODES = 64
_GROWTH = 2 ** (1 / HALF_LIFE_EPISODES)
MAX_LOST_SHARE = 0.05
MAX_LENGTH_RATIO = 1.25


@dataclass
class Sums:
    """Decayed sums over episodes of one final state; `known` counts those with a result."""

    count: float = 0.0
    known: float = 0.0
    tokens: float = 0.0
    reward: float = 0.0

    def mean(self, total: float) -> float:
        return total / self.known if self.known else 0.0


@dataclass
class Audit:
    """Decayed sums per final state; `lost` means stale or failed."""

    sums: dict[str, Sums] = field(default_factory=lambda: {state: Sums() for state in FINAL_STATES})
    has_alarmed: bool = False
    _weight: float = 1.0

    def add(self, state: str, tokens: float | None = None, reward: float | None = None) -> None:
        """Add one episode that ended; `tokens` per sample and mean reward if it has a result."""
        # Give later episodes more weight instead of decaying earlier ones: one addition per episode.
        self._weight *= _GROWTH
        sums, weight = self.sums[state], self._weight
        sums.count += weight
        if tokens is not None and reward is not None:
            sums.known += weight
            sums.tokens += weight * tokens
            sums.reward += weight * reward
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
        """Return a warning when losses begin to bias the training data; once, until they are normal again."""
        values = self.stats()
        total = sum(s.count for s in self.sums.values()) / self._weight
        stale, trained = values["audit/length_stale"], values["audit/length_trained"]
        has_losses = total >= MIN_EPISODES and values["audit/lost_share"] > MAX_LOST_SHARE
        are_longer = stale > MAX_LENGTH_RATIO * trained > 0
        if not has_losses:
            self.has_alarmed = False
            return None
        if self.has_alarmed:
            return None
        self.has_alarmed = True
        share = f"{values['audit/lost_share']:.0%} of the last episodes were dropped as stale or failed"
        if are_longer:
            return (
                f"{share}; stale episodes have {stale:.0f} tokens on average, trained ones {trained:.0f}: long answers "
                "are starved. Raise rollout.max_head_offpolicyness, or lower gconfig.max_new_tokens"
            )
        return f"{share}: see their reasons in run.sqlite, table episodes"
