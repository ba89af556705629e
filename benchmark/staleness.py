"""What does staleness cost? Reward after the same number of samples for several η, decoupled objective on and off.

    python benchmark/staleness.py [--steps 220] [--lr 2e-4] [--etas 0 1 4 8 16] [--seeds 1 2 3] [--out results.jsonl]

The demo's task from the same supervised start, with every sample η versions old (`staleness_task.py`). Prints the final weights' mean reward on 512
held-out prompts × 8 samples, with the lag the trained tokens really had, and one JSON line. `--out` keeps each run, and goes on where it was left.
The demo itself uses 110 steps at 4e-4, as fast as a synchronous run can learn; there four versions are a large part of the way.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from common import describe_machine, print_table

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples" / "arealite"
sys.path.insert(0, str(EXAMPLES))
from demo import supervise  # noqa: E402
from reverse import make_model  # noqa: E402

Result = dict[str, float]


def run(
    eta: int,
    decoupled: bool,
    seed: int,
    model: Path,
    work: Path,
    steps: int,
    lr: float,
    mode: str,
    adaptive: bool,
) -> Result:
    trial = f"eta{eta}-{'decoupled' if decoupled else 'naive'}-{seed}"
    command = [sys.executable, "-m", "arealite.launcher.local", "benchmark/staleness_task.py"]
    command += ["--config", str(EXAMPLES / "configs" / "demo.yaml"), f"actor.path={model}"]
    command += [f"rollout.max_head_offpolicyness={eta}", f"cluster.fileroot={work}", f"seed={seed}"]
    command += [f"trial_name={trial}", f"total_train_steps={steps}", "stats_logger.console=false"]
    command += [f"actor.use_decoupled_loss={str(decoupled).lower()}", "actor.prox_logp=recompute"]
    command += [f"actor.behav_imp_weight_mode={mode}"] if decoupled else []
    command += ["valid_dataset.path=generated", f"evaluator.freq_steps={steps}"]
    command += [f"rollout.adaptive_lead={str(adaptive).lower()}", f"actor.optimizer.lr={lr}"]
    subprocess.run(command, check=True, cwd=ROOT, timeout=3600)
    lines = (work / "demo" / trial / "stats.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    full = rows[2 * eta :]  # before, the pipeline fills
    return {
        "eta": eta,
        "decoupled": decoupled,
        "seed": seed,
        "lr": lr,
        "mode": mode,
        "adaptive": adaptive,
        "steps": steps,
        "eval_reward": rows[-1]["eval/reward"],
        "train_reward": statistics.mean(r["reward"] for r in rows[-5:]),
        "lag": statistics.mean(r["staleness"] for r in full),
        "behav_kl": statistics.mean(r.get("behav_kl/k3", 0.0) for r in full),
        "num_samples": sum(r["num_seqs"] for r in rows),
        "seconds": sum(r["time/step"] for r in rows),
    }


def spread(values: list[float]) -> str:
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):.3f} ± {deviation:.3f} ({len(values)})"


def show(results: list[Result]) -> None:
    rows = []
    for eta in sorted({int(r["eta"]) for r in results}):
        cells = [str(eta)]
        for decoupled in (True, False):
            mine = [r for r in results if r["eta"] == eta and r["decoupled"] is decoupled]
            lag = f"{statistics.mean(r['lag'] for r in mine):.2f}" if mine else ""
            cells += [spread([r["eval_reward"] for r in mine]) if mine else "", lag]
        rows.append(cells)
    print("final reward: mean ± deviation over seeds (number of seeds)")
    print_table(["eta", "decoupled", "lag", "naive", "lag"], rows)
    print(json.dumps({"benchmark": "staleness", "results": results, **describe_machine()}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=220)
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--etas", type=int, nargs="+", default=[0, 1, 4, 8, 16])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--adaptive", action="store_true", help="as runs do: no older than needed")
    parser.add_argument("--mode", default="token_mask", help="actor.behav_imp_weight_mode")
    parser.add_argument("--objectives", nargs="+", default=["decoupled", "naive"])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    results: list[Result] = []
    if options.out and options.out.exists():
        results = [json.loads(line) for line in options.out.read_text().splitlines()]
    seen = {(r["eta"], r["decoupled"], r["seed"]) for r in results}
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        make_model(work / "random", seed=1)
        supervise(work / "random", work / "model", seed=1)
        objectives = [name == "decoupled" for name in options.objectives]
        cases = [(e, d, s) for s in options.seeds for e in options.etas for d in objectives]
        for case in cases:
            if case not in seen:
                results.append(
                    run(
                        *case,
                        work / "model",
                        work,
                        options.steps,
                        options.lr,
                        options.mode,
                        options.adaptive,
                    )
                )
                if options.out:
                    options.out.write_text("".join(json.dumps(r) + "\n" for r in results))
    show(results)


if __name__ == "__main__":
    main()
