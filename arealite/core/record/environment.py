"""What a run depends on: configuration, code, versions, hardware, data files of supervised runs.

Recorded once per start of a run; a replay describes itself in the same way, and `differences` says what has changed.
"""

import contextlib
import importlib.metadata
import platform
import subprocess
import sys
import sysconfig
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from omegaconf import OmegaConf

from arealite.api.alloc_mode import AllocationMode
from arealite.api.cli_args import BaseExperimentConfig
from arealite.utils.config import hide_secrets
from arealite.utils.distributed import world_size
from arealite.utils.settings.nodes import to_node

# Keys that decide nothing about the results of training, or that a replay sets.
_IRRELEVANT = ("experiment_name", "trial_name", "cluster.", "recover.", "saver.", "evaluator.", "valid_dataset")
_IRRELEVANT += ("stats_logger.", "dashboard", "record", "launcher.", "on_collapse", "controller", "eval_gconfig.")
_IRRELEVANT += ("rollout.server_addrs", "rollout.weight_update", "rollout.dump_rollouts", "rollout.max_dump_tokens")
_IRRELEVANT += ("server.port", "server.host", "server.api_key", "rollout.num_workers")
_CHOSEN = ("max_tokens_per_mb", "gradient_checkpointing", "logprob_chunk_size")
_GIT_TIMEOUT_S = 10.0
# Of a data file: how much is read for its checksum, at its start and at its end.
_MAX_DATA_BYTES = 32 << 20


def describe_environment(config: BaseExperimentConfig) -> dict[str, Any]:
    """Return what this process depends on, as JSON. `config` is the configuration of the run."""
    values: Any = hide_secrets(OmegaConf.to_container(to_node(config), resolve=True))
    # Servers are no part of it: a replay may do without them.
    values["allocation_mode"] = str(AllocationMode.from_str(config.allocation_mode).train)
    on_gpu = torch.cuda.is_available()
    return {
        "hardware": {
            "machine": platform.machine(),
            "processor": _processor(),
            "gpu": torch.cuda.get_device_name() if on_gpu else "none",
            "threads": torch.get_num_threads(),
            "ranks": world_size(),
        },
        "versions": {
            "arealite": _installed_version(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "commit": _commit(),
        "modules": dict(sorted(_own_modules())),
        "config": dict(_flatten(values)),
        # Rollouts get their rows from the record.
        "data": {} if hasattr(config, "rollout") else _describe_data(config),
    }


def differences(recorded: Mapping[str, Any], now: Mapping[str, Any], with_ranks: bool = True) -> list[str]:
    """Return what has changed since the record, in words; without ranks, their number may differ."""
    ignored = _IRRELEVANT if with_ranks else (*_IRRELEVANT, "allocation_mode", "ranks")
    found = []
    for kind in ("hardware", "versions", "config"):
        old, new = recorded[kind], now[kind]
        for name in [name for name in sorted({*old, *new}) if not name.startswith(ignored)]:
            # The run has chosen a size that was not set; a replay sets it.
            is_chosen = old.get(name) is None and name.endswith(_CHOSEN)
            if old.get(name) != new.get(name) and not is_chosen:
                found.append(f"{name}: {old.get(name)}, now {new.get(name)}")
    # Records of older versions know nothing of data.
    old, new = recorded.get("data", {}), now.get("data", {})
    for name in old:
        if old[name] != new.get(name):
            found.append(f"rows of {name}: {old[name]}, now {new.get(name, 'no such file')}")
    old, new = recorded["modules"], now["modules"]
    changed = [name for name in old if name in new and old[name] != new[name]]
    if changed:
        more = f" and {len(changed) - 8} more" if len(changed) > 8 else ""
        found.append(f"code of {', '.join(changed[:8])}{more} (recorded at commit {recorded['commit'] or 'unknown'})")
    return found


def _describe_data(config: BaseExperimentConfig) -> dict[str, str]:
    """Return size and checksum of each file with training rows; names on a hub are left out."""
    sources = {"train_dataset": config.train_dataset}
    sources |= {f"train_datasets.{name}": source for name, source in config.train_datasets.items()}
    found = {}
    for name, source in sources.items():
        path = Path(source.path).expanduser()
        # What is wrong with a file is said where its rows are read.
        with contextlib.suppress(OSError, ValueError):
            if path.is_file():
                found[name] = _describe_file(path)
    return found


def _describe_file(path: Path) -> str:
    with path.open("rb") as file:
        size = path.stat().st_size
        checksum = zlib.crc32(file.read(_MAX_DATA_BYTES))
        file.seek(max(file.tell(), size - _MAX_DATA_BYTES))
        checksum = zlib.crc32(file.read(_MAX_DATA_BYTES), checksum)
    return f"{size} bytes with checksum {checksum:08x}"


def _flatten(values: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _own_modules() -> Iterator[tuple[str, int]]:
    """Yield the loaded modules that are not installed packages, with a checksum of each file."""
    kinds = ("stdlib", "platstdlib", "purelib", "platlib")
    folders = [Path(sysconfig.get_path(name)) for name in kinds]
    installed = tuple({str(path) for folder in folders for path in (folder, folder.resolve())})
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        # To resolve thousands of paths takes long.
        if not isinstance(file, str) or not file.endswith(".py") or file.startswith(installed):
            continue
        # Processes that others start have the script under this name too; a forked one may have another program's.
        if name == "__mp_main__":
            continue
        if not str(Path(file).resolve()).startswith(installed):
            try:
                own = "script" if name == "__main__" else name
                yield own, zlib.crc32(Path(file).read_bytes())
            except OSError:
                # A module of an archive, or one that is gone.
                continue


def _installed_version() -> str:
    """Return the version of the installed package; that of a checkout is in the checksums of its modules."""
    try:
        return importlib.metadata.version("arealite")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _processor() -> str:
    """Return the kind of the CPU: other kinds have other kernels."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    wanted = ("model name", "CPU implementer", "CPU part", "Features", "flags")
    found = dict.fromkeys(line.split(":", 1)[-1].strip() for line in lines if line.startswith(wanted))
    return f"{next(iter(found), '')} {zlib.crc32(' '.join(found).encode()):08x}"


def _commit() -> str:
    """Return the commit of the package's repository; empty if it is in none."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short=12", "HEAD"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return result.stdout.strip()
