"""Time from the command to the first rollout and the first update, for each launcher. Prints a table and a JSON line.

    python benchmark/launch.py [--rounds 3] [local torchrun slurm ray controller] [--model FOLDER] [--set KEY=VALUE]…

Uses a tiny random model, or that of `--model`, one embedded server and one trainer rank on this machine. The time runs
from the start of the launcher's process until the first training batch is collected, or its step is done. Each round
starts twice: the first start compiles into an empty cache, the second one finds it. Medians over rounds in which the
launchers alternate. The JSON line has the parts of each start (`time/startup/*`). On a GPU, for example:

    python benchmark/launch.py local --rounds 1 --model FOLDER --set actor.device=cuda --set server.device=cuda \\
        --set actor.compile=true --set actor.dtype=bfloat16 --set server.dtype=bfloat16

Ray and Slurm use one-machine clusters that are already running; `controller` is Ray's controller mode. A
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


def measure(launcher: str, folder: Path, model: Path, rows: Path, env: dict[str, str], more: list[str]) -> dict:
    """Seconds until the first batch, its update, and the end of all processes; and the parts of the start."""
    argv = [*arguments(folder, "embedded", model, rows, "embedded.d1p1t1+d1p1t1", steps=1), *more]
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
    parts = {key.removeprefix("time/"): round(value, 2) for key, value in step.items() if key.startswith("time/")}
    times = {"to_first_rollout_s": first_s, "to_first_update_s": step["time"] - began, "to_end_s": ended - began}
    return {**times, "parts": parts}


def measure_both(launcher: str, folder: Path, model: Path, rows: Path, env: dict[str, str], more: list[str]) -> dict:
    """Measure a start with an empty cache of compiled code, and a second one with that of the first."""
    names = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    env = {**env, **{name: str(folder / "caches" / name.lower()) for name in names}}
    return {start: measure(launcher, folder / start, model, rows, env, more) for start in ("first", "second")}


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
    parser.add_argument("--model", type=Path, help="a model folder; by default a tiny random model")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of the run")
    options = parser.parse_args()
    found: dict[str, list[dict]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = options.model or make_model(folder / "model", seed=0)
        rows = folder / "gsm8k.jsonl"
        row = {"question": "1 + 1?", "answer": "#### 2"}
        rows.write_text("".join(json.dumps(row) + "\n" for _ in range(16)))
        for number in range(options.rounds):
            for launcher in options.launchers:
                here = folder / f"{launcher}{number}"
                with cluster(launcher, here) as env:
                    if env is not None:
                        took = measure_both(launcher, here, model, rows, env, options.set)
                        found.setdefault(launcher, []).append(took)
    keys = ["to_first_rollout_s", "to_first_update_s", "to_end_s"]
    results = {
        f"{launcher}, {start} start": {
            **{key: statistics.median(took[start][key] for took in all_took) for key in keys},
            "parts": all_took[-1][start]["parts"],
        }
        for launcher, all_took in found.items()
        for start in ("first", "second")
    }
    print_table(["launcher", *keys], [[n, *(f"{r[k]:.1f}" for k in keys)] for n, r in results.items()])  # fmt: skip
    about = {"benchmark": "launch", "rounds": options.rounds, **describe_machine()}
    print(json.dumps({**about, "results": results}))


if __name__ == "__main__":
    main()
