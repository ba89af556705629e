"""How many episodes can the executor run, how many can wait, and how long does one take through it?

    python benchmark/executor.py [--seconds 3] [--in-flight 20000]

Trivial episodes that return fresh tensors; a batch of 64 is consumed at a time. Prints a table and one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import statistics
import time

import psutil
import torch
from common import describe_machine, print_table

from arealite.api.cli_args import InferenceEngineConfig
from arealite.api.workflow_api import RolloutWorkflow
from arealite.core.workflow_executor import WorkflowExecutor

BATCH = 64


def fresh_tensors() -> dict[str, torch.Tensor]:
    return {
        "input_ids": torch.ones(1, 8, dtype=torch.long),
        "attention_mask": torch.ones(1, 8, dtype=torch.long),
        "loss_mask": torch.ones(1, 8, dtype=torch.long),
        "logprobs": torch.zeros(1, 8),
        "versions": torch.zeros(1, 8, dtype=torch.long),
        "rewards": torch.ones(1),
    }


class Trivial(RolloutWorkflow):
    async def arun_episode(self, engine, data):
        if "gate" in data:
            await data["gate"].wait()
        return fresh_tensors()


def make_executor(batch_size: int) -> WorkflowExecutor:
    config = InferenceEngineConfig(max_concurrent_rollouts=1 << 20, max_head_offpolicyness=1 << 20)
    executor = WorkflowExecutor(config, None, batch_size)  # pyright: ignore[reportArgumentType]
    executor.start()
    return executor


def throughput(seconds: float) -> float:
    """Episodes per second from submission to a joined batch."""
    executor, workflow = make_executor(BATCH), Trivial()
    count, began = 0, time.perf_counter()
    for _ in range(8 * BATCH):
        executor.submit({}, workflow)
    while time.perf_counter() - began < seconds:
        for _ in range(BATCH):
            executor.submit({}, workflow)
        executor.wait(BATCH)
        count += BATCH
    rate = count / (time.perf_counter() - began)
    executor.stop()
    return rate


def in_flight(count: int) -> tuple[float, int]:
    """Bytes per waiting episode, and how many of `count` came back."""
    executor, workflow = make_executor(count), Trivial()
    process = psutil.Process()
    gate = asyncio.Event()
    gc.collect()
    before = process.memory_info().rss
    for _ in range(count):
        executor.submit({"gate": gate}, workflow)
    while len(gate._waiters) < count:
        time.sleep(0.01)
    size_bytes = (process.memory_info().rss - before) / count
    executor.runner.loop.call_soon_threadsafe(gate.set)
    batch = executor.wait(count)
    executor.stop()
    return size_bytes, len(set(batch["group_ids"].tolist()))


def latency(waiting: int, repeats: int = 300) -> float:
    """Median milliseconds from submit to result while `waiting` episodes wait for something else."""
    executor, workflow = make_executor(1), Trivial()
    gate = asyncio.Event()
    for _ in range(waiting):
        executor.submit({"gate": gate}, workflow)
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        executor.submit({}, workflow)
        executor.wait(1)
        times.append((time.perf_counter() - began) * 1e3)
    executor.stop()
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--in-flight", type=int, default=20000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rate = throughput(options.seconds)
    size_bytes, returned = in_flight(options.in_flight)
    results = {
        "episodes_per_s": round(rate),
        "bytes_per_waiting_episode": round(size_bytes),
        "in_flight": options.in_flight,
        "returned": returned,
        "latency_ms_alone": round(latency(0), 3),
        "latency_ms_5000_waiting": round(latency(5000), 3),
    }
    print_table(["measure", "value"], [[key, str(value)] for key, value in results.items()])
    print(json.dumps({"benchmark": "executor", **results, **describe_machine()}))


if __name__ == "__main__":
    main()
