"""Costs and workload of a recorded run: `read_run(RUN_DIR)`, for `arealite plan --from`.

Episodes are those of the recording (`core.foresee.recording`) with the tokens of each of their samples. First costs
come from the servers' counters and the statistics; `match` then scales them until the simulated run takes the recorded
time.
"""

import contextlib
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import yaml

from arealite.api.alloc_mode import AllocationMode
from arealite.api.errors import ConfigError
from arealite.core.foresee.core_sharing import CoreUse
from arealite.core.foresee.recorded_work import Timeline
from arealite.core.foresee.recording import PlayedEpisode, Recording, read_recording
from arealite.core.foresee.resources import fit_step_cost
from arealite.core.foresee.speed import fit_devices, switching
from arealite.core.foresee.step_curve import StepCurve
from arealite.core.ledger.reading import open_ledger
from arealite.plan.costs import ServerCost, TrainCost, UpdateCost
from arealite.plan.match import FILLING_STEPS, Target, match, match_servers, scaled_train, scaled_update
from arealite.plan.measured import Measured, fit
from arealite.plan.recorded_episodes import SampleTokens, in_steps, make_shapes, with_unfinished
from arealite.plan.workload import Distribution, EpisodeShape, Workload
from arealite.utils.rundir import RunDir
from arealite.utils.trace.cpu_clock import num_cores

_MOST_EPISODES = 4096
# Steps with a longer evaluation or checkpoint, as a share of their time, are left out.
_PAUSE_SHARE = 0.05
# Standard errors of costs in CPU seconds: if the tokens of all answers were counted, and if they follow from times.
_COUNTED_ERROR, _GUESSED_ERROR = 0.1, 0.2


def read_run(folder: Path, steps: Sequence[dict[str, Any]]) -> Measured:
    """Return what a run tells. `steps` are its statistics."""
    run_dir = RunDir(folder)
    run_dir.check()
    warm = warm_steps(run_dir, steps, 0)
    recording = read_recording(run_dir.path, steps)
    if recording.began:
        # A run that was resumed starts processes and fills its pipeline again.
        warm = warm_steps(run_dir, steps, recording.steps[0].number)
    config: dict[str, Any] = yaml.safe_load(run_dir.config_path.read_text())
    mode = AllocationMode.from_str(config.get("allocation_mode") or "embedded.d1+d1")
    with contextlib.closing(open_ledger(run_dir.db_path)) as database:
        shapes = _read_shapes(recording, database, _answer_limit(config))
    curve, shared = fit_devices(recording)
    on_gpu = recording.server_use.cpu_s is None and bool(recording.server_use.steps)
    on_gpu = on_gpu or str((config.get("actor") or {}).get("device", "cpu")).startswith("cuda")
    update_s = mean(step.get("time/weights", 0.0) for step in warm)
    target = _target(recording, warm)
    alone = _alone(recording, warm, target)
    first = Measured(
        _workload(config, recording, shapes),
        recording.settings.servers,
        _server_cost(config, recording, curve),
        scaled_train(_train_cost(warm, target, update_s, mode.train.data if mode.train else 1), alone or 1.0),
        scaled_update(_update_cost(update_s, is_swap=mode.gen_backend == "embedded"), alone or 1.0),
        recording.settings.max_head_offpolicyness,
        shared or (None if on_gpu else CoreUse(num_cores())),
        recording.settings.lead is None,
        recording.settings.max_concurrent_rollouts,
        len(warm),
    )
    if alone is None:
        return match(first, target)
    is_counted = any(any(episode.answers) for episode in recording.episodes)
    return match_servers(first, target, _COUNTED_ERROR if is_counted else _GUESSED_ERROR)


def warm_steps(run_dir: RunDir, steps: Sequence[dict[str, Any]], first: int) -> list[dict[str, Any]]:
    """Return the steps of a start after those that fill the pipeline."""
    own = [step for step in steps if step.get("step", -1) >= first]
    warm = [step for step in own if step["step"] >= first + FILLING_STEPS]
    if len(warm) < 3:
        since = " since it was resumed" if first else ""
        raise ConfigError(f"{run_dir.path} has {len(own)} steps{since}; at least {FILLING_STEPS + 3} are needed")
    return warm


def _alone(recording: Recording, warm: Sequence[dict[str, Any]], target: Target) -> float | None:
    """Return which share of its time the trainer needs with the cores to itself; None if not known."""
    used = [step for step in _without_pauses(warm) if step.get("cpu/cores")]
    if recording.cores is None or not used or target.work_s <= 0:
        return None
    cpu_s = mean(step["cpu/trainer"] for step in used) / switching(recording).trainer
    return min(1.0, cpu_s / recording.cores.trainer / target.work_s)


def _read_shapes(recording: Recording, database: sqlite3.Connection, limit: float) -> list[EpisodeShape]:
    query = "SELECT episode, tokens, answer_tokens FROM rollouts WHERE source != 'direct' ORDER BY episode, sample"
    samples: dict[int, list[SampleTokens]] = {}
    for episode, tokens, answer in database.execute(query):
        samples.setdefault(episode, []).append(SampleTokens(tokens, answer))
    started = in_steps(recording)[-_MOST_EPISODES:]
    played = [e for e in started if e.state not in ("failed", "rejected", "running") and e.tokens > 0]
    generated = _num_generated(database, recording.began)
    if generated is not None:
        ended_s, all_s = (sum(map(_generate_s, rows)) for rows in (recording.episodes, recording.started))
        # Those that had not ended have a part of it.
        generated *= ended_s / max(all_s, 1e-9)
    shapes = make_shapes(played, samples, generated, limit, _computed(recording))
    if not shapes:
        raise ConfigError("the ledger of the run has no finished episode")
    return with_unfinished(started, played, shapes)


def _computed(recording: Recording) -> float | None:
    """Return the prompt tokens that servers computed for a generation; None if they did not count them."""
    rows = recording.server_use.steps
    return sum(row.prompt_tokens for row in rows) / Timeline(recording).num_generations if rows else None


def _answer_limit(config: dict[str, Any]) -> float:
    return float((config.get("gconfig") or {}).get("max_new_tokens") or "inf")


def _num_generated(database: sqlite3.Connection, began: float) -> float | None:
    """Return the tokens that servers generated for training since a time; None if that is not known."""
    if database.execute("SELECT 1 FROM episodes WHERE source = 'direct' LIMIT 1").fetchone():
        # Evaluations count, too.
        return None
    each = "SELECT MAX(generated_tokens) AS most FROM servers WHERE time >= ? GROUP BY address"
    return database.execute(f"SELECT SUM(most) FROM ({each})", (began,)).fetchone()[0]


def _workload(config: dict[str, Any], recording: Recording, shapes: list[EpisodeShape]) -> Workload:
    samples = round(mean(len(shape.kept) for shape in shapes))
    totals = [sum(turn[i] for turn in shape.answers) for shape in shapes for i in range(len(shape.kept))]
    return Workload(
        recording.settings.batch_size,
        int((config.get("gconfig") or {}).get("n_samples") or samples),
        Distribution.of([shape.prompt for shape in shapes]),
        Distribution.of(totals[:_MOST_EPISODES]),
        Distribution.of([shape.reward_s for shape in shapes]),
        episodes=tuple(shapes),
    )


def _target(recording: Recording, warm: Sequence[dict[str, Any]]) -> Target:
    """Return the times that a simulation of the run must have."""
    recorded = {step.number for step in recording.steps}
    numbers = {step["step"] for step in _without_pauses([line for line in warm if line["step"] in recorded])}
    steps = [step for step in recording.steps if step.number in numbers]
    generated = [_generate_s(e) for e in recording.episodes if e.step in numbers]
    return Target(mean(s.waited_s for s in steps), mean(s.work_s for s in steps), mean(generated or [0.0]))


def _without_pauses(warm: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the steps without a long evaluation or checkpoint; all, if each of them has one."""

    def is_short(step: dict[str, Any]) -> bool:
        paused_s = (step.get("time/evaluate") or 0.0) + (step.get("time/save") or 0.0)
        return paused_s <= _PAUSE_SHARE * (step.get("time/step") or 0.0)

    return [step for step in warm if is_short(step)] or list(warm)


def _generate_s(episode: PlayedEpisode) -> float:
    return sum(seconds for kind, seconds in episode.parts if kind == "generate")


def _server_cost(config: dict[str, Any], recording: Recording, curve: StepCurve | None) -> ServerCost:
    """Return the cost of a step by what the servers counted, or else by two samples of their load."""
    running = recording.max_running or int((config.get("server") or {}).get("max_running_requests") or 256)
    if curve is not None:
        costs = {name: getattr(curve, name) for name in ("context_s", "spread_s", "prompt_s", "pass_s")}
        return ServerCost(curve.at(1), **costs, max_running=running, curve=curve)
    cost = fit_step_cost(recording.server_use)
    if cost is not None:
        return ServerCost(cost.fixed_s, sequence_s=cost.sequence_s, prompt_s=cost.prompt_s, max_running=running)
    rates = [rate for rate in recording.rates if rate.running > 0]
    if len(rates) < 3:
        # `match` finds the speed; how it depends on the load is not known then.
        return ServerCost(step_s=1e-3, max_running=running)
    seconds = [rate.running * rate.seconds / rate.tokens for rate in rates]
    step_s, sequence_s = fit([(1.0, rate.running) for rate in rates], seconds)
    if step_s + sequence_s <= 0:
        step_s = mean(seconds)
    return ServerCost(step_s=step_s, sequence_s=sequence_s, max_running=running)


def _update_cost(update_s: float, is_swap: bool) -> UpdateCost:
    """Return the cost of a weight update.

    Servers that generate meanwhile slow down all of it, if they share a device with the trainer.
    """
    return UpdateCost(update_s) if is_swap else UpdateCost(update_s / 2, update_s / 2, is_swap=False)


def _train_cost(warm: Sequence[dict[str, Any]], target: Target, update_s: float, num_replicas: int) -> TrainCost:
    """Divide the trainer's time into a part for each token and a fixed one."""
    work = [step for step in warm if step.get("time/update")]
    if not work:
        raise ConfigError("the statistics of the run have no time/update: it did not train")
    tokens = [step.get("num_seqs", 1.0) * step.get("seq_len", step.get("answer_len", 1.0)) for step in work]
    seconds = [(step.get("time/logp") or 0.0) + step["time/update"] for step in work]
    fixed_s, token_s = fit([(1.0, count) for count in tokens], seconds)
    # Advantages, statistics and what else a step does.
    rest_s = max(0.0, target.work_s - update_s - mean(seconds))
    return TrainCost(token_s * num_replicas, step_s=fixed_s + rest_s, num_replicas=num_replicas)
