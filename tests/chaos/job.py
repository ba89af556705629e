"""A real job of launcher, servers and trainer: kill its parts, and check what must hold afterwards."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from arealite.utils.process import process_table
from tests import warm_python

ROOT = Path(__file__).parents[2]
BATCH, STEPS, ETA = 4, 12, 2


class ChaosJob:
    """`python -m arealite.launcher.local tests/chaos/task.py …` in a folder of its own."""

    def __init__(
        self, folder: Path, model_path: Path, *, wrap: Sequence[str] = (), is_warm: bool = True, **overrides: object
    ):
        """Start the job; `wrap` is written between `python` and its arguments (`tests.chaos.within`).

        A warm job consists of forks that have imported torch.
        """
        self.folder, self.is_warm = folder, is_warm
        self.run_dir = folder / "runs" / "chaos" / "job"
        options: dict[str, object] = {
            "experiment_name": "chaos",
            "trial_name": "job",
            "allocation_mode": "embedded.d1+d1",
            "cluster.fileroot": folder / "runs",
            "total_train_epochs": 100,
            "total_train_steps": STEPS,
            "train_dataset.path": "generated",
            "train_dataset.batch_size": BATCH,
            "gconfig.n_samples": 2,
            "gconfig.max_new_tokens": 24,
            "rollout.max_head_offpolicyness": ETA,
            "rollout.episode_timeout_s": 20,
            "rollout.request_timeout_s": 60,
            "rollout.health_timeout_s": 3,
            "rollout.setup_timeout_s": 200,
            "rollout.batch_timeout_s": 300,
            "rollout.weight_update": "shm",
            "server.device": "cpu",
            "server.dtype": "float32",
            "server.max_total_tokens": 8192,
            "actor.path": model_path,
            "actor.dtype": "float32",
            "actor.device": "cpu",
            "recover.mode": "auto",
            "recover.retries": 5,
            "recover.freq_steps": 2,
            "launcher.server_restarts": 5,
            "launcher.threads_per_process": 1,
            "stats_logger.console": "false",
            **overrides,
        }
        self.command = [sys.executable, *wrap, "-m", "arealite.launcher.local", str(ROOT / "tests/chaos/task.py")]
        self.command += [f"{key}={value}" for key, value in options.items()]
        self.eta = int(str(options["rollout.max_head_offpolicyness"]))
        self.steps = int(str(options["total_train_steps"]))
        self.batch = int(str(options["train_dataset.batch_size"]))
        self.log = (folder / "launcher.log").open("a")
        self.env = {**os.environ, "CHAOS_FOLDER": str(folder), "PYTHONPATH": str(ROOT)}
        self.start()

    def start(self) -> None:
        self.launcher: subprocess.Popen | warm_python.WarmProcess
        if self.is_warm:
            output = self.log.fileno()
            self.launcher = warm_python.start(self.command[1:], cwd=ROOT, env=self.env, stdout=output, stderr=output)
            return
        self.launcher = subprocess.Popen(
            self.command, cwd=ROOT, env=self.env, stdout=self.log, stderr=self.log, start_new_session=True
        )

    def pids(self, part: str) -> list[int]:
        """Return the processes of a part: `server`, `trainer`, `worker` (of rollout), `launcher` or `watchdog`."""
        words = {
            "server": "arealite.cli.serve",
            "trainer": "chaos/task.py",
            "worker": "multiprocessing.forkserver",
            "launcher": "launcher.local",
            "watchdog": "launcher.watchdog",
        }
        found = []
        for pid in self.all_pids():
            command = self.command_of(pid)
            if words[part] in command and (words["launcher"] in command) == (part == "launcher"):
                found.append(pid)
        return found

    @staticmethod
    def command_of(pid: int) -> str:
        """Return the command line of a process; empty if it has ended."""
        try:
            command = Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
            environment = Path(f"/proc/{pid}/environ").read_text(errors="replace")
        except OSError:
            return ""
        return environment.partition("\0")[0] if environment.startswith(warm_python.COMMAND_ENV) else command

    def all_pids(self) -> list[int]:
        mark = f"CHAOS_FOLDER={self.folder}\0".encode()
        found = []
        for pid, info in process_table().items():
            try:
                if not info.zombie and mark in Path(f"/proc/{pid}/environ").read_bytes():
                    found.append(pid)
            except OSError:
                continue
        return found

    def send_signal(self, part: str, number: signal.Signals = signal.SIGKILL) -> int:
        """Send a signal to one process of a part, once there is one."""
        return self.until(lambda: self._signal_first(part, number), f"a {part} process")

    def _signal_first(self, part: str, number: signal.Signals) -> int | None:
        """Return the process that got the signal; None if there is none, or it has just ended."""
        for pid in self.pids(part)[:1]:
            if self.signal_if_alive(pid, number):
                return pid
        return None

    @staticmethod
    def signal_if_alive(pid: int, number: signal.Signals) -> bool:
        """Send a signal to a process that may have ended meanwhile; False if it has."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
            return True
        return False

    def step(self) -> int:
        """Return the number of finished steps."""
        path = self.run_dir / "stats.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return json.loads(lines[-1])["step"] + 1 if lines else 0

    def wait_for_step(self, step: int) -> None:
        self.until(lambda: self.step() >= step, f"step {step}")

    def until(self, condition, what: str, timeout_s: float = 300.0) -> None:
        """Wait until `condition()` is true, and return what it returned."""
        deadline = time.monotonic() + timeout_s
        while not (met := condition()):
            assert time.monotonic() < deadline, f"{what} never came:\n{self.tail()}"
            if self.launcher.poll() is not None:
                met = condition()
                assert met, f"the launcher ended:\n{self.tail()}"
                return met
            time.sleep(0.05)
        return met

    def finish(self, timeout_s: float = 500.0) -> int:
        return self.launcher.wait(timeout=timeout_s)

    def tail(self) -> str:
        logs = [self.folder / "launcher.log", *sorted((self.run_dir / "logs").glob("**/*.log"))]
        return "\n".join(f"--- {p.name}\n{p.read_text(errors='replace')[-3000:]}" for p in logs)

    def end(self) -> None:
        """Kill all processes of the job."""
        for pid in self.all_pids():
            self.signal_if_alive(pid, signal.SIGKILL)
        self.launcher.wait(timeout=10)
        self.log.close()

    def check(self) -> None:
        """Check that all steps ran once, the ledger adds up, nothing was too old, and no process is left."""
        steps = [json.loads(line) for line in (self.run_dir / "stats.jsonl").read_text().splitlines()]
        assert [row["step"] for row in steps] == list(range(self.steps)), self.tail()
        assert max(row["staleness/max"] for row in steps) <= self.eta
        db = sqlite3.connect(self.run_dir / "run.sqlite")
        counts = dict(db.execute("SELECT state, COUNT(*) FROM episodes GROUP BY state").fetchall())
        per_step = dict(
            db.execute("SELECT step, COUNT(*) FROM episodes WHERE state = 'trained' GROUP BY step").fetchall()
        )
        too_old = db.execute(
            "SELECT id, step, oldest_version FROM episodes WHERE state = 'trained' AND step - oldest_version > ?",
            (self.eta,),
        ).fetchall()
        db.close()
        assert counts["trained"] == self.steps * self.batch, counts
        assert per_step == {step: self.batch for step in range(self.steps)}, per_step
        assert not too_old, too_old
        last = steps[-1]
        assert last["trained"] == counts["trained"]
        ended = last["accepted"] + last["rejected"] + last["failed"] + last["stale"]
        assert last["admitted"] == last["running"] + ended
        self.until_gone()

    def until_gone(self, timeout_s: float = 60.0) -> None:
        deadline = time.monotonic() + timeout_s
        while left := self.all_pids():
            assert time.monotonic() < deadline, f"left behind: {list(map(self.command_of, left))}\n{self.tail()}"
            time.sleep(0.05)
