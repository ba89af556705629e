"""Runs one node's part of a job, for every launcher: starts its servers and ranks and watches both.

Nodes find each other through the name service: a node publishes the addresses of its servers when it starts them, and
the node of rank 0 publishes the rendezvous address. Ranks start when all names are there; they load their model while
the servers load theirs, and wait for the servers before the first request. A server that dies after it was healthy is
started again at a new address; any other failure ends the node. `python -m arealite.launcher.node JOB.json [NODE]`.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path

from arealite.api.backends import BACKENDS, Spread
from arealite.api.errors import AReaLiteError, ConfigError, ServerError
from arealite.launcher.job import SEE_NODE, STOP_NAME, Job, name_checkpoint
from arealite.launcher.placement import ServerPlacement, visible_gpus
from arealite.launcher.servers import halve_gpu_memory, health_problem, prepare_server, server_port, wait_for_running
from arealite.launcher.supervisor import INTERRUPTED, Child, ChildSpec, Interrupted, Supervisor
from arealite.utils.activity import activity
from arealite.utils.config import LOG_FILE_ENV, REFUSED, run_main
from arealite.utils.names import ELASTIC_PREFIX, FileNames, elastic_names, wait_for_names
from arealite.utils.network import free_port, host_address, is_free
from arealite.utils.process import SHARED_GPU_ENV, STORE_ENV, is_stopped
from arealite.utils.status.writer import status
from arealite.utils.text import clean

_STARTING_WAKE_S, _RUNNING_WAKE_S = 0.1, 1.0
_NUMBER = re.compile("-?[0-9]{1,9}")


class NodeFailure(AReaLiteError):
    """A rank of this node or another node failed; this node ends with `code`."""

    def __init__(self, message: str, code: int):
        super().__init__(message)
        self.code = code


def run_node(job: Job, node: int, make_part: Callable[..., NodePart] | None = None) -> int:
    """Run this node's part until it ends; returns the exit code. Leaves no process behind."""
    names = FileNames(job.names_folder)
    with (
        job.lock() if node == 0 else nullcontext() as lock,
        Supervisor(job.config.launcher.stop_timeout_s, lock) as supervisor,
    ):
        # Negative nodes are servers of a pool. They leave while the job goes on, and its shared memory stays.
        if node >= 0:
            supervisor.remove_at_end(job.run_dir.shared_weights)
        part = (make_part or NodePart)(job, node, names, supervisor)
        status.begin_launcher(job.run_dir.path, node, supervisor.describe_children)
        code = 0
        try:
            with activity.doing(part.describe_start):
                part.run()
        except Interrupted as interrupt:
            print(f"{interrupt}: ending {len(supervisor.children)} processes", file=sys.stderr)
            code = 128 + interrupt.number
        except AReaLiteError as error:
            print(clean(f"error: {error}"), file=sys.stderr, flush=True)
            status.note_error(error)
            code = error.code if isinstance(error, NodeFailure) else 1
        part.elastic.close()
        # The other nodes read this and end too.
        try:
            names.publish(f"ended/{node}", str(code))
        except OSError as error:
            print(clean(f"warning: cannot notify the other nodes: {error}"), file=sys.stderr, flush=True)
    # With the exit codes of all children.
    status.end(f"ended with code {code}")
    return code


class NodePart:
    """State of one node: its starting and running servers, and its ranks."""

    def __init__(self, job: Job, node: int, names: FileNames, supervisor: Supervisor):
        self.job, self.node, self.names, self.supervisor = job, node, names, supervisor
        self.config, self.placement, self.logs = job.config, job.placement(), job.run_dir.logs
        self.host = "127.0.0.1" if len(job.devices) == 1 else host_address()
        self.gpus = visible_gpus() if job.on_gpu else []
        # Servers that are not healthy yet: (child, address, deadline) by index.
        self.starting: dict[int, tuple[Child, str, float]] = {}
        self.servers: dict[int, Child] = {}
        self.addresses: list[str] = []
        # Processes of servers that span nodes and have their address on another node.
        self.spanning: list[Child] = []
        self.ranks: list[Child] = []
        # Exit codes of nodes that have ended. Kept here because names expire.
        self.ended: dict[int, int] = {}
        self.num_restarts = 0
        # Set by the first signal, here or at the launcher of the job. Ranks save a checkpoint then, until the deadline.
        self.interrupted: Interrupted | None = None
        self.save_deadline = math.inf
        # Whether the first servers have all been started, and whether all of them have been healthy.
        self.has_started_servers = self.is_up = False
        # Then the ranks of other nodes need the servers here for their last step.
        self.only_serves = node >= 0 and bool(self.placement.ranks) and not self.placement.ranks_on(node)
        self.began = time.monotonic()
        self.elastic = elastic_names(job.run_dir)
        self.mps: Child | None = None
        self.dashboard: Child | None = None
        self.mps_env: dict[str, str] = {}
        if self.placement.shares_gpus:
            self.config = halve_gpu_memory(self.config)

    def run(self) -> None:
        """Start servers and ranks, and return when the ranks of the job have ended."""
        if self.node == 0 and self.config.dashboard is not False:
            self.start_dashboard(self.config.dashboard)
        if self.placement.shares_gpus:
            self.start_mps()
        self.start_servers()
        backend = BACKENDS.get(self.placement.mode.gen_backend or "")
        # Where both would measure the free memory of one GPU, the server comes first.
        comes_first = self.placement.shares_gpus and backend is not None and backend.measures_free_memory
        while self.starting and comes_first:
            self.step()
        if not self.placement.ranks_on(self.node):
            return self.serve_until_ranks_end()
        self.start_ranks()
        while self.ranks:
            self.step()

    def start_servers(self) -> None:
        """Start the servers of this node, and say where they will answer."""
        for server in self.placement.servers_on(self.node):
            self.start_server(server)
        self.has_started_servers = True
        if self.starting:
            addresses = ", ".join(address for _, address, _ in self.starting.values())
            what = f"starting {len(self.starting)} {self.placement.mode.gen_backend} server(s)"
            print(f"{what}: {addresses} (logs: {self.logs}/server*.log)", flush=True)
            activity.note_output()

    def describe_start(self) -> str:
        """Say what the start of this node waits for; empty when rank 0 speaks for itself."""
        if self.starting and not self.is_up:
            child, address, _ = next(iter(self.starting.values()))
            what = f"waiting for {len(self.starting)} of {len(self.starting) + len(self.servers)} servers: {child.name}"
            return f"{what} at {address}{child.last_line()}"
        if any(child.spec.echo and not child.has_printed for child in self.ranks):
            return f"waiting for {self.ranks[0].name}, which imports its libraries"
        return ""

    def serve_until_ranks_end(self) -> None:
        """Keep the servers of a node without ranks running until all nodes with ranks have ended."""
        self.wait_for(["master"])
        while not self.ended.keys() >= {rank.node for rank in self.placement.ranks}:
            self.step()

    def step(self, wait_s: float = _RUNNING_WAKE_S) -> None:
        """Wait for an event and handle it. Raises if this node must end."""
        self.names.renew()
        self.elastic.renew()
        activity.tick()
        self.check_starting()
        for child in self._wait(_STARTING_WAKE_S if self.starting else wait_s):
            if child in self.ranks:
                self.ranks.remove(child)
                # After a signal others may still write their part of the checkpoint.
                if child.code and not self.interrupted:
                    code = child.code if child.code > 0 else 128 - child.code
                    # The launcher got no signal, so codes of an interrupt are an ordinary failure.
                    raise NodeFailure(child.describe_end(), 1 if code in INTERRUPTED else code)
            elif child is self.mps:
                print(f"warning: {child.describe_end()}; processes share the GPUs by time slices", flush=True)
            elif child is self.dashboard:
                print(f"warning: {child.describe_end()}; the run goes on without its dashboard", flush=True)
            else:
                self.handle_server_end(child)
        if self.interrupted and not self.only_serves and self.have_ranks_ended():
            raise self.interrupted
        self.check_other_nodes()

    def _wait(self, wait_s: float) -> list[Child]:
        """Wait for children that end; after the first signal only ranks are asked to."""
        try:
            return self.supervisor.wait(wait_s)
        except Interrupted as interrupt:
            self.interrupt_ranks(interrupt)
            self.supervisor.forgive_signal()
            return []

    def interrupt_ranks(self, interrupt: Interrupted) -> None:
        """Have the ranks save a checkpoint and end; raises without ranks, and if they were asked before."""
        status.mark(signal=signal.Signals(interrupt.number).name)
        if self.interrupted or not (self.ranks or self.only_serves) or interrupt.number == signal.SIGHUP:
            raise interrupt
        self.interrupted = interrupt
        self.save_deadline = time.monotonic() + self.config.launcher.save_timeout_s
        self.names.publish(STOP_NAME, str(int(interrupt.number)))
        # Slurm's own SIGTERM may have reached them, too: to them a second one is the same request.
        number = signal.SIGTERM if "SLURM_JOB_ID" in os.environ else signal.SIGINT
        for pid in self.rank_pids():
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def rank_pids(self) -> list[int]:
        return [child.process.pid for child in self.ranks]

    def have_ranks_ended(self) -> bool:
        """Whether ranks have ended, or are not waited for: one is stopped, or their time to save is over."""
        if (is_late := time.monotonic() > self.save_deadline) and self.ranks:
            print("warning: ranks still run after launcher.save_timeout_s: they are ended", file=sys.stderr, flush=True)
        return not self.ranks or is_late or any(map(is_stopped, self.rank_pids()))

    def check_other_nodes(self) -> None:
        """Record which nodes have ended; raises if a required one failed."""
        for name, code in self.names.list("ended/").items():
            # A damaged entry counts as a failure of its node.
            node = name.removeprefix("ended/")
            if _NUMBER.fullmatch(node):
                self.ended[int(node)] = int(code) if _NUMBER.fullmatch(code) else 1
        if self.interrupted is None and (number := self.names.get(STOP_NAME)) and _NUMBER.fullmatch(number):
            self.interrupt_ranks(Interrupted(int(number)))
        for node, code in self.ended.items():
            if self.interrupted and code in INTERRUPTED:
                # Ranks of this node, too, end by themselves: they may still write their part of the checkpoint.
                continue
            if code and self.is_required(node):
                raise NodeFailure(SEE_NODE.format(node), code)

    def is_required(self, node: int) -> bool:
        """Whether the job cannot go on without this node. Servers of a pool (negative nodes) are extra."""
        return node >= 0

    def wait_for(self, wanted: list[str]) -> dict[str, str]:
        """Wait until other nodes have published these names, while this node is watched as usual."""
        return wait_for_names(self.names, wanted, self.config.setup_timeout_s, f"node {self.node}", self.step)

    def start_mps(self) -> None:
        """Start NVIDIA's MPS daemon if installed: kernels of processes on one GPU then run concurrently."""
        command = shutil.which("nvidia-cuda-mps-control")
        # With the variable set, a daemon runs already.
        if command is None or "CUDA_MPS_PIPE_DIRECTORY" in os.environ:
            return
        # The path of a run directory may be too long for a socket.
        folder = tempfile.mkdtemp(prefix="arealite-mps-")
        self.supervisor.remove_at_end(Path(folder))
        self.mps_env = {f"CUDA_MPS_{kind}_DIRECTORY": folder for kind in ("PIPE", "LOG")}
        spec = ChildSpec("mps", [command, "-f"], self.logs / "mps.log", self.mps_env)
        self.mps = self.supervisor.start(spec)

    def start_dashboard(self, port: bool | int) -> None:
        """Show the run in a browser until it ends. The process prints its address."""
        command = [sys.executable, "-m", "arealite.cli.dashboard", str(self.job.run_dir.path)]
        command += [] if port is True else ["--port", str(port)]
        spec = ChildSpec("dashboard", command, self.logs / "dashboard.log", echo=True, cwd=Path(self.job.cwd))
        self.dashboard = self.supervisor.start(spec)

    def start_server(self, server: ServerPlacement) -> None:
        backend = self.placement.mode.gen_backend
        assert backend is not None
        place, devices = next((i, devices) for i, (node, devices) in enumerate(server.places) if node == self.node)
        threads = {"OMP_NUM_THREADS": str(self.placement.threads)}
        env = threads | prepare_server(self.config, backend) | self.mps_env
        if self.gpus and devices:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(self.gpus[d] for d in devices)
        port = free_port() if self.is_up else server_port(self.config, server.index)
        spread = self.meet_spread(server, place) if len(server.places) > 1 else None
        command = BACKENDS[backend].command(self.config, port, spread, server.index)
        name = f"server{server.index}" + (f".{place}" if place else "")
        spec = ChildSpec(name, command, self.logs / f"{name}.log", env, cwd=Path(self.job.cwd))
        child = self.supervisor.start(replace(spec, secret=self.config.server.api_key))
        if place:
            self.spanning.append(child)
        else:
            listens_on = self.config.server.host
            host = self.host if listens_on in ("0.0.0.0", "::") else listens_on
            deadline = time.monotonic() + self.config.setup_timeout_s
            self.starting[server.index] = (child, f"{host}:{port}", deadline)
            if not self.is_up:
                # Ranks start at once and wait for it. One that joins a running job is published when it is healthy.
                self.names.publish(f"servers/{server.index}", f"{host}:{port}")

    def meet_spread(self, server: ServerPlacement, place: int) -> Spread:
        """Agree with the other nodes of a server on the address of its first node."""
        name = f"server-rendezvous/{server.index}"
        if place == 0:
            self.names.publish(name, f"{self.host}:{free_port(self.host)}")
        return Spread(len(server.places), place, self.wait_for([name])[name])

    def check_starting(self) -> None:
        """Find servers that have become healthy; raises if one has passed its deadline."""
        for index, (child, address, deadline) in list(self.starting.items()):
            if health_problem(address, self.config.server.api_key) is None:
                child.hide_secret()
                del self.starting[index]
                self.servers[index] = child
                self.addresses.append(address)
                # A server that joins a running job is found by its lease.
                if self.is_up:
                    self.names.publish(f"servers/{index}", address)
                    self.elastic.publish(ELASTIC_PREFIX + address, address)
            elif time.monotonic() > deadline:
                raise ServerError(
                    f"node {self.node} waited {self.config.setup_timeout_s:.0f} s (rollout.setup_timeout_s) for "
                    f"{child.name} to answer http://{address}/health; the last lines of {child.spec.log_path}:\n"
                    f"{child.last_lines()}"
                )
        if self.has_started_servers and not self.starting and not self.is_up:
            self.is_up = True
            if self.servers:
                what = f"{len(self.servers)} {self.placement.mode.gen_backend} server(s) ready"
                print(f"{what} in {time.monotonic() - self.began:.1f} s: {', '.join(self.addresses)}", flush=True)

    def handle_server_end(self, child: Child) -> None:
        """Start a dead server again at a new address: at the old one clients expect its former weights.

        A server that refuses its configuration or its model would do so again: the job ends.
        """
        if child.code == REFUSED:
            raise NodeFailure(f"{child.name} cannot start: {child.error_message()}", REFUSED)
        if child in self.spanning or not self.is_up:
            raise ServerError(f"a server died while it was starting: {child.describe_end()}")
        running = {i: c for i, (c, _, _) in self.starting.items()} | self.servers
        index = next(i for i, c in running.items() if c is child)
        self.starting.pop(index, None)
        if self.servers.pop(index, None):
            address = self.names.get(f"servers/{index}")
            self.names.withdraw(f"servers/{index}")
            self.elastic.withdraw(f"{ELASTIC_PREFIX}{address}")
        self.num_restarts += 1
        if self.num_restarts > (allowed := self.config.launcher.server_restarts):
            raise ServerError(
                f"servers died {self.num_restarts} times (launcher.server_restarts={allowed}): {child.describe_end()}"
            )
        print(f"warning: {child.describe_end()}\nstarting server {index} again", flush=True)
        self.start_server(self.placement.servers[index])

    def start_ranks(self) -> None:
        """Start this node's ranks when the addresses of all servers and of the rendezvous are known."""
        servers, master = self.meet_servers()
        mine, meeting = self.placement.ranks_on(self.node), dict[str, str]()
        if len(self.job.devices) == 1:
            # Every user can connect to a port; only this one can enter the folder.
            meeting[STORE_ENV] = tempfile.mkdtemp(prefix="arealite-store-")
            self.supervisor.remove_at_end(Path(meeting[STORE_ENV]))
            if not self.config.server_addrs and self.config.weight_update != "broadcast":
                # Servers on other machines may join a broadcast.
                meeting["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
        for rank in mine:
            env = self.rank_env(servers, master, len(mine)) | meeting
            log_path = self.logs / f"rank{rank.rank}.log"
            env |= {"RANK": str(rank.rank), "LOCAL_RANK": str(rank.local_rank), LOG_FILE_ENV: str(log_path)}
            spec = ChildSpec(log_path.stem, self.job.command(), log_path, env, cwd=Path(self.job.cwd))
            if rank.rank == 0:
                spec = replace(spec, echo=True, terminal=sys.stdout.isatty())
            self.ranks.append(self.supervisor.start(spec))

    def meet_servers(self) -> tuple[list[str], str]:
        """Wait for and return (addresses of all servers, rendezvous address of the ranks)."""
        has_rank_0 = self.placement.ranks_on(self.node)[0].rank == 0
        addresses = list(self.placement.external_servers)
        if has_rank_0:
            wait_for_running(addresses, self.config.server.api_key, self.config.setup_timeout_s, self.step)
            port = self.config.launcher.trainer_port or free_port(self.host)
            if not is_free(port, self.host):
                raise ServerError(f"launcher.trainer_port={port} is taken: set another, or 0 for a free one")
            self.names.publish("master", f"{self.host}:{port}")
        published = self.wait_for([f"servers/{server.index}" for server in self.placement.servers])
        return addresses or list(published.values()), self.wait_for(["master"])["master"]

    def rank_env(self, servers: list[str], master: str, local_world_size: int) -> dict[str, str]:
        env = self.job.rank_env(servers, master, local_world_size) | self.mps_env
        if self.placement.shares_gpus:
            # Below the servers on the same GPU: their kernels are short, and the trainer waits for their samples.
            env |= {SHARED_GPU_ENV: "1"} | ({"CUDA_MPS_CLIENT_PRIORITY": "1"} if self.mps_env else {})
        devices = [rank.device for rank in self.placement.ranks_on(self.node) if rank.device is not None]
        if self.gpus and devices:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(self.gpus[d] for d in devices)
        return env


def main(argv: list[str]) -> int:
    if not argv:
        raise ConfigError("usage: python -m arealite.launcher.node JOB.json [NODE]")
    node = argv[1] if len(argv) > 1 else os.environ.get("SLURM_NODEID", "0")
    job = Job.load(argv[0])
    # A requeued Slurm job runs the same command again: that is a later attempt.
    attempt = job.attempt + int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    code = run_node(replace(job, attempt=attempt), int(node))
    if int(node) == 0:
        name_checkpoint(job, code)
    return code


if __name__ == "__main__":
    run_main(main)
