"""`arealite init`: the project works as it is written, and nothing is overwritten."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from arealite.api.cli_args import GRPOConfig
from arealite.api.errors import ConfigError
from arealite.cli import init
from arealite.utils.config import load_config
from tests import warm_python

ROOT = Path(__file__).parents[2]


def test_all_files_are_written_and_the_configuration_is_valid(tmp_path, capsys):
    folder = tmp_path / "my tasks" / "my-task"
    assert init.main([str(folder)]) == 0
    assert sorted(path.name for path in folder.iterdir()) == sorted(init.FILES)
    assert f"cd '{folder}' && pytest" in capsys.readouterr().out
    config = load_config(["--config", str(folder / "config.yaml")], GRPOConfig)
    assert config.experiment_name == "my-task"
    assert not any("PROJECT" in path.read_text() for path in folder.iterdir())
    checks = [sys.executable, "-m", "ruff", "check", "--config", str(ROOT / "pyproject.toml"), str(folder)]
    assert subprocess.run(checks, capture_output=True).returncode == 0


def test_the_current_folder_is_the_default(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert init.main([]) == 0
    assert (tmp_path / "train.py").is_file()


def test_nothing_is_overwritten(tmp_path):
    (tmp_path / "config.yaml").write_text("mine")
    with pytest.raises(ConfigError, match=r"config\.yaml exists and is not overwritten"):
        init.main([str(tmp_path)])
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]


@pytest.mark.parametrize(
    ("name", "message"), [("a b", "cannot be the name"), ("file/x", "cannot write to"), ("--nmae", "unrecognized")]
)
def test_wrong_names(name, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=message):
        init.main([name])


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_tests_of_the_project_pass(tmp_path):
    init.write_project(tmp_path / "my-task")
    env = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = warm_python.run(command, cwd=tmp_path / "my-task", env=env, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "7 passed" in done.stdout
