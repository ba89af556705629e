import json
import subprocess
import sys

import pytest

from tests.dashboard.client import Dashboard
from tests.dashboard.make_run import STARTED, STEP_S, make_run


@pytest.fixture
def run_dir(tmp_path):
    return make_run(tmp_path / "exp" / "a", steps=50, rollouts=400)


@pytest.fixture
def page(tmp_path, run_dir):
    with Dashboard(tmp_path) as dashboard:
        dashboard.url = f"/api/runs/{dashboard.run_id('exp/a')}/trace"
        yield dashboard


def num_spans(answer):
    return sum(len(lane["spans"]) for lane in answer["lanes"])


def test_the_whole_trace(page):
    answer = page.json(page.url)
    assert (answer["start"], answer["truncated"]) == (STARTED, False)
    assert answer["end"] == pytest.approx(STARTED + 50 * STEP_S - 1)
    groups = [lane["group"] for lane in answer["lanes"]]
    assert list(dict.fromkeys(groups)) == ["trainer", "weights", "rollout", "reward"]
    assert len({lane["id"] for lane in answer["lanes"]}) == len(groups)
    trainer = answer["lanes"][0]["spans"]
    assert trainer[0] == [STARTED, 4.0, "rollout", {}] and len(trainer) == 250
    assert [span[0] for span in trainer] == sorted(span[0] for span in trainer)


def test_a_window(page):
    answer = page.json(f"{page.url}?start={STARTED + 100}&end={STARTED + 110}")
    assert (answer["start"], answer["end"]) == (STARTED + 100, STARTED + 110)
    for lane in answer["lanes"]:
        assert all(span[0] <= answer["end"] and span[0] + span[1] >= answer["start"] for span in lane["spans"])
    assert 0 < num_spans(answer) < 20
    assert num_spans(page.json(f"{page.url}?start={STARTED - 100}&end={STARTED - 50}")) == 0
    # A window that ends before it begins is empty.
    assert num_spans(page.json(f"{page.url}?start={STARTED + 110}&end={STARTED + 100}")) == 0


def test_many_spans_are_merged(page, run_dir):
    with run_dir.trace_path.open("a") as file:
        for i in range(20_000):
            event = {
                "pid": 4,
                "tid": 0,
                "name": f"turn {i % 3}",
                "ph": "X",
                "ts": (STARTED + i / 50) * 1e6,
                "dur": 100 + i % 3,
            }
            file.write(json.dumps(event) + ",\n")
    answer = page.json(f"{page.url}?limit=1000")
    assert answer["truncated"] and 100 < num_spans(answer) <= 1000
    merged = [span for lane in answer["lanes"] for span in lane["spans"] if "merged" in span[3]]
    whole = page.json(f"{page.url}?limit=100000000")
    assert num_spans(whole) <= 20_000
    assert sum(span[3]["merged"] for span in merged) + num_spans(answer) - len(merged) == 20_000 + 50 * 18
    # Details come back in a narrow window.
    part = page.json(f"{page.url}?start={STARTED + 10}&end={STARTED + 12}&limit=1000")
    assert not part["truncated"] and num_spans(part) > 100


def test_a_trace_that_grows_and_is_replaced(page, run_dir):
    path, before = run_dir.trace_path, num_spans(page.json(page.url))
    event = json.dumps({"pid": 1, "tid": 0, "name": "save", "ph": "X", "ts": STARTED * 1e6, "dur": 5})
    with path.open("a") as file:
        file.write(event + ",\n" + event[:20])
    assert num_spans(page.json(page.url)) == before + 1
    with path.open("a") as file:
        file.write(event[20:] + "\n]\n")
    assert num_spans(page.json(page.url)) == before + 2
    # A file that has become too large goes on in a new one.
    path.rename(path.with_name("trace.1.json"))
    path.write_text("[\n" + event + ",\n")
    assert num_spans(page.json(page.url)) == before + 3
    path.unlink()
    assert page.json(page.url)["lanes"] == []


def test_spans_take_little_memory(tmp_path):
    path, count = tmp_path / "trace.json", 20_000
    event = {"pid": 4, "tid": 0, "name": "turn", "ph": "X", "ts": 1e6, "dur": 5, "args": {"version": 3, "tokens": 12}}
    path.write_text((json.dumps(event) + ",\n") * count)
    # In a process of its own, whose memory nobody has used before.
    code = (
        "import os, sys; from pathlib import Path; from arealite.dashboard.trace import TraceFile\n"
        "def size(): return int(open('/proc/self/statm').read().split()[1]) * os.sysconf('SC_PAGE_SIZE')\n"
        "before, trace = size(), TraceFile(Path(sys.argv[1])); trace.window(0.0, 0.0, 1)\n"
        "print(size() - before)"
    )
    command = [sys.executable, "-c", code, str(path)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    assert int(done.stdout) < 1_500 * count


def test_a_damaged_trace(page, run_dir):
    lines = [
        b"[",
        b"null,",
        b"\xff\xfe,",
        b"{}",
        b'{"ph": "X"}',
        b'{"ph": "X", "ts": "a", "dur": null, "name": 1, "pid": []},',
        b'{"ph": "M", "name": "thread_name", "pid": 1, "tid": 1, "args": []},',
        b"{" * 10_000,
        b'{"ph": 5, "args": 7},',
        b'{"ph": "X", "ts": 1e6, "dur": -5, "name": "<script>", "pid": 1, "tid": 1, "args": {"a": "<b>"}},',
    ]
    run_dir.trace_path.write_bytes(b"\n".join(lines) + b"\n")
    (lane,) = page.json(page.url)["lanes"]
    assert lane["spans"] == [[1.0, 0.0, "<script>", {"a": "<b>"}]]
