"""The section `simulated` of foresee.py: predictions of `arealite plan` against measured runs and published ratios."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

from async_vs_sync import CASES, EXAMPLES, ROOT, make_start
from common import print_table

from arealite.api.cli_args import InferenceEngineConfig
from arealite.plan.hardware import GPUS
from arealite.plan.layouts import Layout
from arealite.plan.model_shape import find_model
from arealite.plan.recorded import read_run
from arealite.plan.search import make_setup
from arealite.plan.simulate import Setup, simulate
from arealite.plan.workload import Distribution, Workload

# AReaL (arXiv 2505.24298), thousand trained tokens/s by η. Eight GPUs: 1.5B, 8k context, 64 x 16 answers.
# Many GPUs: its larger ablation, whose model and lengths are not stated there.
EIGHT_GPUS = {0: 27.1, 1: 47.8, 4: 49.0, 16: 52.0}
MANY_GPUS = {0: 129.0, 1: 269.0, 2: 357.0, 4: 357.0, 8: 372.0, 16: 382.0}
FILLING_STEPS = 5
# Servers, η, seconds of a reward.
RUNS = [(1, 0, 0.0), (1, 1, 0.0), (1, 4, 0.0), (2, 4, 0.0), (1, 0, 1.0), (1, 4, 1.0)]


def rollout(eta: int) -> InferenceEngineConfig:
    limits = dict.fromkeys(("request_timeout_s", "episode_timeout_s", "batch_timeout_s"), 1e7)
    # AReaL generates as far ahead as η allows.
    return InferenceEngineConfig(max_head_offpolicyness=eta, adaptive_lead=False, **limits)


def published(options: argparse.Namespace, folder: Path) -> list[dict[str, object]]:
    """Ratios to η = 0. Lengths are not published: log-normal up to the context is assumed."""
    prompt = Distribution("lognormal", (150.0, 0.5, 1024.0))
    short = Workload(64, 16, prompt, Distribution("lognormal", (2500.0, 0.8, 8192.0)))
    long = Workload(256, 8, prompt, Distribution("lognormal", (5000.0, 0.9, 27_000.0)))
    cases = {"8 x H800": ("sglang.d6+d2", short, EIGHT_GPUS), "64 x H800": ("sglang.d48+d16", long, MANY_GPUS)}
    rows = []
    for name, (mode, work, measured) in cases.items():
        # AReaL recomputes log-probs before the update.
        layout = Layout.parse(mode, find_model("1.5B"), GPUS["H800"], prox_logp="recompute")
        speeds = {}
        for eta in measured:
            setup, _ = make_setup(layout, work, rollout(eta))
            speeds[eta] = simulate(replace(setup, steps=6, warm_up=min(eta, 4) + 2)).answer_tokens_per_s
        for eta, speed in measured.items():
            if eta:
                row = {"case": f"{name}, eta {eta} / eta 0", "measured": speed / measured[0]}
                rows.append(row | {"predicted": speeds[eta] / speeds[0]})
    return rows


def real_run(work: Path, model: Path, eta: int, servers: int, steps: int, reward_s: float) -> Path:
    """Run the task of async_task.py with launcher, server and trainer; returns the run directory."""
    case, trial = CASES["one_gpu_dry"], f"eta{eta}-servers{servers}-reward{reward_s:g}"
    command = [sys.executable, "-m", "arealite.launcher.local", "benchmark/async_task.py"]
    command += ["--config", str(EXAMPLES / "configs" / "demo.yaml"), f"actor.path={model}", *case.options]
    command += [f"rollout.max_head_offpolicyness={eta}", f"cluster.fileroot={work}", f"trial_name={trial}"]
    command += [f"total_train_steps={steps}", "stats_logger.console=false", f"allocation_mode=embedded.d{servers}+d1"]
    command += ["rollout.adaptive_lead=false", "train_dataset.batch_size=16"]
    env = {**os.environ, **case.env, "BENCH_REWARD_WAIT_S": str(reward_s)}
    subprocess.run(command, check=True, cwd=ROOT, timeout=3600, env=env)
    return work / "demo" / trial


def read_rows(run_dir: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run_dir / "stats.jsonl").read_text().splitlines()]


def on_this_machine(options: argparse.Namespace, work: Path) -> list[dict[str, object]]:
    """Seconds per step of real runs, predicted from the first: one server and η = 0, to which costs are fitted."""
    rows = []
    model = make_start(CASES["one_gpu_dry"], work)
    measured = None
    for servers, eta, reward_s in RUNS:
        run_dir = real_run(work, model, eta, servers, options.steps, reward_s)
        steps = read_rows(run_dir)
        measured = measured or read_run(run_dir, steps)
        played = measured.workload
        if reward_s:
            played = replace(played, episodes=tuple(e._replace(reward_s=reward_s) for e in played.episodes))
        costs = measured.server, measured.train, measured.update
        # The same steps as those that are measured: the lengths of so few episodes vary.
        window = options.steps - FILLING_STEPS, FILLING_STEPS
        setup = Setup(played, servers, *costs, rollout(eta), *window, cores=measured.cores)
        took_s = statistics.mean(row["time/step"] for row in steps[FILLING_STEPS:])
        name = f"{servers} server(s), eta {eta}, reward {reward_s:g} s"
        rows.append({"case": name, "measured": took_s, "predicted": simulate(setup).step_s})
    return rows


def large(options: argparse.Namespace, folder: Path) -> list[dict[str, object]]:
    """CPU seconds that the simulation of a large job takes: 100,000 episodes in flight on 512 GPUs."""
    work = Workload(20_000, 1, Distribution("constant", (500.0,)), Distribution("lognormal", (2000.0, 1.0, 8192.0)))
    layout = Layout.parse("sglang.d384+d128", find_model("7B"), GPUS["H100"], max_running=512)
    setup, _ = make_setup(layout, work, rollout(4))
    began = time.process_time()
    found = simulate(replace(setup, steps=3, warm_up=2))
    took_s = time.process_time() - began
    row = {"case": f"{found.most_in_flight:,} episodes in flight, 512 GPUs: CPU seconds, of 60", "measured": 60.0}
    return [row | {"predicted": took_s}]


PARTS = {"published": published, "machine": on_this_machine, "large": large}


def run(options: argparse.Namespace, work: Path) -> dict[str, object]:
    rows = [row for name in options.only or PARTS for row in PARTS[name](options, work)]
    table = []
    for row in rows:
        measured, predicted = float(str(row["measured"])), float(str(row["predicted"]))
        table.append([str(row["case"]), f"{measured:.2f}", f"{predicted:.2f}", f"{predicted / measured - 1:+.0%}"])
    print_table(["case", "measured", "predicted", "difference"], table)
    return {"rows": rows}
