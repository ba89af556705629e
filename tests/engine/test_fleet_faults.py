"""Faults of servers: wrong weights, servers that hang, garbled answers, servers that stop in an update."""

import asyncio
import contextlib
import signal
import socket
import threading

import pytest
import torch
from transformers import Qwen2ForCausalLM

from arealite.api.cli_args import GenerationHyperparameters, InferenceEngineConfig
from arealite.api.errors import ConfigError, HttpError, ServerError
from arealite.api.io_struct import ModelRequest, WeightUpdateMeta
from arealite.engine.remote.client import read_version
from arealite.engine.remote.fleet import Fleet
from arealite.engine.remote.server import ServerInfo
from arealite.utils.json_client import JsonClient, UnreachableError
from arealite.utils.network import free_port
from arealite.weights.fingerprint import fingerprints
from tests.engine.test_fleet import TOKENS, background, connect, is_open, request, run, steady, steady_process, until  # noqa: F401
from tests.server_process import server_process


def on_loop(engine, function, *args):
    engine.executor.runner.loop.call_soon_threadsafe(function, *args)


def test_a_server_that_comes_back_with_other_weights_gets_no_requests(model_path, connect, steady):  # noqa: F811
    """It reports the right version: only fingerprints show the difference. A failed load is retried."""
    with server_process(model_path, deterministic="true") as one:
        engine = connect(steady, one)
        engine.update_weights(WeightUpdateMeta("disk", str(model_path), 1))
        torn = Qwen2ForCausalLM.from_pretrained(model_path, dtype=torch.float32)
        torn.model.layers[1].mlp.up_proj.weight.data[3] += 1
        held = fingerprints(torn.named_parameters())
        true, asked, is_torn = engine.client.fingerprints, [], [True]

        async def torn_fingerprints(server):
            asked.append(server.address)
            return held if is_torn[0] and server.address == one.address else await true(server)

        engine.client.fingerprints = torn_fingerprints
        on_loop(engine, engine.fleet.suspect, engine.router.servers[one.address], ServerError("x"))
        until(lambda: asked.count(one.address) > 2)
        assert not is_open(engine, one) and is_open(engine, steady)
        is_torn[0] = False
        until(lambda: is_open(engine, one))


@pytest.mark.parametrize("forged", ["7", str(2**31 - 1)])
def test_a_version_that_was_never_published_is_not_trained_on(forged, model_path, connect, steady):  # noqa: F811
    engine = connect(steady)
    engine.update_weights(WeightUpdateMeta("disk", str(model_path), 1))
    steady.post("update_weight_version", weight_version=forged, reset_version=True)
    assert set(run(engine, engine.agenerate(request(0))).output_versions) == {1}
    assert steady.get("model_info")["weight_version"] == "1"
    # An update finds it as well, and the server gets the weights of the run again.
    steady.post("update_weight_version", weight_version=forged, reset_version=True)
    engine.update_weights(WeightUpdateMeta("disk", str(model_path), 2))
    assert steady.get("model_info")["weight_version"] == "2"
    # A run that recovers goes back.
    engine.update_weights(WeightUpdateMeta("disk", str(model_path), 0))
    assert steady.get("model_info")["weight_version"] == "0"


@pytest.mark.parametrize("version", ["999999999999999999", 2**31])
def test_a_version_that_no_run_reaches_is_an_error(version):
    with pytest.raises(ValueError, match="above"):
        read_version(version, 0)


def test_requests_leave_a_server_that_fails_and_then_hangs(model_path, connect, steady):  # noqa: F811
    """A failure closes the server; its other requests must not wait for their deadlines."""
    with server_process(model_path, deterministic="true") as one:
        engine = connect(one, steady, health_timeout_s=1.5)
        futures = [background(engine, engine.agenerate(request(i))) for i in range(4)]
        until(lambda: one.get("server_info")["running"] > 0)
        one.signal(signal.SIGSTOP)
        on_loop(engine, engine.fleet.suspect, engine.router.servers[one.address], ServerError("x"))
        assert all(len(f.result(30).output_tokens) == TOKENS for f in futures)


def test_an_update_does_not_wait_for_a_server_that_hangs_while_it_catches_up(
    model_path,
    connect,  # noqa: F811
    steady,  # noqa: F811
):
    with server_process(model_path, deterministic="true") as one:
        engine = connect(one, steady, health_timeout_s=1.5, setup_timeout_s=600.0)
        load, hangs = engine.client.load_folder, threading.Event()

        def stop_and_load(server, meta):
            if server.address == one.address:
                one.signal(signal.SIGSTOP)
                hangs.set()
            return load(server, meta)

        engine.fleet.updater._published = WeightUpdateMeta("disk", str(model_path), 1)
        engine.fleet.updater.version = 1
        engine.client.load_folder = stop_and_load
        on_loop(engine, engine.fleet.suspect, engine.router.servers[one.address], ServerError("x"))
        assert hangs.wait(30)
        engine.client.load_folder = load
        update = threading.Thread(target=engine.update_weights, args=[WeightUpdateMeta("disk", str(model_path), 2)])
        update.start()
        update.join(30)
        assert not update.is_alive() and is_open(engine, steady)
        one.signal(signal.SIGCONT)
        until(lambda: is_open(engine, one))
        assert one.get("model_info")["weight_version"] == "2"


@pytest.mark.parametrize("garbled", ["model_info", "weights_checker?tensors=1"])
def test_a_server_recovers_from_a_garbled_answer(
    garbled,
    model_path,
    connect,  # noqa: F811
    steady,  # noqa: F811
):
    engine = connect(steady)
    get, answers = engine.client.http.get, [None, [], {}]

    async def garble(url, timeout_s=None):
        is_meant = url.endswith(garbled) and answers
        return answers.pop() if is_meant else await get(url, timeout_s)

    engine.client.http.get = garble
    engine.update_weights(WeightUpdateMeta("disk", str(model_path), 1))
    on_loop(engine, engine.fleet.suspect, engine.router.servers[steady.address], ServerError("x"))
    until(lambda: not answers and is_open(engine, steady))


def test_the_run_continues_when_a_server_dies_with_released_memory(model_path, connect, steady):  # noqa: F811
    with server_process(model_path, deterministic="true") as one:
        engine = connect(one, steady, health_timeout_s=60.0)
        engine.offload()
        one.kill()
        engine.onload()
        assert is_open(engine, steady) and not is_open(engine, one)
        assert len(run(engine, engine.agenerate(request(1))).output_tokens) == TOKENS


def test_a_server_that_recovers_while_memory_is_released_waits_for_onload(connect, steady):  # noqa: F811
    engine = connect(steady)
    engine.offload()
    release, again = engine.client.release_memory, threading.Event()

    async def released_again(server):
        await release(server)
        again.set()

    engine.client.release_memory = released_again
    on_loop(engine, engine.fleet.suspect, engine.router.servers[steady.address], ServerError("x"))
    assert again.wait(20) and not is_open(engine, steady)
    with pytest.raises(ConfigError, match=r"call onload\(\) before update_weights\(\)"):
        engine.update_weights(WeightUpdateMeta("disk", "", 1))
    engine.onload()
    assert len(run(engine, engine.agenerate(request(1))).output_tokens) == TOKENS


def test_a_new_trainer_can_use_servers_that_a_killed_one_has_left_released(connect, steady):  # noqa: F811
    connect(steady).offload()
    engine = connect(steady)
    assert len(run(engine, engine.agenerate(request(1))).output_tokens) == TOKENS


def test_min_new_tokens_may_exceed_a_segment(connect, steady):  # noqa: F811
    engine = connect(steady, segment_tokens=16)
    gconfig = GenerationHyperparameters(max_new_tokens=60, min_new_tokens=40)
    answers = [run(engine, engine.agenerate(ModelRequest([5, 6, 7], gconfig, seed=i))) for i in range(4)]
    assert all(40 <= len(answer.output_tokens) <= 60 for answer in answers)


class Obedient:
    """A client that reaches every server; records which servers it has resumed."""

    def __init__(self):
        self.resumed = []

    async def probe(self, server):
        return ServerInfo(version=7)

    async def resume(self, server):
        self.resumed.append(server.address)


def test_a_rollout_worker_does_not_open_a_server_that_the_trainer_has_closed():
    """The trainer may have paused the server in an update, or found wrong weights in it."""

    async def worker_side():
        client = Obedient()
        owner, worker = (Fleet(InferenceEngineConfig(), client) for _ in range(2))  # pyright: ignore
        server = owner.router.add("a:1")
        owner.router.open(server)
        server.version = 7
        worker.mirror(owner.state())
        mine = worker.router.servers["a:1"]
        owner.router.close(server)
        worker.mirror(owner.state())
        worker.suspect(mine, ServerError("x"))
        for _ in range(20):
            await asyncio.sleep(0)
        while_closed = mine.is_open
        owner.router.open(server)
        worker.mirror(owner.state())
        async with asyncio.timeout(10):
            while worker._recovering or not mine.is_open:
                await asyncio.sleep(0.01)
        await worker.close()
        return while_closed, client.resumed

    assert asyncio.run(worker_side()) == (False, [])


def test_the_run_continues_when_a_server_stops_while_it_reads_weights(model_path, connect, steady):  # noqa: F811
    """It answers 503, which is not a refusal of the weights."""
    with server_process(model_path, deterministic="true") as one:
        engine = connect(one, steady)
        load = engine.client.load_folder

        async def load_and_stop(server, meta):
            if server.address == one.address:
                one.signal(signal.SIGTERM)
                await asyncio.to_thread(until, lambda: not answers(one))
                raise HttpError(f"{server.url}/update_weights_from_disk", 503, "the inference engine is closed")
            await load(server, meta)

        engine.client.load_folder = load_and_stop
        engine.update_weights(WeightUpdateMeta("disk", str(model_path), 1))
        assert is_open(engine, steady) and not is_open(engine, one)


def answers(server):
    with socket.socket() as sock:
        host, port = server.address.split(":")
        return sock.connect_ex((host, int(port))) == 0


def test_unreachable_servers_do_not_count_as_attempts(connect, steady):  # noqa: F811
    """Servers that were lost while idle are the least loaded ones."""
    engine = connect(steady, request_retries=2, health_timeout_s=60.0)
    for _ in range(4):
        engine.router.add(f"127.0.0.1:{free_port()}").is_open = True
    # Of equally loaded servers the first one is chosen.
    servers = engine.router.servers
    servers[steady.address] = servers.pop(steady.address)
    assert len(run(engine, engine.agenerate(request(1))).output_tokens) == TOKENS


def test_a_connection_timeout_is_reported_as_such(monkeypatch):
    """The limit is that of connecting, not the hour that a generation may take."""
    monkeypatch.setattr("arealite.utils.json_client.CONNECT_TIMEOUT_S", 0.2)

    async def ask(address):
        client = JsonClient()
        try:
            await client.post(f"http://{address}/generate", {}, 3600.0)
        finally:
            await client.close()

    with socket.socket() as full, contextlib.ExitStack() as stack:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for _ in range(4):  # nobody accepts: soon the next one waits outside
            sock = stack.enter_context(socket.socket())
            sock.setblocking(False)
            sock.connect_ex(full.getsockname())
        with pytest.raises(UnreachableError, match=r"cannot be reached: .*0\.2 s"):
            asyncio.run(ask(f"127.0.0.1:{full.getsockname()[1]}"))


def test_a_wrong_api_key_is_reported_at_once(model_path, connect):  # noqa: F811
    """Retrying does not help."""
    with (
        server_process(model_path, api_key="secret") as server,
        pytest.raises(ConfigError, match=r"401.*set AREALITE_API_KEY"),
    ):
        connect(server, setup_timeout_s=60.0)


def test_a_shorter_context_length_is_warned_about(
    model_path,
    tmp_path,
    connect,  # noqa: F811
    steady,  # noqa: F811
    capfd,
):
    engine = connect(steady)
    with server_process(model_path, context_length=32, join=tmp_path / "run") as guest:
        until(lambda: is_open(engine, guest))
    assert f"{guest.address} takes 32 tokens of prompt and answer" in capfd.readouterr().out
