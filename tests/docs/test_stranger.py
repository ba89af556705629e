"""A stranger's path: README's commands alone lead to own data, a trained model, its evaluation and the page.

Runs them as they stand on README, with their own settings; only `make` is replaced: it would install packages. The soak
test starts every process as a user does and trains as long. The shorter one forks them from a process that has imported
torch, stops the demo at a third of its steps and trains one epoch on own data.
"""

from __future__ import annotations

import json
import re
import subprocess
import urllib.request

import pytest
from transformers import AutoModelForCausalLM

from tests.docs.workspace import ROOT, Workspace, blocks_of

README = ROOT / "README.md"


def commands(text: str) -> list[str]:
    """Return the commands of a block of bash."""
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    return [command for line in lines if (command := line.partition("  #")[0].strip())]


def visit_dashboard(workspace: Workspace, command: str) -> str:
    """Start the dashboard, return its first page, and end it."""
    shell = ["bash", "-c", f"exec {command} --port 0"]
    process = subprocess.Popen(
        shell,
        cwd=workspace.folder,
        env=workspace.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert process.stdout is not None
        output = ""
        for line in process.stdout:
            output += line
            found = re.search(r"http://[^\s/]+/\S*", line)
            if found:
                # The address has a token, which a visit puts into a cookie.
                browser = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
                with browser.open(found[0], timeout=60) as answer:
                    return answer.read().decode()
        raise AssertionError(f"{command} ended without an address:\n{output}")
    finally:
        process.terminate()
        process.communicate(timeout=60)


LENGTH = "total_train_epochs=4"
# Its reward begins at 0.4 and ends above 0.9 after 120 steps.
SHORT_DEMO = f"""
import sys
sys.path.insert(0, {str(ROOT / "examples" / "arealite")!r})
import demo
demo.GOAL = 0.5
sys.exit(demo.main(["total_train_steps=40"]))
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("length", "reward"), [("total_train_epochs=2", 0.5), pytest.param(LENGTH, 0.8, marks=pytest.mark.soak)]
)
def test_readme_leads_to_a_trained_model(tmp_path, length, reward):
    is_whole = length == LENGTH
    workspace = Workspace(tmp_path, is_small=False, is_warm=not is_whole)
    assert LENGTH in README.read_text()
    if not is_whole:
        (tmp_path / "short_demo.py").write_text(SHORT_DEMO)
        (tmp_path / ".venv/bin/make").write_text("#!/usr/bin/env bash\nexec python short_demo.py\n")
    for block in blocks_of(README):
        if block.test != "tests/docs/test_stranger.py":
            continue
        if block.file_name:
            workspace.write(block)
            continue
        for command in commands(block.text):
            if "arealite dashboard" in command:
                assert "<html" in visit_dashboard(workspace, command)
            else:
                workspace.execute(["bash", "-c", command.replace(LENGTH, length)], str(block), timeout_s=600)
    run = tmp_path / "runs" / "arealite" / "grpo"
    steps = [json.loads(line) for line in (run / "stats.jsonl").read_text().splitlines()]
    rewards = [step["reward"] for step in steps if "reward" in step]
    assert sum(rewards[-5:]) / 5 > reward > 2 * sum(rewards[:3]) / 3, rewards
    assert not any(step.get("alarms") for step in steps)
    checkpoints = sorted((run / "checkpoints").glob("step*"))
    evaluated = {step["step"] for step in steps if "eval/valid/reward" in step}
    assert {-1, *(int(path.name[4:]) - 1 for path in checkpoints)} <= evaluated
    AutoModelForCausalLM.from_pretrained(checkpoints[-1])
