"""Tests of the services that statistics are sent to, with the real packages in their offline modes."""

import importlib.util
import os
import re
import subprocess
import sys
import threading

import pytest

from arealite.api.cli_args import SFTConfig
from arealite.api.errors import ConfigError
from arealite.trainer.output import loggers
from arealite.trainer.stats_logger import StatsLogger
from arealite.utils.config import load_config
from arealite.utils.rundir import RunDir


def make_config(tmp_path, *overrides) -> SFTConfig:
    base = ["experiment_name=e", "trial_name=t", "train_dataset.path=d", "model.path=m"]
    return load_config([*base, f"cluster.fileroot={tmp_path}", *overrides], SFTConfig)


class FakeService:
    """A module with the calls of all three services, which notes them or fails."""

    def __init__(self, fails_in: str = ""):
        self.fails_in, self.rows, self.opened, self.ended = fails_in, [], {}, threading.Event()

    def Settings(self, **settings):
        return settings

    def init(self, **settings):
        self._maybe_fail("init")
        self.opened = settings
        return self

    def define_metric(self, *_, **__):
        pass

    def log(self, values, step=None):
        self._maybe_fail("log")
        self.rows.append((values.get("step", step), values["loss"]))

    def finish(self):
        self._maybe_fail("finish")
        self.ended.set()

    def _maybe_fail(self, call):
        if call == self.fails_in:
            raise ConnectionError("unreachable\nsecond line")


@pytest.fixture
def service(monkeypatch):
    def use(fails_in: str = "") -> FakeService:
        fake = FakeService(fails_in)
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
        monkeypatch.setattr(loggers.importlib, "import_module", lambda name: fake)
        return fake

    return use


KEYS = {"wandb": "offline", "swanlab": "offline", "trackio": "local"}


@pytest.mark.parametrize("name", KEYS)
def test_a_service_gets_the_configuration_every_step_and_the_same_id_after_a_resume(name, tmp_path, service):
    fake = service()
    config = make_config(tmp_path, f"stats_logger.{name}={KEYS[name]}")
    ids = []
    for start in (0, 2):
        logger = StatsLogger(config, RunDir(config))
        for step in (start, start + 1):
            logger.commit(step, {"loss": float(step), "bad": float("nan")})
        logger.close()
        ids.append(fake.opened.get("id"))
    assert fake.rows == [(0, 0.0), (1, 1.0), (2, 2.0), (3, 3.0)]
    assert fake.opened["project"] == "e" and fake.opened["name"] == "t" and fake.opened["resume"] == "allow"
    assert fake.opened["config"]["model"]["path"] == "m"
    assert ids[0] == ids[1]


def test_secrets_are_not_sent(tmp_path, service):
    fake = service()
    secrets = {"workflow_args.judge.api_key": "s1", "workflow_args.HF_TOKEN": "s2", "workflow_args.keys": "[s3]"}
    plain = {"workflow_args.max_tokens": 5, "tokenizer_path": "t1", "workflow_args.passwords.url": "s4"}
    config = make_config(tmp_path, "stats_logger.wandb=online", *(f"{k}={v}" for k, v in (secrets | plain).items()))
    logger = StatsLogger(config, RunDir(config))
    logger.close()
    sent = fake.opened["config"]
    assert sent["workflow_args"]["max_tokens"] == 5 and sent["tokenizer_path"] == "t1"
    assert not re.search(r"\bs\d\b", str(sent)) and sent["workflow_args"]["HF_TOKEN"] == "(hidden)"


@pytest.mark.parametrize("call", ["init", "log", "finish"])
def test_a_failing_service_is_one_warning_and_statistics_are_written(call, tmp_path, service, capsys):
    service(call)
    config = make_config(tmp_path, "stats_logger.wandb=online")
    logger = StatsLogger(config, RunDir(config))
    for step in range(3):
        logger.commit(step, {"loss": 1.0})
    logger.close()
    out = capsys.readouterr().out
    assert len(re.findall("warning: statistics no longer go to wandb", out)) == 1 and "unreachable" in out
    assert len(RunDir(config).stats_path.read_text().splitlines()) == 3


def test_a_service_that_hangs_does_not_delay_training(tmp_path, service, monkeypatch, capsys):
    fake, release = service(), threading.Event()
    monkeypatch.setattr(fake, "log", lambda *args, **kwargs: release.wait(60))
    monkeypatch.setattr(loggers, "_CLOSE_TIMEOUT_S", 0.05)
    config = make_config(tmp_path, "stats_logger.swanlab=online")
    logger = StatsLogger(config, RunDir(config))
    logger.commit(0, {"loss": 1.0})
    logger.close()
    release.set()
    assert "did not end within" in capsys.readouterr().out


def test_a_missing_package_is_refused_at_the_start(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    config = make_config(tmp_path, "stats_logger.trackio=local")
    with pytest.raises(ConfigError, match=r"pip install 'arealite\[trackio\]'"):
        StatsLogger(config, RunDir(config))
    with pytest.raises(ConfigError, match="wandb"):
        make_config(tmp_path, "stats_logger.wandb=sometimes")


_REAL = """
import sys
from arealite.api.cli_args import SFTConfig
from arealite.trainer.stats_logger import StatsLogger
from arealite.utils.config import load_config
from arealite.utils.rundir import RunDir

base = ["experiment_name=e", "trial_name=t", "train_dataset.path=d", "model.path=m"]
config = load_config([*base, *sys.argv[1:]], SFTConfig)
for start in (0, 2):
    logger = StatsLogger(config, RunDir(config))
    for step in (start, start + 1):
        logger.commit(step, {"loss": 1.0 / (step + 1), "eval/valid/pass@1": 0.5})
    logger.close()
    assert not any(service.failed for service in logger.services)
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", KEYS)
def test_real_packages_work_offline(name, tmp_path):
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    env = {**os.environ, "HOME": str(tmp_path), "TRACKIO_DIR": str(tmp_path / "trackio")}
    settings = [f"cluster.fileroot={tmp_path}", f"stats_logger.{name}={KEYS[name]}"]
    command = [sys.executable, "-c", _REAL, *settings]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0 and "no more" not in done.stdout, done.stdout + done.stderr
    run = tmp_path / "e" / "t"
    files = {"wandb": run.glob("wandb/offline-run-*/run-*.wandb"), "swanlab": run.glob("swanlab/run-*/*.swanlab"),
             "trackio": tmp_path.glob("trackio/e*.db")}  # fmt: skip
    assert list(files[name])
