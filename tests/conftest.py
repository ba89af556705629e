"""Fixtures for all tests: a tiny tokenizer, a tiny model folder, a tiny dataset. Tests run on one thread and offline.

This file does not import torch: pytest loads it also in the process that only distributes tests to workers.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest

from tests import fork_servers, warm_python


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--failed-to", metavar="FILE", help="write ids of failed tests to FILE; `pytest @FILE` runs them")


def pytest_configure(config: pytest.Config) -> None:
    # With workers, one process forks for all of them. Without, it starts at the first test that needs it.
    if config.getoption("numprocesses", None) and not config.getoption("collectonly"):
        warm_python.prepare()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(specs: list[Any]) -> None:
    """Let workers be forks of the process that has imported torch. Each of them would import it again."""
    for spec in specs:
        spec.python = shlex.join([sys.executable, warm_python.__file__, "--worker"])


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Hide the objects of imported modules from garbage collection: each full one would visit half a million."""
    gc.disable()
    result = yield
    gc.freeze()
    gc.enable()
    return result


def pytest_runtest_setup() -> None:
    fork_servers.start()


def pytest_unconfigure() -> None:
    fork_servers.close()
    warm_python.close()


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    path = config.getoption("--failed-to")
    if path:
        reports = [*terminalreporter.stats.get("failed", ()), *terminalreporter.stats.get("error", ())]
        ids = {report.nodeid for report in reports}
        Path(path).write_text("".join(f"{name}\n" for name in sorted(ids)))


@pytest.fixture(scope="session")
def tokenizer():
    return importlib.import_module("tests.tiny_model").make_tokenizer()


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    importlib.import_module("tests.tiny_model").make_model(folder)
    return folder


@pytest.fixture(scope="session")
def gsm8k_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Invented rows in the format of GSM8K."""
    path = tmp_path_factory.mktemp("gsm8k") / "train.jsonl"
    rows = [
        {"question": f"Tom has {i} pens and gets {i + 1}. How many?", "answer": f"{i}+{i + 1}\n#### {2 * i + 1}"}
        for i in range(32)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def start_launcher() -> Iterator[Callable[..., Any]]:
    """Start a script with a launcher. The process ends with the test."""
    started: list[Any] = []

    def launch(script: Path, launcher: str, argv: list[str], **env: str) -> Any:
        command = ["-m", f"arealite.launcher.{launcher}", str(script), *argv]
        options: dict[str, Any] = {"env": {**os.environ, **env}, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        if launcher == "local":
            started.append(warm_python.start(command, cwd=os.getcwd(), **options))
        else:
            started.append(subprocess.Popen([sys.executable, *command], text=True, **options))
        return started[-1]

    yield launch
    for process in started:
        if process.poll() is None:
            process.terminate()
            process.communicate(timeout=60)
