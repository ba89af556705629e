"""Everything on this machine: `python -m arealite.launcher.local script.py --config file.yaml key=value… [--dry-run]`.

Starts the inference servers that `allocation_mode` asks for, waits until they are healthy, starts the trainer ranks and watches. The first
failure ends everything (or, with `recover.retries`, starts it again from the recover checkpoint); nothing outlives the launcher.
"""

from __future__ import annotations

import os
import shlex
import sys
import time
from pathlib import Path

from arealite.api.errors import AReaLiteError, ConfigError, ServerError
from arealite.launcher.plan import LaunchConfig, Plan, make_plan, read_launch_config, visible_gpus
from arealite.launcher.servers import server_command, server_env, server_ports, wait_healthy
from arealite.launcher.supervisor import Child, ChildSpec, Interrupted, Supervisor
from arealite.utils.config import run_main
from arealite.utils.network import free_port, is_free
from arealite.utils.rundir import RunDir

USAGE = "usage: python -m arealite.launcher.local SCRIPT.py [--config FILE.yaml]... [key=value]... [--dry-run]"


def launch(script: str | Path, argv: list[str], dry_run: bool = False) -> int:
    """Run `script` (a file, or a module's dotted name) with what its configuration asks for; returns the exit code."""
    script = str(script)
    config = read_launch_config(script, argv)
    if config.cluster.n_nodes > 1:
        raise ConfigError(
            f"cluster.n_nodes={config.cluster.n_nodes}, but the local launcher runs on one machine: use "
            "arealite.launcher.ray or arealite.launcher.slurm, or set cluster.n_nodes=1"
        )
    plan = make_plan(config, [visible_gpus()])
    run_dir = RunDir(
        os.path.join(config.cluster.fileroot, config.experiment_name, config.trial_name)
    )
    if dry_run:
        print(_describe(config, plan, run_dir, script, argv))
        return 0
    run_dir.create()
    run_dir.config_path.write_text(config.resolved_yaml)
    print(f"run directory: {run_dir.path}", flush=True)
    for attempt in range(config.recover.retries + 1):
        code = _attempt(config, plan, run_dir, script, argv, attempt)
        retries = config.recover.retries
        if code in (0, 130, 143) or attempt == retries:
            return code
        print(
            f"starting again from the recover checkpoint (restart {attempt + 1} of {retries})",
            flush=True,
        )
    raise AssertionError("unreachable")


def _attempt(
    config: LaunchConfig, plan: Plan, run_dir: RunDir, script: str, argv: list[str], attempt: int
) -> int:
    """Start everything once and watch it to its end."""
    with Supervisor(config.launcher.stop_timeout_s) as supervisor:
        try:
            addresses = _start_servers(supervisor, config, plan, run_dir)
            ranks = [
                supervisor.start(spec)
                for spec in rank_specs(config, plan, run_dir, script, argv, addresses, attempt)
            ]
            return _watch(supervisor, ranks)
        except Interrupted as interrupt:
            print(f"{interrupt}: ending {len(supervisor.children)} processes", file=sys.stderr)
            return 128 + interrupt.number
        except AReaLiteError as error:
            print(f"error: {error}", file=sys.stderr, flush=True)
            return 1


def _start_servers(
    supervisor: Supervisor, config: LaunchConfig, plan: Plan, run_dir: RunDir
) -> list[str]:
    if not plan.servers:
        return []
    started = time.monotonic()
    ports = server_ports(config, len(plan.servers))
    specs = server_specs(config, plan, run_dir, ports)
    children = {
        f"{config.server.host}:{port}": supervisor.start(spec)
        for port, spec in zip(ports, specs, strict=True)
    }
    wait_healthy(supervisor, children, config.setup_timeout_s, config.server.api_key)
    took_s = time.monotonic() - started
    print(
        f"{len(children)} {plan.mode.gen_backend} server(s) ready in {took_s:.1f} s: {', '.join(children)}",
        flush=True,
    )
    return list(children)


def _watch(supervisor: Supervisor, ranks: list[Child]) -> int:
    """Until all ranks have ended well (0) or anything has ended otherwise (its code)."""
    running = list(ranks)
    while running:
        for child in supervisor.wait():
            if child in running and child.code == 0:
                running.remove(child)
                continue
            raise_code = child.code if child in ranks else None
            print(f"error: {child.describe_end()}", file=sys.stderr, flush=True)
            if raise_code is None:
                raise ServerError(f"{child.name} ended while {len(running)} ranks still needed it")
            return raise_code if raise_code > 0 else 128 - raise_code
    return 0


# -------------------------------------------------------------------------------------------- what is started


def server_specs(
    config: LaunchConfig, plan: Plan, run_dir: RunDir, ports: list[int]
) -> list[ChildSpec]:
    backend = plan.mode.gen_backend
    assert backend is not None
    specs = []
    for server, port in zip(plan.servers, ports, strict=True):
        env = {"OMP_NUM_THREADS": str(plan.threads), **server_env(config, backend)}
        (_, devices), *_ = server.places
        if devices:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, devices))
        name = f"server{server.index}"
        command = server_command(config, backend, config.server.host, port)
        specs.append(ChildSpec(name, command, run_dir.logs / f"{name}.log", env))
    return specs


def rank_specs(
    config: LaunchConfig,
    plan: Plan,
    run_dir: RunDir,
    script: str,
    argv: list[str],
    addresses: list[str],
    attempt: int = 0,
) -> list[ChildSpec]:
    port = config.launcher.trainer_port or free_port()
    if not is_free(port):
        raise ServerError(
            f"launcher.trainer_port={port} is taken: choose another, or 0 for a free one"
        )
    target = [script] if script.endswith(".py") else ["-m", script]
    devices = ",".join(str(rank.device) for rank in plan.ranks if rank.device is not None)
    specs = []
    for rank in plan.ranks:
        name = f"rank{rank.rank}"
        log_path = run_dir.logs / f"{name}.log"
        env = {
            "RANK": str(rank.rank),
            "LOCAL_RANK": str(rank.local_rank),
            "WORLD_SIZE": str(len(plan.ranks)),
            "LOCAL_WORLD_SIZE": str(len(plan.ranks)),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "AREALITE_SERVER_ADDRS": ",".join(addresses),
            "AREALITE_ATTEMPT": str(attempt),
            "AREALITE_LOG_FILE": str(log_path),
            "OMP_NUM_THREADS": str(plan.threads),
            "PYTHONUNBUFFERED": "1",
        }
        env |= {"CUDA_VISIBLE_DEVICES": devices} if devices else {}
        if rank.rank == 0 and sys.stdout.isatty():
            env["AREALITE_TTY_FD"] = str(sys.stdout.fileno())
        command = [sys.executable, *target, *argv]
        specs.append(ChildSpec(name, command, log_path, env, echo=rank.rank == 0))
    return specs


def _describe(
    config: LaunchConfig, plan: Plan, run_dir: RunDir, script: str, argv: list[str]
) -> str:
    """What would be started, one process a block."""
    lines = [f"allocation {plan.mode}, run directory {run_dir.path}"]
    specs = []
    ports = server_ports(config, len(plan.servers)) if plan.servers else []
    if ports:
        specs += server_specs(config, plan, run_dir, ports)
    addresses = [f"{config.server.host}:{port}" for port in ports]
    specs += rank_specs(config, plan, run_dir, script, argv, addresses)
    for spec in specs:
        shown = {
            k: v for k, v in spec.env.items() if k in ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")
        }
        lines.append(f"{spec.name}: {' '.join(f'{k}={v}' for k, v in shown.items())}")
        lines.append(f"    {shlex.join(spec.command)}")
    return "\n".join(lines)


def main(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(f"{USAGE}\n\n{__doc__}")
        return 0 if argv else 2
    arguments = [a for a in argv[1:] if a != "--dry-run"]
    return launch(argv[0], arguments, dry_run="--dry-run" in argv)


if __name__ == "__main__":
    run_main(main)
