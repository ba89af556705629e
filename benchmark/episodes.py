"""How much CPU time of the trainer's process does an episode take, on which of its threads?

    python benchmark/episodes.py --model FOLDER [--steps 8] [--profile FILE]

Runs `RLVRWorkflow` with the reward of GSM8K, ledger and record against a process that answers `/generate` as the
embedded server does, with made-up groups. The trainer shares its interpreter with these threads. Prints a table and one
JSON line; `checksum` is that of all trained rows: equal for two versions of the code that make the same batches.
"""

import argparse
import asyncio
import cProfile
import itertools
import json
import multiprocessing
import random
import tempfile
import threading
import time
import zlib
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import torch
from aiohttp import web
from common import describe_machine, print_table
from transformers import AutoTokenizer

from arealite.api.cli_args import GenerationHyperparameters, InferenceEngineConfig
from arealite.core.record.step_file import step_path
from arealite.engine.sglang_remote import RemoteSGLangEngine
from arealite.reward.gsm8k import gsm8k_reward
from arealite.workflow.rlvr import RLVRWorkflow

BATCH, GROUP, NUM_ANSWERS = 32, 8, 256
THREADS = ("rollout", "record", "ledger")
COLUMNS = ("input_ids", "attention_mask", "loss_mask", "logprobs", "versions")


def make_texts(seed: int, count: int, lines: tuple[int, int]) -> list[str]:
    """Make up texts that look like answers to GSM8K; a line has about 30 tokens."""
    chosen, texts = random.Random(seed), []
    for _ in range(count):
        numbers = [chosen.randint(2, 400) for _ in range(chosen.randint(*lines))]
        step = "**Step {0}**: Janet then sells {1} eggs, so she has 16 + {1} = {2}.\n"
        steps = (step.format(i, n, n + 16) for i, n in enumerate(numbers))
        texts.append(f"{''.join(steps)}#### {numbers[-1] + 16}")
    return texts


def serve(model: str, ready: Connection) -> None:
    """Answer requests as the embedded server does; a group depends on its seed alone."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    generator = np.random.default_rng(0)
    answers = []
    for text in make_texts(0, NUM_ANSWERS, (5, 13)):
        ids = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
        meta = {
            "output_logprobs": (-generator.exponential(0.3, len(ids))).astype(np.float32).tolist(),
            "prompt_tokens": 100,
            "completion_tokens": len(ids),
            "cached_tokens": 0,
            "weight_version": "0",
            "weight_versions": [{"version": "0", "start": 0, "end": len(ids)}],
            "e2e_latency": 1.0,
            "finish_reason": {"type": "stop", "matched": tokenizer.eos_token_id},
        }
        answers.append({"text": "", "output_ids": ids, "meta_info": meta})

    async def generate(request: web.Request) -> web.Response:
        params = orjson.loads(await request.read())["sampling_params"]
        group = [answers[(params["sampling_seed"] + i) % NUM_ANSWERS] for i in range(params["n"])]
        return web.Response(body=orjson.dumps(group), content_type="application/json")

    async def info(request: web.Request) -> web.Response:
        return web.json_response({"engine": "arealite", "weight_version": "0", "context_length": 4096})

    async def run() -> None:
        app = web.Application()
        app.add_routes([web.post("/generate", generate), web.get("/{name}", info)])
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        ready.send(runner.addresses[0][1])
        await asyncio.Event().wait()

    asyncio.run(run())


def cpu_s() -> dict[str, float]:
    """Return the CPU seconds of each thread so far."""
    idents = {thread.name: thread.ident for thread in threading.enumerate()}
    return {name: time.clock_gettime(time.pthread_getcpuclockid(idents[name])) for name in THREADS}


def checksum(batch: dict[str, torch.Tensor]) -> int:
    """Return a sum over the rows of a batch that depends neither on their order nor on padding."""
    lengths = batch["attention_mask"].sum(1).tolist()
    rows = (b"".join(batch[k][i, :n].numpy().tobytes() for k in COLUMNS) for i, n in enumerate(lengths))
    return sum(zlib.crc32(row, int(reward)) for row, reward in zip(rows, batch["rewards"].tolist(), strict=True))


def measure(model: str, address: str, folder: Path, steps: int, profile: str | None) -> dict[str, Any]:
    config = InferenceEngineConfig(max_concurrent_rollouts=64, max_head_offpolicyness=1 << 20)
    engine = RemoteSGLangEngine(config, ledger_path=folder / "run.sqlite")
    engine.initialize([address], BATCH)
    engine.begin_record(str(folder / "record"), 1 << 30, 0, {})
    tokenizer = AutoTokenizer.from_pretrained(model)
    workflow = RLVRWorkflow(gsm8k_reward, GenerationHyperparameters(n_samples=GROUP, max_new_tokens=512), tokenizer)
    questions = make_texts(1, 4 * BATCH, (3, 4))
    rows = itertools.cycle([{"messages": [{"role": "user", "content": q}], "answer": q} for q in questions])
    loop, profiler = engine.executor.runner.loop, cProfile.Profile(time.thread_time)

    def run(count: int, first: int) -> int:
        for _ in range(count * BATCH):
            engine.submit(next(rows), workflow)
        total = 0
        for step in range(first, first + count):
            total += checksum(engine.wait(BATCH, 120.0))
            engine.record_step(step, {})
        return total

    # Connections, workers of rewards, and one epoch of prompts.
    total = run(4, 0)
    if profile:
        loop.call_soon_threadsafe(profiler.enable)
    before = cpu_s()
    total += run(steps, 4)
    engine.executor.accounts.record_trained()
    engine.executor.accounts.ledger.flush()
    while not step_path(folder / "record", steps + 3).exists():
        time.sleep(0.01)
    used = {name: seconds - before[name] for name, seconds in cpu_s().items()}
    if profile:
        loop.call_soon_threadsafe(profiler.disable)
    engine.destroy()
    if profile:
        profiler.dump_stats(profile)
    return {f"{name}_ms": round(1e3 * s / steps / BATCH, 3) for name, s in used.items()} | {"checksum": total}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="folder of a tokenizer with a chat template")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--profile", help="file for a profile of the thread `rollout`")
    args = parser.parse_args()
    torch.set_num_threads(1)
    ours, theirs = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(args.model, theirs), daemon=True)
    server.start()
    with tempfile.TemporaryDirectory() as folder:
        results = measure(args.model, f"127.0.0.1:{ours.recv()}", Path(folder), args.steps, args.profile)
    server.terminate()
    print_table(["of one episode", "value"], [[key, str(value)] for key, value in results.items()])
    print(json.dumps({"benchmark": "episodes", **results, **describe_machine()}))


if __name__ == "__main__":
    main()
