"""What do the trace and the records of rollouts cost a training run?

    python benchmark/trace.py [--rounds 6]

One run: the executor plays episodes of a small task beside a trainer that computes for half a second a step, in
micro-batches with the spans of the real one. Blocks of steps that record nothing, the trace, and trace and rollouts
follow each other, so that all have the same machine, caches and neighbours. The work of a step is fixed, so that its
CPU time (all threads, user and system) is comparable also on a machine that others use. Prints a table and one JSON
line: medians of a step for each kind of block, the overhead of CPU time as the median over rounds with its range, and
the bytes that a step writes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
from common import describe_machine, print_table

from arealite.api.cli_args import InferenceEngineConfig
from arealite.api.workflow_api import RolloutWorkflow
from arealite.core.ledger.store import Ledger
from arealite.core.workflow_executor import WorkflowExecutor
from arealite.trainer.trace import Trace
from arealite.utils.trace import tracing

BATCH, SAMPLES, TOKENS, STEP_S = 64, 8, 64, 0.5
MICRO_BATCHES = 8
BLOCK_STEPS, SKIPPED_STEPS = 6, 2
MODES = ("nothing", "trace", "trace and rollouts")


class Answers(RolloutWorkflow):
    """Waits as for a server and a reward, and returns a group of answers."""

    async def arun_episode(self, engine, data):
        with tracing.part_of_episode("generate", samples=SAMPLES):
            await asyncio.sleep(0.05)
        with tracing.part_of_episode("reward", rows=SAMPLES):
            await asyncio.sleep(0.01)
        versions = torch.full((SAMPLES, TOKENS), engine.get_version())
        versions[:, : TOKENS // 2] = -1
        return {
            "input_ids": torch.randint(0, 30_000, (SAMPLES, TOKENS)),
            "attention_mask": torch.ones(SAMPLES, TOKENS, dtype=torch.long),
            "loss_mask": (versions >= 0).long(),
            "logprobs": -torch.rand(SAMPLES, TOKENS),
            "versions": versions,
            "rewards": torch.rand(SAMPLES),
        }


class Engine:
    version = 0

    def get_version(self) -> int:
        return self.version


def compute(products: int) -> None:
    """Do a fixed amount of work."""
    weights = torch.rand(192, 192)
    for _ in range(products):
        weights = torch.nn.functional.normalize(weights @ weights)


def calibrate() -> int:
    """Return how many products take `STEP_S` of CPU time."""
    compute(200)
    began = time.process_time()
    compute(1000)
    return round(1000 * STEP_S / (time.process_time() - began))


def train(batch: dict[str, torch.Tensor], products: int) -> None:
    """Compute for a while, as micro-batches and a collective, and add the columns of a trainer."""
    for number in range(MICRO_BATCHES):
        with tracing.span("trainer", "micro-batches", f"micro-batch {number}", tokens=SAMPLES * TOKENS):
            compute(products // MICRO_BATCHES)
    with tracing.span("trainer", "collectives", "wait: other ranks"):
        pass
    batch["advantages"] = batch["train_logp"] = torch.rand(batch["logprobs"].shape)


def measure(rounds: int, folder: Path) -> dict[str, float | str]:
    config = InferenceEngineConfig(max_head_offpolicyness=2)
    ledger, engine = Ledger(folder / "run.sqlite"), Engine()
    executor = WorkflowExecutor(config, engine, BATCH, ledger=ledger)  # pyright: ignore[reportArgumentType]
    executor.start()
    trace, workflow, rows = Trace(folder / "trace.json"), Answers(), [[{"i": i} for i in range(BATCH)]]
    seconds: dict[str, list[float]] = {mode: [] for mode in MODES}
    cpu: dict[str, list[float]] = {mode: [] for mode in MODES}
    products = calibrate()
    for step in range(rounds * len(MODES) * BLOCK_STEPS):
        mode = MODES[step // BLOCK_STEPS % len(MODES)]
        executor.accounts.dump_rollouts = mode == "trace and rollouts"
        if step % BLOCK_STEPS == 0:
            tracing.stop() if mode == "nothing" else tracing.start()
        began, cpu_began = time.perf_counter(), time.process_time()
        with trace.phase("rollout"):
            batch = executor.prepare_batch(rows, workflow)
        with trace.phase("update"):
            train(batch, products)
        executor.accounts.record_trained()
        engine.version = step + 1
        executor.set_version(step + 1)
        trace.take()
        # The first steps of a block write what was recorded before.
        if step % BLOCK_STEPS >= SKIPPED_STEPS:
            seconds[mode].append(time.perf_counter() - began)
            cpu[mode].append(time.process_time() - cpu_began)
    executor.stop()
    trace.close()
    results: dict[str, float | str] = {
        f"step_ms, {mode}": round(statistics.median(seconds[mode]) * 1e3, 2) for mode in MODES
    }
    results |= {f"cpu_ms, {mode}": round(statistics.median(cpu[mode]) * 1e3, 2) for mode in MODES}
    kept = BLOCK_STEPS - SKIPPED_STEPS
    by_round = {m: [statistics.median(cpu[m][i * kept : (i + 1) * kept]) for i in range(rounds)] for m in MODES}
    for mode in MODES[1:]:
        shares = sorted(100 * (a / b - 1) for a, b in zip(by_round[mode], by_round["nothing"], strict=True))
        results[f"overhead_percent, {mode}"] = round(statistics.median(shares), 2)
        results[f"overhead_percent_range, {mode}"] = f"{shares[0]:.2f} to {shares[-1]:.2f}"
    steps = rounds * BLOCK_STEPS
    results["trace_bytes_per_step"] = round((folder / "trace.json").stat().st_size / (2 * steps))
    results["ledger_bytes_per_step"] = round((folder / "run.sqlite").stat().st_size / steps)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=6)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        results = measure(options.rounds, Path(folder))
    print_table(["measure", "value"], [[key, str(value)] for key, value in results.items()])
    print(json.dumps({"benchmark": "trace", **results, **describe_machine()}))


if __name__ == "__main__":
    main()
