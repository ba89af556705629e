from arealite.core.diagnosis import FailureStreak
from arealite.core.episode import EpisodeId


def test_streaks_of_failures_print_fewer_and_fewer_lines(capfd):
    streak = FailureStreak(limit=10)
    for _ in range(100):
        for _ in range(3):
            assert streak.add(EpisodeId("stream", 0), ValueError("broken")) is None
        streak.end()
    lines = capfd.readouterr().out.splitlines()
    assert lines[0].startswith("warning: 3 episodes in a row failed, 3 so far: ValueError: broken")
    assert [int(line.split(", ")[1].split()[0]) for line in lines] == [3, 6, 12, 24, 48, 96, 192]
