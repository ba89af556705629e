"""Shows evaluations: a line for each validation set during training, and a table in reports.

Reads statistics named `eval/SET/METRIC`, with an interval in `eval/SET/METRIC/low` and `/high`.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from rich import box
from rich.table import Table

_PREFIX = "eval/"
_SHARES = ("pass@", "maj@", "truncated")


def describe_step(step: int) -> str:
    """Say when an evaluation began. `step` counts from 0; -1 is before the first step."""
    return f"after step {step + 1}" if step >= 0 else "before the first step"


def evaluation_lines(step: int, stats: Mapping[str, float | None]) -> list[str]:
    """Return one line for each validation set."""
    lines = []
    for name in set_names(stats):
        pairs = "  ".join(f"{metric} {cell}" for metric, cell in _cells(name, stats).items())
        lines.append(f"evaluation {describe_step(step)}, {name}:  {pairs}")
    return lines


def evaluation_table(evaluations: Iterable[tuple[int, Mapping[str, float | None]]]) -> Table:
    """Tabulate evaluations, given by step, one row for each of their validation sets."""
    rows = [(step + 1, name, _cells(name, stats)) for step, stats in evaluations for name in set_names(stats)]
    metrics = dict.fromkeys(metric for *_, cells in rows for metric in cells)
    if all(cells.get("failed", "0") == "0" for *_, cells in rows):
        metrics.pop("failed", None)
    # Narrow, so that the table of one set fits into 80 columns.
    looks: dict[str, Any] = {"box": box.SIMPLE_HEAD, "show_edge": False, "pad_edge": False}
    table = Table(title="evaluations (with 95% intervals)", padding=(0, 1, 0, 0), **looks)
    for heading in ("step", "set", *metrics):
        shown = "questions" if heading == "num_questions" else heading
        table.add_column(shown, justify="left" if heading == "set" else "right", overflow="fold")
    for step, name, cells in rows:
        table.add_row(str(step), name, *(cells.get(metric, "–") for metric in metrics))
    return table


def set_names(stats: Mapping[str, float | None]) -> list[str]:
    """Return the names of the validation sets that have statistics."""
    return list(dict.fromkeys(key.split("/")[1] for key in stats if key.startswith(_PREFIX)))


def _cells(name: str, stats: Mapping[str, float | None]) -> dict[str, str]:
    """Return the metrics of one set as text."""
    prefix = f"{_PREFIX}{name}/"
    own = {key.removeprefix(prefix): value for key, value in stats.items() if key.startswith(prefix)}
    shown = {k: v for k, v in own.items() if not (k.endswith(("/low", "/high", "/min", "/max")) or "sampling/" in k)}
    cells = {}
    for metric, value in shown.items():
        form = "{:.1%}" if metric.startswith(_SHARES) else "{:.4g}"
        cells[metric] = "–" if value is None else form.format(value)
        low, high = own.get(f"{metric}/low"), own.get(f"{metric}/high")
        if low is not None and high is not None:
            is_share = metric.startswith(_SHARES)
            cells[metric] += f" ({100 * low:.1f}–{100 * high:.1f})" if is_share else f" ({low:.4g}–{high:.4g})"
    oldest, newest = own.get("version/min"), own.get("version/max")
    if oldest is not None and newest is not None:
        cells["version"] = f"{oldest:.0f}" if oldest == newest else f"{oldest:.0f}–{newest:.0f}"
    return cells
