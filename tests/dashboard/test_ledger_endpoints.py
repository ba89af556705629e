import contextlib
import csv
import io
import sqlite3

import pytest

from arealite.core.ledger import reading
from arealite.core.ledger.store import EpisodeRow, Ledger, RolloutRow
from tests.dashboard.client import Dashboard
from tests.dashboard.make_run import HOSTILE, SERVERS, STARTED, make_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    make_run(folder / "exp" / "a", steps=60, rollouts=2_000)
    return folder


@pytest.fixture(scope="module")
def page(folder):
    with Dashboard(folder) as dashboard:
        dashboard.url = f"/api/runs/{dashboard.run_id('exp/a')}"
        yield dashboard


def rollouts(page, query=""):
    return page.json(f"{page.url}/rollouts?{query}")


def test_rollouts_are_listed_newest_first(page):
    answer = rollouts(page)
    assert answer["total"] == 1_926 and len(answer["rows"]) == 100
    row = answer["rows"][0]
    names = {"source", "episode", "sample", "step", "reward", "tokens", "oldest_version", "newest_version", "prompt"}
    assert names | {"completion", "images", "turns", "state"} <= set(row)
    assert len(row["prompt"]) <= 200 and len(row["completion"]) <= 200
    steps = [row["step"] for row in answer["rows"]]
    assert steps == sorted(steps, reverse=True)


@pytest.mark.parametrize("sort", ["reward", "tokens", "turns", "oldest_version", "episode"])
@pytest.mark.parametrize("desc", ["0", "1"])
def test_every_order_has_every_rollout_once(page, sort, desc):
    pages = [
        rollouts(page, f"sort={sort}&desc={desc}&limit=1000&offset={offset}")["rows"] for offset in (0, 1000, 2000)
    ]
    rows = [row for part in pages for row in part]
    values = [row[sort] for row in rows]
    assert values == sorted(values, reverse=desc == "1")
    assert len({(row["source"], row["episode"], row["sample"]) for row in rows}) == len(rows) == 1_926


def test_filters(page):
    rows = rollouts(page, "limit=1000")["rows"] + rollouts(page, "limit=1000&offset=1000")["rows"]

    def check(query, wanted):
        answer = rollouts(page, f"{query}&limit=1000")
        assert answer["total"] == sum(map(wanted, rows)) > 0, query
        assert all(map(wanted, answer["rows"]))

    check("min_reward=0.5", lambda row: row["reward"] >= 0.5)
    check("max_reward=0.4&min_tokens=100", lambda row: row["reward"] <= 0.4 and row["tokens"] >= 100)
    check("max_tokens=150&step_from=10&step_to=12", lambda row: row["tokens"] <= 150 and 10 <= row["step"] <= 12)
    check("source=direct", lambda row: row["source"] == "direct")
    check("state=evaluated", lambda row: row["state"] == "evaluated")
    check("state=trained&source=stream", lambda row: row["source"] == "stream")
    assert rollouts(page, "state=none")["total"] == rollouts(page, "source=none")["total"] == 0


def test_text_search(page):
    total = rollouts(page)["total"]
    found = rollouts(page, "text=calculator&limit=1000")
    assert 0 < found["total"] < total
    detail = page.json(f"{page.url}/rollouts/stream/{found['rows'][0]['episode']}/{found['rows'][0]['sample']}")
    assert "calculator" in detail["completion"]
    # The last word may be incomplete, case does not matter, and prompts are searched too.
    assert rollouts(page, "text=CALCULAT")["total"] == found["total"]
    assert rollouts(page, "text=you+solve+problems")["total"] == total - 6
    for text in ("%22", "%5C", "%25", "_", "'", "NEAR(", "a+AND+b", "*", "%22+OR+%22", "%00", "日本", "--", "%F0%9F"):
        assert 0 <= rollouts(page, f"text={text}")["total"] <= total, text
    assert rollouts(page, "text=%7B%7Bconstructor")["total"] > 0
    assert rollouts(page, "text=" + "q" * 3000)["total"] == 0


def test_bad_filters_are_refused(page):
    for query in ("sort=id;DROP", "sort=preview", "min_reward=x", "min_reward=nan", "max_reward=inf", "min_tokens=1.5"):
        answer = page.get(f"{page.url}/rollouts?{query}")
        assert answer.status == 400 and answer.json["error"], query
    assert len(rollouts(page, "limit=100000000")["rows"]) == 1000
    assert rollouts(page, "offset=99999999")["rows"] == [] and rollouts(page, "limit=-5")["rows"] == []


def test_one_rollout(page):
    rows = rollouts(page, "source=stream")["rows"]
    row = next(row for row in rows if row["episode"] % 20 != 19 and row["turns"] == 1)
    detail = page.json(f"{page.url}/rollouts/stream/{row['episode']}/{row['sample']}")
    assert detail["prompt"].startswith(row["prompt"][:150]) and set(detail["parts"]) == {"correct", "format"}
    tokens = detail["tokens"]
    names = ("text", "trained", "version", "logp")
    assert {len(tokens[name]) for name in names} == {detail["num_tokens"]} and detail["num_tokens"] == row["tokens"]
    assert [message["role"] for message in detail["messages"]] == ["system", "user", "assistant"]
    assert detail["same_prompt"] >= 8 and detail["images"] == []
    # Some rows have nothing of the trainer, some no tokens at all.
    found = rollouts(page, "limit=1000&source=stream&step_to=30")["rows"]
    bare = next(row for row in found if row["episode"] % 20 == 19)
    assert page.json(f"{page.url}/rollouts/stream/{bare['episode']}/0")["tokens"] is None
    partial = page.json(f"{page.url}/rollouts/stream/{row['episode']}/2")["tokens"]
    assert partial is None or partial["advantage"] is None


def test_rollouts_that_do_not_exist(page):
    for key in ("stream/999999/0", "none/0/0", "stream/0/99", "stream/-1/0"):
        assert page.get(f"{page.url}/rollouts/{key}").status == 404
    assert page.get(f"{page.url}/rollouts/stream/x/0").status == 400
    assert page.get(f"{page.url}/rollouts/stream/{'9' * 30}/0").status == 400
    assert page.json(f"{page.url}/groups/stream/999999") == {"rows": []}
    assert page.json(f"{page.url}/same-prompt?source=stream&episode=999999&sample=0") == {"rows": []}


def test_groups_and_the_same_prompt(page):
    group = page.json(f"{page.url}/groups/stream/5")["rows"]
    assert [row["sample"] for row in group] == list(range(8)) and len({row["prompt"] for row in group}) == 1
    rows = page.json(f"{page.url}/same-prompt?source=stream&episode=5&sample=0")["rows"]
    assert len(rows) == group[0]["same_prompt"] and [row["step"] for row in rows] == sorted(row["step"] for row in rows)


def test_hostile_text_is_json_and_nothing_else(page):
    found = 0
    for row in rollouts(page, "source=stream&limit=1000")["rows"]:
        if row["episode"] % 10 == 3 and row["sample"] == 0:
            answer = page.get(f"{page.url}/rollouts/stream/{row['episode']}/0")
            assert answer.headers["Content-Type"].startswith("application/json")
            assert answer.headers["X-Content-Type-Options"] == "nosniff"
            found += any(text in answer.json["completion"] for text in HOSTILE)
    assert found > 5


def test_flow_and_ages(page):
    flow = page.json(f"{page.url}/flow")
    lengths = {len(flow[name]) for name in ("steps", "admitted", "buffered", "trained", "stale", "rejected", "failed")}
    assert lengths == {len(flow["steps"])} and sum(flow["trained"]) == flow["now"]["trained"] == 240
    assert sum(flow["admitted"]) == sum(flow["now"].values())
    assert len(page.json(f"{page.url}/flow?buckets=7")["steps"]) <= 7
    ages = page.json(f"{page.url}/ages")
    assert ages["steps"] == list(range(60)) and ages["ages"] == [0, 1, 2, 3, 4]
    assert [sum(counts) for counts in ages["counts"]] == [32] * 60


def test_servers(page):
    servers = page.json(f"{page.url}/servers")["servers"]
    assert [server["address"] for server in servers] == list(SERVERS)
    for server in servers:
        columns = server["columns"]
        names = {"time", "running", "waiting", "kv_used", "prefix_hits", "tokens_per_s", "version"}
        assert names <= set(columns) and len({len(column) for column in columns.values()}) == 1
        assert columns["prefix_hits"][1] == pytest.approx(0.7)
    part = page.json(f"{page.url}/servers?start={STARTED + 100}&end={STARTED + 200}")["servers"]
    times = part[0]["columns"]["time"]
    assert times[0] >= STARTED + 100 and times[-1] <= STARTED + 200


def test_events(page):
    rows = page.json(f"{page.url}/events")["rows"]
    assert {row["level"] for row in rows} == {"info", "warning", "alarm"} and rows[0]["kind"] == "start"
    assert [row["time"] for row in rows] == sorted(row["time"] for row in rows)
    alarm = next(row for row in rows if row["level"] == "alarm")
    assert alarm["step"] == 57 and HOSTILE[1] in alarm["text"]
    assert page.json(f"{page.url}/events?since={rows[-1]['time']}")["rows"] == []
    assert page.json("/api/runs")["runs"][0]["alarms"] == 1


def test_csv_of_rollouts(page):
    answer = page.get(f"{page.url}/rollouts.csv?min_reward=0.5")
    rows = list(csv.DictReader(io.StringIO(answer.body.decode())))
    assert len(rows) == rollouts(page, "min_reward=0.5")["total"]
    assert {"reward", "prompt", "completion"} <= set(rows[0])
    assert not any(value.startswith(("=", "+", "@")) for row in rows for value in row.values())
    # As docs/dashboard.md says.
    assert max(len(row["completion"]) for row in rows) == reading.MAX_PREVIEW == 200


def test_a_run_that_goes_on(tmp_path):
    run_dir = make_run(tmp_path / "exp" / "live", steps=4, rollouts=64)
    ledger = Ledger(run_dir.db_path)
    try:
        with Dashboard(tmp_path) as page:
            page.url = f"/api/runs/{page.run_id('exp/live')}"
            before, same = rollouts(page)["total"], rollouts(page, "text=newest")["total"]
            for number in range(3):
                row = RolloutRow(10_000 + number, 0, 4, 1.0, 3, 4, 9, "a prompt", f"the newest answer {number}")
                ledger.record(EpisodeRow(row.episode, "trained", step=4))
                ledger.commit(lambda row=row: [row])
                ledger.flush()
                assert rollouts(page)["total"] == before + number + 1
                assert rollouts(page, "text=newest")["total"] == same + number + 1
                assert rollouts(page)["rows"][0]["episode"] == row.episode
            # A run that recovers removes rows.
            evaluated = rollouts(page, "source=direct")["total"]
            ledger.clear(["stream"])
            assert rollouts(page)["total"] == evaluated and rollouts(page, "text=newest")["total"] == 0
    finally:
        ledger.close()


def test_ledgers_that_cannot_be_read(tmp_path):
    names = ("missing", "empty", "foreign", "damaged", "truncated", "older", "bare")
    runs = {name: make_run(tmp_path / "e" / name, steps=4, rollouts=64) for name in names}
    paths = {name: run.db_path for name, run in runs.items()}
    paths["missing"].unlink()
    paths["empty"].write_bytes(b"")
    paths["foreign"].write_text("this is no database\n" * 1000)
    data = paths["damaged"].read_bytes()
    paths["damaged"].write_bytes(data[:4096] + b"\xff" * 8192 + data[12288:])
    paths["truncated"].write_bytes(data[: len(data) // 2])
    with contextlib.closing(sqlite3.connect(paths["older"])) as db:
        db.execute("PRAGMA user_version = 1")
    with contextlib.closing(sqlite3.connect(paths["bare"])) as db, db:
        db.execute("DROP TABLE rollouts")
        db.execute("DROP TABLE events")
    with Dashboard(tmp_path) as page:
        assert len(page.json("/api/runs")["runs"]) == len(names)
        for name in names:
            url = f"/api/runs/{page.run_id(f'e/{name}')}"
            assert page.json(f"{url}/stats")["columns"]["step"]
            for what in ("rollouts", "flow", "ages", "servers", "events", "groups/stream/0", "rollouts.csv"):
                answer = page.get(f"{url}/{what}")
                assert answer.status in (200, 503), (name, what, answer.body)
                if name in ("missing", "empty", "bare"):
                    assert answer.status == 200, (name, what, answer.body)
                elif name in ("foreign", "older"):
                    assert answer.status == 503 and "run.sqlite of e/" in answer.json["error"]
        url = f"/api/runs/{page.run_id('e/older')}"
        assert "its schema is 1" in page.get(f"{url}/rollouts").json["error"]


def test_reading_leaves_no_files_behind(tmp_path):
    run_dir = make_run(tmp_path / "exp" / "a", steps=4, rollouts=64)
    before = sorted(path.name for path in run_dir.path.iterdir())
    with Dashboard(tmp_path) as page:
        page.url = f"/api/runs/{page.run_id('exp/a')}"
        rollouts(page)
    assert sorted(path.name for path in run_dir.path.iterdir()) == before


def test_paths_with_special_characters(tmp_path):
    make_run(tmp_path / "a?b#c%20d" / "t é", steps=2, rollouts=16)
    with Dashboard(tmp_path) as page:
        page.url = f"/api/runs/{page.run_id('a?b#c%20d/t é')}"
        assert rollouts(page)["total"] > 0
