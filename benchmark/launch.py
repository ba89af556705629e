"""Time from the command to the first rollout, for each launcher. Prints a table and one JSON line.

    python benchmark/launch.py [--rounds 3] [local torchrun slurm ray controller]

Uses a tiny random model, one embedded server and one trainer rank on this machine. The time runs from the start of
the launcher's process until the first training batch is collected. Medians over rounds in which the launchers
alternate. Ray and Slurm use one-machine clusters that are already running; `controller` is Ray's controller mode. A
launcher whose cluster cannot be started here is left out, with the reason.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmark.common import describe_machine, print_table  # noqa: E402
from tests.launcher.slurm_cluster import SlurmCluster, why_not  # noqa: E402
from tests.servers.conftest import make_model  # noqa: E402
from tests.servers.test_training import arguments  # noqa: E402

EXAMPLE = ROOT / "examples" / "arealite" / "gsm8k_grpo.py"
LAUNCHERS = ["local", "torchrun", "slurm", "ray", "controller"]


def measure(launcher: str, folder: Path, model: Path, rows: Path, env: dict[str, str]) -> dict:
    """Seconds until the first batch, and until all processes have ended."""
    argv = arguments(folder, "embedded", model, rows, "embedded.d1p1t1+d1p1t1", steps=1)
    argv += ["controller=true"] if launcher == "controller" else []
    module = "ray" if launcher == "controller" else launcher
    command = [sys.executable, "-m", f"arealite.launcher.{module}", str(EXAMPLE), *argv]
    began = time.time()
    result = subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True)
    ended = time.time()
    if result.returncode:
        raise SystemExit(f"{launcher} failed:\n{result.stdout}{result.stderr}")
    run = folder / "e" / "t"
    step = json.loads((run / "stats.jsonl").read_text().splitlines()[0])
    first_s = step["time"] - began - step["time/step"] + step.get("time/rollout", 0.0)
    return {"to_first_rollout_s": first_s, "to_end_s": ended - began}


@contextlib.contextmanager
def cluster(launcher: str, folder: Path):
    """Start the launcher's cluster. Yields its environment variables, or None if it cannot be started here."""
    if launcher == "slurm":
        reason = why_not()
        if reason:
            print(f"slurm is left out: {reason}")
            yield None
            return
        with SlurmCluster(folder / "slurm", nodes=1) as made:
            yield made.env
    elif launcher in ("ray", "controller"):
        try:
            from ray.cluster_utils import Cluster
        except ImportError:
            print("ray is left out: it is not installed (pip install 'arealite[ray]')")
            yield None
            return
        # The other launchers do not lower priorities either.
        os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112
        made = Cluster(initialize_head=True, head_node_args={"num_cpus": 4})
        yield {"RAY_ADDRESS": made.address}
        made.shutdown()
    else:
        yield {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("launchers", nargs="*", default=LAUNCHERS)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    found: dict[str, list[dict]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = make_model(folder / "model", seed=0)
        rows = folder / "gsm8k.jsonl"
        row = {"question": "1 + 1?", "answer": "#### 2"}
        rows.write_text("".join(json.dumps(row) + "\n" for _ in range(16)))
        for number in range(options.rounds):
            for launcher in options.launchers:
                here = folder / f"{launcher}{number}"
                with cluster(launcher, here) as env:
                    if env is not None:
                        took = measure(launcher, here, model, rows, env)
                        found.setdefault(launcher, []).append(took)
    keys = ["to_first_rollout_s", "to_end_s"]
    results = {
        launcher: {key: statistics.median(took[key] for took in all_took) for key in keys}
        for launcher, all_took in found.items()
    }
    print_table(["launcher", *keys], [[n, *(f"{r[k]:.1f}" for k in keys)] for n, r in results.items()])  # fmt: skip
    about = {"benchmark": "launch", "rounds": options.rounds, **describe_machine()}
    print(json.dumps({**about, "results": results}))


if __name__ == "__main__":
    main()
