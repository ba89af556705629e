"""What does staleness cost? Reward after the same number of samples for several η, decoupled objective on and off.

    python benchmark/staleness.py [--forced] [--etas 0 1 4 8 16] [--seeds 1 2 3] [--objectives decoupled naive]
        [--steps 220] [--lr 2e-4] [--out results.jsonl] [--model FOLDER] [--at-once 1] [KEY=VALUE ...]

Trains the demo's task from the same supervised start, as a run does it: η is the limit, and generation runs ahead no
further than keeps the trainer busy. With `--forced` every sample is η versions old when it is trained on
(`staleness_task.py`). Prints two rewards and the lag: `final`, of the last weights on fresh samples (512 held-out
prompts × 8, the same for all runs; compare this one), and `train`, of the last five training batches, which older
weights sampled. One seed by default: ten runs of a minute and a half each on two idle cores. `--out` keeps each run,
and a second start continues there. The demo itself uses 110 steps at 4e-4, as fast as a synchronous run can learn;
there four versions are a large part of the training. With `--model` a real model learns the task of
`configs/reasoning_gym_grpo.yaml` instead.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from common import describe_machine, print_table

from arealite.trainer.stats_logger import read_stats
from arealite.utils.rundir import RunDir

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples" / "arealite"
sys.path.insert(0, str(EXAMPLES))
from demo import supervise  # noqa: E402
from reverse import make_model  # noqa: E402

# What makes a run: its η, objective, seed, and how; and then what came of it.
Setting = dict[str, Any]
Result = dict[str, Any]


def task_of(model: Path | None, work: Path) -> list[str]:
    """Return the configuration of the task: the demo's with a model made here, or reasoning-gym with a real one."""
    if model:
        path = str(EXAMPLES / "configs" / "reasoning_gym_grpo.yaml")
        return ["--config", path, f"actor.path={model.resolve()}", "valid_dataset.options.size=512"]
    make_model(work / "random", seed=1)
    supervise(work / "random", work / "model", seed=1)
    path = str(EXAMPLES / "configs" / "demo.yaml")
    return ["--config", path, f"actor.path={work / 'model'}", "valid_dataset.path=generated"]


def run(setting: Setting, work: Path, task: list[str], overrides: list[str]) -> Result:
    eta, steps = setting["eta"], setting["steps"]
    trial = "-".join(f"{name}_{value}" for name, value in setting.items())
    command = [sys.executable, "-m", "arealite.launcher.local", "benchmark/staleness_task.py", *task]
    command += [f"cluster.fileroot={work}", "experiment_name=staleness", f"trial_name={trial}"]
    command += [f"seed={setting['seed']}"]
    command += [f"total_train_steps={steps}", f"actor.optimizer.lr={setting['lr']}"]
    command += [f"rollout.max_head_offpolicyness={eta}", "stats_logger.console=false"]
    command += [f"rollout.adaptive_lead={str(setting['adaptive']).lower()}"]
    command += [f"actor.use_decoupled_loss={str(setting['decoupled']).lower()}"]
    if setting["decoupled"]:
        command += [f"actor.behav_imp_weight_mode={setting['mode']}", "actor.prox_logp=recompute"]
    command += [f"evaluator.freq_steps={steps}", "evaluator.at_start_and_end=false"]
    command += ["eval_gconfig.n_samples=8", "eval_gconfig.temperature=1"]
    subprocess.run([*command, *overrides], check=True, cwd=ROOT, timeout=3600)
    rows = read_stats(RunDir(work / "staleness" / trial))
    # Before, the pipeline fills.
    full = rows[2 * eta :]
    return {
        **setting,
        "eval_reward": rows[-1]["eval/valid/reward"],
        "train_reward": statistics.mean(r["reward"] for r in rows[-5:]),
        "lag": statistics.mean(r["staleness"] for r in full),
        "behav_kl": statistics.mean(r.get("behav_kl/k3", 0.0) for r in full),
        "num_samples": sum(r["num_seqs"] for r in rows),
        "seconds": sum(r["time/step"] for r in rows),
    }


def cells(results: list[Result]) -> list[str]:
    """Mean reward of the final weights, its deviation over seeds, their number; mean reward in training; mean lag."""
    if not results:
        return ["", "", ""]
    rewards = [r["eval_reward"] for r in results]
    deviation = f" ± {statistics.stdev(rewards):.3f}" if len(rewards) > 1 else ""
    train, lag = (statistics.mean(r[key] for r in results) for key in ("train_reward", "lag"))
    final = f"{statistics.mean(rewards):.3f}{deviation} ({len(rewards)})"
    return [final, f"{train:.3f}", f"{lag:.2f}"]


def show(results: list[Result]) -> None:
    rows = []
    for eta in sorted({r["eta"] for r in results}):
        mine = [r for r in results if r["eta"] == eta]
        sides = [[r for r in mine if r["decoupled"] is on] for on in (True, False)]
        rows.append([str(eta), *cells(sides[0]), *cells(sides[1])])
    print("rewards: mean ± deviation over seeds (number of seeds)")
    print_table(["eta", "decoupled: final", "train", "lag", "naive: final", "train", "lag"], rows)
    print(json.dumps({"benchmark": "staleness", "results": results, **describe_machine()}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--forced", action="store_true", help="every sample is eta versions old")
    parser.add_argument("--etas", type=int, nargs="+", default=[0, 1, 4, 8, 16])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--steps", type=int, default=220)
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--mode", default="token_mask", help="actor.behav_imp_weight_mode")
    parser.add_argument("--objectives", nargs="+", default=["decoupled", "naive"])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--model", type=Path, help="Hugging Face folder of a real model")
    parser.add_argument("--at-once", type=int, default=1, help="runs at the same time")
    parser.add_argument("overrides", nargs="*", help="further configuration")
    options = parser.parse_args()
    if options.steps <= 2 * max(options.etas):
        parser.error(f"--steps {options.steps}: the pipeline fills for 2 eta steps, so more are needed")
    known: list[Result] = []
    if options.out and options.out.exists():
        known = [json.loads(line) for line in options.out.read_text().splitlines()]
    how = {"lr": options.lr, "mode": options.mode, "adaptive": not options.forced, "steps": options.steps}
    settings = [
        {"eta": eta, "decoupled": name == "decoupled", "seed": seed, **how}
        for seed in options.seeds
        for eta in options.etas
        for name in options.objectives
    ]
    results = [row for setting in settings for row in known if setting.items() <= row.items()]
    missing = [setting for setting in settings if not any(setting.items() <= row.items() for row in known)]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.at_once) as pool:
        work = Path(folder)
        one = partial(run, work=work, task=task_of(options.model, work), overrides=options.overrides)
        for result in pool.map(one, missing):
            results.append(result)
            if options.out:
                with options.out.open("a") as file:
                    file.write(json.dumps(result) + "\n")
    show(results)


if __name__ == "__main__":
    main()
