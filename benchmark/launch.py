"""How long from the command to the first rollout, for each launcher? Prints a table and one JSON line.

    python benchmark/launch.py [local torchrun slurm ray]

A tiny random model, one embedded server and one trainer rank on this machine. The clock starts before the launcher's process and stops when the
first training batch has been collected. Ray and Slurm run on clusters of one machine that are up already, as they would be; a launcher
whose cluster cannot be made here is left out, with the reason.
"""

from __future__ import annotations

import contextlib
import json
import os
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
from tests.servers.test_training import SCRIPT, arguments  # noqa: E402


def measure(launcher: str, folder: Path, model: Path, rows: Path, env: dict[str, str]) -> dict:
    """Seconds until servers are ready, until the first batch, and until everything has ended."""
    argv = arguments(folder, "embedded", model, rows, "embedded.d1p1t1+d1p1t1", steps=1)
    command = [sys.executable, "-m", f"arealite.launcher.{launcher}", str(SCRIPT), *argv]
    began = time.time()
    result = subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True)
    ended = time.time()
    if result.returncode:
        raise SystemExit(f"{launcher} failed:\n{result.stdout}{result.stderr}")
    run = folder / "e" / "t"
    step = json.loads((run / "stats.jsonl").read_text().splitlines()[0])
    first_s = step["time"] - began - step["time/step"] + step.get("time/rollout", 0.0)
    return {"launcher": launcher, "to_first_rollout_s": first_s, "to_end_s": ended - began}


@contextlib.contextmanager
def cluster(launcher: str, folder: Path):
    """Variables under which the launcher finds its cluster; None if there can be none here."""
    if launcher == "slurm":
        reason = why_not()
        if reason:
            print(f"slurm is left out: {reason}")
            yield None
            return
        with SlurmCluster(folder / "slurm", nodes=1) as made:
            yield made.env
    elif launcher == "ray":
        try:
            from ray.cluster_utils import Cluster
        except ImportError:
            print("ray is left out: it is not installed (pip install 'arealite[ray]')")
            yield None
            return
        # As the others, for a fair comparison.
        os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112
        made = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
        yield {"RAY_ADDRESS": made.address}
        made.shutdown()
    else:
        yield {}


def main() -> None:
    launchers = sys.argv[1:] or ["local", "torchrun", "slurm", "ray"]
    results = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = make_model(folder / "model", seed=0)
        rows = folder / "gsm8k.jsonl"
        row = {"question": "1 + 1?", "answer": "#### 2"}
        rows.write_text("".join(json.dumps(row) + "\n" for _ in range(16)))
        for launcher in launchers:
            with cluster(launcher, folder) as env:
                if env is not None:
                    results.append(measure(launcher, folder / launcher, model, rows, env))
    columns = ["launcher", "to_first_rollout_s", "to_end_s"]
    print_table(columns, [[row[c] if isinstance(row[c], str) else f"{row[c]:.1f}" for c in columns] for row in results])  # fmt: skip
    print(json.dumps({"benchmark": "launch", **describe_machine(), "results": results}))


if __name__ == "__main__":
    main()
