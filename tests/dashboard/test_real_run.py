"""A real run with a dashboard beside it, and what the dashboard shows of it afterwards."""

import json
import re
import subprocess
import urllib.error
import urllib.request

import pytest

from arealite.cli.report import main as report
from tests import warm_python
from tests.dashboard.client import Dashboard


@pytest.mark.slow
def test_the_dashboard_of_a_real_run(model_path, gsm8k_path, tmp_path, capsys):
    command = [
        *("-m", "arealite.cli.main", f"cluster.fileroot={tmp_path}", "dashboard=0"),
        *("trainer.type=grpo", f"trainer.grpo.actor.path={model_path}", "trainer.grpo.actor.dtype=float32"),
        *(f"train_dataset.path={gsm8k_path}", "train_dataset.batch_size=4", "total_train_steps=3"),
        *("trainer.grpo.gconfig.n_samples=2", "trainer.grpo.gconfig.max_new_tokens=8"),
        *("trainer.grpo.server.max_total_tokens=8192", "allocation_mode=embedded.d1+d1"),
    ]
    process = warm_python.start(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if line.startswith("dashboard: "):
                break
        address = lines[-1].split()[1]
        page, _, token = address.partition("?token=")
        request = urllib.request.Request(f"{page}api/runs", headers={"Authorization": f"Bearer {token}"})
        with urllib.request.urlopen(request, timeout=30) as response:
            (run,) = json.load(response)["runs"]
        assert run["live"] and run["trial"] == "grpo"
        output, _ = process.communicate(timeout=200)
        assert process.returncode == 0, f"{lines} {output}"
    finally:
        process.kill()
        process.wait(30)
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(address, timeout=30)
    check_endpoints(tmp_path)
    report([str(tmp_path / "arealite" / "grpo"), "--rollouts", "0"])
    check_foresight(tmp_path, capsys.readouterr().out)


def check_foresight(folder, text):
    """The command and the page say what this run waited for, with a chain and advice."""
    assert re.search(r"the trainer waited \d+% of [\d.]+ s: \d+% \w+", text), text
    assert re.search(r"  step [23] waited [\d.]+ s: .* of episode \d+ [\d.]+ s", text), text
    assert "predicted time of a step: " in text or "no single change would save 1% of a step" in text, text
    with Dashboard(folder) as page:
        (run,) = page.json("/api/runs")["runs"]
        found = page.json(f"/api/runs/{run['id']}/foresight")
    assert found["sentence"] in text and [chain["step"] for chain in found["chains"]]
    waited_s = sum(link["seconds"] for chain in found["chains"] for link in chain["links"])
    assert waited_s == pytest.approx(sum(chain["waited_s"] for chain in found["chains"]), abs=0.01)
    assert [answer["eta"] for answer in found["eta"]] == [0, 1, 2, 4, 8]


def check_endpoints(folder):
    with Dashboard(folder) as page:
        (run,) = page.json("/api/runs")["runs"]
        assert (run["steps"], run["total_steps"], run["live"]) == (3, 3, False)
        url = f"/api/runs/{run['id']}"
        assert page.json(f"{url}/stats")["columns"]["step"] == [0, 1, 2]
        found = page.json(f"{url}/rollouts")
        assert found["total"] == 3 * 4 * 2
        row = found["rows"][0]
        detail = page.json(f"{url}/rollouts/{row['source']}/{row['episode']}/{row['sample']}")
        tokens = detail["tokens"]
        assert len(tokens["text"]) == len(tokens["advantage"]) == detail["num_tokens"] and detail["messages"]
        assert page.json(f"{url}/flow")["now"]["trained"] == 12
        assert sum(map(sum, page.json(f"{url}/ages")["counts"])) == 24
        trace = page.json(f"{url}/trace")
        assert {"trainer", "weights", "rollout"} <= {lane["group"] for lane in trace["lanes"]}
        assert trace["end"] - trace["start"] < 600
        assert {file["name"] for file in page.json(f"{url}/logs")["files"]} >= {
            "rank0.log",
            "server0.log",
            "dashboard.log",
        }
        assert page.json(f"{url}/servers")["servers"] and page.json(f"{url}/events")["rows"] is not None
