"""How many calls of agents does the gateway serve, and how much time does it add to each?

    python benchmark/agents.py [--sessions 1000] [--turns 6] [--rate 500]

The gateway runs in a process of its own with an engine that answers at once; this process plays all sessions at the
same time, over HTTP and with growing histories. Two runs: as fast as possible (calls/s), and at a fixed rate, where the
latency of a call is what the gateway adds to it. Afterwards every call must be in its session's tree, without drift.
Prints a table and one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import subprocess
import sys
import time
from typing import Any, cast

import aiohttp
from common import describe_machine, print_table
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from arealite.agents.export import to_batch
from arealite.agents.gateway import Gateway
from arealite.api.cli_args import GenerationHyperparameters
from arealite.api.engine_api import InferenceEngine
from arealite.api.io_struct import ModelRequest, ModelResponse
from arealite.core.event_loop import new_event_loop
from arealite.utils.process import raise_file_limit

ANSWER = "The answer is forty-two, as always."
QUESTION = "What is the answer to question number {}, given all that was said before?"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer with one token per character and a chat template."""
    vocabulary = {chr(i): i for i in range(128)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="?", clean_up_tokenization_spaces=False)
    tokenizer.add_special_tokens({"eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>"]})
    tokenizer.chat_template = TEMPLATE
    return tokenizer


class InstantEngine:
    """Answers every request at once with the same tokens."""

    def __init__(self, tokenizer: Any):
        self.tokens = tokenizer.encode(ANSWER + "<|im_end|>", add_special_tokens=False)

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        tokens = list(self.tokens)
        return ModelResponse(request.input_ids, tokens, [-1.0] * len(tokens), [0] * len(tokens), "stop")


async def serve(num_sessions: int) -> None:
    """Open the sessions and print them; at the end of the input, print what they have recorded."""
    tokenizer = make_tokenizer()
    gateway = Gateway(cast(InferenceEngine, InstantEngine(tokenizer)), tokenizer)
    await gateway.start()
    opened = [gateway.open_session(GenerationHyperparameters(max_new_tokens=256)) for _ in range(num_sessions)]
    print(json.dumps([(found.base_url, found.token) for found in opened]), flush=True)
    gc.collect()
    gc.freeze()
    used = time.process_time()
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    used = time.process_time() - used
    began = time.perf_counter()
    for found in opened:
        found.session.reward(1.0)
        to_batch({0: found.session})
    export_ms = (time.perf_counter() - began) * 1e3 / num_sessions
    calls = [len(found.session.replies) for found in opened]
    drift = sum(found.session.counts["drift_calls"] for found in opened)
    branches = sum(found.session.stats()["branches"] for found in opened)
    kept = {"calls": calls, "drift": drift, "branches": branches, "export_ms": export_ms}
    print(json.dumps({**kept, "cpu_ms": used * 1e3 / max(1, sum(calls))}), flush=True)
    await gateway.close()


async def play(http: aiohttp.ClientSession, url: str, token: str, starts: list[float]) -> list[float]:
    """Play one session; a call starts at its time, or after the one before. Returns the latency of each call."""
    headers = {"Authorization": f"Bearer {token}"}
    messages: list[dict[str, str]] = []
    latencies = []
    for turn, start in enumerate(starts):
        await asyncio.sleep(max(0.0, start - time.perf_counter()))
        messages.append({"role": "user", "content": QUESTION.format(turn)})
        began = time.perf_counter()
        body = {"model": "policy", "messages": messages}
        async with http.post(f"{url}/chat/completions", json=body, headers=headers) as answer:
            said = await answer.json()
        latencies.append(time.perf_counter() - began)
        messages.append(said["choices"][0]["message"])
    return latencies


async def play_all(sessions: list[tuple[str, str]], turns: int, rate: float) -> tuple[float, list[float]]:
    """Play all sessions at the same time; `rate` calls start in a second, or with 0 as many as can."""
    rng, now = random.Random(0), time.perf_counter() + 0.1
    period = len(sessions) / rate if rate else 0.0
    offsets = [now + (rng.random() * period if rate else 0.0) for _ in sessions]
    starts = [[offset + turn * period for turn in range(turns)] for offset in offsets]
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=300)
    async with aiohttp.ClientSession(connector=connector) as http:
        began = time.perf_counter()
        tasks = [play(http, *own, times) for own, times in zip(sessions, starts, strict=True)]
        found = await asyncio.gather(*tasks)
        return time.perf_counter() - began, [latency for own in found for latency in own]


def measure(num_sessions: int, turns: int, rate: float) -> dict[str, Any]:
    command = [sys.executable, __file__, "--serve", "--sessions", str(num_sessions)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as gateway:
        assert gateway.stdin is not None and gateway.stdout is not None
        sessions = [(url, token) for url, token in json.loads(gateway.stdout.readline())]
        gc.collect()
        gc.freeze()
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            seconds, latencies = runner.run(play_all(sessions, turns, rate))
        gateway.stdin.close()
        kept = json.loads(gateway.stdout.readline())
    latencies.sort()
    return {
        "calls_per_s": round(len(latencies) / seconds),
        "latency_ms_p50": round(latencies[len(latencies) // 2] * 1e3, 1),
        "latency_ms_p99": round(latencies[int(len(latencies) * 0.99)] * 1e3, 1),
        "gateway_cpu_ms_per_call": round(kept["cpu_ms"], 2),
        "lost_calls": sum(turns - count for count in kept["calls"]),
        "drift_calls": kept["drift"],
        "branches": kept["branches"],
        "export_ms_per_session": round(kept["export_ms"], 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--rate", type=float, default=500.0, help="calls per second of the second run")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    raise_file_limit()
    if options.serve:
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            runner.run(serve(options.sessions))
        return
    results = {
        "as fast as possible": measure(options.sessions, options.turns, 0.0),
        f"{options.rate:g} calls/s": measure(options.sessions, options.turns, options.rate),
    }
    names = list(next(iter(results.values())))
    print_table(["measure", *results], [[name, *(str(own[name]) for own in results.values())] for name in names])
    settings = {"sessions": options.sessions, "turns": options.turns}
    print(json.dumps({"benchmark": "agents", **settings, **results, **describe_machine()}))


if __name__ == "__main__":
    main()
