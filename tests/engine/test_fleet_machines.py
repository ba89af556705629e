"""The fleet over several machines: power cuts, partitions and slow links, where no connection is ever closed."""

import signal
import threading
import time

import pytest

from arealite.api.backends import API_KEY_ENV
from arealite.api.cli_args import InferenceEngineConfig
from arealite.api.io_struct import WeightUpdateMeta
from arealite.engine.sglang_remote import RemoteSGLangEngine
from arealite.utils.network import free_port
from arealite.weights.process_group import fill_outbox
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
    with (
        server_process(model_path, net[1], **options) as one,
        server_process(model_path, net[2], **options) as two,
    ):
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
    expected = [run(engine, engine.agenerate(request(i))).output_tokens for i in range(2)]
    futures = [background(engine, engine.agenerate(request(i % 2))) for i in range(8)]
    until(lambda: one.get("server_info")["running"] > 0)
    getattr(net[1], fault)()
    assert [f.result(DEADLINE_S).output_tokens for f in futures] == expected * 4
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
    futures = [background(engine, engine.agenerate(request(i))) for i in range(8)]
    until(lambda: one.get("server_info")["running"] > 0)
    assert {v for f in futures for v in f.result(DEADLINE_S).output_versions} == {2}
