"""Checks this machine and says what to do: `python -m arealite.cli.doctor [FILEROOT]`.

Checks versions, GPUs, shared memory, free space, ports and optional packages. Exits with 1 if something that every run
needs is wrong.
"""

import importlib.util
import os
import platform
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import transformers

from arealite.utils.config import run_main
from arealite.utils.network import free_port, release_port

_GB = 1e9
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
    yield _check_version("torch", torch.__version__, (2, 11))
    yield _check_version("transformers", transformers.__version__, (5, 12))
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(i)
            name = torch.cuda.get_device_name(i)
            yield Finding("ok", f"GPU {i}: {name}, {free / _GB:.0f} of {total / _GB:.0f} GB free")
    else:
        yield Finding("note", "no GPU: everything runs on the CPU, in float32 (set dtype=float32)")
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


def _check_version(name: str, version: str, least: tuple[int, int]) -> Finding:
    have = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    if have >= least:
        return Finding("ok", f"{name} {version}")
    need = f"{least[0]}.{least[1]} or later is needed: pip install -U {name}"
    return Finding("wrong", f"{name} {version}, but {need}")


def _check_space(what: str, path: Path, least_gb: float, why: str) -> Finding:
    if not path.exists():
        return Finding("note", f"{what} does not exist ({why})")
    free_gb = shutil.disk_usage(path).free / _GB
    state = "ok" if free_gb >= least_gb else "note"
    return Finding(state, f"{what}: {free_gb:.0f} GB free ({why})")


def _nearest_existing(path: Path) -> Path:
    path = path.absolute()
    return path if path.exists() else _nearest_existing(path.parent)


def main(argv: list[str]) -> int:
    if argv and argv[0] in ("-h", "--help"):
        print(__doc__)
        return 0
    found = list(check_machine(Path(argv[0] if argv else "runs")))
    for finding in found:
        print(f"{finding.state:5}  {finding.text}")
    return int(any(finding.state == "wrong" for finding in found))


if __name__ == "__main__":
    run_main(main)
