"""A real embedded server in its own process, for tests that talk to one, stop it or kill it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from tests import warm_python
from tests.machines import Machine

API_KEY = "key-of-servers-on-machines"
ROOT = Path(__file__).resolve().parents[1]


class ServerProcess:
    """`python -m arealite.cli.serve` that listens on `address` once the object exists, on `machine` if given."""

    def __init__(self, model_path: str | Path, machine: Machine | None = None, **options: Any):
        self.machine = machine
        if machine is not None:
            options = {"host": machine.address, "api_key": API_KEY, **options}
        options = {"device": "cpu", "dtype": "float32", "max_total_tokens": 8192, "port": 0, **options}
        command = [*(machine.python if machine else []), "-m", "arealite.cli.serve", f"model_path={model_path}"]
        command += [f"{key}={value}" for key, value in options.items()]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "AREALITE_DIE_WITH_PARENT": "1"}
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        self.process: subprocess.Popen | warm_python.WarmProcess
        if options["device"] == "cpu":
            self.process = warm_python.start(command, env=env, **pipes)
        else:  # CUDA does not survive a fork
            self.process = subprocess.Popen([sys.executable, *command], env=env, cwd=ROOT, text=True, **pipes)
        self.lines: list[str] = []
        self.address = self._read_address()
        # The server blocks once the pipe is full, so keep reading.
        threading.Thread(target=self._drain, daemon=True).start()

    def _read_address(self) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            found = re.search(r"http://([\w.]+:\d+)", line)
            if found:
                return found.group(1)
        raise RuntimeError(f"the server did not start:\n{''.join(self.lines)}")

    def _drain(self) -> None:
        assert self.process.stdout is not None
        self.lines.extend(self.process.stdout)

    def post(self, path: str, **body: Any) -> Any:
        return self._request(path, json.dumps(body).encode())

    def get(self, path: str) -> Any:
        return self._request(path, None)

    def _request(self, path: str, data: bytes | None) -> Any:
        headers = {"Content-Type": "application/json"}
        if self.machine is not None:
            headers["Authorization"] = f"Bearer {API_KEY}"
        request = urllib.request.Request(f"http://{self.address}/{path}", data, headers)
        network = self.machine.network() if self.machine else nullcontext()
        with network, urllib.request.urlopen(request, timeout=30) as response:
            return json.load(response)

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(timeout=10)


@contextmanager
def server_process(model_path: str | Path, machine: Machine | None = None, **options: Any) -> Iterator[ServerProcess]:
    server = ServerProcess(model_path, machine, **options)
    try:
        yield server
    finally:
        server.kill()
