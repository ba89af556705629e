"""The trace: what is collected, how overlapping parts are laid out, and that it stays small."""

import asyncio
import itertools
import json

import pytest

from arealite.utils.trace import tracing
from arealite.utils.trace.trace_file import TraceWriter, older_path, read_trace
from arealite.utils.trace.tracing import Span


@pytest.fixture
def traced():
    tracing.start()
    yield
    tracing.stop()


def test_nothing_is_collected_before_the_start():
    tracing.record("trainer", "steps", "update", 1.0, 1.0)
    tracing.count("server", "a:1", running=1)
    assert tracing.begin_episode() is None and tracing.take() == []


def test_parts_belong_to_the_episode_of_their_task(traced):
    async def part(name):
        with tracing.part_of_episode(name):
            await asyncio.sleep(0)

    async def episode(lane):
        tracing.enter_episode(lane)
        await asyncio.gather(part("generate"), part("reward"))

    async def run():
        await asyncio.gather(
            asyncio.create_task(episode("episodes 01")), asyncio.create_task(episode(None)), part("outside")
        )

    asyncio.run(run())
    assert [(span.lane, span.name) for span in tracing.take()] == [
        ("episodes 01", "generate"),
        ("episodes 01", "reward"),
    ]


def test_few_episodes_are_traced_at_once_and_lanes_are_used_again(traced):
    lanes = [tracing.begin_episode() for _ in range(100)]
    assert lanes[: tracing.MAX_EPISODES] == [f"episodes {i:02d}" for i in range(tracing.MAX_EPISODES)]
    assert set(lanes[tracing.MAX_EPISODES :]) == {None}
    tracing.end_episode("episodes 07", "episode 7", 1.0, 1.0)
    assert tracing._free_lanes == [7]
    # As if a second had passed.
    tracing._allowance = (1.0, tracing._allowance[1])
    assert tracing.begin_episode() == "episodes 07"


def test_parts_that_overlap_get_rows_of_their_own(tmp_path):
    writer = TraceWriter(tmp_path / "trace.json")
    times = {"a": (0.0, 2.0), "b": (1.0, 3.0), "c": (2.0, 4.0), "d": (3.0, 5.0)}
    for name, (began, end) in times.items():
        writer.write([Span("rollout", "episodes 00", name, 100 + began, end - began, {}, is_part=True)])
    writer.write([Span("rollout", "episodes 00", "episode 0", 99.0, 9.0, {"tokens": 4})])
    writer.close()
    lanes = {lane.name: [span[2] for span in lane.spans] for lane in read_trace(tmp_path / "trace.json")}
    assert lanes == {"episodes 00": ["episode 0", "a", "c"], "episodes 00 +1": ["b", "d"]}


def test_spans_that_follow_each_other_do_not_overlap(tmp_path):
    """Perfetto drops a span that begins before another one of its lane has ended."""
    writer, now = TraceWriter(tmp_path / "trace.json"), 1_795_061_161.0
    for number in range(50):
        end = now + 2.0 + 3e-7 * number
        writer.write([Span("server", "a:1 batches", f"{number}", now, end - now, {})])
        now = end
    writer.close()
    spans = [e for e in json.loads((tmp_path / "trace.json").read_text()) if e["ph"] == "X"]
    assert all(one["ts"] + one["dur"] <= two["ts"] for one, two in itertools.pairwise(spans))


@pytest.mark.parametrize("cut", [1, 2, 20])
def test_a_trace_that_was_cut_off_in_a_line_is_ended_before_it(tmp_path, cut):
    path = tmp_path / "trace.json"
    writer = TraceWriter(path)
    writer.write([Span("trainer", "steps", name, 1.0, 0.5, {}) for name in ("whole", "cut")])
    path.write_bytes(path.read_bytes()[:-cut])
    TraceWriter(path)
    names = [event["name"] for event in json.loads(older_path(path).read_text()) if event["ph"] == "X"]
    assert names == ["whole"]


def test_a_trace_is_rotated_and_both_files_are_read(tmp_path):
    path = tmp_path / "trace.json"
    writer = TraceWriter(path, max_bytes=20_000)
    for step in range(1000):
        writer.write([Span("trainer", "steps", f"step {step}", float(step), 0.5, {})])
        writer.write([Span("server", "a:1", "a:1", float(step), None, {"running": step})])
    sizes = [file.stat().st_size for file in (path, older_path(path))]
    assert max(sizes) < 21_000 and json.loads(older_path(path).read_text())
    # The file is not ended yet, and its last line may be half written.
    with path.open("a") as file:
        file.write('{"name": "step 10')
    steps, servers = read_trace(path)
    assert steps.spans[-1][2] == "step 999" and servers.spans[-1] == [999.0, None, "a:1", {"running": 999}]
    assert 100 < len(steps.spans) < 1000 and read_trace(tmp_path / "none.json") == []
