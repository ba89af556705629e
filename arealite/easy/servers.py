"""`ServersBeside`: the inference servers of a run, in a child process of the trainer.

The child is a launcher without ranks (`arealite.launcher.beside`). It ends with the `with` block, and with this process
if that is killed. If it fails, the main thread gets its message as an exception, wherever it waits.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from types import FrameType

from arealite.api.backends import API_KEY_ENV
from arealite.api.errors import AReaLiteError, ConfigError, ServerError
from arealite.engine.remote.base import ADDRESSES_ENV, NAMES_ENV
from arealite.launcher.job import Job
from arealite.utils.config import REFUSED
from arealite.utils.names import FileNames, wait_for_names
from arealite.utils.process import ATTEMPT_ENV, last_error, python_path, tail

# Wakes the main thread when the servers have failed.
_FAILED = signal.SIGUSR1
# For the child to end, besides the grace period of the servers.
_ENDING_S = 10.0


class ServersBeside:
    """Starts the servers of a job at once and ends them at the end of the `with` block."""

    def __init__(self, job: Job):
        self.job, self.placement = job, job.placement()
        self.failure: AReaLiteError | None = None
        self._log = job.run_dir.logs / "launcher.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._has_ended = threading.Event()
        # Guards `_is_ending` and the decision to interrupt the main thread.
        self._lock = threading.Lock()
        self._is_ending = False
        self._is_main = threading.current_thread() is threading.main_thread()
        self._old_handler: object = None

    def __enter__(self) -> ServersBeside:
        if not self.placement.servers:
            return self
        if self._is_main:
            self._old_handler = signal.signal(_FAILED, self._raise_failure)
        env = {**os.environ, "PYTHONPATH": python_path(), "PYTHONUNBUFFERED": "1"}
        command = [sys.executable, "-m", "arealite.launcher.beside", str(self.job.path), str(os.getpid())]
        with self._log.open("ab") as log:
            # In a session of its own: Ctrl+C is for the trainer, which then ends its servers.
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env, start_new_session=True
            )
        threading.Thread(target=self._watch, name="servers beside", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._is_ending = True
        try:
            self._end()
        finally:
            if self._old_handler is not None:
                signal.signal(_FAILED, self._old_handler)  # type: ignore[arg-type]

    def environment(self) -> dict[str, str]:
        """Wait until the addresses are known; return the variables by which the trainer finds its servers."""
        job, env = self.job, {}
        if self._process is not None:
            wanted = [f"servers/{server.index}" for server in self.placement.servers]
            names, timeout_s = FileNames(job.names_folder), job.config.setup_timeout_s
            found = wait_for_names(names, wanted, timeout_s, "the trainer", self._pause)
            env = {ADDRESSES_ENV: ",".join(found.values()), NAMES_ENV: str(job.names_folder)}
            # The child holds the lock of the run directory.
            env[ATTEMPT_ENV] = "0"
        if job.config.server.api_key:
            env[API_KEY_ENV] = job.config.server.api_key
        device = self.placement.ranks[0].device
        if device is not None and job.on_gpu:
            # CUDA may be in use in this process: CUDA_VISIBLE_DEVICES would come too late.
            env["LOCAL_RANK"] = str(device)
        return env

    def _pause(self, seconds: float) -> None:
        self._has_ended.wait(seconds)
        if self.failure is not None:
            raise self.failure

    def _watch(self) -> None:
        """Wait for the end of the child; an end that was not asked for interrupts the main thread."""
        assert self._process is not None
        code = self._process.wait()
        with self._lock:
            if not self._is_ending:
                kind = ConfigError if code == REFUSED else ServerError
                self.failure = kind(f"the inference servers ended: {self._message(code)}")
                if self._is_main:
                    signal.pthread_kill(threading.main_thread().ident or 0, _FAILED)
        self._has_ended.set()

    def _message(self, code: int) -> str:
        return last_error(tail(self._log)) or f"exit code {code}; see {self._log}"

    def _raise_failure(self, number: int, frame: FrameType | None) -> None:
        if self.failure is not None and not self._is_ending:
            raise self.failure

    def _end(self) -> None:
        if self._process is None:
            return
        try:
            self._process.terminate()
            self._has_ended.wait(self.job.config.launcher.stop_timeout_s + _ENDING_S)
        finally:
            # After a second Ctrl+C, or if it hangs. Its watchdog ends what is left.
            self._process.kill()
            self._has_ended.wait(_ENDING_S)
