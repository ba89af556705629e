"""Alarms: reads the statistics of each step and says what goes wrong, why, and what to set.

Pure: no torch, no files. `Guard` calls `Alarms.check` once a step and `check_validation` once an evaluation, and shows
the lines. A rule is either an entry of `LIMITS` (a statistic far out of its usual range) or a small function of the
history. An alarm is raised once, and again only after several steps without its condition.

The usual range of a statistic is the median and the MAD of the steps before, so that few outliers do not widen it (the
standard deviation where most values are equal). A floor keeps statistics near 0 from alarming over nothing.
"""

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise, takewhile
from statistics import fmean, median, pstdev
from typing import NamedTuple, TypeGuard

# Steps kept.
_HISTORY = 1000
# Steps that define the usual range, and how many of them are needed.
_USUAL, _MIN_USUAL = 50, 5
# Rewards are compared as means over this many steps.
_WINDOW = 5
# Steps without its condition after which an alarm may be raised again.
_REARM = 5
# Standard deviations from the median at which the usual range ends.
_NUM_STD = 6
# The standard deviation of normal noise is so many times its median absolute deviation.
_MAD_TO_STD = 1.4826

# Needed to know the noise of a mean reward, besides the number of samples.
_COUNTING_KEYS = ("reward", "reward/min", "reward/max")

# The statistics of one step; those that are not finite may be None.
StepStats = Mapping[str, float | None]


class Alarm(NamedTuple):
    """One line for the user. A collapse is what `on_collapse` acts on."""

    name: str
    text: str
    is_collapse: bool = False


class Limits(NamedTuple):
    """Bounds of one statistic.

    Too high is what is above `factor` times the usual value, above six standard deviations from it, and above `floor`.
    Values above `limit` are too high from the first step on. `low_factor` times the usual value is too low. The
    condition must hold for `patience` steps in a row.
    """

    key: str
    title: str
    factor: float
    floor: float
    cause: str
    advice: str
    limit: float = math.inf
    low_factor: float = 0.0
    patience: int = 2


_SMALLER_STEPS = "lower actor.optimizer.lr or actor.ppo_n_minibatches, or lengthen the warm-up"
UPDATE_KL = Limits(
    "prox_kl", "KL between the policies before and after minibatches of one update", factor=20, floor=0.01, limit=0.1,
    patience=1, cause="the optimizer steps are too large", advice=_SMALLER_STEPS,
)  # fmt: skip
LIMITS = (
    Limits(
        "behav_kl/k3", "KL between the policies that sampled and that are trained", factor=10, floor=0.03, limit=0.05,
        cause="the policy changes too fast between versions, or servers hold other weights than they should",
        advice="lower actor.optimizer.lr or rollout.max_head_offpolicyness",
    ),
    Limits(
        "behav_kl/fresh", "KL between server and trainer under the same weights", factor=10, floor=0.01, limit=0.03,
        cause="server and trainer compute different log-probs (dtype, temperature, attention, wrong weights)",
        advice="use the same dtype and temperature on both sides, or set "
        "actor.behav_imp_weight_mode=token_clamp actor.behav_imp_weight_cap=2",
    ),
    Limits(
        "ratio/max", "largest probability ratio of a token within one update", factor=20, floor=100, limit=200,
        cause="the optimizer steps are too large", advice=_SMALLER_STEPS,
    ),
    Limits(
        "grad_norm", "gradient norm before clipping", factor=10, floor=0.5, patience=3,
        cause="training has become unstable, or rewards or data changed their scale",
        advice="lower optimizer.lr of the trained model, and check rewards and data",
    ),
    Limits(
        "truncated_share", "share of answers cut off at gconfig.max_new_tokens", factor=2, floor=0.3, patience=3,
        cause="the policy no longer ends its answers, or they have become longer than the limit",
        advice="lower actor.optimizer.lr if the reward falls too, else raise gconfig.max_new_tokens",
    ),
    Limits(
        "answer_len", "mean length of answers", factor=2.5, floor=16, low_factor=0.3, patience=3,
        cause="the policy found a degenerate way to answer",
        advice="look at the answers (arealite report RUN_DIR), and lower actor.optimizer.lr if the reward falls too",
    ),
)  # fmt: skip


def _is_finite(value: float | None) -> TypeGuard[float]:
    return value is not None and math.isfinite(value)


class History:
    """The statistics of the last steps, and the best reward (a mean over a few steps) of the whole run."""

    def __init__(self, best_reward: float = -math.inf, has_score: bool = False):
        self.best_reward = best_reward
        # A reward model scores the validation sets, and so the training.
        self.has_score = has_score
        self._steps: deque[StepStats] = deque(maxlen=_HISTORY)

    def add(self, stats: StepStats) -> None:
        self._steps.append({key: stats.get(key) for key in _KEYS})
        rewards = self.values("reward")[-_WINDOW:]
        if len(rewards) == _WINDOW:
            self.best_reward = max(self.best_reward, fmean(rewards))

    def last(self, key: str) -> float | None:
        """Return a statistic of the last step; None if it has none (a step without any gradient has few)."""
        return self._steps[-1].get(key)

    def counting_noise(self) -> float:
        """Return the standard deviation of a step's mean reward that its number of samples implies.

        0 if the number is unknown. Rewards between `low` and `high` have at most the variance
        (high - mean)·(mean - low), and have it if each is one of both. A few steps may differ less than this by chance.
        """
        steps = [stats for stats in self._steps if all(_is_finite(stats.get(key)) for key in _COUNTING_KEYS)]
        counts = [stats.get("num_seqs") or stats.get("groups") or 0.0 for stats in steps]
        if not steps or min(counts) <= 0:
            return 0.0
        means, lows, highs = ([stats[key] or 0.0 for stats in steps] for key in _COUNTING_KEYS)
        low, high = min(*lows, *means), max(*highs, *means)
        return math.sqrt(fmean((high - mean) * (mean - low) / n for mean, n in zip(means, counts, strict=True)))

    def values(self, key: str) -> list[float]:
        """Return the finite values of a statistic, the oldest first."""
        found = (stats.get(key) for stats in self._steps)
        return [value for value in found if _is_finite(value)]


class Alarms:
    """Keeps the history of one run and the alarms that are active."""

    def __init__(self) -> None:
        self._history = History()
        # Steps without the condition, for each alarm that is active.
        self.active: dict[str, int] = {}
        self._to_skip = 0
        # For each validation set its first accuracy, and the best one after the lower end of its interval.
        self._first_accuracy: dict[str, float] = {}
        self._best_accuracy: dict[str, tuple[float, float]] = {}
        self._fallen: set[str] = set()

    def check(self, stats: StepStats) -> list[Alarm]:
        """Add a step to the history; return the alarms that it raises."""
        if self._to_skip:
            self._to_skip -= 1
            return []
        self._history.add(stats)
        found = [alarm for rule in RULES if (alarm := rule(self._history)) is not None]
        names = {alarm.name for alarm in found}
        self.active = {name: 0 if name in names else steps + 1 for name, steps in self.active.items()}
        self.active = {name: steps for name, steps in self.active.items() if steps < _REARM}
        raised = [alarm for alarm in found if alarm.name not in self.active]
        self.active |= {alarm.name: 0 for alarm in raised}
        return raised

    def check_validation(self, stats: StepStats) -> list[Alarm]:
        """Return an alarm for each validation set that has lost half of its gain, by more than noise."""
        raised = []
        self._history.has_score |= any(key.startswith("eval/") and key.endswith("/reward/low") for key in stats)
        for key in [key for key in stats if key.startswith("eval/") and key.endswith(("/pass@1", "/reward"))]:
            now, low, high = (stats.get(f"{key}{end}") for end in ("", "/low", "/high"))
            if not (_is_finite(now) and _is_finite(low) and _is_finite(high)):
                continue
            first = self._first_accuracy.setdefault(key, now)
            best_low, best = self._best_accuracy[key] = max(self._best_accuracy.get(key, (low, now)), (low, now))
            if high >= best_low or best - now <= (best - first) / 2:
                self._fallen.discard(key)
            elif key not in self._fallen:
                self._fallen.add(key)
                raised.append(_validation_alarm(key, best, now))
        return raised

    def restart(self, num_skipped: int) -> None:
        """Forget the history and ignore the next steps: the policy has been replaced by an earlier one.

        The best reward stays: the earlier policy must reach it again.
        """
        self._history = History(self._history.best_reward, self._history.has_score)
        self.active.clear()
        self._to_skip = num_skipped

    @property
    def is_healthy(self) -> bool:
        """Whether no alarm is active and the reward is, up to noise, the best so far."""
        drop = _RewardDrop.of(self._history)
        return not self.active and drop is not None and drop.best - drop.now <= drop.noise


def _usual(values: Sequence[float]) -> tuple[float, float] | None:
    """Return median and standard deviation of the usual range; None if there are too few values."""
    if len(values) < _MIN_USUAL:
        return None
    middle = median(values := values[-_USUAL:])
    return middle, _MAD_TO_STD * median(abs(value - middle) for value in values) or pstdev(values)


def out_of_range(history: History, limits: Limits) -> Alarm | None:
    """Compare the last steps with the limits of one statistic."""
    values = history.values(limits.key)
    before, recent = values[: -limits.patience], values[-limits.patience :]
    if len(recent) < limits.patience or history.last(limits.key) is None:
        return None
    usual, high, low = _usual(before), limits.limit, -math.inf
    if usual is not None:
        middle, std = usual
        high = min(high, max(limits.floor, limits.factor * middle, middle + _NUM_STD * std))
        low = min(limits.low_factor * middle, middle - _NUM_STD * std) if limits.low_factor else low
    if not (min(recent) > high or max(recent) < low):
        return None
    compared = f"limit {high:.3g}" if min(recent) > high == limits.limit or usual is None else f"usually {usual[0]:.3g}"
    happened = f"{limits.title} ({limits.key}) is {recent[-1]:.3g}, {compared}"
    return Alarm(limits.key, _line(happened, limits.cause, limits.advice))


def _line(happened: str, cause: str, advice: str) -> str:
    return f"{happened}. Likely cause: {cause}. What to do: {advice}"


class _RewardDrop(NamedTuple):
    """Means of the reward over a few steps: the best less its noise, the last, and what noise explains."""

    best: float
    now: float
    noise: float

    @classmethod
    def of(cls, history: History) -> "_RewardDrop | None":
        rewards = history.values("reward")
        if len(rewards) < _WINDOW + 2:
            return None
        std = max(_std_of_differences(rewards), history.counting_noise()) / math.sqrt(_WINDOW)
        # The best is the largest of many means: noise alone lifts it by 2 to 3 standard deviations within 200 steps.
        return cls(history.best_reward - 2 * std, fmean(rewards[-_WINDOW:]), _NUM_STD * std)


def _std_of_differences(values: Sequence[float]) -> float:
    """Return the standard deviation of the noise of a series, from differences of neighbours.

    Slow changes are not in them. The last steps, which may be a collapse, are left out. Of a few values, the largest
    difference may be one: the others stand for it, by their mean size, which is 2·std/√π.
    """
    if len(values) > 3 * _WINDOW:
        return math.sqrt(fmean((b - a) ** 2 for a, b in pairwise(values[:-_WINDOW])) / 2)
    sizes = sorted(abs(b - a) for a, b in pairwise(values))
    return sum(sizes[:-1]) / (len(sizes) - 2) * math.sqrt(math.pi) / 2


def _has_vanished(history: History) -> bool:
    """Whether all answers of the last steps have the lowest reward, which is no chance (p < 10⁻⁶)."""
    lowest = min(history.values("reward/min"), default=-math.inf)
    bests = history.values("reward/max")
    num_last = sum(1 for _ in takewhile(lambda best: best <= lowest, reversed(bests)))
    before = bests[: len(bests) - num_last]
    return num_last >= _WINDOW and 16 * (sum(best <= lowest for best in before) + 1) < len(before) + 2


def _validation_alarm(key: str, best: float, now: float) -> Alarm:
    name, _, metric = key.rpartition("/")
    what, form = ("reward", ".3g") if metric == "reward" else ("accuracy", ".1%")
    happened = (
        f"the {what} of validation set {name.removeprefix('eval/')} fell from {best:{form}} to {now:{form}}, beyond "
        "the 95% intervals of both"
    )
    cause = "the policy has specialised on the training data and loses what this set measures"
    advice = f"stop earlier (saver.best_metric={key} keeps the best model), lower the rate, or train on such rows too"
    return Alarm(name, _line(happened, cause, advice))


def reward_fell(history: History) -> Alarm | None:
    """The reward is far below its own best: by more than noise, and by a third of it."""
    drop, has_vanished = _RewardDrop.of(history), _has_vanished(history)
    if drop is None or drop.best - drop.now <= max(0.0 if has_vanished else drop.noise, abs(drop.best) / 3):
        return None
    happened = f"the reward fell from {history.best_reward:.3g} (best mean of {_WINDOW} steps) to {drop.now:.3g}"
    advice = f"go back to an earlier checkpoint (on_collapse=rollback does), {_SMALLER_STEPS}"
    return Alarm("reward", _line(happened, "the policy is being destroyed by too large steps", advice), True)


def entropy_exploded(history: History) -> Alarm | None:
    """The entropy is several times what it was: the policy becomes random."""
    values = history.values("entropy")
    usual, recent = _usual(values[:-3]), values[-3:]
    if usual is None or min(recent) <= max(2.5 * usual[0], usual[0] + 0.5, usual[0] + _NUM_STD * usual[1]):
        return None
    happened = f"the entropy rose to {recent[-1]:.3g} nats, usually {usual[0]:.3g}"
    return Alarm("entropy/high", _line(happened, "the policy becomes random: too large steps", _SMALLER_STEPS), True)


def entropy_collapsed(history: History) -> Alarm | None:
    """The entropy is a small share of that at the start, and the reward has not gained by it.

    The score of a reward model gains when a policy answers always what the model overrates.
    """
    values, rewards, drop = history.values("entropy"), history.values("reward"), _RewardDrop.of(history)
    if len(values) < 4 * _MIN_USUAL or drop is None:
        return None
    start, now = median(values[:_MIN_USUAL]), max(values[-3:])
    # Between the first and the last quarter of the steps, two standard deviations are a gain.
    quarter, two_std = max(1, len(rewards) // 4), 2 * drop.noise / _NUM_STD
    has_gained = fmean(rewards[-quarter:]) - fmean(rewards[:quarter]) > two_std * math.sqrt(2 * _WINDOW / quarter)
    has_gained = has_gained and drop.best - drop.now <= drop.noise
    if now >= 0.1 * start or (has_gained and not history.has_score):
        return None
    happened = f"the entropy fell to {now:.3g} nats from {start:.3g}, and the reward did not rise"
    if has_gained:
        happened = f"the entropy fell to {now:.3g} nats from {start:.3g} while a reward model's score rose"
        cause = "the policy answers always the same, perhaps what the reward model overrates"
        advice = "read the answers (arealite report RUN_DIR), and add actor.kl_loss_coef (0.1) or lower the rate"
        return Alarm("entropy/low", _line(happened, cause, advice))
    advice = "raise actor.eps_clip_higher (0.28) or actor.entropy_coef, add actor.kl_loss_coef, or lower the rate"
    return Alarm("entropy/low", _line(happened, "the policy answers always the same", advice))


def update_too_large(history: History) -> Alarm | None:
    """One update moves the policy too far; with `max_update_kl` its remaining minibatches are skipped."""
    skipped, kl = history.last("skipped_minibatches"), history.last(UPDATE_KL.key)
    if not skipped:
        return out_of_range(history, UPDATE_KL)
    happened = f"the update moved the policy by more than actor.max_update_kl; minibatches left out: {skipped:.0f}"
    happened += "" if kl is None else f" ({UPDATE_KL.key}, a mean over minibatches, is {kl:.3g})"
    return Alarm(UPDATE_KL.key, _line(happened, UPDATE_KL.cause, UPDATE_KL.advice))


RULES: tuple[Callable[[History], Alarm | None], ...] = (
    reward_fell, entropy_exploded, entropy_collapsed, update_too_large,
    *(partial(out_of_range, limits=limits) for limits in LIMITS),
)  # fmt: skip
_KEYS = (
    *_COUNTING_KEYS, "num_seqs", "groups", "entropy", "skipped_minibatches", UPDATE_KL.key,
    *(limits.key for limits in LIMITS),
)  # fmt: skip
