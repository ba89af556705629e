"""Costs and workload of a recorded run: `read_run(RUN_DIR)`, for `arealite plan --from`.

From the statistics: training and weight updates. From the ledger: tokens of episodes, and how many sequences servers
decoded at which speed. From the trace: how long rewards took after generation.
"""

import contextlib
import os
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

import yaml

from arealite.api.alloc_mode import AllocationMode
from arealite.api.errors import ConfigError
from arealite.core.ledger.reading import open_ledger
from arealite.plan.costs import ServerCost, TrainCost, UpdateCost
from arealite.plan.measured import Measured, fit
from arealite.plan.workload import Distribution, Workload
from arealite.utils.rundir import RunDir
from arealite.utils.trace.trace_file import Lane, read_trace

# The first steps load, compile and fill the pipeline.
_FILLING_STEPS = 2
_MOST_VALUES = 4096
_TRAINING = ("time/logp", "time/update")


def read_run(folder: Path, steps: Sequence[dict[str, Any]]) -> Measured:
    """Return what a run tells. `steps` are its statistics."""
    run_dir = RunDir(folder)
    if not run_dir.path.is_dir():
        raise ConfigError(f"there is no run directory {run_dir.path}")
    for path in (run_dir.config_path, run_dir.trace_path, run_dir.db_path):
        if not path.exists():
            raise ConfigError(
                f"{run_dir.path} has no {path.name}: give the directory of a run with a trace and a ledger"
            )
    warm = [step for step in steps if step["step"] >= _FILLING_STEPS]
    if len(warm) < 3:
        raise ConfigError(f"{run_dir.path} has {len(steps)} steps; at least {_FILLING_STEPS + 3} are needed")
    config: dict[str, Any] = yaml.safe_load(run_dir.config_path.read_text())
    mode = AllocationMode.from_str(config.get("allocation_mode") or "embedded.d1+d1")
    with contextlib.closing(open_ledger(run_dir.db_path)) as database:
        workload = _workload(config, database, read_trace(run_dir.trace_path), warm)
        server = _server_cost(config, database, run_dir.path)
    on_gpu = str((config.get("actor") or {}).get("device", "cpu")).startswith("cuda")
    pauses = mean(step.get("time/weights", 0.0) for step in warm)
    return Measured(
        workload,
        max(1, mode.num_servers),
        server,
        _train_cost(warm, mode.train.data if mode.train else 1),
        UpdateCost(publish_s=pauses / 2, load_s=pauses / 2, is_swap=mode.gen_backend == "embedded"),
        int((config.get("rollout") or {}).get("max_head_offpolicyness") or 0),
        None if on_gpu else float(os.cpu_count() or 1),
    )


def _workload(config: dict[str, Any], database: sqlite3.Connection, lanes: list[Lane], warm: Sequence[Any]) -> Workload:
    query = (
        "SELECT tokens * 1.0 / samples FROM episodes WHERE source = 'stream' AND samples > 0 AND tokens > 0 "
        f"ORDER BY id DESC LIMIT {_MOST_VALUES}"
    )
    lengths = [row[0] for row in database.execute(query)]
    if not lengths:
        raise ConfigError("the ledger of the run has no finished episode")
    answer = mean(step.get("answer_len", 0.0) for step in warm) or mean(lengths)
    prompt = max(1.0, mean(lengths) - answer)
    answers = [max(1.0, length - prompt) for length in lengths]
    gconfig, data = config.get("gconfig") or {}, config.get("train_dataset") or {}
    return Workload(
        int(data.get("batch_size") or 8),
        int(gconfig.get("n_samples") or 1),
        Distribution("constant", (prompt,)),
        Distribution.of(answers),
        Distribution.of(_reward_seconds(lanes)),
    )


def _reward_seconds(lanes: list[Lane]) -> list[float]:
    """Return how long traced episodes went on after their last generation."""
    found: list[float] = []
    for lane in (lane for lane in lanes if lane.group == "rollout" and "+" not in lane.name):
        parts = [span for other in lanes if other.name.split(" +")[0] == lane.name for span in other.spans]
        generations = [(span[0], span[0] + span[1]) for span in parts if span[2] == "generate" and span[1] is not None]
        for began, seconds, name, _ in lane.spans:
            if seconds is None or not name.startswith("episode"):
                continue
            inside = [end for start, end in generations if began <= start and end <= began + seconds + 1e-3]
            if inside:
                found.append(max(0.0, began + seconds - max(inside)))
    return found[-_MOST_VALUES:] or [0.0]


def _server_cost(config: dict[str, Any], database: sqlite3.Connection, path: Path) -> ServerCost:
    """Fit the seconds of a step to the number of sequences, between two samples of a server."""
    query = (
        "SELECT address, time, running, generated_tokens, busy_s FROM servers WHERE running IS NOT NULL AND "
        "generated_tokens IS NOT NULL AND busy_s IS NOT NULL ORDER BY address, time"
    )
    rows, seconds = [], []
    before: tuple[Any, ...] | None = None
    for row in database.execute(query):
        if before is not None and before[0] == row[0]:
            tokens, busy_s = row[3] - before[3], row[4] - before[4]
            running = (row[2] + before[2]) / 2
            if tokens > 0 and busy_s > 0 and running > 0:
                rows.append((1.0, running))
                seconds.append(running * busy_s / tokens)
        before = row
    if len(rows) < 3:
        raise ConfigError(
            f"{path} has {len(rows)} usable samples of its servers; 3 are needed: embedded servers, and a run of at "
            "least ten seconds"
        )
    step_s, sequence_s = fit(rows, seconds)
    if step_s + sequence_s <= 0:
        step_s = median(seconds)
    running = int((config.get("server") or {}).get("max_running_requests") or 256)
    return ServerCost(step_s=step_s, sequence_s=sequence_s, max_running=running)


def _train_cost(warm: Sequence[dict[str, Any]], num_replicas: int) -> TrainCost:
    work = [step for step in warm if step.get("time/update")]
    if not work:
        raise ConfigError("the statistics of the run have no time/update: it did not train")
    tokens = [step.get("num_seqs", 1.0) * step.get("seq_len", step.get("answer_len", 1.0)) for step in work]
    seconds = [sum(step.get(name) or 0.0 for name in _TRAINING) for step in work]
    step_s, token_s = fit([(1.0, count) for count in tokens], seconds)
    return TrainCost(token_s * num_replicas, step_s=step_s, num_replicas=num_replicas)
