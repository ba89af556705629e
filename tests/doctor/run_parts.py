"""Parts of a small run for the injected cases: its processes, a real embedded server, a client of it, a network."""

import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

from arealite.api.cli_args import GenerationHyperparameters, InferenceEngineConfig, ServerConfig
from arealite.api.io_struct import ModelRequest
from arealite.api.workflow_api import RolloutWorkflow
from arealite.cli.server import run_server
from arealite.engine.sglang_remote import RemoteSGLangEngine
from arealite.utils.status.writer import RUN_ENV, status
from tests.doctor.slow_calls import FOREVER_S


class Workflow(RolloutWorkflow):
    """An episode that awaits `play(row)`."""

    def __init__(self, play: Any):
        self.play = play

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> None:
        await self.play(data)


class Generate(RolloutWorkflow):
    """An episode that asks a server for a long answer, and is never content with it."""

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> None:
        while True:
            gconfig = GenerationHyperparameters(max_new_tokens=400, ignore_eos=True)
            await engine.agenerate(ModelRequest([5, 6, 7], gconfig))


def child(run_dir: Path, name: str, role: str, body: Any) -> int:
    """Fork a process of the run, which sleeps after `body`; returns its pid once it has begun."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        if role == "trainer":
            os.environ |= {"RANK": name.removeprefix("rank"), "WORLD_SIZE": "2"}
        status.begin(run_dir, name, role)
        os.write(writer, b"!")
        body()
        time.sleep(FOREVER_S)
        os._exit(0)
    os.read(reader, 1)
    return pid


class Network:
    """Carries the bytes of all connections to an address. Once dead, it accepts connections and carries nothing."""

    def __init__(self, target: tuple[str, int]):
        self.target = target
        self.is_dead = threading.Event()
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.address = "{}:{}".format(*self._socket.getsockname())
        self._held: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            near, _ = self._socket.accept()
            self._held.append(near)
            if self.is_dead.is_set():
                continue
            try:
                far = socket.create_connection(self.target)
            except ConnectionRefusedError:
                # The server has not started yet.
                near.close()
                continue
            self._held.append(far)
            for pair in ((near, far), (far, near)):
                threading.Thread(target=self._carry, args=pair, daemon=True).start()

    def _carry(self, source: socket.socket, sink: socket.socket) -> None:
        while data := source.recv(1 << 16):
            if self.is_dead.is_set():
                return
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)


def start_server(
    run_dir: Path, model: str, port: int, before: Any = None, address: str | None = None
) -> tuple[int, str]:
    """Fork a real embedded server; returns its pid and the address under which others know it."""

    def serve() -> None:
        if before is not None:
            before()
        if address is not None:
            threading.Thread(target=announce, daemon=True).start()
        run_server(ServerConfig(model_path=model, device="cpu", dtype="float32", max_total_tokens=8192, port=port))

    def announce() -> None:
        while "address" not in status.facts:
            time.sleep(0.05)
        status.facts["address"] = address

    return child(run_dir, "server0", "server", serve), address or f"127.0.0.1:{port}"


def connect(run_dir: Path, address: str, **config: Any) -> RemoteSGLangEngine:
    """Begin rank 0 with a real client of a server."""
    os.environ[RUN_ENV] = str(run_dir)
    status.begin(run_dir, "rank0", "trainer")
    limits = dict.fromkeys(("batch_timeout_s", "request_timeout_s", "setup_timeout_s"), FOREVER_S)
    engine = RemoteSGLangEngine(InferenceEngineConfig(**limits, **config))
    engine.initialize([address], 4)
    return engine


def play(engine: RemoteSGLangEngine, count: int = 4) -> None:
    """Start episodes that generate, and a thread that waits for them; returns when the server has all."""
    for number in range(count):
        engine.submit({"x": number}, Generate())
    threading.Thread(target=engine.wait, args=(count,), daemon=True).start()
    while sum(info.get("running", 0) for info in engine.server_info()) < count:
        time.sleep(0.05)
