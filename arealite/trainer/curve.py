"""A number per step as a picture. A file of its own: drawing takes a second to import, and only the demo draws."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

# Matplotlib would keep its font list in the user's home; a run writes nothing there.
os.environ.setdefault("MPLCONFIGDIR", str(Path(tempfile.gettempdir()) / "arealite-matplotlib"))

from matplotlib.figure import Figure


def save_curve(path: Path, values: Sequence[float], ylabel: str = "reward", window: int = 5) -> Path:
    """Draw one number per step, and its running mean, as a PNG."""
    steps = range(1, len(values) + 1)
    means = [sum(values[max(0, i - window) : i]) / min(i, window) for i in steps]
    figure = Figure(figsize=(7, 4), dpi=120, layout="tight")
    axes = figure.subplots()
    axes.plot(steps, values, alpha=0.35, label="each step")
    axes.plot(steps, means, label=f"mean of {window}")
    axes.set_xlabel("step")
    axes.set_ylabel(ylabel)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path
