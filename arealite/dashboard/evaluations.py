"""Collects the results of evaluations from the statistics of a run.

Statistics are named `eval/SET/METRIC`, with an interval in `eval/SET/METRIC/low` and `/high` and the versions of the
evaluated weights in `eval/SET/version/min` and `/max`.
"""

from typing import Any

from arealite.dashboard.stats import StatsFile

_PREFIX = "eval/"
_BOUNDS = ("/low", "/high", "/min", "/max")


def read_evaluations(stats: StatsFile) -> dict[str, Any]:
    """Return a row for each evaluation, validation set and metric."""
    columns = stats.rows()["columns"]
    names = [name for name in columns if name.startswith(_PREFIX) and not name.endswith(_BOUNDS)]
    rows = []
    for i, step in enumerate(columns.get("step", ())):
        for name in names:
            if columns[name][i] is not None:
                rows.append(_row(columns, name, i) | {"step": step})
    return {"rows": rows}


def _row(columns: dict[str, list[float | None]], name: str, i: int) -> dict[str, Any]:
    _, set_name, metric = name.split("/", 2) if name.count("/") >= 2 else ("", name.removeprefix(_PREFIX), "")

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
