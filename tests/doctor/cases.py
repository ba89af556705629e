"""Twenty ways in which a run hangs or is slow, each with real processes: `python -m tests.doctor.cases NAME RUN_DIR`.

A case starts the processes of a small run that fails in one way, makes the file RUN_DIR.ready once it does, and stays
so until it is killed. `EXPECTED` names what the doctor must find. `full_disk` needs a small disk of its own: it mounts
one in a namespace (`NAMESPACE`), which ends with the case.
"""

import asyncio
import ctypes
import errno
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from arealite.api.cli_args import InferenceEngineConfig, ServerConfig
from arealite.api.io_struct import WeightUpdateMeta
from arealite.engine.remote.collecting import CollectingEngine
from arealite.inference.engine import Engine
from arealite.inference.sequence import Request, SamplingParams
from arealite.inference.weights import ServedWeights
from arealite.reward.pool import RewardPool
from arealite.utils import distributed
from arealite.utils.network import free_port
from arealite.utils.pools.call_pool import CallPool
from arealite.utils.pools.process_pool import never_import_script, start_fork_server
from arealite.utils.status.writer import FOLDER, RUN_ENV, status
from arealite.utils.trace.tracing import part_of_episode
from tests.doctor.run_parts import Network, Workflow, child, connect, play, start_server
from tests.doctor.slow_calls import FOREVER_S, forever, hanging_score, slow_score

EXPECTED = {
    "collective": "collective_deadlock",
    "stuck_reward": "reward_stuck",
    "full_disk": "disk_full",
    "dead_network": "network_dead",
    "slow_server": "server_slow",
    "blocked_loop": "loop_blocked",
    "gil": "gil_held",
    "memory": "memory_pressure",
    "version_skew": "version_skew",
    "stopped_rank": "process_stopped",
    "dead_server": "server_dead",
    "stuck_tool": "tool_stuck",
    "stuck_agent": "agent_stuck",
    "slow_reward": "reward_slow",
    "weight_update": "weight_update_stuck",
    "nothing_admitted": "nothing_admitted",
    "kv_full": "kv_full",
    "killed_worker": "worker_dead",
    "late_files": "status_lag",
    "stopped_launcher": "launcher_stopped",
}


# Cases that run in namespaces of their own, and the command that starts a process there: `enter` for the doctor.
OWN_NAMESPACE = ("full_disk",)
NAMESPACE = ("unshare", "--user", "--map-root-user", "--mount")


def enter(pid: int) -> list[str]:
    """Return the command that runs another one in the namespaces of a process."""
    return ["nsenter", f"--target={pid}", "--user", "--mount", "--preserve-credentials"]


class StubRollout(CollectingEngine):
    """A rollout engine without servers: episodes do everything themselves."""

    async def ask(self, progress: Any, count: int) -> Any:
        raise AssertionError("these episodes ask nobody")

    def update_weights(self, meta: Any) -> None: ...

    def initialize(self, *args: Any) -> None: ...


def rollout(run_dir: Path, play: Any, count: int = 4, **config: Any) -> StubRollout:
    """Begin rank 0 with an executor whose episodes await `play`, and a thread that waits for the batch."""
    os.environ[RUN_ENV] = str(run_dir)
    status.begin(run_dir, "rank0", "trainer")
    engine = StubRollout(InferenceEngineConfig(batch_timeout_s=FOREVER_S, **config))
    engine.start_executor(count)
    for number in range(count):
        engine.submit({"x": number}, Workflow(play))
    threading.Thread(target=engine.wait, args=(count,), daemon=True).start()
    return engine


def prepare_workers(run_dir: Path) -> None:
    """Start what forks workers, without this script, which imports torch."""
    os.environ[RUN_ENV] = str(run_dir)
    never_import_script()
    start_fork_server("tests.doctor.slow_calls")


def engine(model: str, **settings: Any) -> Engine:
    torch.set_num_threads(1)
    made = Engine(ServerConfig(model_path=model, device="cpu", dtype="float32", **settings)).start()
    status.add("engine", made.status)
    return made


def requests(server: Engine, count: int, tokens: int) -> list[Future]:
    params = SamplingParams(max_new_tokens=tokens, ignore_eos=True)
    return [server.submit(Request([5 + i, 6, 7], params)) for i in range(count)]


async def forever_async(_: Any = None) -> None:
    await asyncio.sleep(FOREVER_S)


# ------------------------------------------------------------------------------------------------------- cases


def collective(run_dir: Path, model: str) -> None:
    store = str(run_dir / "store")

    def rank(number: int) -> None:
        dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=number, world_size=2)
        if number == 0:
            distributed.barrier()
        else:
            distributed.broadcast_json({"x": 1}, src=1)
            distributed.all_gather_rows(torch.zeros(3))

    child(run_dir, "rank1", "trainer", lambda: rank(1))
    os.environ |= {"RANK": "0", "WORLD_SIZE": "2"}
    status.begin(run_dir, "rank0", "trainer")
    threading.Thread(target=rank, args=(0,), daemon=True).start()


def stuck_reward(run_dir: Path, model: str) -> None:
    prepare_workers(run_dir)
    pool = RewardPool(num_workers=1, timeout_s=FOREVER_S)
    rollout(run_dir, lambda row: pool.run(hanging_score, [row]))


def slow_reward(run_dir: Path, model: str) -> None:
    prepare_workers(run_dir)
    pool = RewardPool(num_workers=1, timeout_s=FOREVER_S, max_workers=1)

    async def play(row: dict[str, Any]) -> None:
        await pool.run(slow_score, [row])
        raise RuntimeError("not good enough: another one")

    made = rollout(run_dir, play, count=4, max_failed_episodes=100_000)

    def refill() -> None:
        while True:
            made.submit({"x": 0}, Workflow(play))
            time.sleep(0.3)

    threading.Thread(target=refill, daemon=True).start()


def full_disk(run_dir: Path, model: str) -> None:
    """Fill a disk of 64 MiB while a process of the run writes its status there."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(run_dir)], check=True)
    status.begin(run_dir, "rank0", "trainer")
    try:
        with open(run_dir / "checkpoint", "wb", buffering=0) as file:
            while True:
                file.write(b"\0" * (1 << 16))
    except OSError as error:
        assert error.errno == errno.ENOSPC, error
    while not status.snapshot()["problem"]:
        time.sleep(0.05)


def slow_server(run_dir: Path, model: str) -> None:
    def serve(delay_s: float) -> None:
        server = engine(model, max_total_tokens=65536)
        step = server.core.step
        server.core.step = lambda: (time.sleep(delay_s), step())  # type: ignore[method-assign]

        def load() -> None:
            while True:
                for future in requests(server, 2, 400):
                    future.result()

        threading.Thread(target=load, daemon=True).start()

    for number, delay_s in enumerate((0.01, 0.01, 0.7)):
        child(run_dir, f"server{number}", "server", lambda delay_s=delay_s: serve(delay_s))
    rollout(run_dir, forever_async, count=1, episode_timeout_s=FOREVER_S).destroy()


def blocked_loop(run_dir: Path, model: str) -> None:
    async def play(row: dict[str, Any]) -> None:
        await asyncio.sleep(0.5)
        forever()

    rollout(run_dir, play)


def gil(run_dir: Path, model: str) -> None:
    status.begin(run_dir, "rank0", "trainer")
    # Catastrophic backtracking of a regular expression, as in a careless reward.
    threading.Timer(1.5, lambda: re.match("(a+)+$", "a" * 60 + "b")).start()


def memory(run_dir: Path, model: str) -> None:
    status.begin(run_dir, "rank0", "trainer")
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = int(pages * resource.getpagesize() * 1.01)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def version_skew(run_dir: Path, model: str) -> None:
    def serve() -> None:
        status.facts["address"] = "127.0.0.1:1"
        engine(model, max_total_tokens=512)

    child(run_dir, "server0", "server", serve)
    made = rollout(run_dir, forever_async)
    made.set_version(3)


def stopped_rank(run_dir: Path, model: str) -> None:
    def meet(number: int) -> None:
        store = dist.FileStore(str(run_dir / "store"), 2)
        dist.init_process_group("gloo", store=store, rank=number, world_size=2)
        while True:
            distributed.barrier()
            (run_dir / f"met{number}").touch()
            time.sleep(0.02)

    pid = child(run_dir, "rank1", "trainer", lambda: meet(1))
    os.environ |= {"RANK": "0", "WORLD_SIZE": "2"}
    status.begin(run_dir, "rank0", "trainer")
    threading.Thread(target=meet, args=(0,), daemon=True).start()
    while not (run_dir / "met1").exists():
        time.sleep(0.02)
    os.kill(pid, signal.SIGSTOP)


def stuck_tool(run_dir: Path, model: str) -> None:
    prepare_workers(run_dir)
    pool = CallPool(2)

    async def play(row: dict[str, Any]) -> None:
        with part_of_episode("tool", tool="browser"):
            await pool.run(forever, timeout_s=FOREVER_S)

    rollout(run_dir, play)


def stuck_agent(run_dir: Path, model: str) -> None:
    async def think(row: dict[str, Any]) -> None:
        await asyncio.Event().wait()

    rollout(run_dir, think)


def nothing_admitted(run_dir: Path, model: str) -> None:
    made = StubRollout(InferenceEngineConfig(batch_timeout_s=FOREVER_S))
    status.begin(run_dir, "rank0", "trainer")
    made.start_executor(4)
    made.pause()
    made.submit({"x": 1}, Workflow(forever_async))
    threading.Thread(target=made.wait, args=(4,), daemon=True).start()


def kv_full(run_dir: Path, model: str) -> None:
    def serve() -> None:
        server = engine(model, max_total_tokens=512, block_size=16, context_length=500)
        step = server.core.step
        server.core.step = lambda: (time.sleep(0.02), step())  # type: ignore[method-assign]

        def load() -> None:
            open_requests: list[Future] = []
            while True:
                open_requests += requests(server, 8, 450)
                while len(open_requests) > 4:
                    time.sleep(0.05)
                    open_requests = [future for future in open_requests if not future.done()]

        threading.Thread(target=load, daemon=True).start()

    child(run_dir, "server0", "server", serve)
    status.begin(run_dir, "rank0", "trainer")


def late_files(run_dir: Path, model: str) -> None:
    """Write the status to a folder that does not answer: opening a pipe that nobody reads does not return."""
    status.begin(run_dir, "rank0", "trainer")
    os.mkfifo(run_dir / FOLDER / f".rank0.json.{os.getpid()}")


def dead_network(run_dir: Path, model: str) -> None:
    port = free_port()
    network = Network(("127.0.0.1", port))
    _, address = start_server(run_dir, model, port, address=network.address)
    play(connect(run_dir, address))
    network.is_dead.set()


def dead_server(run_dir: Path, model: str) -> None:
    pid, address = start_server(run_dir, model, free_port())
    play(connect(run_dir, address))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def weight_update(run_dir: Path, model: str) -> None:
    def hang() -> None:
        # As if the file system of the weights hung.
        ServedWeights.stage = lambda *args, **options: forever()  # type: ignore[method-assign,assignment]

    _, address = start_server(run_dir, model, free_port(), before=hang)
    made = connect(run_dir, address)
    meta = WeightUpdateMeta("disk", model, 4)
    threading.Thread(target=made.update_weights, args=(meta,), daemon=True).start()


def killed_worker(run_dir: Path, model: str) -> None:
    _, address = start_server(run_dir, model, free_port())
    made = connect(run_dir, address, num_workers=1)
    pool = made.executor.runner.pool
    assert pool is not None
    pid = pool._workers[0].process.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


def stopped_launcher(run_dir: Path, model: str) -> None:
    script = run_dir / "script.py"
    script.write_text(f"import time\ntime.sleep({FOREVER_S})\n")
    folder = run_dir.parent
    names = [f"cluster.fileroot={folder.parent}", f"experiment_name={folder.name}", f"trial_name={run_dir.name}"]
    command = [sys.executable, "-m", "arealite.launcher.local", str(script), *names, "allocation_mode=d1"]
    launcher = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while not (run_dir / FOLDER / "node0.json").exists():
        assert launcher.poll() is None, "the launcher has ended"
        time.sleep(0.05)
    launcher.send_signal(signal.SIGSTOP)


if __name__ == "__main__":
    # Whatever the case started ends with this process.
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    globals()[sys.argv[1]](Path(sys.argv[2]), sys.argv[3])
    ready = Path(sys.argv[2]).with_suffix(".ready")
    aside = ready.with_suffix(".aside")
    aside.write_text(str(os.getpid()))
    aside.replace(ready)
    time.sleep(FOREVER_S)
