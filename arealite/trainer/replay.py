"""Starts the replay of a run: chooses steps, configuration and script, and reports the result.

`arealite replay` calls `replay_run`. The script of the run is launched again on this machine, with its configuration
and the plan of the replay; `engine.replay` does the rest in its processes.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from arealite.api.alloc_mode import AllocationMode
from arealite.api.errors import ConfigError, RecordError
from arealite.core.record.step_file import read_step
from arealite.engine.replay.compare import Difference
from arealite.engine.replay.plan import REPLAY_ENV, Mode, ReplayPlan, choose_steps, environment_of
from arealite.launcher.local import launch
from arealite.trainer.recover import find_damage
from arealite.utils.config import load_plain
from arealite.utils.rundir import RunDir, list_complete, make_new_folder

_LOOP = Path(__file__).with_name("replay_loop.py")
# Sections that a replay does not need: it saves and evaluates nothing.
_DROPPED = ("saver", "evaluator", "recover", "valid_dataset", "valid_datasets", "on_collapse", "dashboard")
_DROPPED += ("controller",)


@dataclass(frozen=True)
class RecordedRun:
    """A run directory: its configuration, its script and where that was started."""

    dir: RunDir
    config: dict[str, Any]
    script: str
    cwd: str


def replay_run(
    path: str, mode: Mode, first: int | None, last: int | None, num_steps: int | None, overrides: list[str]
) -> int:
    """Replay `first` to `last`, counted from 0, or `num_steps`; returns 1 if something differs."""
    run = read_run(RunDir(path))
    plan = make_plan(run, mode, first, last, num_steps)
    print(describe_plan(run, plan), flush=True)
    return _launch(run, plan, overrides)


def read_run(run_dir: RunDir) -> RecordedRun:
    """Return what a run directory says about its run."""
    run_dir.check()
    if not run_dir.config_path.is_file():
        raise ConfigError(f"{run_dir.path} is not a run directory: it has no {run_dir.config_path.name}")
    config: Any = OmegaConf.to_container(load_plain(["--config", str(run_dir.config_path)]))
    if not config.get("allocation_mode") or not any(isinstance(config.get(name), dict) for name in ("actor", "model")):
        raise ConfigError(
            f"{run_dir.config_path} is not the whole configuration of a run: it needs allocation_mode, and actor or "
            "model. Restore the file from a copy"
        )
    if config.get("record") == 0:
        raise RecordError(f"the run in {run_dir.path} was not recorded (record=0): set record=256 in the next one")
    job_path = run_dir.path / "job.json"
    try:
        job = json.loads(job_path.read_text()) if job_path.is_file() else {}
        if not isinstance(job, dict):
            raise ValueError("it is not a JSON object")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{job_path} cannot be read ({error}): remove it to replay the training alone") from error
    cwd = job.get("cwd") or os.getcwd()
    if not Path(cwd).is_dir():
        raise ConfigError(f"the run was started in {cwd}, which is not there: paths of its configuration begin there")
    return RecordedRun(run_dir, config, job.get("script") or "", cwd)


def make_plan(run: RecordedRun, mode: Mode, first: int | None, last: int | None, num_steps: int | None) -> ReplayPlan:
    """Decide what is replayed; raises `RecordError` if the record does not have it."""
    folder = run.dir.record
    good = [path for path in list_complete(run.dir.recover) if not find_damage(path)]
    checkpoints = [(int(path.name.removeprefix("step")), path) for path in good]
    trains = mode != "rollout-only"
    start, end, checkpoint = choose_steps(folder, checkpoints, first, last, trains, num_steps)
    if mode != "trainer-only" and "rollout" not in run.config:
        if mode == "rollout-only":
            raise ConfigError(f"the run in {run.dir.path} has no rollouts: it is supervised training")
        mode = "trainer-only"
    if mode != "trainer-only" and not run.script:
        raise ConfigError(
            f"the script of the run in {run.dir.path} is not known (it was started from Python, or without a "
            "launcher): only its training can be replayed, with --trainer-only"
        )
    with _writing(run):
        result = str(make_new_folder(run.dir.path / "replays" / str(number) for number in range(1, 100_000)))
    return ReplayPlan(
        record=str(folder),
        mode=mode,
        first=start,
        last=end,
        checkpoint=None if checkpoint is None else str(checkpoint),
        uses_servers=mode == "whole" and not why_recorded_answers(run),
        result=f"{result}/result.json",
    )


@contextmanager
def _writing(run: RecordedRun) -> Iterator[None]:
    """Raise `ConfigError` if the folder of replays cannot be written."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"cannot write to {run.dir.path / 'replays'}: {error.strerror}. Free space there, or replay a copy of the "
            "run directory in a folder that you can write"
        ) from error


def why_recorded_answers(run: RecordedRun) -> str:
    """Return why answers cannot be generated again; empty if they can."""
    rollout, server = run.config.get("rollout", {}), run.config.get("server", {})
    backend = AllocationMode.from_str(run.config["allocation_mode"]).gen_backend
    if backend != "embedded":
        return f"{backend} servers do not repeat their answers bit for bit"
    if rollout.get("server_addrs"):
        return "its servers were not started by the run"
    if not server.get("deterministic"):
        return "server.deterministic=false: log-probs depend on what else a server computes at the time"
    if rollout.get("pause_mode", "abort") != "abort":
        return "pause_mode=in_place keeps keys and values of older weights"
    if server.get("keep_prefix_across_updates"):
        return "keep_prefix_across_updates keeps keys and values of older weights"
    gconfig = run.config.get("gconfig", {})
    looks_back = gconfig.get("stop") or any(gconfig.get(f"{n}_penalty") for n in ("frequency", "presence"))
    if looks_back or gconfig.get("repetition_penalty", 1) != 1:
        return "stop strings and penalties look back at tokens of older weights"
    return ""


def describe_plan(run: RecordedRun, plan: ReplayPlan) -> str:
    """Say what will be replayed."""
    start = plan.checkpoint or "the model before the first step"
    lines = [f"replaying steps {plan.first + 1} to {plan.last + 1} ({plan.mode})"]
    if plan.mode != "rollout-only":
        lines.append(f"training starts from {start}")
    if plan.mode != "trainer-only":
        reason = why_recorded_answers(run) if plan.mode == "whole" else "no model runs"
        source = "generated again by servers" if plan.uses_servers else f"those of the record ({reason})"
        lines.append(f"answers are {source}")
    return "\n".join(lines)


def _launch(run: RecordedRun, plan: ReplayPlan, overrides: list[str]) -> int:
    """Run the script again and print the result; returns the exit code."""
    folder = Path(plan.result).parent
    config_path, plan_path = folder / "config-replay.yaml", folder / "plan.json"
    settings = OmegaConf.to_yaml(OmegaConf.create(replay_config(run, plan, folder)))
    with _writing(run):
        config_path.write_text(settings)
        plan.save(plan_path)
    os.chdir(run.cwd)
    os.environ[REPLAY_ENV] = str(plan_path)
    code = launch(run.script or _LOOP, ["--config", str(config_path), *overrides])
    if code or not Path(plan.result).is_file():
        print(f"the replay has failed: see {folder / 'logs'}", flush=True)
        return code or 1
    result = json.loads(Path(plan.result).read_text())
    print(describe_result(plan, result), flush=True)
    return 0 if result["difference"] is None else 1


def replay_config(run: RecordedRun, plan: ReplayPlan, folder: Path) -> dict[str, Any]:
    """Return the configuration of a replay in `folder`: that of the run, without what has no influence."""
    config = {key: value for key, value in run.config.items() if key not in _DROPPED}
    environment = environment_of(Path(plan.record), plan.first)
    config |= {"experiment_name": folder.parent.name, "trial_name": folder.name, "record": 0}
    # All ranks run on this machine, whatever the run had.
    one_node = {"fileroot": str(run.dir.path), "n_nodes": None, "min_nodes": None}
    config["cluster"] = {**(config.get("cluster") or {}), **one_node}
    config["stats_logger"] = {"console": False}
    # Other numbers of threads round otherwise.
    threads = environment["hardware"]["threads"]
    config["launcher"] = {**(config.get("launcher") or {}), "threads_per_process": threads}
    for name, own in read_step(Path(plan.record), plan.first).info["sizes"].items():
        section = name if name in config else "model"
        config[section] = {**config[section], **own}
    if "server" in config:
        config["server"] = {**config["server"], "api_key": None, "port": 0}
    if "rollout" in config:
        config["rollout"] = {**config["rollout"], "num_workers": 0, "server_addrs": []}
    if not plan.uses_servers:
        train = AllocationMode.from_str(config["allocation_mode"]).train
        config["allocation_mode"] = "d1" if plan.mode == "rollout-only" else str(train)
    return config


def describe_result(plan: ReplayPlan, result: dict[str, Any]) -> str:
    """Say whether everything was equal, and what was not."""
    difference, changes = result["difference"], result["changes"]
    lines = []
    if result["num_not_run"]:
        lines.append(f"{result['num_not_run']} episodes could not run again (their rows are not in the record)")
    for episode, reason, now in result["failures"]:
        lines.append(f"episode {episode} failed in the run ({reason}); now: {now}")
    if difference is not None:
        return "\n".join([*lines, "the replay diverges from the run:", Difference(**difference).describe(changes)])
    parts = [f"{result['num_episodes']} episodes"] if plan.mode != "trainer-only" else []
    parts += ["losses, statistics and weights"] if plan.mode != "rollout-only" else ["trajectories and rewards"]
    lines.append(f"equal bit for bit: {result['num_steps']} steps ({', '.join(parts)})")
    if changes:
        lines += ["although this has changed since the run:", *(f"  {change}" for change in changes)]
    return "\n".join(lines)
