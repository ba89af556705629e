"""Says why a run hangs, is slow or has died, and what to do: `arealite doctor RUN_DIR`.

Prints a verdict with its evidence and a remedy; every process with what it waits for, since when and for whom; stacks,
disks, memory, GPUs and the last events. Works while the run goes on and after it. Exits with 0 if nothing is wrong,
with 1 otherwise.

Without a run directory it checks this machine: versions, GPUs, shared memory, free space, ports and optional packages.
Exits with 1 if something that every run needs is wrong.
"""

import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from arealite.api.errors import ConfigError
from arealite.cli.arguments import ArgumentParser
from arealite.doctor.collect import collect
from arealite.doctor.evidence import read_evidence
from arealite.doctor.report import render
from arealite.doctor.rules import diagnose
from arealite.utils.config import run_main
from arealite.utils.network import free_port, release_port
from arealite.utils.rundir import RunDir
from arealite.utils.status.writer import FOLDER

_GB = 1e9
_RUNS = "runs"
_HEALTHY = ("healthy", "finished")
_OPTIONAL = {
    "datasets": "hub datasets: pip install 'arealite[hub]'",
    "tensorboard": "TensorBoard files: pip install 'arealite[tensorboard]'",
    "peft": "LoRA: pip install 'arealite[lora]'",
    "ray": "mode=ray: pip install 'arealite[ray]'",
    "sglang": "SGLang servers in this environment (or set sglang.command)",
    "vllm": "vLLM servers in this environment (or set vllm.command)",
}


class Finding(NamedTuple):
    """One result. `state` is ok, note (an option is missing) or wrong."""

    state: str
    text: str


def check_machine(fileroot: Path) -> Iterator[Finding]:
    """Yield all findings, most important first."""
    where = f"{platform.machine()}, {os.cpu_count()} cores"
    yield Finding("ok", f"Python {platform.python_version()} on {where}")
    yield _check_version("torch", (2, 11))
    yield _check_version("transformers", (5, 12))
    yield from _check_gpus()
    shm = Path("/dev/shm")
    yield _check_space(str(shm), shm, 1, "rollout.weight_update=shm needs room for the weights")
    yield _check_space(f"run directories in {fileroot}", _nearest_existing(fileroot), 5, "checkpoints go there")
    port = free_port()
    release_port(port)
    yield Finding("ok", f"ports can be taken (for example {port})")
    for command, purpose in (("sbatch", "mode=slurm"), ("nvidia-smi", "finding GPUs")):
        yield _check_option(command, shutil.which(command), "not found", purpose)
    for module, purpose in _OPTIONAL.items():
        yield _check_option(module, importlib.util.find_spec(module), "absent", purpose)


def _check_option(name: str, found: object, otherwise: str, purpose: str) -> Finding:
    if found is None:
        return Finding("note", f"{name} {otherwise} ({purpose})")
    return Finding("ok", f"{name} found ({purpose.split(': pip')[0]})")


def _check_gpus() -> Iterator[Finding]:
    try:
        torch = importlib.import_module("torch")
    # OSError: a library of CUDA is missing or does not fit.
    except (ImportError, OSError) as error:
        yield Finding("wrong", f"torch cannot be imported: {error}")
        return
    if not torch.cuda.is_available():
        yield Finding("note", "no GPU: everything runs on the CPU, in float32 (set dtype=float32)")
        return
    for i in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(i)
        yield Finding("ok", f"GPU {i}: {torch.cuda.get_device_name(i)}, {free / _GB:.0f} of {total / _GB:.0f} GB free")


def _check_version(name: str, least: tuple[int, int]) -> Finding:
    need = f"{least[0]}.{least[1]} or later is needed: pip install -U {name}"
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return Finding("wrong", f"{name} is not installed: {need}")
    have = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    return Finding("ok", f"{name} {version}") if have >= least else Finding("wrong", f"{name} {version}, but {need}")


def _check_space(what: str, path: Path, least_gb: float, why: str) -> Finding:
    if not path.exists():
        return Finding("note", f"{what} does not exist ({why})")
    free_gb = shutil.disk_usage(path).free / _GB
    state = "ok" if free_gb >= least_gb else "note"
    return Finding(state, f"{what}: {free_gb:.0f} GB free ({why})")


def _nearest_existing(path: Path) -> Path:
    path = path.absolute()
    return path if path.exists() else _nearest_existing(path.parent)


def is_run_directory(path: Path) -> bool:
    """Whether a folder is that of one run, not of many."""
    run_dir = RunDir(path)
    return any(found.exists() for found in (run_dir.config_path, run_dir.stats_path, run_dir.logs, path / FOLDER))


def examine(path: Path, patience_s: float, as_json: bool, with_stacks: bool) -> int:
    """Print what is wrong with a run; returns the exit code."""
    case = collect(path, patience_s, with_stacks)
    read_evidence(case)
    findings = diagnose(case)
    if as_json:
        print(json.dumps({"findings": [asdict(finding) for finding in findings], "case": case.to_json()}, default=str))
    else:
        print(render(case, findings))
    return int(findings[0].kind not in _HEALTHY)


def main(argv: list[str]) -> int:
    parser = ArgumentParser("doctor", __doc__, "arealite doctor runs/gsm8k/trial0", "arealite doctor")
    parser.add_argument("path", nargs="?", default=_RUNS, help="a run directory, or the folder of all of them")
    parser.add_argument("--patience", type=float, default=60.0, help="seconds that a wait may take (default: 60)")
    parser.add_argument("--json", action="store_true", help="print all that is known as one line of JSON")
    parser.add_argument("--no-stacks", action="store_true", help="do not ask processes for their stacks")
    arguments = parser.parse_args(argv)
    path = Path(arguments.path)
    if not 0 < arguments.patience < float("inf"):
        raise ConfigError(f"--patience {arguments.patience:g}: give a number of seconds above 0")
    if is_run_directory(path):
        return examine(path, arguments.patience, arguments.json, not arguments.no_stacks)
    if arguments.json:
        raise ConfigError(f"--json needs a run directory, and {path} is none (it has no config.yaml, logs or status)")
    if arguments.path != _RUNS:
        if not path.is_dir():
            raise ConfigError(f"there is no folder {path}: give a run directory, or nothing to check this machine")
        print(f"{path} is not a run directory (it has no config.yaml, logs or status): checking this machine\n")
    found = list(check_machine(path))
    for finding in found:
        print(f"{finding.state:5}  {finding.text}")
    return int(any(finding.state == "wrong" for finding in found))


if __name__ == "__main__":
    run_main(main)
