"""weight_update=auto: shared memory if every server can read it and there is room, else disk."""

import logging
import shutil
from collections import namedtuple
from pathlib import Path

import pytest

from arealite.api.cli_args import GRPOConfig, InferenceEngineConfig
from arealite.engine.sglang_remote import RemoteSGLangEngine
from arealite.weights.sync import make_weight_meta
from tests.server_process import server_process


@pytest.fixture(scope="module")
def rollout(model_path):
    engine = RemoteSGLangEngine(InferenceEngineConfig(setup_timeout_s=60))
    with server_process(model_path) as server:
        engine.initialize([server.address])
        yield engine
        engine.destroy()


@pytest.fixture
def config(model_path):
    config = GRPOConfig("e", "t")
    config.actor.path, config.actor.device = str(model_path), "cpu"
    return config


def test_shared_memory_if_all_servers_read_it(rollout, config, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    meta = make_weight_meta(config, tmp_path, rollout)
    assert (meta.type, Path(meta.path).parent) == ("shm", Path("/dev/shm"))
    assert "rollout.weight_update=auto: shm" in caplog.text
    assert not list(Path("/dev/shm").glob(f"{Path(meta.path).name}*")), "the probe was left behind"


@pytest.mark.parametrize("reason", ["room", "elsewhere", "unasked", "adapters"])
def test_otherwise_disk_and_the_reason_is_logged(reason, rollout, config, tmp_path, caplog, monkeypatch):
    caplog.set_level(logging.INFO)
    if reason == "room":
        usage = namedtuple("Usage", "free")
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(free=1000))
    if reason == "elsewhere":  # a server in a container, on another machine, or of another kind
        probe = "cannot attach shared weights: No such file"
        monkeypatch.setattr(rollout, "read_probe", lambda path: [probe])
    config.actor.lora_rank = 4 if reason == "adapters" else 0
    meta = make_weight_meta(config, tmp_path, None if reason == "unasked" else rollout)
    assert (meta.type, meta.path) == ("disk", str(tmp_path / "weights"))
    words = {"room": "0 MiB free", "elsewhere": "No such file", "unasked": "cannot be asked", "adapters": "folders"}
    assert f"{words[reason]}" in caplog.text
