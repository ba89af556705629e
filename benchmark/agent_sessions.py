"""Plays multi-turn sessions on a real model: our gateway and server beside SGLang's and vLLM's chat endpoints.

    python benchmark/agent_sessions.py --model FOLDER --questions GSM8K.jsonl [--sessions 256] [--turns 6]
        [--sglang "env PYTHONPATH=… python3"] [--vllm "env PYTHONPATH=… python3"] [--device cuda]

Every session asks a question, then five times for a next step, with the whole conversation in every request, as agents
send it. All sides get the same messages, sampling and limits, and return log-probs. `gateway` is the path of a training
run: processes with a gateway each, as rollout workers have, that keep every token. The sides run one after the other,
each with a warm-up of its own. Prints a table and one JSON line.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import describe_machine, print_table
from head_to_head import OURS, Server
from session_load import PROCESSES, measure, result_of, start

from arealite.agents.gateway import Gateway
from arealite.api.cli_args import GenerationHyperparameters, InferenceEngineConfig
from arealite.core.waits import NamedWait
from arealite.dataset import load_tokenizer
from arealite.engine.sglang_remote import RemoteSGLangEngine
from arealite.utils.process import raise_file_limit


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


# ------------------------------------------------------------------------------------------------ processes


def serve_gateway(args: argparse.Namespace) -> None:
    """Open sessions of a gateway in front of the server and print them; close them at the end of the input."""
    engine = RemoteSGLangEngine(InferenceEngineConfig(max_concurrent_rollouts=args.sessions))
    engine.initialize([args.gateway])
    gateway = Gateway(engine, load_tokenizer(args.model))
    engine.executor.run_coroutine(gateway.start(), NamedWait("start", "the gateway", 60))
    before = engine.server_info()[0]
    gconfig = GenerationHyperparameters(max_new_tokens=args.max_tokens, temperature=1.0)
    opened = [gateway.open_session(gconfig) for _ in range(args.sessions)]
    print(json.dumps([(found.base_url, found.token) for found in opened]), flush=True)
    sys.stdin.read()
    after = engine.server_info()[0]
    kept = {name: after[name] - before[name] for name in ("prompt_tokens", "cached_tokens")}
    kept["drift"] = sum(found.session.counts["drift_calls"] for found in opened)
    print(json.dumps({"calls": sum(len(found.session.replies) for found in opened), **kept}), flush=True)
    engine.executor.run_coroutine(gateway.close(), NamedWait("close", "the gateway", 60))
    engine.destroy()


def through_gateways(args: argparse.Namespace, address: str, questions: list[str]) -> dict[str, float]:
    share = -(-len(questions) // PROCESSES)
    command = [__file__, "--gateway", address, "--model", args.model, "--max-tokens", str(args.max_tokens)]
    gateways = [start(*command, "--sessions", str(share)) for _ in range(PROCESSES)]
    try:
        places = [place for gateway in gateways for place in result_of(gateway)]
        sessions = [(url, token, q) for (url, token), q in zip(places, questions, strict=False)]
        found = measure(sessions, args.turns, args.max_tokens)
        for gateway in gateways:
            assert gateway.stdin is not None
            gateway.stdin.close()
        kept = [result_of(gateway) for gateway in gateways]
    finally:
        for gateway in gateways:
            with contextlib.suppress(subprocess.TimeoutExpired):
                gateway.wait(10)
            gateway.kill()
            gateway.wait()
    lost = len(questions) * args.turns - sum(own["calls"] for own in kept)
    # All gateways see the counters of the same server. Its answers to them do not tell what was in its cache.
    hits = max(own["cached_tokens"] / own["prompt_tokens"] for own in kept)
    return found | {"prefix_hits": round(hits, 3), "lost": lost, "drift": sum(own["drift"] for own in kept)}


# --------------------------------------------------------------------------------------------------- sides


def commands(args: argparse.Namespace) -> dict[str, list[str]]:
    """Return the command line of each server but for its port; same limits for all."""
    longest, tokens = str(args.context), str(args.sessions * args.context)
    ours = [sys.executable, "-m", "arealite.cli.serve", f"model_path={args.model}", f"device={args.device}"]
    ours += [f"max_running_requests={args.sessions}", f"max_total_tokens={tokens}", f"context_length={longest}"]
    found = {OURS: [*ours, "port={port}"]}
    cuda = args.device == "cuda"
    if args.sglang:
        command = [*shlex.split(args.sglang), "-m", "sglang.launch_server", "--model-path", args.model]
        command += ["--context-length", longest, "--max-running-requests", str(args.sessions), "--log-level", "warning"]
        command += ["--enable-cache-report", "--host", "127.0.0.1", "--port", "{port}", "--max-total-tokens", tokens]
        cuda_options = ["--attention-backend", "fa3", "--sampling-backend", "pytorch", "--mem-fraction-static", "0.8"]
        cuda_options += ["--cuda-graph-max-bs-decode", str(args.sessions)]
        found["sglang"] = command + (cuda_options if cuda else [])
    if args.vllm:
        command = [
            *shlex.split(args.vllm),
            "-m",
            "vllm.entrypoints.cli.main",
            "serve",
            args.model,
            "--host",
            "127.0.0.1",
        ]
        command += ["--port", "{port}", "--served-model-name", "model", "--max-model-len", longest, "--max-num-seqs"]
        command += [str(args.sessions), "--disable-log-stats", "--enable-prompt-tokens-details", "--max-logprobs", "20"]
        cuda_options = ["--gpu-memory-utilization", "0.8", "--max-cudagraph-capture-size", str(args.sessions)]
        cuda_options += ["--api-server-count", str(PROCESSES)]
        found["vllm"] = command + (cuda_options if cuda else ["--dtype", "float32", "--enforce-eager"])
    return found


def run_side(args: argparse.Namespace, system: str, command: list[str], questions: list[str], folder: Path) -> dict:
    port = free_port()
    server = Server(system, "sessions", [[part.format(port=port) for part in command]], port, folder)
    try:
        server.wait_until_ready(time.monotonic() + args.start_s)
        print(f"{system} is up after {time.monotonic() - server.started_s:.0f} s", flush=True)
        direct = [(f"{server.url}/v1", "none", question) for question in questions]
        # The warm-up has other questions, so that only the system prompt is in the prefix cache.
        measure([(url, token, question[::-1]) for url, token, question in direct], 2, 64)
        rows = {}
        for i in range(args.repeats):
            varied = [(url, token, f"({i}) {question}") for url, token, question in direct]
            rows[f"{system} /v1 {i}"] = measure(varied, args.turns, args.max_tokens)
            print(f"{system} /v1", rows[f"{system} /v1 {i}"], flush=True)
            if system == OURS:
                found = through_gateways(args, f"127.0.0.1:{port}", [f"[{i}] {q}" for q in questions])
                rows[f"{system} gateway {i}"] = found
                print(f"{system} gateway", found, flush=True)
        return rows
    finally:
        server.end()


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="Hugging Face folder with a chat template")
    parser.add_argument("--questions", help="jsonl file with a column `question`")
    parser.add_argument("--sessions", type=int, default=256)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--max-tokens", type=int, default=256, help="of an answer")
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--sglang", default="", help="command of a Python with SGLang; empty: not measured")
    parser.add_argument("--vllm", default="", help="command of a Python with vLLM; empty: not measured")
    parser.add_argument("--start-s", type=float, default=240.0)
    parser.add_argument("--gateway", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    raise_file_limit()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    if args.gateway:
        serve_gateway(args)
        return
    lines = Path(args.questions).read_text().splitlines()[: args.sessions]
    questions = [json.loads(line)["question"] for line in lines]
    results: dict[str, dict] = {}
    with tempfile.TemporaryDirectory() as folder:
        for system, command in commands(args).items():
            try:
                results |= run_side(args, system, command, questions, Path(folder))
            except RuntimeError as error:
                print(f"{system}: {error}", flush=True)
    names = list(dict.fromkeys(name for row in results.values() for name in row))
    print_table(
        ["side", *names], [[side, *(str(row.get(name, "")) for name in names)] for side, row in results.items()]
    )
    settings = {"sessions": args.sessions, "turns": args.turns, "max_tokens": args.max_tokens, "processes": PROCESSES}
    print(json.dumps({"benchmark": "agent_sessions", **settings, **describe_machine(), "results": results}), flush=True)


if __name__ == "__main__":
    main()
