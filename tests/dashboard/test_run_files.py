import json
import os
from pathlib import Path

import pytest

from arealite.core.ledger import reading
from arealite.dashboard.runs import MAX_RUNS, Runs
from arealite.utils.rundir import RunDir
from tests.dashboard.client import Dashboard
from tests.dashboard.make_run import make_run


@pytest.fixture
def runs(tmp_path):
    make_run(tmp_path / "runs" / "exp" / "a", steps=40, rollouts=80)
    make_run(tmp_path / "runs" / "exp" / "b", steps=20, rollouts=40, seed=1)
    return tmp_path / "runs"


def test_list_of_runs(runs):
    with Dashboard(runs) as page:
        found = {run["name"]: run for run in page.json("/api/runs")["runs"]}
        assert set(found) == {"exp/a", "exp/b"}
        run = found["exp/a"]
        assert (run["experiment"], run["trial"], run["steps"], run["live"]) == ("exp", "a", 40, False)
        assert run["total_steps"] == 40
        assert run["path"] == str(runs / "exp" / "a")
        assert 0 < run["reward"] < 1 and run["updated"] > 1e9


def test_supervised_runs_have_no_rollouts(runs):
    configs = {
        "sft": "model: {path: m}",
        "rl": "model: {path: m}\nrollout: {max_concurrent_rollouts: 1}",
        "bad": "a: [",
    }
    for name, text in configs.items():
        make_run(runs / "exp" / name, steps=1, rollouts=8).config_path.write_text(text)
    with Dashboard(runs) as page:
        found = {run["trial"]: run["has_rollouts"] for run in page.json("/api/runs")["runs"]}
    assert found == {"a": True, "b": True, "sft": False, "rl": True, "bad": True}


def test_a_run_directory_itself_and_a_folder_far_above(runs):
    with Dashboard(runs / "exp" / "a") as page:
        assert [run["name"] for run in page.json("/api/runs")["runs"]] == ["exp/a"]
    with Dashboard(runs.parent) as page:
        assert {run["name"] for run in page.json("/api/runs")["runs"]} == {"runs/exp/a", "runs/exp/b"}
    # The same run below two folders is one run.
    with Dashboard(runs, runs / "exp" / "a") as page:
        assert len(page.json("/api/runs")["runs"]) == 2


def test_a_run_in_use_is_live(runs):
    run_dir = make_run(runs / "exp" / "live", steps=2, rollouts=8)
    with run_dir.lock(), Dashboard(runs) as page:
        assert {run["trial"] for run in page.json("/api/runs")["runs"] if run["live"]} == {"live"}


def test_of_very_many_runs_the_newest_are_listed(tmp_path):
    for i in range(MAX_RUNS + 2):
        path = tmp_path / f"{i:05}" / "stats.jsonl"
        path.parent.mkdir()
        path.touch()
        os.utime(path, (i, i))
    found = Runs([tmp_path]).all()
    assert [run.name for run in found] == [f"{i:05}" for i in range(MAX_RUNS + 1, 1, -1)]


def test_stats_in_portions(runs):
    path = runs / "exp" / "a" / "stats.jsonl"
    with Dashboard(runs) as page:
        url = f"/api/runs/{page.run_id('exp/a')}/stats"
        first = page.json(url)
        columns = first["columns"]
        # 40 steps and 2 evaluations.
        assert len(columns["step"]) == 42 and {len(column) for column in columns.values()} == {42}
        assert columns["grad_norm"][3] is None and "reset" not in first
        assert page.json(f"{url}?since={first['next']}")["columns"]["step"] == []
        with path.open("a") as file:
            file.write('{"step": 40, "time": 1.0, "reward": 0.5, "new": 7}\n{"step": 41, "rew')
        more = page.json(f"{url}?since={first['next']}")
        assert more["columns"]["step"] == [40] and more["columns"]["new"] == [7] and more["columns"]["loss"] == [None]
        with path.open("a") as file:
            file.write('ard": 0.25}\n')
        assert page.json(f"{url}?since={more['next']}")["columns"]["reward"] == [0.25]


def test_stats_that_a_recovery_rewrote(runs):
    path = runs / "exp" / "a" / "stats.jsonl"
    with Dashboard(runs) as page:
        url = f"/api/runs/{page.run_id('exp/a')}/stats"
        first = page.json(url)
        lines = path.read_text().splitlines(keepends=True)
        aside = path.with_name("aside")
        # Longer than before: only its identity shows that it was replaced.
        aside.write_text("".join(lines[:5]) + '{"step": 5, "reward": 1.0}\n' * 100)
        aside.replace(path)
        again = page.json(f"{url}?since={first['next']}")
        assert again["reset"] and len(again["columns"]["step"]) == 105
        path.write_text(lines[0])
        assert page.json(f"{url}?since={again['next']}")["columns"]["step"] == [0]
        path.unlink()
        assert page.json(url)["columns"] == {}


def test_damaged_stats(runs):
    path = runs / "exp" / "a" / "stats.jsonl"
    lines = [
        b"\xff\xfe not UTF-8", b"[1, 2]", b"null", b'{"reward": 1}', b'{"step": "x"}', b'{"step": 1e400}',
        b'{"step": 0, "reward": "<script>", "list": [1], "deep": {"a": 1}, "huge": 1e308}',
        b'{"step": 0, "big": 1234567890123456789012}',
        b"[" * 100_000, b'{"step": 1, "nan": NaN}', b'{"step": 99999999999999999999}', b'{"step": 2, "reward": 0.5}',
    ]  # fmt: skip
    path.write_bytes(b"\n".join(lines) + b"\n")
    with Dashboard(runs) as page:
        columns = page.json(f"/api/runs/{page.run_id('exp/a')}/stats")["columns"]
    assert columns["step"] == [0, 0, 2] and columns["reward"] == [None, None, 0.5]


def test_evaluations(runs):
    with Dashboard(runs) as page:
        rows = page.json(f"/api/runs/{page.run_id('exp/a')}/evaluations")["rows"]
    assert {(row["step"], row["set"], row["metric"]) for row in rows} >= {
        (19, "gsm8k", "pass@1"),
        (39, "math", "maj@8"),
    }
    row = next(row for row in rows if row["metric"] == "pass@1")
    assert row["low"] < row["value"] < row["high"] and row["version"] == row["step"] + 1


def test_results_of_a_later_evaluation_replace_all_of_an_earlier_one(runs):
    """As in `arealite report`: with fewer samples, pass@8 of the first evaluation is none of the second."""
    before = {"eval/gsm8k/pass@1": 0.25, "eval/gsm8k/pass@8": 0.5, "eval/math/pass@1": 0.1}
    after = {"eval/gsm8k/pass@1": 0.75, "eval/gsm8k/pass@1/low": 0.7, "eval/gsm8k/sampling/top_p": 1.0}
    with RunDir(runs / "exp" / "a").stats_path.open("a") as file:
        file.writelines(json.dumps({"step": 40, "time": 1.7e9, **values}) + "\n" for values in (before, after))
    with Dashboard(runs) as page:
        rows = page.json(f"/api/runs/{page.run_id('exp/a')}/evaluations")["rows"]
    found = {(row["set"], row["metric"]): (row["value"], row["low"]) for row in rows if row["step"] == 40}
    assert found == {("math", "pass@1"): (0.1, None), ("gsm8k", "pass@1"): (0.75, 0.7)}
    assert {row["metric"] for row in rows} == {"pass@1", "maj@8", "length"}


def test_configuration_and_comparison(runs):
    with Dashboard(runs) as page:
        a, b = page.run_id("exp/a"), page.run_id("exp/b")
        assert "optimizer" in page.json(f"/api/runs/{a}/config")["yaml"]
        rows = {row["key"]: (row["a"], row["b"]) for row in page.json(f"/api/compare?a={a}&b={b}")["rows"]}
        assert rows["actor.optimizer.lr"] == ("1e-06", "2e-06") and "experiment_name" not in rows
        assert page.json(f"/api/compare?a={a}&b={a}") == {"rows": []}
        (runs / "exp" / "b" / "config.yaml").write_text("a: [1\n")
        assert "config.yaml of exp/b" in page.get(f"/api/compare?a={a}&b={b}").json["error"]
        assert page.get(f"/api/compare?a={a}").status == 404


def test_logs(runs):
    logs = runs / "exp" / "a" / "logs"
    (logs / "long.log").write_text("".join(f"line {i}\n" for i in range(10_000)))
    with Dashboard(runs) as page:
        url = f"/api/runs/{page.run_id('exp/a')}/logs"
        names = [file["name"] for file in page.json(url)["files"]]
        assert names == ["long.log", "rank0.log", "server0.log"]
        part = page.json(f"{url}/long.log?size=1000")
        size = (logs / "long.log").stat().st_size
        assert part["end"] == part["size"] == size and part["text"].endswith("line 9999\n")
        assert part["text"].startswith("line ") and part["end"] - part["start"] == len(part["text"])
        before = page.json(f"{url}/long.log?size=1000&end={part['start']}")
        assert (
            before["end"] == part["start"]
            and (before["text"] + part["text"]).count("\n") == (size - before["start"]) // 10
        )
        assert "\x1b" not in page.json(f"{url}/server0.log")["text"]


def test_a_log_is_followed_without_repeating_text(runs):
    path = runs / "exp" / "a" / "logs" / "live.log"
    content = "\x1b[31mred\x1b[0m one\rtwo é 公 🙂\n\x07\xff end\n".encode() + b"\xfe\n"
    path.write_bytes(b"")
    with Dashboard(runs) as page:
        url = f"/api/runs/{page.run_id('exp/a')}/logs/live.log"
        end, text = page.json(url)["end"], ""
        for byte in content:
            with path.open("ab") as file:
                file.write(bytes([byte]))
            part = page.json(f"{url}?since={end}")
            assert part["start"] == end
            end, text = part["end"], text + part["text"]
        assert end == len(content) and text == page.json(url)["text"]
        assert text.startswith("red one\rtwo é 公 🙂\n\\x07")
        # Its part is limited, and a file that has become shorter is shown from its end.
        assert page.json(f"{url}?since=0&size=64")["end"] <= 64
        path.write_text("new\n")
        assert page.json(f"{url}?since={end}") == {"text": "new\n", "start": 0, "end": 4, "size": 4}


def test_logs_are_only_those_of_the_run(runs):
    run = runs / "exp" / "a"
    os.symlink(run / "private" / "api_key", run / "logs" / "link.log")
    os.mkfifo(run / "logs" / "pipe.log")
    (run / "logs" / ".hidden").write_text("hidden")
    with Dashboard(runs) as page:
        url = f"/api/runs/{page.run_id('exp/a')}/logs"
        bad = (
            "link.log",
            "pipe.log",
            ".hidden",
            "..",
            "../private/api_key",
            "..%2Fprivate%2Fapi_key",
            "%00",
            "none.log",
        )
        for name in (*bad, "%2Fetc%2Fpasswd", "rank0.log%00", "a" * 5000):
            answer = page.get(f"{url}/{name}")
            assert answer.status == 404 and b"the key" not in answer.body and "error" in answer.json, name
        assert "link.log" not in str(page.json(url)["files"])
        (run / "logs").rename(run / "moved")
        os.symlink(run / "private", run / "logs")
        assert page.get(f"{url}/api_key").status == 404 and page.get(url).status == 404


def test_csv_of_statistics(runs):
    with Dashboard(runs) as page:
        answer = page.get(f"/api/runs/{page.run_id('exp/a')}/stats.csv")
    lines = answer.body.decode().splitlines()
    assert (
        answer.headers["Content-Type"].startswith("text/csv") and "attachment" in answer.headers["Content-Disposition"]
    )
    assert lines[0].startswith("step,time,reward") and len(lines) == 43
    assert lines[1].startswith("1,") and lines[-1].startswith("40,"), "steps count from 1, as on the page"


def test_a_run_that_is_removed_while_shown(runs):
    with Dashboard(runs) as page:
        run_id = page.run_id("exp/a")
        (runs / "exp" / "a").rename(runs.parent / "elsewhere")
        for what in ("stats", "config", "logs", "evaluations"):
            answer = page.get(f"/api/runs/{run_id}/{what}")
            assert answer.status == 404 and "removed" in answer.json["error"]


def test_folders_with_anything_in_them_do_not_hide_other_runs(runs):
    for name in ("folder", "pipe", "link"):
        run = runs / "odd" / name
        make = {
            "folder": Path.mkdir,
            "pipe": os.mkfifo,
            "link": lambda path: path.symlink_to(runs / "exp/a" / path.name),
        }
        run.mkdir(parents=True)
        for file in ("stats.jsonl", "run.sqlite", "trace.json", "config.yaml", "lock"):
            make[name](run / file)
    broken = runs / os.fsdecode(b"not \xff UTF-8")
    make_run(runs / "plain", steps=2, rollouts=16).path.rename(broken)
    with Dashboard(runs) as page:
        found = {run["name"]: run for run in page.json("/api/runs")["runs"]}
        assert set(found) == {"exp/a", "exp/b", "odd/folder", "odd/pipe", "odd/link", "not \\udcff UTF-8"}
        assert all(found[f"odd/{name}"]["steps"] == 0 for name in ("folder", "pipe", "link"))
        for name, run in found.items():
            for what in ("stats", "trace", "rollouts", "events"):
                page.json(f"/api/runs/{run['id']}/{what}")
            assert page.get(f"/api/runs/{run['id']}/config").status == (404 if name.startswith("odd") else 200)
        run = found["not \\udcff UTF-8"]
        assert page.json(f"/api/runs/{run['id']}/rollouts")["total"] > 0
    # A run below such a folder itself.
    with Dashboard(broken) as page:
        (run,) = page.json("/api/runs")["runs"]
        assert run["steps"] == 2


def test_a_run_that_has_just_begun(tmp_path):
    (tmp_path / "e" / "t" / "logs").mkdir(parents=True)
    (tmp_path / "e" / "t" / "config.yaml").write_text("seed: 1\n")
    with Dashboard(tmp_path) as page:
        (run,) = page.json("/api/runs")["runs"]
        assert run["steps"] == 0 and run["reward"] is None
        assert page.json(f"/api/runs/{run['id']}/stats")["columns"] == {}
        json.dumps(run)


def test_images_of_prompts_are_png_files_of_one_folder(runs):
    run = runs / "exp" / "a"
    folder = run / "rollouts" / "images"
    folder.mkdir(parents=True, exist_ok=True)
    png, name = b"\x89PNG\r\n\x1a\n rest", "0123456789abcdef"
    (folder / f"{name}.png").write_bytes(png)
    (folder / "aaaaaaaa.png").write_bytes(b"<svg onload=alert(1)>")
    (folder / "bbbbbbbb.png").symlink_to(folder / f"{name}.png")
    with (folder / "cccccccc.png").open("wb") as file:
        file.write(png)
        file.truncate((1 << 24) + 1)
    (run / "private" / "dddddddd.png").write_bytes(png)
    with Dashboard(runs) as page:
        assert len(page.json("/api/runs")["runs"]) == 2, "folders of a run are no runs"
        url = f"/api/runs/{page.run_id('exp/a')}/images"
        answer = page.get(f"{url}/{name}")
        assert answer.status == 200 and answer.body == png
        assert answer.headers["Content-Type"] == "image/png" and answer.headers["X-Content-Type-Options"] == "nosniff"
        bad = (f"{name}.png", "aaaaaaaa", "bbbbbbbb", "cccccccc", "00000000", "..%2F..%2Fprivate%2Fdddddddd", "", "%00")
        for each in (*bad, "..%2f..%2fconfig", "ABCDEF0123", "a" * 65):
            assert page.get(f"{url}/{each}").status == 404, each
        folder.rename(run / "elsewhere")
        folder.symlink_to(run / "elsewhere")
        assert page.get(f"{url}/{name}").status == 404, "links are not followed"


def test_details_have_the_addresses_of_their_images(runs, monkeypatch):
    folder = runs / "exp" / "a" / "rollouts" / "images"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "0123456789abcdef.png").write_bytes(b"\x89PNG\r\n\x1a\n rest")
    read_rollout, names = reading.read_rollout, ["0123456789abcdef", "00000000", "../../a"]
    monkeypatch.setattr(reading, "read_rollout", lambda *key: read_rollout(*key) | {"image_names": names})
    with Dashboard(runs) as page:
        run_id = page.run_id("exp/a")
        detail = page.json(f"/api/runs/{run_id}/rollouts/stream/0/0")
        assert detail["images"] == [f"api/runs/{run_id}/images/0123456789abcdef"] and detail["num_images"] == 0
