"""What does staleness cost? Reward after the same number of samples for several η, decoupled objective on and off.

    python benchmark/staleness.py [--steps 110] [--etas 0 1 4 8 16] [--seeds 1]

The demo's task from the same supervised start. Prints a table of final rewards (mean of the last five batches) with the lag that the samples really had,
and one JSON line.
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


def run(
    eta: int, decoupled: bool, seed: int, model: Path, work: Path, steps: int
) -> dict[str, float]:
    trial = f"eta{eta}-{'decoupled' if decoupled else 'naive'}-{seed}"
    command = [sys.executable, "-m", "arealite.launcher.local", str(EXAMPLES / "reverse_grpo.py")]
    command += ["--config", str(EXAMPLES / "configs" / "demo.yaml"), f"actor.path={model}"]
    command += [f"rollout.max_head_offpolicyness={eta}", f"cluster.fileroot={work}", f"seed={seed}"]
    command += [f"trial_name={trial}", f"total_train_steps={steps}", "stats_logger.console=false"]
    command += [f"actor.use_decoupled_loss={str(decoupled).lower()}", "actor.prox_logp=recompute"]
    command += ["rollout.adaptive_lead=false"]  # every sample as old as it may be
    subprocess.run(command, check=True, cwd=ROOT, timeout=1800)
    lines = (work / "demo" / trial / "stats.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return {
        "eta": eta,
        "decoupled": decoupled,
        "seed": seed,
        "reward": statistics.mean(r["reward"] for r in rows[-5:]),
        "lag_mean": statistics.mean(r["lag_mean"] for r in rows[len(rows) // 4 :]),
        "seconds": sum(r["time/step"] for r in rows),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=110)
    parser.add_argument("--etas", type=int, nargs="+", default=[0, 1, 4, 8, 16])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        make_model(work / "random", seed=1)
        supervise(work / "random", work / "model", seed=1)
        results = [
            run(eta, decoupled, seed, work / "model", work, options.steps)
            for seed in options.seeds
            for eta in options.etas
            for decoupled in (True, False)
        ]
    rows = []
    for eta in options.etas:
        cells = [str(eta)]
        for decoupled in (True, False):
            mine = [r for r in results if r["eta"] == eta and r["decoupled"] is decoupled]
            cells.append(f"{statistics.mean(r['reward'] for r in mine):.3f}")
            cells.append(f"{statistics.mean(r['lag_mean'] for r in mine):.2f}")
        rows.append(cells)
    print_table(["eta", "decoupled", "lag", "naive", "lag"], rows)
    print(json.dumps({"benchmark": "staleness", "results": results, **describe_machine()}))


if __name__ == "__main__":
    main()
