"""A Slurm cluster of several nodes, for tests: real munged, slurmctld and slurmd in a folder.

Its nodes are on this machine, with one address, or each is one of the machines of `tests.machines`.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from arealite.utils.network import free_port
from tests.machines import Machine

CONF = """
ClusterName=test
SlurmctldHost={host}({address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=cred_expire=5
CryptoType=crypto/munge
SlurmctldPort={port}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmdLogFile={folder}/slurmd.%n.log
SlurmdSpoolDir={folder}/spool.%n
StateSaveLocation={folder}/state
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,bf_interval=1
JobAcctGatherType=jobacct_gather/linux
AccountingStorageType=accounting_storage/none
KillWait=2
MailProg=/bin/true
GresTypes=gpu
{node_lines}
PartitionName=main Nodes=n[1-{nodes}] Default=YES MaxTime=INFINITE State=UP
"""


def why_not() -> str | None:
    """Return why no cluster can be made on this machine; None if one can."""
    missing = [p for p in ("slurmctld", "slurmd", "munged", "sbatch") if shutil.which(p, path=_path()) is None]
    if missing:
        return f"{', '.join(missing)} not installed (apt-get install slurm-wlm munge)"
    return None if os.geteuid() == 0 else "a cluster on one machine needs root"


class SlurmCluster:
    """Start with `with SlurmCluster(folder) as cluster`; client commands need `cluster.env`."""

    def __init__(self, folder: Path, nodes: int = 4, machines: Sequence[Machine] = ()):
        self.folder, self.nodes, self.machines = folder, len(machines) or nodes, machines
        self.env = {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": _path()}
        self._owns_munge = False

    def __enter__(self) -> SlurmCluster:
        self._owns_munge = self._start_munge()
        devices = self.folder / "dev"
        for folder in (devices, self.folder / "state", *(self.folder / f"spool.n{i + 1}" for i in range(self.nodes))):
            folder.mkdir(parents=True)
        for i in range(8):
            subprocess.run(["mknod", str(devices / f"nvidia{i}"), "c", "1", "3"], check=True)
        first, here = self._free_range(), (socket.gethostname(), "127.0.0.1")
        places = [(machine.name, machine.address) for machine in self.machines] or [here] * self.nodes
        lines = [
            f"NodeName=n{i + 1} NodeHostname={host} NodeAddr={address} Port={first + i} CPUs=8 RealMemory=4000 "
            "Gres=gpu:8 State=UNKNOWN"
            for i, (host, address) in enumerate(places)
        ]
        values = {
            "host": places[0][0],
            "address": places[0][1],
            "folder": self.folder,
            "nodes": self.nodes,
            "port": free_port(),
            "node_lines": "\n".join(lines),
        }
        (self.folder / "slurm.conf").write_text(CONF.format(**values))
        (self.folder / "gres.conf").write_text(f"NodeName=n[1-{self.nodes}] Name=gpu File={devices}/nvidia[0-7]\n")
        self._daemon("slurmctld", "-f", self.env["SLURM_CONF"])
        for i in range(self.nodes):
            self._daemon("slurmd", "-f", self.env["SLURM_CONF"], "-N", f"n{i + 1}", node=i)
        self._wait_idle()
        return self

    def __exit__(self, *_: object) -> None:
        self.client("scancel", "--full", "--user=root")
        deadline = time.monotonic() + 30
        while self.client("squeue", "-h").strip() and time.monotonic() < deadline:
            time.sleep(0.2)
        pidfiles = [*self.folder.glob("slurmd.*.pid"), self.folder / "slurmctld.pid"]
        pidfiles += [Path("/run/munge/munged.pid")] if self._owns_munge else []
        for pidfile in pidfiles:
            if pidfile.exists():
                pid = int(pidfile.read_text())
                try:
                    os.kill(pid, 9)
                except ProcessLookupError:
                    continue

    @contextmanager
    def without_controller(self) -> Iterator[None]:
        """Stop slurmctld inside the block; it starts again afterwards, with its former state."""
        pidfile = self.folder / "slurmctld.pid"
        pidfd = os.pidfd_open(int(pidfile.read_text()))
        signal.pidfd_send_signal(pidfd, signal.SIGTERM)
        select.select([pidfd], [], [], 30)
        os.close(pidfd)
        try:
            yield
        finally:
            self._daemon("slurmctld", "-f", self.env["SLURM_CONF"])

    def client(self, *command: str) -> str:
        """Return what a command of Slurm prints on the first node."""
        return self._run(0, *command, text=True, capture_output=True).stdout

    def _daemon(self, *command: str, node: int = 0) -> None:
        self._run(node, *command)

    def _run(self, node: int, *command: str, **options: Any) -> subprocess.CompletedProcess:
        options |= {"preexec_fn": self.machines[node].enter} if self.machines else {}
        # Not in the working directory of a test, where processes are looked for that a job has left.
        env = {**os.environ, **self.env}
        return subprocess.run(command, env=env, cwd=self.folder, check=True, timeout=60, **options)

    def _wait_idle(self, timeout_s: float = 60) -> None:
        deadline = time.monotonic() + timeout_s
        while self.client("sinfo", "-h", "-o", "%T %D").split() != ["idle", str(self.nodes)]:
            assert time.monotonic() < deadline, self.client("sinfo", "-R")
            time.sleep(0.2)

    def _free_range(self) -> int:
        while True:
            first = free_port()
            if all(_can_bind(first + i) for i in range(self.nodes)):
                return first

    @staticmethod
    def _start_munge() -> bool:
        """Start munged unless it runs; returns whether it was started here and must be ended here."""
        if subprocess.run(["munge", "-n"], capture_output=True).returncode == 0:
            return False
        run = Path("/run/munge")
        run.mkdir(exist_ok=True)
        for folder in (run, Path("/var/log/munge"), Path("/var/lib/munge")):
            shutil.chown(folder, "munge", "munge")
        subprocess.run(["su", "-s", "/bin/sh", "munge", "-c", "/usr/sbin/munged"], check=True)
        return True


def _can_bind(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _path() -> str:
    return f"{os.environ['PATH']}:/usr/sbin:/sbin"
