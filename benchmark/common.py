"""Shared by all benchmarks: describe machine, versions and commit, and print tables."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

import torch
import transformers


def describe_machine() -> dict[str, object]:
    """Commit, hardware and versions for the JSON line of a benchmark."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    ).stdout.strip()
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "commit": commit or "unknown",
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "gpu": gpu,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def gap(delta: torch.Tensor) -> dict[str, float]:
    """Statistics of a difference of log-probs: its absolute size, and the k3 estimate of the KL divergence."""
    size = delta.abs()
    return {
        "mean": size.mean().item(),
        "p99": size.quantile(0.99).item(),
        "max": size.max().item(),
        "mismatch_kl": (delta.exp() - 1 - delta).mean().item(),
    }


def print_table(header: list[str], rows: list[list[str]]) -> None:
    """Print rows in aligned columns."""
    widths = [max(len(str(row[i])) for row in [header, *rows]) for i in range(len(header))]
    for row in [header, ["-" * width for width in widths], *rows]:
        print("  ".join(str(cell).ljust(width) for cell, width in zip(row, widths, strict=True)))


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else []:
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()
