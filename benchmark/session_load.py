"""Load generator of multi-turn sessions, for agent_sessions.py. Several processes, so that it is not the bottleneck.

Run as a script, this file is one of the processes: it reads its sessions from standard input, prints a line when it is
ready, waits for another line, plays them all at once, and prints its sums as JSON.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from typing import Any

import aiohttp

SYSTEM = "You are a careful teacher of mathematics. Explain each step in full sentences before you name a number."
NEXT = (
    "Observation of turn {turn}: nothing was rejected. Continue: check the last result, state one more fact about it."
)
PROCESSES = 4
# Address of the API, token, first question.
Place = tuple[str, str, str]


async def play(
    http: aiohttp.ClientSession, url: str, token: str, question: str, limits: list[int]
) -> list[dict[str, int]]:
    """Play one session; returns the usage of each call."""
    headers = {"Authorization": f"Bearer {token}"}
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    (turns, max_tokens), usage = limits, []
    for turn in range(turns):
        if turn:
            messages.append({"role": "user", "content": NEXT.format(turn=turn)})
        body = {"model": "model", "messages": messages, "max_tokens": max_tokens, "temperature": 1.0, "logprobs": True}
        async with http.post(f"{url}/chat/completions", json=body, headers=headers) as answer:
            said = await answer.json()
            if answer.status != 200:
                raise RuntimeError(f"{url} answered {answer.status}: {said}")
        choice = said["choices"][0]
        if len(choice["logprobs"]["content"]) < said["usage"]["completion_tokens"] - 1:
            raise RuntimeError(f"{url} returned log-probs of {len(choice['logprobs']['content'])} tokens only")
        messages.append({"role": "assistant", "content": choice["message"]["content"]})
        details = said["usage"].get("prompt_tokens_details") or {}
        usage.append({**said["usage"], "cached": details.get("cached_tokens") or 0})
    return usage


async def play_all(sessions: list[Place], limits: list[int]) -> dict[str, float]:
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(300)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:
        print("{}", flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
        begin = time.time()
        usage = [
            call for calls in await asyncio.gather(*(play(http, *own, limits) for own in sessions)) for call in calls
        ]
    sums = {name: sum(call[name] for call in usage) for name in ("prompt_tokens", "completion_tokens", "cached")}
    return {"begin": begin, "end": time.time(), "calls": len(usage), **sums}


def start(*command: str) -> subprocess.Popen[str]:
    """Start a Python script that reads from this process and prints to it."""
    return subprocess.Popen([sys.executable, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def result_of(process: subprocess.Popen[str]) -> Any:
    """Return the next line of JSON that the process prints; other lines are messages."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(("{", "[")):
            return json.loads(line)
    raise RuntimeError(f"a process of the benchmark ended with code {process.wait()}")


def send(process: subprocess.Popen[str], text: str) -> None:
    assert process.stdin is not None
    process.stdin.write(text + "\n")
    process.stdin.flush()


def measure(sessions: list[Place], turns: int, max_tokens: int) -> dict[str, float]:
    """Play all sessions from several processes."""
    players = [start(__file__) for _ in range(PROCESSES)]
    try:
        for i, player in enumerate(players):
            send(player, json.dumps({"sessions": sessions[i::PROCESSES], "limits": [turns, max_tokens]}))
        for player in players:
            result_of(player)
        for player in players:
            send(player, "go")
        found = [result_of(player) for player in players]
    finally:
        for player in players:
            player.kill()
            player.wait()
    seconds = max(part["end"] for part in found) - min(part["begin"] for part in found)
    sums = {
        name: sum(part[name] for part in found) for name in ("calls", "prompt_tokens", "completion_tokens", "cached")
    }
    return {
        "tokens/s": round(sums["completion_tokens"] / seconds),
        "calls/s": round(sums["calls"] / seconds, 1),
        "seconds": round(seconds, 1),
        "prefix_hits": round(sums["cached"] / sums["prompt_tokens"], 3),
        "answer_len": round(sums["completion_tokens"] / sums["calls"], 1),
    }


if __name__ == "__main__":
    work = json.loads(sys.stdin.readline())
    print(json.dumps(asyncio.run(play_all(work["sessions"], work["limits"]))), flush=True)
