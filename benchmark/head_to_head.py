"""Compares the embedded engine with SGLang and vLLM on one machine.

All get the same weights, prompts, lengths and client, and return log-probs, each in the fastest form that it has: ours
as the trainer asks for them.

    python benchmark/head_to_head.py sglang="env PYTHONPATH=/opt/sgsite python3" \\
        vllm="env PYTHONPATH=/opt/vsite python3"
    VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind python benchmark/head_to_head.py device=cpu \\
        cases=135m/mixed groups=8 median=32 max_output=64 concurrency=32 input_len=32 \\
        vllm=$(scripts/servers/install-vllm-cpu)/bin/python

All servers start in parallel, which takes minutes. SIGSTOP pauses those that are not being measured, and each is
terminated after its last case. Prints a line per measurement, then a table and one JSON line. If a server fails, only
its own results are missing.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import load
import torch
from common import describe_machine, print_table
from inference import EXPERTS, SHAPES, Options, make_jobs, make_model

from arealite.utils.config import load_config

ROOT = Path(__file__).resolve().parent.parent
OURS, IN_PROCESS = "arealite", "arealite in process"
LARGE = ("7b", "30b-a3b", "30b-a3b-24", "30b-a3b-12")


@dataclass
class Comparison:
    """Options of the benchmark."""

    cases: str = field(
        default="0.5b/256,0.5b/1024,0.5b/mixed,7b/256,1.5b/256",
        metadata={
            "help": "shape/concurrency, shape/mixed (256 at once, groups of 8), or shape/64x128+16384 (64 at "
            "once, 128 tokens in, 16,384 out)."
        },
    )
    sglang: str = field(default="", metadata={"help": "Python with SGLang; empty: not measured."})
    vllm: str = field(default="", metadata={"help": "Python with vLLM; empty: not measured."})
    our_settings: str = field(default="", metadata={"help": "More settings of our server: kv_cache_dtype=fp8 …"})
    sglang_settings: str = field(default="", metadata={"help": "More options of SGLang: --kv-cache-dtype fp8_e4m3 …"})
    device: str = field(default="cuda", metadata={"help": "cuda or cpu."})
    input_len: int = field(default=128, metadata={"help": "Prompt tokens."})
    output_len: int = field(default=512, metadata={"help": "Sampled tokens of the fixed cases."})
    median: int = field(default=256, metadata={"help": "Median output of mixed cases."})
    max_output: int = field(default=2048, metadata={"help": "Longest output of mixed cases."})
    waves: int = field(default=2, metadata={"help": "Requests per concurrent slot (fixed cases)."})
    groups: int = field(default=250, metadata={"help": "Prompts of mixed cases, 8 samples each."})
    concurrency: int = field(default=256, metadata={"help": "Requests at once in mixed cases."})
    repeats: int = field(default=2, metadata={"help": "Runs of each case; the best counts."})
    folder: str = field(default="", metadata={"help": "Where weights and logs go; by default a new folder in memory."})
    tokenizer: str = field(default="", metadata={"help": "Folder of a tokenizer, for vLLM."})
    skip: str = field(default="", metadata={"help": "Measurements to skip: system:shape/case,…"})
    in_process: bool = field(default=True, metadata={"help": "Also measure the engine without HTTP."})
    start_s: float = field(default=240.0, metadata={"help": "Seconds that a server may take to start."})
    run_s: float = field(default=120.0, metadata={"help": "Seconds that one measurement may take."})


@dataclass
class Case:
    """One workload: a row of the table."""

    name: str
    shape: str
    concurrency: int
    jobs: list[load.Job]


class Server:
    """A server process in its own session; paused while others are measured.

    `commands`: alternative command lines, best first. If one exits early, the next is tried.
    """

    def __init__(self, system: str, shape: str, commands: list[list[str]], port: int, folder: Path):
        self.system, self.shape, self.commands, self.folder = system, shape, commands, folder
        self.url = f"http://127.0.0.1:{port}"
        self.dialect = "arealite" if system == OURS else "native"
        self.log = folder / f"{system}-{shape}.log"
        self._start()

    def _start(self) -> None:
        env = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
        env |= {"VLLM_LOGGING_LEVEL": "WARNING"}
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                self.commands.pop(0),
                stdout=log,
                stderr=log,
                env=env,
                start_new_session=True,
                cwd=ROOT if self.system == OURS else self.folder,
            )
        self.started_s = time.monotonic()

    def wait_until_ready(self, deadline: float) -> None:
        while not self._answers():
            if self.process.poll() is not None and self.commands:
                print(f"{self.system} {self.shape}: trying the next command line", flush=True)
                self.signal(signal.SIGKILL)
                self._start()
            if self.process.poll() is not None or time.monotonic() > deadline:
                tail = self.log.read_text(errors="replace")[-1500:]
                raise RuntimeError(f"{self.system} {self.shape} did not start: {tail}")
            time.sleep(0.5)

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(self.url + "/health", timeout=5) as answer:
                return answer.status == 200
        except (urllib.error.URLError, OSError):
            return False

    def signal(self, number: int) -> None:
        """Send a signal to every process of the session."""
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                session = int(stat.read_text().rsplit(")", 1)[1].split()[3])
                if session == self.process.pid:
                    os.kill(int(stat.parent.name), number)
            except (OSError, IndexError):
                continue  # the process has ended

    def end(self) -> None:
        self.signal(signal.SIGCONT)
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(10)
        self.signal(signal.SIGKILL)
        self.process.wait(30)


def main() -> None:
    config = load_config(sys.argv[1:], Comparison)
    folder = Path(config.folder or tempfile.mkdtemp(prefix="head-to-head-", dir="/dev/shm"))
    folder.mkdir(parents=True, exist_ok=True)
    cases = [make_case(config, name) for name in config.cases.split(",")]
    shapes = list(dict.fromkeys(case.shape for case in cases))
    results: dict[str, dict[str, float]] = {case.name: {} for case in cases}
    others = [name for name in ("sglang", "vllm") if getattr(config, name)]
    skipped = set(config.skip.split(","))
    begin = time.monotonic()
    servers: list[Server] = []
    for shape in shapes:
        save_model(config, shape, folder)
        mine = [case.name for case in cases if case.shape == shape]
        # Our server of a large model does not fit beside the others: it starts after they have ended.
        present = [name for name in others if not skipped >= {f"{name}:{case}" for case in mine}]
        for system in [*([] if shape in LARGE else [OURS]), *present]:
            servers.append(start(config, system, shape, cases, folder))
    try:
        servers = [s for s in servers if is_ready(config, s, begin + config.start_s)]
        for shape in shapes:
            mine = [case for case in cases if case.shape == shape]
            for server in [s for s in servers if s.shape == shape]:
                measure(config, server, mine, results)
            if not any(s.shape == shape and s.system == OURS for s in servers):
                servers.append(start(config, OURS, shape, cases, folder))
                if is_ready(config, servers[-1], time.monotonic() + config.start_s):
                    measure(config, servers[-1], mine, results)
        for case in cases if config.in_process else []:
            run_in_process(config, case, results[case.name])
    finally:
        report(config, results)  # also if the run was interrupted
        for server in servers:
            server.end()
        for shape in shapes:
            shutil.rmtree(folder / shape, ignore_errors=True)


# ---------------------------------------------------------------------------------------------- preparation


def case_options(config: Comparison, name: str) -> Options:
    """Options of a case, see `Comparison.cases`."""
    shape, kind = name.split("/")
    if kind == "mixed":
        return options(config, shape, "mixed", config.concurrency)
    concurrency, _, lengths = kind.partition("x")
    chosen = options(config, shape, "fixed", int(concurrency))
    if lengths:
        chosen.input_len, chosen.output_len = map(int, lengths.split("+"))
    return chosen


def with_new_prompts(jobs: list[load.Job], shape: str, count: int) -> list[load.Job]:
    """The same jobs with other tokens, which no prefix cache has seen; another `count` gives others."""
    vocab = SHAPES[shape][5]
    return [([(token + count) % vocab for token in prompt], length) for prompt, length in jobs]


def options(config: Comparison, shape: str, workload: str, concurrency: int) -> Options:
    names = ("input_len", "output_len", "median", "max_output", "waves", "groups", "device")
    common = {name: getattr(config, name) for name in names}
    return Options(shape=shape, workload=workload, concurrency=concurrency, **common)


def make_case(config: Comparison, name: str) -> Case:
    chosen = case_options(config, name)
    made = make_jobs(chosen, SHAPES[chosen.shape][5])
    # Each sample of a group is one request, as most clients send them.
    jobs = [(job.prompt, job.max_new_tokens) for job in made for _ in range(job.n)]
    return Case(name, chosen.shape, chosen.concurrency, jobs)


def save_model(config: Comparison, shape: str, folder: Path) -> None:
    target = folder / shape
    if not (target / "config.json").exists():
        model = make_model(options(config, shape, "fixed", 1), config.device)
        # Some servers do not start without an EOS token; requests ignore it (`ignore_eos`).
        model.config.eos_token_id = model.generation_config.eos_token_id = 0
        # Parts of 5 GB: a part is copied to the host's memory before it is written.
        model.save_pretrained(target, max_shard_size="5GB")
        del model
        if config.device == "cuda":
            torch.cuda.empty_cache()
    if config.tokenizer:
        for file in Path(config.tokenizer).glob("*token*"):
            shutil.copy(file, target)


def start(config: Comparison, system: str, shape: str, cases: list[Case], folder: Path) -> Server:
    mine = [case for case in cases if case.shape == shape]
    most = max(case.concurrency for case in mine)
    longest = max(len(prompt) + length for case in mine for prompt, length in case.jobs)
    # Room for every sequence at its longest, plus one block each.
    tokens = max(c.concurrency * (max(len(p) + n for p, n in c.jobs) + 16) for c in mine)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    made = COMMANDS[system](config, folder / shape, shape, port, most, longest + 16, tokens)
    commands = [made]
    if system == "vllm" and config.device == "cuda":  # separate processes encode its answers
        commands.insert(0, [*made, "--api-server-count", "4"])
    return Server(system, shape, commands, port, folder)


def our_command(config, path, shape, port, most, longest, tokens) -> list[str]:
    return [
        sys.executable, "-m", "arealite.cli.serve", f"model_path={path}", f"port={port}",
        f"max_running_requests={most}", f"max_total_tokens={tokens}", f"device={config.device}",
        f"context_length={longest}", *shlex.split(config.our_settings),
    ]  # fmt: skip


def sglang_command(config, path, shape, port, most, longest, tokens) -> list[str]:
    command = [
        *shlex.split(config.sglang), "-m", "sglang.launch_server", "--model-path", path,
        "--host", "127.0.0.1", "--port", port, "--skip-tokenizer-init", "--context-length", longest,
        "--max-running-requests", most, "--max-total-tokens", tokens, "--log-level", "warning",
        "--watchdog-timeout", "900",
    ]  # fmt: skip
    if config.device == "cuda":
        command += ["--attention-backend", "fa3", "--sampling-backend", "pytorch"]
        command += ["--cuda-graph-max-bs-decode", most, "--mem-fraction-static", "0.9"]
        command += ["--chunked-prefill-size", "8192"]
    return [str(part) for part in [*command, *shlex.split(config.sglang_settings)]]


def vllm_command(config, path, shape, port, most, longest, tokens) -> list[str]:
    command = [
        *shlex.split(config.vllm), "-m", "vllm.entrypoints.cli.main", "serve", path,
        "--host", "127.0.0.1", "--port", port, "--served-model-name", "model",
        "--max-model-len", longest, "--max-num-seqs", most, "--disable-log-stats",
    ]  # fmt: skip
    if config.device == "cuda":
        hidden, _, layers, heads, kv_heads, *_ = SHAPES[shape]
        head_dim = EXPERTS[shape][3] if shape in EXPERTS else hidden // heads
        size = 2 * layers * kv_heads * head_dim * 2
        command += ["--kv-cache-memory-bytes", tokens * size, "--gpu-memory-utilization", "0.15"]
        command += ["--max-cudagraph-capture-size", most, "--max-num-batched-tokens", "8192"]
    else:
        command += ["--dtype", "float32", "--enforce-eager", "--enable-scale-out"]
    return [str(part) for part in command]


COMMANDS = {OURS: our_command, "sglang": sglang_command, "vllm": vllm_command}


def is_ready(config: Comparison, server: Server, deadline: float) -> bool:
    try:
        server.wait_until_ready(deadline)
        choose_dialect(config, server)
    except RuntimeError as error:
        print(error, flush=True)
        server.end()
        return False
    took = time.monotonic() - server.started_s
    print(f"{server.system} {server.shape} is up after {took:.0f} s", flush=True)
    server.signal(signal.SIGSTOP)
    return True


def choose_dialect(config: Comparison, server: Server) -> None:
    """Choose the faster one of vLLM's two protocols."""
    if server.system != "vllm":
        return
    count, length = (128, 32) if config.device == "cuda" else (16, 8)
    jobs, rates = [([i + 1] * 16, length) for i in range(count)], {}
    for dialect in ("vllm", "completions", "vllm", "completions"):
        try:
            rates[dialect] = load.measure(server.url, dialect, jobs, 64, 60, processes=2)
        except RuntimeError as error:
            print(f"vllm {server.shape} through {dialect}: {error}", flush=True)
    if not rates:
        raise RuntimeError(f"vllm {server.shape} answers neither protocol")
    server.dialect = max(rates, key=rates.__getitem__)
    print(f"vllm {server.shape}: {rates}", flush=True)


# --------------------------------------------------------------------------------------------- measurement


def measure(config: Comparison, server: Server, cases: list[Case], results: dict) -> None:
    server.signal(signal.SIGCONT)
    for case in cases:
        if f"{server.system}:{case.name}" in config.skip.split(","):
            continue
        warm = [(prompt, 16) for prompt, _ in with_new_prompts(case.jobs[: case.concurrency], case.shape, 1)]
        try:
            load.measure(server.url, server.dialect, warm, case.concurrency, config.run_s)
            for repeat in range(config.repeats):
                begin = time.monotonic()
                jobs = with_new_prompts(case.jobs, case.shape, 2 + repeat)
                rate = load.measure(server.url, server.dialect, jobs, case.concurrency, config.run_s)
                record(server.system, case, rate, results[case.name])
                if time.monotonic() - begin > 20:  # long enough for a stable result
                    break
        except RuntimeError as error:
            print(f"{server.system} {case.name}: {error}", flush=True)
    server.end()


def run_in_process(config: Comparison, case: Case, row: dict[str, float]) -> None:
    chosen = case_options(config, case.name)
    arguments = [f"{k}={v}" for k, v in vars(chosen).items() if v != getattr(Options(), k)]
    arguments += [f"server.{setting}" for setting in shlex.split(config.our_settings)]
    command = [sys.executable, "benchmark/inference.py", *arguments, "http=false", "update=false"]
    command.append(f"repeats={config.repeats}")
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=config.run_s, check=True)
    except subprocess.CalledProcessError as error:
        print(f"in process {case.name}: {error.stderr[-1500:]}", flush=True)
    except subprocess.TimeoutExpired:
        print(f"in process {case.name}: no result within {config.run_s} s", flush=True)
    else:
        print(done.stdout.splitlines()[-1], flush=True)
        record(IN_PROCESS, case, json.loads(done.stdout.splitlines()[-1])["in_process"], row)


def record(system: str, case: Case, rate: float, row: dict[str, float]) -> None:
    row[system] = max(rate, row.get(system, 0.0))
    print(f"{system:20} {case.name:12} {rate:12,.0f} tokens/s", flush=True)


def report(config: Comparison, results: dict[str, dict[str, float]]) -> None:
    systems = list(dict.fromkeys(name for row in results.values() for name in row))
    rows: list[list[str]] = []
    for name, row in results.items():
        best = max((rate for system, rate in row.items() if "arealite" not in system), default=0)
        ratio = f"{row[OURS] / best:.2f}" if best and OURS in row else "-"
        rows.append([name, *(f"{row[s]:,.0f}" if s in row else "-" for s in systems), ratio])
    print_table(["tokens/s", *systems, "HTTP / best other server"], rows)
    line: dict[str, Any] = {"benchmark": "head_to_head", **describe_machine(), **vars(config)}
    for name in ("folder", "sglang", "vllm", "tokenizer"):
        line.pop(name)
    print(json.dumps(line | {"results": results}))


if __name__ == "__main__":
    main()
