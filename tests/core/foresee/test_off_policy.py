"""Importance weights and clip shares at other ages: known drifts, and recordings that say nothing."""

import math

import numpy as np
import pytest

from arealite.core.foresee.off_policy import AgeStats, Drift, predict, read_drift
from arealite.core.ledger.rollouts import RolloutRow
from arealite.core.ledger.store import Ledger
from arealite.core.ledger.token_record import TokenRecord

BOUNDS = math.log(0.8), math.log(1.2)
# Three of four differences are 0.
SHAPE = np.array([0.0, 0.0, 0.0, 2.0])


def drift(**squares):
    stats = {int(age[1:]): AgeStats(1000, square, 1.0, math.exp(square), 0.0) for age, square in squares.items()}
    return Drift(stats, BOUNDS, SHAPE)


def test_ages_of_the_run_use_what_was_measured():
    found = predict(drift(a0=0.0, a1=0.04), {0: 1, 1: 1})
    assert found["log_ratio_rms"] == pytest.approx(math.sqrt(0.02)) and found["extrapolated_ages"] == []
    assert found["ess"] == pytest.approx(2 / (1 + math.exp(0.04)))


def test_other_ages_follow_the_line_of_the_variance():
    found = predict(drift(a0=0.01, a1=0.03), {3: 10})
    assert found["log_ratio_rms"] == pytest.approx(math.sqrt(0.07)) and found["extrapolated_ages"] == [3]
    weight = math.exp(2 * math.sqrt(0.07))
    assert found["ess"] == pytest.approx(((3 + weight) / 4) ** 2 / ((3 + weight**2) / 4))
    assert found["clip_share"] == 0.25, "the shape of the oldest age is kept"


def test_a_recording_that_says_nothing_says_so():
    assert "age 0 only" in predict(drift(a0=0.01), {0: 1, 2: 1})["problem"]
    assert "clip_share" in predict(drift(a0=0.01), {0: 1})
    assert "kept no log-probs" in predict(Drift({}, BOUNDS, SHAPE), {0: 1})["problem"]


def test_the_drift_is_read_from_the_ledger(tmp_path):
    ledger, count = Ledger(tmp_path / "run.sqlite"), 200
    rows = []
    for episode, (version, gap) in enumerate(((5, 0.0), (4, 0.25))):
        columns = np.zeros(count, np.int64), np.ones(count), np.full(count, version), np.full(count, -1.0)
        record = TokenRecord(*columns, np.full(count, -1.0 + gap, np.float32))
        rows.append(RolloutRow(episode, 0, 5, 1.0, version, version, count, "p", "c", record=record.to_bytes()))
    ledger.commit(lambda: rows)
    ledger.close()
    found = read_drift(tmp_path / "run.sqlite")
    assert list(found.ages) == [0, 1]
    assert found.ages[0].clipped == 0 and found.ages[1].clipped == 1
    assert found.ages[1].weight == pytest.approx(math.exp(0.25), rel=1e-3)
