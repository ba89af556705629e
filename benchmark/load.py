"""Load generator for inference servers. Uses several processes, so that the client is not the bottleneck.

The inference benchmarks call `measure(url, dialect, jobs, ...)`. Run as a script, this file is one of the processes: it
reads its share of the requests from standard input, prints `ready`, waits for `go`, keeps `concurrency` requests open,
and prints the number of tokens and the times. It parses every answer and counts its log-probs.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from typing import Any

import aiohttp

Job = tuple[list[int], int]  # prompt, tokens to sample


def _native(prompt: list[int], length: int) -> dict[str, Any]:
    params = {"max_new_tokens": length, "temperature": 1.0, "ignore_eos": True}
    return {"input_ids": prompt, "sampling_params": params, "return_logprob": True}


def _flat(prompt: list[int], length: int) -> dict[str, Any]:
    return _native(prompt, length) | {"flat_logprobs": True}


def _vllm_tokens(prompt: list[int], length: int) -> dict[str, Any]:
    params = {"max_tokens": length, "temperature": 1.0, "ignore_eos": True, "logprobs": 0}
    # output_kind 2: one answer at the end, none after single steps
    params |= {"detokenize": False, "output_kind": 2}
    return {"token_ids": prompt, "sampling_params": params}


def _completions(prompt: list[int], length: int) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": length, "temperature": 1.0, "ignore_eos": True}
    return body | {"logprobs": 0, "model": "model"}


# Path, body of a request, and the log-probs in its answer.
DIALECTS = {
    "native": ("/generate", _native, lambda a: a["meta_info"]["output_token_logprobs"]),
    # What the trainer asks the embedded server for.
    "arealite": ("/generate", _flat, lambda a: a["meta_info"]["output_logprobs"]),
    "vllm": ("/inference/v1/generate", _vllm_tokens, lambda a: a["choices"][0]["logprobs"]["content"]),
    "completions": ("/v1/completions", _completions, lambda a: a["choices"][0]["logprobs"]["token_logprobs"]),
}  # fmt: skip


def measure(
    url: str, dialect: str, jobs: list[Job], concurrency: int, timeout_s: float = 300.0, processes: int = 4
) -> float:
    """Measure tokens per second from the first request to the last answer.

    Raises `RuntimeError` if a request fails or takes longer than `timeout_s`.
    """
    processes = min(processes, concurrency, len(jobs))
    command = [sys.executable, __file__]
    children = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(processes)
    ]
    try:
        for i, child in enumerate(children):
            share = {"url": url, "dialect": dialect, "jobs": jobs[i::processes]}
            share["concurrency"] = concurrency // processes + (i < concurrency % processes)
            share["timeout_s"] = timeout_s
            child.stdin.write(json.dumps(share) + "\n")
            child.stdin.flush()
        for child in children:
            _expect(child)
        for child in children:
            child.stdin.write("go\n")
            child.stdin.flush()
        results = [json.loads(_expect(child)) for child in children]
    finally:
        for child in children:
            child.kill()
            child.wait()
            child.stdin.close()
            child.stdout.close()
    span = max(r["end"] for r in results) - min(r["begin"] for r in results)
    return sum(r["tokens"] for r in results) / span


def _expect(child: subprocess.Popen) -> str:
    line = child.stdout.readline()
    if not line:
        raise RuntimeError("a client process ended early: see its error above")
    return line


async def run(url: str, dialect: str, jobs: list[Job], concurrency: int, timeout_s: float) -> None:
    path, make_body, find_logprobs = DIALECTS[dialect]
    bodies = [(json.dumps(make_body(*job)).encode(), job[1]) for job in jobs]
    todo = iter(bodies)
    headers = {"Content-Type": "application/json"}
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, connector=connector, timeout=timeout) as session:

        async def work() -> int:
            tokens = 0
            for body, expected in todo:
                async with session.post(path, data=body, headers=headers) as answer:
                    raw = await answer.read()
                if answer.status != 200:
                    raise RuntimeError(f"{url}{path} answered {answer.status}: {raw[:500]!r}")
                got = len(find_logprobs(json.loads(raw)))
                if got != expected:
                    raise RuntimeError(f"{url}{path}: {got} tokens instead of {expected}")
                tokens += got
            return tokens

        print("ready", flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
        begin = time.monotonic()
        async with asyncio.timeout(timeout_s):
            counts = await asyncio.gather(*(work() for _ in range(concurrency)))
    print(json.dumps({"tokens": sum(counts), "begin": begin, "end": time.monotonic()}), flush=True)


if __name__ == "__main__":
    asyncio.run(run(**json.loads(sys.stdin.readline())))
