"""weight_update=auto: shared memory if every server can read it and there is room, else disk."""

import asyncio
import logging
import os
import shutil
from collections import namedtuple
from pathlib import Path

import pytest
import torch

from arealite.api.cli_args import GRPOConfig, InferenceEngineConfig
from arealite.api.io_struct import WeightUpdateMeta
from arealite.engine.sft.lm_engine import FSDPLMEngine
from arealite.engine.sglang_remote import RemoteSGLangEngine
from arealite.utils.rundir import RunDir
from arealite.weights.host_memory import SharedWeights
from arealite.weights.sync import make_transport, make_weight_meta, sync_weights
from tests.engine.engine_testing import SPEC, engine_config
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


@pytest.mark.parametrize("folder", ["/proc", "/missing"])
def test_disk_if_shared_memory_cannot_be_written(rollout, config, tmp_path, monkeypatch, capsys, folder):
    monkeypatch.setattr(RunDir, "shared_weights", Path(folder) / "arealite-x")
    usage = namedtuple("Usage", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(free=1 << 40))
    meta = make_weight_meta(config, tmp_path, rollout)
    assert (meta.type, meta.path) == ("disk", str(tmp_path / "weights"))
    output = capsys.readouterr().out
    assert output.count("warning: weights cannot pass through shared memory") == (folder == "/proc"), output


class Owner:
    """The part of a train engine that a transport uses: one tensor."""

    def __init__(self):
        self.value = 0.0

    def empty_weights(self):
        return {"w": torch.empty(4, device="meta")}

    def gather_weights(self):
        yield "w", torch.full((4,), self.value)


def test_a_segment_that_is_removed_between_two_updates_or_before_a_load_is_made_again(tmp_path):
    meta = WeightUpdateMeta("shm", str(tmp_path / "w"))
    publisher, loader, owner = make_transport(meta), make_transport(meta), Owner()
    read = []

    class Client:
        async def load_segment(self, server, meta):
            # As another process would map it.
            os.link(meta.path, tmp_path / f"link{len(read)}")
            read.append(SharedWeights.attach(tmp_path / f"link{len(read)}").tensors["w"].tolist())

    for version in range(1, 4):
        owner.value = float(version)
        publisher.publish(owner, meta)
        if version == 2:
            Path(meta.path).unlink()
        asyncio.run(loader.load(Client(), None, meta))  # type: ignore[arg-type]
        if version == 1:
            Path(meta.path).unlink()
    assert read == [[1.0] * 4, [2.0] * 4, [3.0] * 4]
    publisher.close()
    assert not Path(meta.path).exists()


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


@pytest.mark.parametrize("way", ["disk", "shm", "broadcast", "stream", "delta"])
def test_a_version_may_be_published_again(model_path, tmp_path, way):
    """A script of a user may leave the number out."""
    actor = FSDPLMEngine(engine_config(str(model_path), lr=0.1))
    actor.initialize(SPEC)
    engine = RemoteSGLangEngine(InferenceEngineConfig(setup_timeout_s=60))
    folder = Path("/dev/shm") if way == "shm" else tmp_path
    meta = WeightUpdateMeta(way, str(folder / f"again-{os.getpid()}"))
    with server_process(model_path) as server:
        engine.initialize([server.address])
        try:
            for _ in range(2):
                for parameter in actor.model.parameters():
                    parameter.detach().mul_(1.5)
                # Compares what the server holds with what was published.
                sync_weights(actor, engine, meta)
        finally:
            engine.destroy()
            actor.destroy()
