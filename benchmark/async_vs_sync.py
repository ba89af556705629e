"""How much faster is asynchronous training than synchronous, same machine, same work, same reward at the end?

    python benchmark/async_vs_sync.py [--runs 1] [--steps 110] [--case lognormal] [--case slow_reward] [--device cpu]

Cases: `lognormal`, answers followed by generations whose length varies by a factor of ten and more; `slow_reward`, rewards that take a second of
waiting. Both sides run through the launcher with an embedded server and a trainer as two processes, and take turns.
"""

from __future__ import annotations

import argparse
import json
import os
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

CASES = {
    "lognormal": {"BENCH_MEDIAN_TOKENS": "12", "BENCH_SIGMA": "1.2"},
    "slow_reward": {"BENCH_REWARD_WAIT_S": "1.0"},
}
ETA = {"synchronous": 0, "asynchronous": 4}


def make_start(work: Path) -> Path:
    """The demo's model after supervised training, with room for longer sequences."""
    make_model(work / "random", seed=1)
    config_path = work / "random" / "config.json"
    config = json.loads(config_path.read_text()) | {"max_position_embeddings": 512}
    config_path.write_text(json.dumps(config))
    supervise(work / "random", work / "model", seed=1)
    return work / "model"


def run(case: str, side: str, model: Path, work: Path, steps: int, device: str) -> dict[str, float]:
    trial = f"{case}-{side}"
    command = [
        sys.executable,
        "-m",
        "arealite.launcher.local",
        str(ROOT / "benchmark/async_task.py"),
    ]
    command += ["--config", str(EXAMPLES / "configs" / "demo.yaml"), f"actor.path={model}"]
    command += [f"rollout.max_head_offpolicyness={ETA[side]}", f"cluster.fileroot={work}"]
    command += [f"trial_name={trial}", f"total_train_steps={steps}", "stats_logger.console=false"]
    command += ["server.context_length=512", "server.max_total_tokens=131072"]
    command += [f"server.device={device}", f"actor.device={device}"]
    subprocess.run(command, check=True, cwd=ROOT, timeout=3600, env={**os.environ, **CASES[case]})
    lines = (work / "demo" / trial / "stats.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    warm = rows[5:]  # the first steps fill the pipeline
    return {
        "seconds_per_step": sum(r["time/step"] for r in warm) / len(warm),
        "final_reward": statistics.mean(r["reward"] for r in rows[-5:]),
        "lag_mean": statistics.mean(r["lag_mean"] for r in warm),
        "trainer_idle": statistics.mean(r["idle/trainer"] for r in warm),
        "server_idle": statistics.mean(r.get("idle/server", 0.0) for r in warm),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--steps", type=int, default=110)
    parser.add_argument("--case", action="append", choices=list(CASES))
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    cases = options.case or list(CASES)
    measured: dict[str, dict[str, list[dict[str, float]]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        model = make_start(work)
        for case in cases:
            measured[case] = {side: [] for side in ETA}
            for _ in range(options.runs):
                for side in ETA:
                    measured[case][side].append(
                        run(case, side, model, work, options.steps, options.device)
                    )
    rows, speedups = [], {}
    for case, sides in measured.items():
        median = {
            side: {k: statistics.median(r[k] for r in runs) for k in runs[0]}
            for side, runs in sides.items()
        }
        speedups[case] = (
            median["synchronous"]["seconds_per_step"] / median["asynchronous"]["seconds_per_step"]
        )
        for side, values in median.items():
            rows.append([case, side, *(f"{v:.3f}" for v in values.values())])
        rows.append([case, "speed-up", f"{speedups[case]:.2f}x", "", "", "", ""])
    header = ["case", "side", "s/step", "final reward", "mean lag", "trainer idle", "server idle"]
    print_table(header, rows)
    line = {"benchmark": "async_vs_sync", "speedup": speedups, "measured": measured}
    print(json.dumps({**line, "steps": options.steps, **describe_machine()}))


if __name__ == "__main__":
    main()
