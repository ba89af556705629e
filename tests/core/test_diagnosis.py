"""Messages about episodes that fail or are rejected in a row."""

import pytest

from arealite.api.errors import TrainingError
from arealite.core.diagnosis import FailureStreak, RejectionStreak
from arealite.core.episode import EpisodeId
from arealite.core.staleness_manager import Counts


def test_the_first_failure_is_shown_and_later_ones_print_fewer_and_fewer_lines(capfd):
    """A reward that raises for some rows must not be silent: the run goes on without them."""
    streak = FailureStreak(limit=10)
    for _ in range(100):
        for _ in range(3):
            assert streak.add(EpisodeId("stream", 0), ValueError("broken")) is None
        streak.end()
    lines = capfd.readouterr().out.splitlines()
    assert lines[0] == "warning: an episode failed, and its row is left out: ValueError: broken (more in the log)"
    assert [int(line.split()[1]) for line in lines[1:]] == [4, 16, 64, 256]
    assert lines[1].startswith("warning: 4 episodes failed so far: ValueError")
    streak, error = FailureStreak(limit=10), ValueError("broken")
    for _ in range(4):
        streak.add(EpisodeId("stream", 0), error)
    assert "4 episodes failed so far, the last 4 in a row: ValueError: broken" in capfd.readouterr().out


def test_rejections_are_shown_and_end_the_run_after_a_bounded_number(capfd):
    """Large data is not tried to its end: that might take days."""
    streak, counts = RejectionStreak(Counts(), least=64, epoch_rows=10**9, first_warning=8), Counts()
    with pytest.raises(TrainingError, match="1025 episodes in a row were rejected by the workflow, and 3 have failed"):
        for _ in range(10**6):
            counts.rejected, counts.failed = counts.rejected + 1, 3
            streak.check(counts)
    lines = capfd.readouterr().out.splitlines()
    assert len(lines) == 7 and all("none was accepted" in line and "stops after 1024" in line for line in lines)
    # An accepted episode is enough.
    RejectionStreak(Counts(), 64, 10, 8).check(Counts(rejected=1000, accepted=1))
    # Episodes that were accepted before and become stale meanwhile are neither a reason to go on nor one to stop.
    with pytest.raises(TrainingError, match="1000 episodes in a row"):
        RejectionStreak(Counts(accepted=9), 64, 10, 8).check(Counts(rejected=1000, accepted=6, stale=3))
    RejectionStreak(Counts(accepted=9), 64, 10, 8).check(Counts(rejected=1000, accepted=9, stale=3))
    with pytest.raises(TrainingError, match="101 episodes in a row were rejected by the workflow, including every row"):
        RejectionStreak(Counts(), 64, 100, 8).check(Counts(rejected=101))
