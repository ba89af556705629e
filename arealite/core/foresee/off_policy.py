"""What importance weights and clip shares would have been with samples of other ages.

The ledger keeps the log-probs of server and trainer for a part of the trained tokens. Their difference d, by the age of
the token, gives the weight exp(d). For ages that the run had, the measured statistics are used. For others, the
variance of d is a line over age, fitted to those that it had, and the distribution has the shape of the oldest one.
With fewer than two ages that is not possible, and the answer says so. It assumes that the policy would have moved as it
did.
"""

import contextlib
import math
import sqlite3
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from arealite.core.foresee.recording import RecordingError
from arealite.core.ledger.reading import open_ledger
from arealite.core.ledger.token_record import TokenRecord

# Rollouts that are read, the newest first, and tokens that an age must have.
_MAX_ROLLOUTS, _MIN_TOKENS = 4_000, 100


class AgeStats(NamedTuple):
    """Means over the tokens of one age: d², the weight, its square, and the share that is clipped."""

    tokens: int
    square: float
    weight: float
    weight_square: float
    clipped: float


class Drift(NamedTuple):
    """Statistics of each age, and the bounds of d beyond which a token counts as clipped.

    `shape` has the differences of the oldest age, divided by the root of their mean square.
    """

    ages: Mapping[int, AgeStats]
    bounds: tuple[float, float]
    shape: np.ndarray


def read_drift(path: Path, eps_clip: float = 0.2, eps_clip_higher: float | None = None) -> Drift:
    """Read the differences of log-probs from the ledger of a run."""
    bounds = math.log(max(1e-6, 1 - eps_clip)), math.log1p(eps_clip if eps_clip_higher is None else eps_clip_higher)
    query = (
        "SELECT r.step, d.record FROM rollouts r JOIN rollout_data d ON d.id = r.id WHERE r.source != 'direct' "
        "AND d.record IS NOT NULL ORDER BY r.id DESC LIMIT ?"
    )
    gaps: dict[int, list[np.ndarray]] = {}
    try:
        with contextlib.closing(open_ledger(path)) as db:
            for step, blob in db.execute(query, (_MAX_ROLLOUTS,)):
                with contextlib.suppress(ValueError, zlib.error):
                    _add_gaps(gaps, step, TokenRecord.from_bytes(blob))
    except sqlite3.Error as error:
        raise RecordingError(f"cannot read the rollouts of {path}: {error}") from error
    joined = {age: np.concatenate(parts) for age, parts in sorted(gaps.items())}
    kept = {age: gap.astype(np.float64) for age, gap in joined.items() if len(gap) >= _MIN_TOKENS}
    oldest = kept[max(kept)] if kept else np.zeros(1)
    shape = oldest / max(float(np.sqrt(np.square(oldest).mean())), 1e-9)
    return Drift({age: _stats(gap, bounds) for age, gap in kept.items()}, bounds, shape)


def _add_gaps(gaps: dict[int, list[np.ndarray]], step: int, record: TokenRecord) -> None:
    if record.train_logp is None:
        return
    gap = record.train_logp - record.logprobs
    is_used = (record.loss_mask != 0) & (record.versions >= 0) & np.isfinite(gap)
    ages = np.maximum(step - record.versions, 0)
    for age in np.unique(ages[is_used]).tolist():
        gaps.setdefault(age, []).append(gap[is_used & (ages == age)])


def _stats(gap: np.ndarray, bounds: tuple[float, float]) -> AgeStats:
    weights = np.exp(np.clip(gap, -20, 20))
    clipped = (gap < bounds[0]) | (gap > bounds[1])
    return AgeStats(
        len(gap), float(np.square(gap).mean()), float(weights.mean()), float(np.square(weights).mean()),
        float(clipped.mean()),
    )  # fmt: skip


def predict(drift: Drift, ages: Mapping[int, int]) -> dict[str, Any]:
    """Return weights and clip shares for samples of these ages; `problem` says why there are none."""
    if not drift.ages:
        return {"problem": "the run kept no log-probs of the trainer (rollout.dump_rollouts, a proximal policy)"}
    missing = sorted(age for age in ages if age not in drift.ages)
    line = _variance_line(drift)
    if missing and line is None:
        return {
            "problem": f"the recording has samples of age {next(iter(drift.ages))} only, so that it says nothing about "
            f"age {', '.join(map(str, missing))}: record a run with a larger max_head_offpolicyness"
        }
    stats = {age: drift.ages[age] if age in drift.ages else _modelled(drift, line, age) for age in ages}
    total = sum(ages.values())
    mean = {name: sum(ages[age] * getattr(stats[age], name) for age in ages) / total for name in AgeStats._fields[1:]}
    return {
        "log_ratio_rms": math.sqrt(mean["square"]),
        "weight_mean": mean["weight"],
        "ess": mean["weight"] ** 2 / mean["weight_square"],
        "clip_share": mean["clipped"],
        "extrapolated_ages": missing,
    }


def _variance_line(drift: Drift) -> tuple[float, float] | None:
    """Return intercept and slope of the variance of d over age; None with fewer than two ages."""
    if len(drift.ages) < 2:
        return None
    ages = np.array(list(drift.ages), float)
    squares = np.array([stats.square for stats in drift.ages.values()])
    weights = np.sqrt([stats.tokens for stats in drift.ages.values()])
    slope, intercept = np.polyfit(ages, squares, 1, w=weights)
    return max(0.0, float(intercept)), max(0.0, float(slope))


def _modelled(drift: Drift, line: tuple[float, float] | None, age: int) -> AgeStats:
    """Return the statistics of differences with the shape of the oldest age and the variance of the line."""
    assert line is not None
    deviation = math.sqrt(line[0] + line[1] * age)
    return _stats(drift.shape * deviation, drift.bounds)
