"""What the steps of a run waited for, what would have helped, and saved sweeps of `arealite plan`.

Playing a run again takes up to seconds, so the answer is kept until the run has a tenth more steps.
"""

import json
from typing import Any

from arealite.core.foresee.critical_path import LINK_TEXTS, CriticalPath, find_critical_path
from arealite.core.foresee.recording import RecordingError, read_recording
from arealite.core.foresee.what_if import WhatIf, describe_settings, parse_question
from arealite.dashboard.query import Query
from arealite.dashboard.runs import Run
from arealite.utils.text import clean

# Chains that the page shows, the longest waits first, and links of one of them.
_MAX_CHAINS, _MAX_LINKS = 8, 40
# Steps that are played again: a page must not wait for hundreds.
_MAX_STEPS = 60
_ETAS = (0, 1, 2, 4, 8)
_GROWTH = 1.1
_MAX_SWEEPS, _MAX_SWEEP_BYTES, _MAX_VALUES = 12, 1 << 18, 100
# What a sweep predicts, by the names of `arealite plan --json`.
_PREDICTED = ("tokens_per_s", "step_s", "trainer_idle", "server_idle", "staleness_mean")


def foresight(run: Run, _: Query) -> dict[str, Any]:
    """Return critical path, advice and re-runs at other limits; `problem` if the run does not tell."""
    columns = run.stats.rows()["columns"]
    steps = max((step for step in columns.get("step", ()) if step is not None), default=-1) + 1
    with run.foresight_lock:
        known = run.foresight
        if known is None or not known[0] <= steps < max(known[0] + 1, _GROWTH * known[0]):
            known = run.foresight = steps, _analyse(run, columns)
        return known[1]


def _analyse(run: Run, columns: dict[str, list[float | None]]) -> dict[str, Any]:
    rows = zip(*columns.values(), strict=True)
    stats = [{name: v for name, v in zip(columns, row, strict=True) if v is not None} for row in rows]
    try:
        recording = read_recording(run.path, stats)
        path, what_if = find_critical_path(recording), WhatIf(recording, _MAX_STEPS)
    except RecordingError as error:
        return {"problem": clean(str(error))}
    eta = recording.settings.max_head_offpolicyness
    swept = [
        {"eta": value} | what_if.ask(*parse_question([f"max_head_offpolicyness={value}"], recording.settings)).to_json()
        for value in sorted({*_ETAS, eta})
    ]
    return {
        "sentence": path.sentence(),
        "seconds": path.total_s,
        "waits": [
            {"kind": kind, "text": LINK_TEXTS.get(kind, kind), "seconds": seconds}
            for kind, seconds in sorted(path.seconds.items(), key=lambda item: -item[1])
        ],
        "chains": _chains(path),
        "settings": describe_settings(recording.settings),
        "recorded_step_s": what_if.recorded_step_s,
        "rerun_step_s": what_if.base.step_s,
        "advice": [answer.to_json() for answer in what_if.advise()],
        "eta": swept,
        "notes": [*path.notes, *what_if.notes()],
    }


def _chains(path: CriticalPath) -> list[dict[str, Any]]:
    longest = sorted(path.paths, key=lambda each: -each.waited_s)[:_MAX_CHAINS]
    return [
        {
            "step": each.step,
            "waited_s": each.waited_s,
            "links": [
                {"kind": link.kind, "text": LINK_TEXTS.get(link.kind, link.kind), "seconds": link.seconds}
                | {"episode": link.episode}
                for link in each.links[-_MAX_LINKS:]
            ],
        }
        for each in longest
        if each.waited_s > 0
    ]


def sweeps(run: Run, _: Query) -> dict[str, Any]:
    """Return the sweeps in `sweeps/` of the run directory; files that are none are left out."""
    found = []
    for path in sorted((run.path / "sweeps").glob("*.json"))[:_MAX_SWEEPS]:
        try:
            values = json.loads(path.read_bytes()[:_MAX_SWEEP_BYTES]) if path.is_file() else None
            found.append(_sweep(values))
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            continue
    return {"sweeps": found}


def _sweep(saved: Any) -> dict[str, Any]:
    values, predictions = saved["values"][:_MAX_VALUES], saved["predictions"][:_MAX_VALUES]
    if len(values) != len(predictions):
        raise ValueError("a value without a prediction")
    columns = {name: [float(prediction[name]) for prediction in predictions] for name in _PREDICTED}
    texts = {name: clean(str(saved[name])[:200]) for name in ("key", "title")}
    return texts | {"values": [clean(str(value)[:60]) for value in values], "columns": columns}
