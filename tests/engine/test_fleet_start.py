"""The start of a job: servers that die before the trainer connects."""

import threading

import pytest

from arealite.api.cli_args import InferenceEngineConfig
from arealite.api.errors import HttpError, WaitTimeout
from arealite.engine.remote.base import NAMES_ENV
from arealite.engine.sglang_remote import RemoteSGLangEngine, SGLangClient
from arealite.utils.names import ELASTIC_PREFIX, FileNames, elastic_names
from arealite.utils.network import free_port
from arealite.utils.rundir import RunDir
from tests.engine.test_fleet import request, run, until
from tests.server_process import server_process


@pytest.mark.timeout(120)
def test_a_server_that_died_is_replaced_by_its_successor(model_path, tmp_path, monkeypatch):
    names = FileNames(tmp_path / "names")
    monkeypatch.setenv(NAMES_ENV, str(tmp_path / "names"))
    dead = f"127.0.0.1:{free_port()}"
    with server_process(model_path) as again:
        names.publish("servers/0", again.address)  # as a launcher does, when it is healthy
        engine = RemoteSGLangEngine(InferenceEngineConfig(setup_timeout_s=60.0))
        try:
            engine.initialize([dead])
            assert list(engine.router.servers) == [again.address]
            assert run(engine, engine.agenerate(request(1, 4))).output_tokens
        finally:
            engine.destroy()


@pytest.mark.timeout(60)
def test_waiting_for_servers_has_a_deadline_when_all_have_died(tmp_path, monkeypatch):
    monkeypatch.setenv(NAMES_ENV, str(tmp_path / "names"))
    engine = RemoteSGLangEngine(InferenceEngineConfig(setup_timeout_s=2.0))
    before = set(threading.enumerate())
    with pytest.raises(WaitTimeout, match="server"):
        engine.initialize([f"127.0.0.1:{free_port()}"])
    assert not engine.router.servers
    names = {thread.name for thread in set(threading.enumerate()) - before}
    assert "rollout" not in names, "an engine that did not start leaves no event loop that looks for servers"


@pytest.mark.timeout(60)
@pytest.mark.parametrize("has_launcher", [False, True])
def test_a_named_server_is_waited_for(has_launcher, tmp_path, monkeypatch):
    """It holds no lease, because no launcher has started it."""
    dead = f"127.0.0.1:{free_port()}"
    if has_launcher:
        monkeypatch.setenv(NAMES_ENV, str(tmp_path / "names"))
    engine = RemoteSGLangEngine(InferenceEngineConfig(setup_timeout_s=0.5, server_addrs=[dead]))
    try:
        with pytest.raises(WaitTimeout, match=f"{dead}/health cannot be reached"):
            engine.initialize([dead])
    finally:
        engine.destroy()


@pytest.mark.parametrize("status", [400, 401])
@pytest.mark.timeout(120)
def test_a_server_that_keeps_refusing_is_warned_about(model_path, tmp_path, monkeypatch, capfd, status):
    """A broadcast of another model's weights is answered with 400, a wrong token with 401."""
    asked = []

    async def refuses(self, server):
        asked.append(server.address)
        raise HttpError(server.url, status, "not these")

    with server_process(model_path) as one:
        engine = RemoteSGLangEngine(InferenceEngineConfig(), ledger_path=tmp_path / "run.sqlite")
        try:
            engine.initialize([one.address])
            monkeypatch.setattr(SGLangClient, "probe", refuses)
            leases = elastic_names(RunDir(tmp_path))
            leases.publish(f"{ELASTIC_PREFIX}guest", "127.0.0.1:9")
            until(lambda: len(asked) > 3)
            assert f"gets no requests: http://127.0.0.1:9 answered {status}" in capfd.readouterr().out
        finally:
            engine.destroy()
