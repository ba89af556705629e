"""Bad connections and data: garbage, delays, cuts, incomplete weights, full disk, clock jumps, long queues."""

import asyncio
import contextlib
import shutil
import threading
import time
from pathlib import Path

import pytest

from arealite.api.cli_args import InferenceEngineConfig
from arealite.api.errors import WeightUpdateError
from arealite.api.io_struct import WeightUpdateMeta
from arealite.core.workflow_executor import WorkflowExecutor
from tests import warm_python
from tests.core.conftest import Echo, StubEngine
from tests.engine.test_fleet import connect, request, run, until  # noqa: F401
from tests.server_process import server_process

ROOT = Path(__file__).parents[2]


class Proxy:
    """Forwards to a server, and delays, cuts or garbles on demand. Runs on a thread of its own."""

    def __init__(self, target: str):
        self.host, self.port = target.split(":")
        self.delay_s, self.is_cut, self.garble = 0.0, False, False
        self.loop = asyncio.new_event_loop()
        self.writers: set[asyncio.StreamWriter] = set()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        server = asyncio.run_coroutine_threadsafe(asyncio.start_server(self.handle, "127.0.0.1", 0), self.loop).result(
            5
        )
        self.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"

    async def handle(self, reader, writer):
        if self.is_cut:
            writer.close()
            return
        upstream_reader, upstream_writer = await asyncio.open_connection(self.host, int(self.port))
        self.writers |= {writer, upstream_writer}
        await asyncio.gather(self.copy(reader, upstream_writer, False), self.copy(upstream_reader, writer, True))

    async def copy(self, reader, writer, is_answer):
        with contextlib.suppress(ConnectionError, asyncio.CancelledError):
            while data := await reader.read(65536):
                await asyncio.sleep(self.delay_s)
                if is_answer and self.garble:
                    data = data.replace(b'"meta_info"', b'"meat_info"')
                writer.write(data)
                await writer.drain()
        writer.close()

    def cut(self):
        self.is_cut = True
        self.loop.call_soon_threadsafe(lambda: [w.close() for w in self.writers])

    def close(self):
        self.cut()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(5)


@pytest.mark.slow
def test_slow_cut_and_garbled_connections_lose_no_request(model_path, connect):  # noqa: F811
    with server_process(model_path, deterministic="true") as server:
        proxy = Proxy(server.address)
        try:
            engine = connect(server, type("P", (), {"address": proxy.address}))
            expected = {i: run(engine, engine.agenerate(request(i, 40))).output_tokens for i in range(4)}

            def check():
                answers = [run(engine, engine.agenerate(request(i, 40))).output_tokens for i in range(4)]
                assert answers == list(expected.values())

            proxy.delay_s = 0.05
            check()
            proxy.delay_s, proxy.garble = 0.0, True
            # What is garbled is asked again elsewhere.
            check()
            proxy.garble = False
            until(lambda: engine.router.servers[proxy.address].is_open)
            proxy.cut()
            check()
            until(lambda: not engine.router.servers[proxy.address].is_open)
            proxy.is_cut = False
            until(lambda: engine.router.servers[proxy.address].is_open)
            check()
            # half-written weights are refused as a whole, and the old ones still serve
            torn = Path(model_path).parent / "torn"
            shutil.copytree(model_path, torn, dirs_exist_ok=True)
            data = (torn / "model.safetensors").read_bytes()
            (torn / "model.safetensors").write_bytes(data[: len(data) // 2])
            with pytest.raises(WeightUpdateError, match="refused version 1"):
                engine.update_weights(WeightUpdateMeta("disk", str(torn), 1))
            assert server.get("model_info")["weight_version"] == "0"
        finally:
            proxy.close()


# The tests of the executor do it with 5,000.
@pytest.mark.slow
@pytest.mark.parametrize("count", [10_000, pytest.param(100_000, marks=pytest.mark.soak)])
def test_many_queued_episodes(monkeypatch, count):
    config = InferenceEngineConfig(max_concurrent_rollouts=20000, max_head_offpolicyness=1 << 20, batch_timeout_s=120)
    executor = WorkflowExecutor(config, StubEngine(), 1000)
    executor.start()
    workflow = Echo()
    # Deadlines must not depend on the wall clock.
    real, jump = time.time, [0.0]
    monkeypatch.setattr(time, "time", lambda: real() + jump[0])
    for x in range(count):
        executor.submit({"x": x, "length": 1}, workflow)
    jump[0] = -3600.0
    seen = executor.wait(count // 2)["group_ids"].unique().numel()
    jump[0] = 86400.0
    seen += executor.wait(count // 2)["group_ids"].unique().numel()
    executor.staleness.counts.check()
    executor.stop()
    assert seen == count


FULL_DISK = """
import os
import resource
import signal
import sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (512 << 10, 512 << 10))  # as if half a megabyte were left on the disk
sys.path.insert(0, sys.argv[2])
from tests.core.conftest import Echo, StubEngine
from arealite.api.cli_args import InferenceEngineConfig
from arealite.api.errors import AReaLiteError
from arealite.core.ledger.store import Ledger
from arealite.core.workflow_executor import WorkflowExecutor
config = InferenceEngineConfig(max_head_offpolicyness=9)
executor = WorkflowExecutor(config, StubEngine(), 8, ledger=Ledger(sys.argv[1]))
executor.start()
data = [[{"x": i} for i in range(8)]]
try:
    for version in range(3000):
        executor.engine.version = version
        executor.prepare_batch(data, Echo())
        executor.set_version(version + 1)
except AReaLiteError as error:
    print("STOPPED", error, flush=True)
    executor.runner.stop()
    # Skip the shutdown of libraries, which may fail if nothing can be written.
    os._exit(3)
"""


def test_a_full_disk_stops_the_run_with_one_clear_message(tmp_path):
    script = tmp_path / "full.py"
    script.write_text(FULL_DISK)

    done = warm_python.run([script, tmp_path / "run.sqlite", ROOT], timeout=100)
    assert done.returncode == 3, done.stderr
    assert "STOPPED the ledger" in done.stdout and "Free space" in done.stdout


FEW_FILES = """
import asyncio, resource, sys
sys.path.insert(0, sys.argv[3])
from arealite.api.cli_args import GenerationHyperparameters, InferenceEngineConfig
from arealite.api.io_struct import ModelRequest
from arealite.core.waits import NamedWait
from arealite.engine.sglang_remote import RemoteSGLangEngine

resource.setrlimit(resource.RLIMIT_NOFILE, (128, 192))
count = int(sys.argv[2])
config = InferenceEngineConfig(setup_timeout_s=60.0, request_timeout_s=200.0, health_timeout_s=20.0)
engine = RemoteSGLangEngine(config)
engine.initialize([sys.argv[1]])

async def ask_all():
    gconfig = GenerationHyperparameters(max_new_tokens=3, ignore_eos=True)
    requests = [ModelRequest([5, 6, 7], gconfig, seed=i) for i in range(count)]
    return await asyncio.gather(*map(engine.agenerate, requests))

answers = engine.executor.run_coroutine(ask_all(), NamedWait("the test", "all answers", 200.0))
print("answered", sum(len(answer.output_tokens) == 3 for answer in answers))
print("failures", sum(server.num_failures for server in engine.router.servers.values()))
engine.destroy()
"""


@pytest.mark.slow
def test_more_requests_than_the_limit_on_open_files_allows_connections(model_path, tmp_path):
    script = tmp_path / "few.py"
    script.write_text(FEW_FILES)
    with server_process(model_path) as server:
        done = warm_python.run([script, server.address, "500", ROOT], timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "answered 500\nfailures 0" in done.stdout, done.stdout + done.stderr
    assert "Too many open files" not in done.stderr
    assert done.stdout.count("the limit on open files is 192. Raise the hard limit (ulimit -Hn)") == 1, done.stdout
