"""One node's part of a job: its servers, its trainer ranks, and the watch over both. Every launcher runs this on every node.

Nodes find each other through the name service: servers publish their addresses when they are healthy, the node of rank 0 the rendezvous; ranks
start when all is there. A server that dies is started again under a new address; any other failure ends the node with a code that is not 0.
Also a command: `python -m arealite.launcher.node JOB.json [NODE]`, NODE from SLURM_NODEID by default.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from arealite.api.errors import AReaLiteError, ConfigError, ServerError
from arealite.launcher.job import Job
from arealite.launcher.placement import ServerPlacement, visible_gpus
from arealite.launcher.servers import is_healthy, server_command, server_env, server_port, sharing_gpus
from arealite.launcher.supervisor import INTERRUPTED, Child, ChildSpec, Interrupted, Supervisor
from arealite.utils.config import run_main
from arealite.utils.controller_mode import CONTROLLER_ENV
from arealite.utils.names import ELASTIC_PREFIX, FileNames, elastic_names, wait_for_names
from arealite.utils.network import free_port, host_address, is_free

_STARTING_WAKE_S, _RUNNING_WAKE_S = 0.1, 1.0


class Failed(AReaLiteError):
    """A rank of this node or another node failed; this one ends with `code`."""

    def __init__(self, message: str, code: int):
        super().__init__(message)
        self.code = code


def run_node(job: Job, node: int, make_part: Callable[..., NodePart] | None = None) -> int:
    """Run this node's part to its end; returns the exit code. Leaves no process behind."""
    names = FileNames(job.names_folder)
    with (
        job.held() if node == 0 else nullcontext() as lock,
        Supervisor(job.config.launcher.stop_timeout_s, lock) as supervisor,
    ):
        if node >= 0:  # a server of a pool leaves while the job goes on
            supervisor.remove_at_end(job.run_dir.shared_weights)
        part = (make_part or NodePart)(job, node, names, supervisor)
        code = 0
        try:
            part.run()
        except Interrupted as interrupt:
            print(f"{interrupt}: ending {len(supervisor.children)} processes", file=sys.stderr)
            code = 128 + interrupt.number
        except AReaLiteError as error:
            print(f"error: {error}", file=sys.stderr, flush=True)
            code = error.code if isinstance(error, Failed) else 1
        part.elastic.close()
        try:  # the other nodes learn of it, and end too
            names.publish(f"ended/{node}", str(code))
        except OSError as error:
            print(f"warning: other nodes cannot be told: {error}", file=sys.stderr, flush=True)
    return code


class NodePart:
    """State of one node: which servers start, which run, which ranks are left."""

    def __init__(self, job: Job, node: int, names: FileNames, supervisor: Supervisor):
        self.job, self.node, self.names, self.supervisor = job, node, names, supervisor
        self.config, self.placement, self.logs = job.config, job.placement(), job.run_dir.logs
        self.host = "127.0.0.1" if len(job.devices) == 1 else host_address()
        self.gpus = visible_gpus() if job.on_gpu else []
        self.starting: dict[int, tuple[Child, str, float]] = {}
        self.servers: dict[int, Child] = {}
        self.addresses: list[str] = []
        self.followers: list[Child] = []
        self.ranks: list[Child] = []
        self.ended: dict[int, int] = {}
        self.num_restarts = 0
        self.is_up = False
        self.elastic = elastic_names(job.run_dir)
        self.mps: Child | None = None
        self.mps_env: dict[str, str] = {}
        if self.placement.shares_gpus:
            self.config = sharing_gpus(self.config)

    def run(self) -> None:
        began = time.monotonic()
        if self.placement.shares_gpus:
            self.start_mps()
        for server in self.placement.servers_on(self.node):
            self.start_server(server)
        while self.starting:
            self.turn()
        self.is_up = True
        if self.servers:
            took_s = time.monotonic() - began
            what = f"{len(self.servers)} {self.placement.mode.gen_backend} server(s)"
            print(f"{what} ready in {took_s:.1f} s: {', '.join(self.addresses)}", flush=True)
        if not self.placement.ranks_on(self.node):
            return self.serve_until_ranks_end()
        self.start_ranks()
        while self.ranks:
            self.turn()

    def serve_until_ranks_end(self) -> None:
        """A node without ranks goes on as long as any node with ranks does."""
        self.wait_for(["master"])
        while not self.ended.keys() >= {rank.node for rank in self.placement.ranks}:
            self.turn()

    def turn(self, wait_s: float = _RUNNING_WAKE_S) -> None:
        """Sleep until something happens, and see to it. What ends this node is raised: a signal, a failure here or elsewhere."""
        self.names.renew()
        self.elastic.renew()
        self.publish_healthy()
        for child in self.supervisor.wait(_STARTING_WAKE_S if self.starting else wait_s):
            if child in self.ranks:
                self.ranks.remove(child)
                if child.code:
                    code = child.code if child.code > 0 else 128 - child.code
                    # Nobody asked the launcher to end: a failure as any other.
                    raise Failed(child.describe_end(), 1 if code in INTERRUPTED else code)
            elif child is self.mps:
                print(f"warning: {child.describe_end()}; GPUs are used in turns", flush=True)
            else:
                self.server_ended(child)
        self.check_others()

    def check_others(self) -> None:
        """Note who has ended, for names lapse, and end with whoever failed."""
        for name, code in self.names.list("ended/").items():
            self.ended[int(name.removeprefix("ended/"))] = int(code)
        for node, code in self.ended.items():
            if code and self.needs(node):
                raise Failed(f"node {node} failed; see its log", code)

    def needs(self, node: int) -> bool:
        """Whether the job cannot go on without it; servers of a pool, below 0, are extra."""
        return node >= 0

    def wait_for(self, wanted: list[str]) -> dict[str, str]:
        """What other nodes publish under these names; meanwhile this one is watched as ever."""
        timeout_s, who = self.config.setup_timeout_s, f"node {self.node}"
        return wait_for_names(self.names, wanted, timeout_s, who, self.turn)

    # -------------------------------------------------------------------------------------------- servers

    def start_mps(self) -> None:
        """NVIDIA's MPS, where it is installed: kernels of processes that share a GPU then run at the same time instead of in turns."""
        command = shutil.which("nvidia-cuda-mps-control")
        if command is None or "CUDA_MPS_PIPE_DIRECTORY" in os.environ:  # or it runs already
            return
        folder = tempfile.mkdtemp(prefix="arealite-mps-")  # a run directory's path may be too long for a socket
        self.supervisor.remove_at_end(Path(folder))
        self.mps_env = {f"CUDA_MPS_{kind}_DIRECTORY": folder for kind in ("PIPE", "LOG")}
        spec = ChildSpec("mps", [command, "-f"], self.logs / "mps.log", self.mps_env)
        self.mps = self.supervisor.start(spec)

    def start_server(self, server: ServerPlacement) -> None:
        backend = self.placement.mode.gen_backend
        assert backend is not None
        place = [node for node, _ in server.places].index(self.node)
        devices = server.places[place][1]
        env = {"OMP_NUM_THREADS": str(self.placement.threads), **server_env(self.config, backend)}
        env |= self.mps_env
        if self.gpus and devices:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(self.gpus[d] for d in devices)
        port = free_port() if self.is_up else server_port(self.config, server.index)
        spread = self.rendezvous(server, place) if len(server.places) > 1 else None
        command = server_command(self.config, backend, port, spread, server.index)
        name = f"server{server.index}" + (f".{place}" if place else "")
        spec = ChildSpec(name, command, self.logs / f"{name}.log", env, cwd=Path(self.job.cwd))
        child = self.supervisor.start(spec)
        if place:
            self.followers.append(child)
        else:
            listens_on = self.config.server.host
            host = self.host if listens_on in ("0.0.0.0", "::") else listens_on
            deadline = time.monotonic() + self.config.setup_timeout_s
            self.starting[server.index] = (child, f"{host}:{port}", deadline)

    def rendezvous(self, server: ServerPlacement, place: int) -> tuple[int, int, str]:
        """(number of nodes, which of them, address of the first) for a server that spans nodes."""
        name = f"server-rendezvous/{server.index}"
        if place == 0:
            self.names.publish(name, f"{self.host}:{free_port(self.host)}")
        return len(server.places), place, self.wait_for([name])[name]

    def publish_healthy(self) -> None:
        """Servers that have come up get their name; one that is late is an error."""
        for index, (child, address, deadline) in list(self.starting.items()):
            if is_healthy(address, self.config.server.api_key):
                del self.starting[index]
                self.servers[index] = child
                self.addresses.append(address)
                self.names.publish(f"servers/{index}", address)
                if self.is_up:  # the running job learns of it by its lease
                    self.elastic.publish(ELASTIC_PREFIX + address, address)
            elif time.monotonic() > deadline:
                raise ServerError(
                    f"node {self.node} waited {self.config.setup_timeout_s:.0f} s (rollout.setup_timeout_s) for {child.name} to answer "
                    f"http://{address}/health; the last lines of {child.spec.log_path}:\n{child.last_lines()}"
                )

    def server_ended(self, child: Child) -> None:
        """Start a server that died again, at a new address: at the old one clients would take it for what it was."""
        if child in self.followers or not self.is_up:
            raise ServerError(f"a server died while it was starting: {child.describe_end()}")
        running = {i: c for i, (c, _, _) in self.starting.items()} | self.servers
        index = next(i for i, c in running.items() if c is child)
        self.starting.pop(index, None)
        if self.servers.pop(index, None):
            address = self.names.get(f"servers/{index}")
            self.names.withdraw(f"servers/{index}")
            self.elastic.withdraw(f"{ELASTIC_PREFIX}{address}")
        self.num_restarts += 1
        allowed = self.config.launcher.server_restarts
        if self.num_restarts > allowed:
            raise ServerError(
                f"servers died {self.num_restarts} times (launcher.server_restarts={allowed}): {child.describe_end()}"
            )
        print(f"warning: {child.describe_end()}\nstarting server {index} again", flush=True)
        self.start_server(self.placement.servers[index])

    # ---------------------------------------------------------------------------------------------- ranks

    def start_ranks(self) -> None:
        """When every server of the job has a name, and rank 0's node has said where the ranks meet."""
        servers, master = self.meet_servers()
        mine = self.placement.ranks_on(self.node)
        for rank in mine:
            env = self.rank_env(servers, master, len(mine))
            env |= {"RANK": str(rank.rank), "LOCAL_RANK": str(rank.local_rank)}
            self.ranks.append(self.supervisor.start(self.rank_spec(rank.rank, env)))

    def meet_servers(self) -> tuple[list[str], str]:
        """(addresses of all servers, where the ranks meet), once they are known."""
        if self.placement.ranks_on(self.node)[0].rank == 0:
            self.names.publish("master", f"{self.host}:{self.trainer_port()}")
        servers = self.wait_for([f"servers/{server.index}" for server in self.placement.servers])
        return list(servers.values()), self.wait_for(["master"])["master"]

    def trainer_port(self) -> int:
        port = self.config.launcher.trainer_port or free_port(self.host)
        if is_free(port, self.host):
            return port
        raise ServerError(f"launcher.trainer_port={port} is taken: set another, or 0 for a free one")

    def rank_env(self, servers: list[str], master: str, local_world_size: int) -> dict[str, str]:
        host, port = master.rsplit(":", 1)
        env = {
            "WORLD_SIZE": str(len(self.placement.ranks)),
            "LOCAL_WORLD_SIZE": str(local_world_size),
            "MASTER_ADDR": host,
            "MASTER_PORT": port,
            "AREALITE_SERVER_ADDRS": ",".join(servers),
            "AREALITE_NAMES": str(self.job.names_folder),
            "AREALITE_ATTEMPT": str(self.job.attempt),
            "OMP_NUM_THREADS": str(self.placement.threads),
            "PYTHONUNBUFFERED": "1",
            **self.mps_env,
        }
        if self.config.server.api_key:
            env["AREALITE_API_KEY"] = self.config.server.api_key
        if self.placement.engines:
            env |= {CONTROLLER_ENV: str(self.job.path), "CUDA_VISIBLE_DEVICES": ""}
        ranks = self.placement.ranks_on(self.node)
        devices = [rank.device for rank in ranks if rank.device is not None]
        if self.gpus and devices:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(self.gpus[d] for d in devices)
        return env

    def rank_spec(self, rank: int, env: dict[str, str]) -> ChildSpec:
        log_path = self.logs / f"rank{rank}.log"
        env = {**env, "AREALITE_LOG_FILE": str(log_path)}
        spec = ChildSpec(f"rank{rank}", self.job.command(), log_path, env, cwd=Path(self.job.cwd))
        return replace(spec, echo=True, terminal=sys.stdout.isatty()) if rank == 0 else spec


def main(argv: list[str]) -> int:
    if not argv:
        raise ConfigError("usage: python -m arealite.launcher.node JOB.json [NODE]")
    node = argv[1] if len(argv) > 1 else os.environ.get("SLURM_NODEID", "0")
    job = Job.load(argv[0])
    # A requeued Slurm job runs the same command again: a later attempt.
    attempt = job.attempt + int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    return run_node(replace(job, attempt=attempt), int(node))


if __name__ == "__main__":
    run_main(main)
