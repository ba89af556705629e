"""Random faults for as long as you like: `python -m tests.chaos.run --minutes 120 --seed 7`.

Starts one job after another, injects faults into random parts at random moments, and checks after each job that
everything documented in docs/reliability.md holds. The first violation ends it and prints the folder of the run.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import tempfile
import time
from pathlib import Path

from arealite.utils.rundir import RunDir
from tests.chaos.job import ChaosJob
from tests.tiny_model import make_model

CHOICES = {
    "allocation_mode": ["embedded.d1+d1", "embedded.d2+d1", "embedded.d1+d2"],
    "rollout.max_head_offpolicyness": [0, 1, 2, 4],
    "rollout.weight_update": ["auto", "disk", "shm", "broadcast"],
    "rollout.pause_mode": ["abort", "in_place"],
    "rollout.num_workers": [0, 0, 1],
}

FAULTS = ["server", "server", "server SIGTERM", "trainer", "trainer SIGTERM", "worker", "launcher", "segment"]
FAULTS += ["server hangs", "trainer hangs", "launcher hangs"]


def inject_faults(job: ChaosJob, rng: random.Random) -> None:
    """Inject up to four faults into one job."""
    for _ in range(rng.randint(1, 4)):
        job.wait_for_step(min(job.steps - 1, job.step() + rng.randint(0, 3)))
        if job.launcher.poll() is not None:
            return
        fault = rng.choice(FAULTS)
        print(f"  step {job.step()}: {fault}", flush=True)
        if fault == "worker" and not job.pids("worker"):
            continue
        if fault.endswith("hangs"):
            pid = job.send_signal(fault.split()[0], signal.SIGSTOP)
            time.sleep(rng.uniform(0, 8))
            os.kill(pid, signal.SIGCONT)
        elif fault == "segment":
            # As systemd does when the user logs out.
            RunDir(job.run_dir).shared_weights.unlink(missing_ok=True)
        elif fault == "launcher":
            job.send_signal("launcher")
            job.launcher.wait()
            job.until_gone()
            job.start()
        else:
            part, _, word = fault.partition(" ")
            job.send_signal(part, signal.Signals[word or "SIGKILL"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--transport", help="fix rollout.weight_update")
    options = parser.parse_args()
    rng = random.Random(options.seed)
    deadline = time.monotonic() + 60 * options.minutes
    number = 0
    while time.monotonic() < deadline:
        folder = Path(tempfile.mkdtemp(prefix="chaos-"))
        make_model(folder / "model")
        overrides = {key: rng.choice(values) for key, values in CHOICES.items()}
        if options.transport:
            overrides["rollout.weight_update"] = options.transport
        chosen = " ".join(f"{key.split('.')[-1]}={value}" for key, value in overrides.items())
        print(f"job {number}: {chosen}, in {folder}", flush=True)
        overrides |= {"recover.retries": 20, "launcher.server_restarts": 20}
        job = ChaosJob(folder, folder / "model", is_warm=False, **overrides)
        try:
            inject_faults(job, rng)
            code = job.finish()
            assert code == 0, f"exit code {code}\n{job.tail()}"
            job.check()
        finally:
            job.end()
        number += 1
    print(f"{number} jobs, no violation")


if __name__ == "__main__":
    main()
