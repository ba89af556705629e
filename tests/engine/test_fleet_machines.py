"""The fleet over several machines: power cuts, partitions and slow links, where no connection is ever closed."""

import shutil
import threading

import pytest
from transformers import Qwen2Config, Qwen2ForCausalLM

from arealite.api.backends import API_KEY_ENV
from arealite.api.cli_args import InferenceEngineConfig
from arealite.api.io_struct import WeightUpdateMeta
from arealite.core.ledger.reading import open_ledger, read_events
from arealite.engine.sglang_remote import RemoteSGLangEngine
from arealite.utils.network import free_port
from arealite.weights import process_group
from tests.engine.test_fleet import background, is_open, other_weights, request, run, until
from tests.machines import machines
from tests.server_process import API_KEY, ServerProcess, server_process

pytestmark = pytest.mark.slow
DEADLINE_S = 60.0


@pytest.fixture
def net():
    """The trainer's machine and two for servers."""
    with machines(3) as made:
        yield made


@pytest.fixture
def connect(net, tmp_path, monkeypatch):
    """Connect an engine on the first machine to servers."""
    monkeypatch.setenv(API_KEY_ENV, API_KEY)
    engines = []

    def make(*servers, **config):
        options = {"setup_timeout_s": 600.0, "request_timeout_s": 600.0, "health_timeout_s": 2.0}
        engine = RemoteSGLangEngine(
            InferenceEngineConfig(**{**options, **config}), ledger_path=tmp_path / "run" / "run.sqlite"
        )
        engines.append(engine)
        # Threads of the engine stay in the network in which they were started.
        with net[0].network():
            engine.initialize([server.address for server in servers])
        return engine

    yield make
    for engine in engines:
        engine.destroy()


@pytest.fixture
def pair(net, model_path, tmp_path):
    """A server on each of the other machines."""
    options = {"deterministic": "true", "weight_folders": f"[{tmp_path},{model_path}]", "port": free_port()}
    with server_process(model_path, net[1], **options) as one, server_process(model_path, net[2], **options) as two:
        yield one, two


def update(engine, meta):
    """Update the weights; fails if that does not end."""
    thread = threading.Thread(target=engine.update_weights, args=[meta])
    thread.start()
    thread.join(DEADLINE_S)
    assert not thread.is_alive(), f"the update waits: {engine.router.describe()}"


def version(server):
    return server.get("model_info")["weight_version"]


@pytest.mark.parametrize("fault", ["kill", "partition"])
def test_training_goes_on_without_a_machine_and_it_comes_back_with_the_current_weights(
    fault, net, pair, connect, model_path, tmp_path
):
    one, two = pair
    engine = connect(one, two)
    update(engine, WeightUpdateMeta("disk", str(model_path), 1))
    expected = run(engine, engine.agenerate(request(0))).output_tokens
    futures = [background(engine, engine.agenerate(request(0))) for _ in range(4)]
    until(lambda: one.get("server_info")["running"] > 0)
    getattr(net[1], fault)()
    assert [f.result(DEADLINE_S).output_tokens for f in futures] == [expected] * 4
    until(lambda: not is_open(engine, one))
    update(engine, WeightUpdateMeta("disk", other_weights(model_path, tmp_path / "other"), 2))
    assert is_open(engine, two) and not is_open(engine, one)
    if fault == "kill":
        net[1].boot()
        port = one.address.split(":")[1]
        one = ServerProcess(model_path, net[1], port=port, deterministic="true", weight_folders=f"[{tmp_path}]")
    else:
        assert version(one) == "1"
        net[1].rejoin()
    until(lambda: is_open(engine, one))
    assert version(one) == version(two) == "2"
    futures = [background(engine, engine.agenerate(request(i))) for i in range(4)]
    until(lambda: one.get("server_info")["running"] > 0)
    assert {v for f in futures for v in f.result(DEADLINE_S).output_versions} == {2}


@pytest.fixture
def large_weights(net, model_path, tmp_path):
    """The model with tensors that do not fit into the buffers of a connection, published for a broadcast."""
    folder = tmp_path / "large"
    shutil.copytree(model_path, folder)
    config = Qwen2Config.from_pretrained(model_path)
    config.intermediate_size = 40_000
    model = Qwen2ForCausalLM(config)
    model.save_pretrained(folder)
    process_group.fill_outbox("large", model.named_parameters())
    return folder


@pytest.mark.parametrize("when", ["before", "during"])
def test_a_broadcast_does_not_wait_for_a_machine_that_is_cut_off(when, net, connect, large_weights, monkeypatch):
    """A sender cannot tell a machine that is cut off from one that is slow, except by time."""
    monkeypatch.setattr(process_group, "STALL_TIMEOUT_S", 3.0)
    with server_process(large_weights, net[1]) as one, server_process(large_weights, net[2]) as two:
        engine = connect(one, two)
        update(engine, WeightUpdateMeta("broadcast", "large", 1))
        assert version(one) == version(two) == "1"
        if when == "before":
            net[1].partition()
        else:
            net[1].slow(mbit=40)
            threading.Timer(0.5, net[1].partition).start()
        update(engine, WeightUpdateMeta("broadcast", "large", 2))
        assert version(two) == "2" and is_open(engine, two)
        until(lambda: not is_open(engine, one))
        net[1].slow()
        net[1].rejoin()
        until(lambda: is_open(engine, one))
        assert version(one) == "2"


def test_a_slow_machine_is_named(net, pair, connect, tmp_path):
    engine = connect(*pair)
    ledger = open_ledger(tmp_path / "run" / "run.sqlite")
    far, near = (engine.router.servers[server.address] for server in pair)
    net[1].slow(delay_ms=150)
    until(lambda: "a health check takes 0.3" in far.slow)
    assert not near.slow
    until(lambda: any("is slow: a health check" in event["text"] for event in read_events(ledger)))
    assert engine._server_status()[0]["slow"].endswith("its network is slow, or its machine is busy")
    net[1].slow()
    until(lambda: not far.slow)
    ledger.close()
