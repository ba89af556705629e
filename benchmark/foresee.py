"""How well does one recorded run predict others? Predicted against measured, one table a section.

    python benchmark/foresee.py --section what_if [--steps 14] [--case lognormal] [--work FOLDER]
    python benchmark/foresee.py --section simulated [--only published] [--steps 30] [--work FOLDER]

`what_if` runs the task of `async_task.py` at η = 0, 1 and 4 with an embedded server on this machine. From each of the
three runs, `arealite report --what-if` predicts the other two: seconds per step and mean age of samples.
`simulated` compares `arealite plan` with published ratios, with runs on this machine, and times a large simulation.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import foresee_simulated
from async_vs_sync import CASES, EXAMPLES, ROOT, make_start
from common import describe_machine, print_table

from arealite.core.foresee.recording import read_recording
from arealite.core.foresee.what_if import WhatIf, parse_question
from arealite.trainer.stats_logger import read_stats
from arealite.utils.rundir import RunDir

ETAS = (0, 1, 4)


def run(case: str, eta: int, model: Path, work: Path, steps: int) -> WhatIf:
    """Train, and return the recording as something that can be asked."""
    trial = f"{case}-{eta}"
    command = [sys.executable, "-m", "arealite.launcher.local", "benchmark/async_task.py"]
    command += ["--config", str(EXAMPLES / "configs" / "demo.yaml"), f"actor.path={model}"]
    command += [f"rollout.max_head_offpolicyness={eta}", f"cluster.fileroot={work}", f"trial_name={trial}"]
    command += [f"total_train_steps={steps}", "stats_logger.console=false", *CASES[case].options]
    env = {**os.environ, **CASES[case].env}
    subprocess.run(command, check=True, cwd=ROOT, timeout=1800, env=env, stdout=subprocess.DEVNULL)
    run_dir = RunDir(work / "demo" / trial)
    return WhatIf(read_recording(run_dir.path, read_stats(run_dir)))


def measured_age(asked: WhatIf) -> float:
    """Return the mean age of the trained samples of a run."""
    ages = [(e.step - e.start_version, e.samples) for e in asked.recording.episodes if e.step is not None]
    return sum(age * samples for age, samples in ages) / sum(samples for _, samples in ages)


def what_if(options: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Predict the step time at each η from each run."""
    model = make_start(CASES[options.case], work)
    runs = {eta: run(options.case, eta, model, work, options.steps) for eta in ETAS}
    table, rows = [], []
    for source, asked in runs.items():
        for eta, other in runs.items():
            scenario, name = parse_question([f"max_head_offpolicyness={eta}"], asked.recording.settings)
            rerun = asked.ask(scenario, name).rerun
            values = rerun.step_s, other.recorded_step_s, rerun.step_s / other.recorded_step_s
            ages = rerun.mean_age, measured_age(other)
            table.append([str(source), str(eta), *(f"{value:.2f}" for value in (*values, *ages))])
            rows.append({"recorded": source, "asked": eta, "ratio": values[2], "ages": ages})
    print_table(["recorded η", "η", "predicted s/step", "measured s/step", "ratio", "predicted age", "age"], table)
    return {"rows": rows}


SECTIONS: dict[str, Callable[[argparse.Namespace, Path], dict[str, Any]]] = {
    "what_if": what_if,
    "simulated": foresee_simulated.run,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    parser.add_argument("--section", choices=list(SECTIONS), default="what_if")
    parser.add_argument("--case", choices=list(CASES), default="lognormal")
    parser.add_argument("--only", action="append", choices=list(foresee_simulated.PARTS), help="parts of simulated")
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--work", type=Path, help="keep the run directories here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = SECTIONS[options.section](options, options.work or Path(folder))
    print(json.dumps({"benchmark": "foresee", "section": options.section, **found, **describe_machine()}))


if __name__ == "__main__":
    main()
