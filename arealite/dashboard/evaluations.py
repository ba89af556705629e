"""Collects the results of evaluations from the statistics of a run.

Statistics are named `eval/SET/METRIC`, with an interval in `eval/SET/METRIC/low` and `/high` and the versions of the
evaluated weights in `eval/SET/version/min` and `/max`. `eval/SET/sampling/KEY` says how answers were sampled and is no
result.
"""

from typing import Any

from arealite.dashboard.stats import StatsFile

_PREFIX = "eval/"
_BOUNDS = ("/low", "/high", "/min", "/max")
_SAMPLING = "sampling/"


def read_evaluations(stats: StatsFile) -> dict[str, Any]:
    """Return a row for each evaluation, validation set and metric.

    Of several evaluations of a set at one step, all results are those of the last, as in `arealite report`.
    """
    columns = stats.rows()["columns"]
    names = [name for name in columns if name.startswith(_PREFIX) and not name.endswith(_BOUNDS)]
    parts = {name: _split(name) for name in names}
    rows: dict[tuple[str, float | None], list[dict[str, Any]]] = {}
    for i, step in enumerate(columns.get("step", ())):
        found: dict[str, list[dict[str, Any]]] = {}
        for name, (set_name, metric) in parts.items():
            if columns[name][i] is not None:
                found.setdefault(set_name, []).append(_row(columns, name, i, set_name, metric) | {"step": step})
        for set_name, measured in found.items():
            # Not the place of the earlier line: rows stay in the order of the file.
            rows.pop((set_name, step), None)
            rows[set_name, step] = [row for row in measured if not row["metric"].startswith(_SAMPLING)]
    return {"rows": [row for measured in rows.values() for row in measured]}


def _split(name: str) -> tuple[str, str]:
    """Return the validation set and the metric of a statistic."""
    set_name, _, metric = name.removeprefix(_PREFIX).partition("/")
    return set_name, metric


def _row(columns: dict[str, list[float | None]], name: str, i: int, set_name: str, metric: str) -> dict[str, Any]:
    def value(key: str) -> float | None:
        return columns[key][i] if key in columns else None

    return {
        "set": set_name,
        "metric": metric,
        "value": value(name),
        "low": value(f"{name}/low"),
        "high": value(f"{name}/high"),
        "version": value(f"{_PREFIX}{set_name}/version/max"),
        "time": value("time"),
    }
