"""Every block of docs/data.md works: configurations load and their data is accepted, commands too, code runs."""

import json
import re
import shlex
from pathlib import Path

import pytest

from arealite.cli.main import MainConfig, flatten
from arealite.trainer.tasks import REWARDS, TASKS, check_data
from arealite.utils.config import load_config

TEXT = (Path(__file__).parents[2] / "docs" / "data.md").read_text()


def blocks(kind):
    return re.findall(rf"```{kind}\n(.*?)```", TEXT, re.DOTALL)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    rows = {
        "mine": {"question": "1+1?", "target": "2"},
        "easy": {"question": "1+0?", "target": "1"},
        "gsm8k": {"question": "1+1?", "answer": "#### 2"},
        "chats": {"messages": turns},
        "pairs": {"prompt": "a", "chosen": "b", "rejected": "c"},
    }
    for name, row in rows.items():
        (tmp_path / "data" / f"{name}.jsonl").write_text((json.dumps(row) + "\n") * 64)
    (tmp_path / "my_rewards.py").write_text(
        "def close(prompt, completion, prompt_ids, completion_ids, **data): return 1"
    )
    return tmp_path


def accept(argv):
    config = load_config(argv, MainConfig)
    check_data(flatten(config), config.trainer.type)


@pytest.mark.parametrize("number", range(len(blocks("yaml"))))
def test_configurations_are_accepted(folder, number):
    text = blocks("yaml")[number]
    if "reasoning_gym" in text:
        pytest.importorskip("reasoning_gym")
    (folder / "config.yaml").write_text(text)
    accept(["--config", "config.yaml", "trainer.type=grpo"])


def test_commands_are_accepted(folder):
    commands = [line for block in blocks("bash") for line in block.replace("\\\n", " ").splitlines()]
    assert len(commands) == 3
    for command in commands:
        python, flag, module, *argv = shlex.split(command)
        assert (python, flag, module) == ("python", "-m", "arealite.cli.main")
        accept(argv)


def test_code_runs(folder, tokenizer):
    (block,) = blocks("python")
    names = {"tokenizer": tokenizer}
    exec(compile(block, "data.md", "exec"), names)
    assert {row["data_source"] for batch in names["dataloader"] for row in batch} == {"words", "sums"}


def test_all_tasks_are_listed():
    listed = re.search(r"\| task \|.*?\n\n", TEXT, re.DOTALL)[0]
    assert {name for name in TASKS if f"`{name}`" in listed} == set(TASKS)
    assert {task.reward for task in TASKS.values()} - {None} <= set(REWARDS)
