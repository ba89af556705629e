"""How well does one recorded run predict others? Predicted against measured, one table a section.

    python benchmark/foresee.py --section what_if [--steps 40] [--case lognormal] [--work FOLDER]
    python benchmark/foresee.py --section plan [the same]
    python benchmark/foresee.py --section what_if --section plan --model FOLDER --data FOLDER --work FOLDER
    python benchmark/foresee.py --section what_if --section plan --from FOLDER
    python benchmark/foresee.py --section simulated [--only published] [--steps 30] [--work FOLDER]

`what_if` and `plan` run the task of `async_task.py` at η = 0, 1 and 4 with an embedded server on this machine; with
`--model` and `--data` (a folder with GSM8K's train.jsonl) the example gsm8k_grpo.py, on the GPU if there is one. From
each of the three runs, `arealite report --what-if` (seconds per step and mean age of samples) and `arealite plan
--from` (seconds per step) predict all of them. Runs that are complete in `--work` are not run again, so `--eta 1` and
so on divide the work. `--keep FOLDER` copies what the runs recorded there, without weights and logs (about 1 MB a
run); `--from FOLDER` predicts from such a folder, without a run. `simulated` compares `arealite plan` with published
ratios, with runs on this machine, and times a large simulation. Every result is printed as soon as it is known.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import foresee_simulated
from async_vs_sync import CASES, EXAMPLES, ROOT, make_start
from common import describe_machine

from arealite.api.cli_args import InferenceEngineConfig
from arealite.core.foresee.recording import read_recording
from arealite.core.foresee.what_if import WhatIf, parse_question
from arealite.plan.match import FILLING_STEPS
from arealite.plan.recorded import read_run
from arealite.plan.simulate import Setup, simulate
from arealite.trainer.stats_logger import read_stats
from arealite.utils.rundir import RunDir

ETAS = (0, 1, 4)


def say(text: str) -> None:
    print(text, flush=True)


def command_of(options: argparse.Namespace, work: Path) -> list[str]:
    """Return the command of a run, without η and its names."""
    command = [sys.executable, "-m", "arealite.launcher.local"]
    if options.model is None:
        model = make_start(CASES[options.case], work)
        command += ["benchmark/async_task.py", "--config", str(EXAMPLES / "configs" / "demo.yaml")]
        return [*command, f"actor.path={model}", *CASES[options.case].options]
    command += [str(EXAMPLES / "gsm8k_grpo.py"), "--config", str(EXAMPLES / "configs" / "gsm8k_grpo.yaml")]
    command += ["allocation_mode=embedded.d1+d1", f"actor.path={options.model}", "rollout.weight_update=shm"]
    command += [f"train_dataset.path={options.data / 'train.jsonl'}", "train_dataset.batch_size=32"]
    return [*command, "gconfig.max_new_tokens=512", "server.max_running_requests=512", "server.context_length=1536"]


def run(options: argparse.Namespace, eta: int, command: list[str], work: Path) -> RunDir:
    """Train, unless the run is there; returns its directory."""
    name = options.case if options.model is None else "gsm8k"
    run_dir = RunDir(work / "foresee" / f"{name}-{eta}")
    if run_dir.stats_path.exists() and len(read_stats(run_dir)) >= options.steps:
        return run_dir
    names = ["experiment_name=foresee", f"trial_name={run_dir.path.name}", f"cluster.fileroot={work}"]
    limits = [f"rollout.max_head_offpolicyness={eta}", f"total_train_steps={options.steps}"]
    env = {**os.environ, **(CASES[options.case].env if options.model is None else {})}
    began = time.monotonic()
    with open(work / f"{run_dir.path.name}.log", "w") as log:
        arguments = [*command, *names, *limits, "stats_logger.console=false", *options.key]
        subprocess.run(arguments, check=True, cwd=ROOT, timeout=1800, env=env, stdout=log, stderr=log)
    took_s = time.monotonic() - began
    say(f"# run at η {eta}: {took_s:.0f} s, {step_s(run_dir):.2f} s a step after the first {FILLING_STEPS}")
    return run_dir


def step_s(run_dir: RunDir) -> float:
    """Return the seconds of a step, without those that fill the pipeline."""
    return statistics.mean(line["time/step"] for line in read_stats(run_dir) if line["step"] >= FILLING_STEPS)


def measured_age(asked: WhatIf) -> float:
    """Return the mean age of the trained samples of a run."""
    ages = [(e.step - e.start_version, e.samples) for e in asked.recording.episodes if e.step is not None]
    return sum(age * samples for age, samples in ages) / sum(samples for _, samples in ages)


def all_runs(options: argparse.Namespace, work: Path) -> dict[int, RunDir]:
    if options.recorded is not None:
        return {eta: recorded_run(options.recorded, eta) for eta in options.eta or ETAS}
    command = command_of(options, work)
    runs = {eta: run(options, eta, command, work) for eta in options.eta or ETAS}
    for run_dir in runs.values() if options.keep else ():
        keep(run_dir, options.keep / run_dir.path.name)
    return runs


def recorded_run(folder: Path, eta: int) -> RunDir:
    """Return the run at an η that `--keep` has copied."""
    found = sorted(folder.glob(f"*-{eta}/run.sqlite"))
    if len(found) != 1:
        raise SystemExit(f"{folder} has {len(found)} folders NAME-{eta} with a run.sqlite: --keep writes one")
    return RunDir(found[0].parent)


def keep(run_dir: RunDir, folder: Path) -> None:
    """Copy what predictions need."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in (run_dir.config_path, run_dir.stats_path):
        shutil.copy(path, folder)
    # With what the last transaction left in the log of the database.
    target = sqlite3.connect(folder / run_dir.db_path.name)
    with contextlib.closing(sqlite3.connect(run_dir.db_path)) as source, contextlib.closing(target):
        source.backup(target)


def what_if(options: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Predict the step time at each η from each run."""
    runs = {eta: WhatIf(read_recording(d.path, read_stats(d))) for eta, d in all_runs(options, work).items()}
    rows = []
    say("what-if: recorded η, η: predicted, measured s/step, ratio; predicted, measured age")
    for source, asked in runs.items():
        for eta, other in runs.items():
            scenario, name = parse_question([f"max_head_offpolicyness={eta}"], asked.recording.settings)
            rerun = asked.ask(scenario, name).rerun
            values = rerun.step_s, other.recorded_step_s, rerun.step_s / other.recorded_step_s
            ages = rerun.mean_age, measured_age(other)
            close = f" (leads {rerun.close_leads} are close)" if rerun.close_leads else ""
            say(f"{source} {eta}: " + " ".join(f"{value:.2f}" for value in (*values, *ages)) + close)
            rows.append({"recorded": source, "asked": eta, "ratio": values[2], "ages": ages})
        shared = asked.simulation.speed.shared
        say(f"# from η {source}: {shared}; {asked.simulation.speed.samples:.2f} sequences of an episode at once")
    return {"rows": rows}


def plan(options: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Simulate each η with the costs and lengths of each run."""
    runs = all_runs(options, work)
    limits = dict.fromkeys(("request_timeout_s", "episode_timeout_s", "batch_timeout_s"), 1e7)
    rows = []
    say("plan: recorded η, η: predicted, measured s/step, ratio")
    for source, run_dir in runs.items():
        found = read_run(run_dir.path, read_stats(run_dir))
        costs = found.server, found.train, found.update
        for eta, other in runs.items():
            rollout = InferenceEngineConfig(max_head_offpolicyness=eta, adaptive_lead=found.adaptive_lead, **limits)
            window = options.steps - FILLING_STEPS, FILLING_STEPS
            setup = Setup(found.workload, found.num_servers, *costs, rollout, *window, cores=found.cores)
            predicted, took_s = simulate(setup).step_s, step_s(other)
            say(f"{source} {eta}: {predicted:.2f} {took_s:.2f} {predicted / took_s:.2f}")
            rows.append({"recorded": source, "asked": eta, "ratio": predicted / took_s})
    return {"rows": rows}


SECTIONS: dict[str, Callable[[argparse.Namespace, Path], dict[str, Any]]] = {
    "what_if": what_if,
    "plan": plan,
    "simulated": foresee_simulated.run,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    parser.add_argument("--section", action="append", choices=list(SECTIONS))
    parser.add_argument("--case", choices=list(CASES), default="lognormal")
    parser.add_argument("--model", type=Path, help="a real model, trained on GSM8K")
    parser.add_argument("--data", type=Path, help="folder with GSM8K's train.jsonl")
    parser.add_argument("--eta", type=int, action="append", choices=ETAS, help="only these runs")
    parser.add_argument("--only", action="append", choices=list(foresee_simulated.PARTS), help="parts of simulated")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--work", type=Path, help="keep the run directories here")
    parser.add_argument("--keep", type=Path, help="copy what the runs recorded here")
    parser.add_argument("--from", dest="recorded", type=Path, help="predict from what --keep has copied")
    parser.add_argument("key", nargs="*", metavar="key=value", help="further settings of the runs")
    options = parser.parse_intermixed_args()
    if (options.model is None) != (options.data is None):
        parser.error("--model and --data go together")
    with tempfile.TemporaryDirectory() as folder:
        work = options.work or Path(folder)
        work.mkdir(parents=True, exist_ok=True)
        for section in options.section or ["what_if"]:
            found = SECTIONS[section](options, work)
            say(json.dumps({"benchmark": "foresee", "section": section, **found, **describe_machine()}))


if __name__ == "__main__":
    main()
