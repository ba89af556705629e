"""With torchrun: `python -m arealite.launcher.torchrun script.py --config file.yaml key=value… [--dry-run]`.

As the local launcher, but the trainer ranks belong to torchrun: a rank that dies is restarted with all others inside the running job (`recover.retries` times,
from the recover checkpoint) while the servers stay up. On several machines run the same command on each; they meet through the
run directory, which they share. Nodes take their numbers in the order in which they come. With `cluster.min_nodes` a machine may join or leave at
any time but the first: the ranks start again, as many as there are now, from the recover checkpoint.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from arealite.api.errors import ConfigError
from arealite.launcher.job import Job
from arealite.launcher.launch_config import read_launch_config
from arealite.launcher.local import command_line
from arealite.launcher.node import Failed, NodePart, run_node
from arealite.launcher.placement import cluster_slots, local_slots
from arealite.launcher.supervisor import ChildSpec
from arealite.utils.config import run_main
from arealite.utils.names import FileNames, wait_for_names

MEETING_TTL_S = 15.0
# A machine that is gone is noticed within seconds; one that joins is waited for as long.
_QUICK = ",last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3"


def launch(script: str | Path, argv: list[str], dry_run: bool = False) -> int:
    """Run this machine's part of `script`; returns the exit code."""
    config = read_launch_config(str(script), argv)
    nodes = config.cluster.n_nodes or 1
    slots = local_slots if nodes == 1 else cluster_slots
    job = Job(config, str(script), argv, *slots(config))
    if dry_run:
        print(job.describe())
        return 0
    _check_elastic(job)
    print(f"run directory: {job.run_dir.path}", flush=True)
    if nodes == 1:
        job.save()
        try:
            return run_node(job, 0, TorchrunPart)
        finally:
            shutil.rmtree(job.names_folder, ignore_errors=True)
    names = FileNames(job.run_dir.names, MEETING_TTL_S)
    try:
        job, node = _meet(job, names)
        return run_node(job, node, partial(TorchrunPart, meeting=names))
    finally:
        names.close()


def _check_elastic(job: Job) -> None:
    config, placement = job.config, job.placement()
    least = config.cluster.min_nodes or len(job.devices)
    if least == len(job.devices):
        return
    if config.recover.retries == 0:
        raise ConfigError(
            f"cluster.min_nodes={least} starts ranks again when machines come and go: set recover.mode=auto and recover.retries"
        )
    far = [s.index for s in placement.servers if any(node >= least for node, _ in s.places)]
    if far or not placement.ranks_on(0):
        raise ConfigError(
            f"cluster.min_nodes={least}, but servers {far} would be on machines that may leave, or the first has no rank: lower the "
            "generating side of allocation_mode, or raise cluster.min_nodes"
        )


def _meet(job: Job, names: FileNames) -> tuple[Job, int]:
    """Agree with the other machines on one job and on who is which node; holds as long as `names` is renewed."""
    count, host = len(job.devices), os.uname().nodename
    for name, holder in names.list("node/").items():
        if holder.startswith(f"{host}/") and not Path("/proc", holder.split("/")[1]).exists():
            names.withdraw(name)  # of a run that was killed here
    node = next((n for n in range(count) if names.claim(f"node/{n}", f"{host}/{os.getpid()}")), None)  # fmt: skip
    if node is None:
        raise ConfigError(
            f"cluster.n_nodes={count}, and so many machines have joined already: end the earlier run, or raise cluster.n_nodes"
        )
    path = job.run_dir.path / "job.json"
    if node == 0:
        job.save()
        names.publish("job", job.id)
    found = wait_for_names(names, ["job"], job.config.setup_timeout_s, f"node {node}")
    agreed = Job.load(path)
    if agreed.id != found["job"]:
        raise ConfigError(f"{path} is of another job: is {job.run_dir.path} on a shared folder?")
    return replace(agreed, cwd=job.cwd), node


class TorchrunPart(NodePart):
    """A node whose ranks are children of one torchrun. `meeting`: the names by which several machines have met."""

    def __init__(self, *args: Any, meeting: FileNames | None = None):
        super().__init__(*args)
        self.meeting = meeting
        # Of machines that have come: since when the lease is missing, None while it lives.
        self.gone_since: dict[int, float | None] = {}
        nodes = len({rank.node for rank in self.placement.ranks})
        self.min_nodes = min(self.config.cluster.min_nodes or nodes, nodes)
        self.is_elastic = self.min_nodes < nodes

    def needs(self, node: int) -> bool:
        """An elastic job outlives any machine but those it cannot do without."""
        return node < self.min_nodes if self.is_elastic else super().needs(node)

    def check_others(self) -> None:
        """A machine with ranks whose lease has lapsed, and stays so, has failed without a word."""
        super().check_others()
        if self.meeting is None:
            return
        self.meeting.renew()
        now, living = time.monotonic(), self.meeting.list("node/")
        for node in {rank.node for rank in self.placement.ranks} - self.ended.keys():
            if f"node/{node}" in living:
                self.gone_since[node] = None
            elif node in self.gone_since and self.needs(node):
                # All leases are late after the shared folder hung: their owners get time to renew them.
                since = self.gone_since[node] = self.gone_since[node] or now
                if now - since > self.meeting.ttl_s:
                    raise Failed(f"node {node} is gone: its machine or its launcher was killed", 1)

    def start_ranks(self) -> None:
        servers, master = self.meet_servers()
        nodes = sorted({rank.node for rank in self.placement.ranks})
        ranks = self.placement.ranks_on(self.node)
        log_path = self.logs / f"torchrun{self.node}.log"
        env = self.rank_env(servers, master, len(ranks))
        for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            env.pop(name)  # torchrun's own
        # A restarted group would meet the keys of the one before it in a shared store.
        env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        command = [sys.executable, "-m", "torch.distributed.run"]
        count = f"{self.min_nodes}:{len(nodes)}" if self.is_elastic else str(len(nodes))
        command += [f"--nnodes={count}", f"--nproc-per-node={len(ranks)}"]
        command += ["--rdzv-backend=c10d", f"--rdzv-endpoint={master}", f"--rdzv-id={self.job.id}"]
        # Said outright, because a host's name and its addresses often do not match.
        settings = f"is_host={int(ranks[0].rank == 0)}" + (_QUICK if self.is_elastic else "")
        command += [f"--rdzv-conf={settings}", f"--local-addr={self.host}"]
        command += [f"--max-restarts={self.config.recover.retries}", "--monitor-interval=0.5"]
        command += [f"--node-rank={nodes.index(self.node)}", f"--log-dir={self.logs / 'torchrun'}"]
        command += ["--redirects=3", "--tee=0:3"] if ranks[0].rank == 0 else ["--redirects=3"]
        script = self.job.command()[1:]
        if self.is_elastic:
            mode = self.config.allocation_mode
            script = ["-m", "arealite.launcher.elastic_rank", mode, *script]
        command += ["--module", *script[1:]] if script[0] == "-m" else script
        spec = ChildSpec("torchrun", command, log_path, env, echo=True, cwd=Path(self.job.cwd))
        self.ranks.append(self.supervisor.start(spec))


if __name__ == "__main__":
    run_main(command_line("torchrun", launch, __doc__))
