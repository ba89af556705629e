"""Draws one number per step as a PNG. Needs matplotlib, which is optional: only the demo draws."""

import os
from collections.abc import Sequence
from pathlib import Path

from arealite.utils.console import show_message
from arealite.utils.startup import cache_folder


def save_curve(path: Path, values: Sequence[float], ylabel: str = "reward", window: int = 5) -> Path | None:
    """Draw the values and their running mean; without matplotlib, print a message and return None."""
    # matplotlib keeps a font list in the user's home by default; a run writes nothing there.
    os.environ.setdefault("MPLCONFIGDIR", str(cache_folder() / "matplotlib"))
    try:
        from matplotlib.figure import Figure
    except ImportError:
        show_message(f"{path.name} is not drawn: matplotlib is missing (pip install 'arealite[plot]')")
        return None
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
