"""Runs a job with torchrun.

    python -m arealite.launcher.torchrun SCRIPT.py --config FILE.yaml key=value… [--dry-run]

Like the local launcher, but torchrun owns the trainer ranks: if one dies, torchrun restarts all of them inside the
running job (up to `recover.retries` times, from the recover checkpoint) while the servers stay up. On several
machines, run the same command on each; they meet through the shared run directory and are numbered in the order of
their arrival. With `cluster.min_nodes`, any machine but the first may join or leave at any time: the ranks then restart
from the recover checkpoint, as many as there are.
"""

import os
import shutil
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from arealite.api.errors import ConfigError
from arealite.launcher.checks import check_job
from arealite.launcher.job import Job, name_checkpoint
from arealite.launcher.launch_config import read_launch_config
from arealite.launcher.local import command_line, show_plan
from arealite.launcher.node import NodeFailure, NodePart, run_node
from arealite.launcher.placement import cluster_slots, local_slots
from arealite.launcher.supervisor import ChildSpec
from arealite.utils.config import run_main
from arealite.utils.names import FileNames, wait_for_names

MEETING_TTL_S = 15.0
# Notice within seconds that a machine has joined or gone.
_QUICK_RENDEZVOUS = ",last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3"
# torchrun sets these itself.
_TORCHRUN_ENV = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def launch(script: str | Path, argv: list[str], dry_run: bool = False) -> int:
    """Run this machine's part of `script`; returns the exit code."""
    config = read_launch_config(str(script), argv)
    nodes = config.cluster.n_nodes or 1
    slots = local_slots if nodes == 1 else cluster_slots
    job = Job(config, str(script), argv, *slots(config))
    if dry_run:
        _check_elastic(job)
        return show_plan(job, servers_run_here=True)
    check_job(job, servers_run_here=True)
    _check_elastic(job)
    job.announce()
    if nodes == 1:
        job.save()
        try:
            code = run_node(job, 0, TorchrunPart)
            name_checkpoint(job, code)
            return code
        finally:
            shutil.rmtree(job.names_folder, ignore_errors=True)
    names = FileNames(job.run_dir.names, MEETING_TTL_S)
    try:
        job, node = _meet(job, names)
        code = run_node(job, node, partial(TorchrunPart, meeting=names))
        name_checkpoint(job, code)
        return code
    finally:
        names.close()


def _check_elastic(job: Job) -> None:
    config, placement = job.config, job.placement()
    min_nodes = config.cluster.min_nodes or len(job.devices)
    if min_nodes == len(job.devices):
        return
    if config.recover.retries == 0:
        raise ConfigError(
            f"cluster.min_nodes={min_nodes} restarts ranks when machines come and go: "
            "set recover.mode=auto and recover.retries"
        )
    leaving = [s.index for s in placement.servers if any(node >= min_nodes for node, _ in s.places)]
    if leaving or not placement.ranks_on(0):
        raise ConfigError(
            f"cluster.min_nodes={min_nodes}, but servers {leaving} would be on machines that may leave, or the first "
            "has no rank: lower the generating side of allocation_mode, or raise cluster.min_nodes"
        )


def _meet(job: Job, names: FileNames) -> tuple[Job, int]:
    """Agree with the other machines on one job and on node numbers, which are held as leases of `names`."""
    count, host = len(job.devices), os.uname().nodename
    for name, holder in names.list("node/").items():
        # Left by a run that was killed on this machine.
        pid = holder.removeprefix(f"{host}/")
        if pid.isdecimal() and len(pid) < 10 and not psutil.pid_exists(int(pid)):
            names.withdraw(name)
    me = f"{host}/{os.getpid()}"
    node = next((n for n in range(count) if names.claim(f"node/{n}", me)), None)
    if node is None:
        raise ConfigError(
            f"cluster.n_nodes={count} machines have joined already: end the earlier run, or raise cluster.n_nodes"
        )
    if node == 0:
        job.save()
        names.publish("job", job.id)
    found = wait_for_names(names, ["job"], job.config.setup_timeout_s, f"node {node}")
    agreed = Job.load(job.path)
    if agreed.id != found["job"]:
        raise ConfigError(f"{job.path} belongs to another job: is {job.run_dir.path} on a shared folder?")
    return replace(agreed, cwd=job.cwd), node


class TorchrunPart(NodePart):
    """A node whose ranks belong to one torchrun. `meeting` holds the leases of several machines."""

    def __init__(self, *args: Any, meeting: FileNames | None = None):
        super().__init__(*args)
        self.meeting = meeting
        # When the lease of a machine that had joined was first found missing; None while it lives.
        self.missing_since: dict[int, float | None] = {}
        nodes = len({rank.node for rank in self.placement.ranks})
        self.min_nodes = min(self.config.cluster.min_nodes or nodes, nodes)
        self.is_elastic = self.min_nodes < nodes
        # The ranks that were interrupted. torchrun itself gets no signal: it would end them.
        self.workers: list[psutil.Process] = []

    def rank_pids(self) -> list[int]:
        self.workers = [worker for child in self.ranks for worker in psutil.Process(child.process.pid).children()]
        return [worker.pid for worker in self.workers]

    def have_ranks_ended(self) -> bool:
        """Whether the interrupted ranks have ended; torchrun would start them again."""
        alive = (w for w in self.workers if w.is_running() and w.status() != psutil.STATUS_ZOMBIE)
        return not self.ranks or not any(alive)

    def is_required(self, node: int) -> bool:
        """Only the first `min_nodes` machines are required in an elastic job."""
        return node < self.min_nodes if self.is_elastic else super().is_required(node)

    def check_other_nodes(self) -> None:
        """Also raise if a required machine with ranks has lost its lease: it failed without notice."""
        super().check_other_nodes()
        if self.meeting is None:
            return
        self.meeting.renew()
        now, living = time.monotonic(), self.meeting.list("node/")
        for node in {rank.node for rank in self.placement.ranks} - self.ended.keys():
            if f"node/{node}" in living:
                self.missing_since[node] = None
            elif node in self.missing_since and self.is_required(node):
                # After the shared folder hung, all leases are late: give their owners time to renew them.
                since = self.missing_since[node] = self.missing_since[node] or now
                if now - since > self.meeting.ttl_s:
                    raise NodeFailure(f"node {node} is gone: its machine or its launcher was killed", 1)

    def start_ranks(self) -> None:
        servers, master = self.meet_servers()
        env = self.rank_env(servers, master, len(self.placement.ranks_on(self.node)))
        for name in _TORCHRUN_ENV:
            env.pop(name)
        # A restarted group would find the keys of the one before it in a shared store.
        env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        script = self.job.command()[1:]
        if self.is_elastic:
            script = ["-m", "arealite.launcher.elastic_rank", self.config.allocation_mode, *script]
        command = [*self._torchrun_command(master), *(["--module", *script[1:]] if script[0] == "-m" else script)]
        log_path = self.logs / f"torchrun{self.node}.log"
        spec = ChildSpec("torchrun", command, log_path, env, echo=True, cwd=Path(self.job.cwd))
        self.ranks.append(self.supervisor.start(spec))

    def _torchrun_command(self, master: str) -> list[str]:
        nodes = sorted({rank.node for rank in self.placement.ranks})
        ranks = self.placement.ranks_on(self.node)
        has_rank_0 = ranks[0].rank == 0
        count = f"{self.min_nodes}:{len(nodes)}" if self.is_elastic else str(len(nodes))
        # Set the host explicitly: the name of a machine and its addresses often do not match.
        settings = f"is_host={int(has_rank_0)}" + (_QUICK_RENDEZVOUS if self.is_elastic else "")
        return [
            *(sys.executable, "-m", "torch.distributed.run"),
            *(f"--nnodes={count}", f"--nproc-per-node={len(ranks)}", f"--node-rank={nodes.index(self.node)}"),
            *("--rdzv-backend=c10d", f"--rdzv-endpoint={master}", f"--rdzv-id={self.job.id}"),
            *(f"--rdzv-conf={settings}", f"--local-addr={self.host}"),
            *(f"--max-restarts={self.config.recover.retries}", "--monitor-interval=0.5"),
            *(f"--log-dir={self.logs / 'torchrun'}", "--redirects=3", *(["--tee=0:3"] if has_rank_0 else [])),
        ]


main = command_line("torchrun", launch, __doc__)

if __name__ == "__main__":
    run_main(main)
