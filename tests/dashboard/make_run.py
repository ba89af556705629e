"""Writes a run directory like that of a long run, for tests and measurements of the dashboard.

    python -m tests.dashboard.make_run FOLDER [--steps 500] [--rollouts 100000] [--seed 0]

The run has several servers, stale and failed episodes, alarms, evaluations, conversations with tools, and texts that
would do harm if a page took them as HTML.
"""

import argparse
import itertools
import json
import math
import random
from collections.abc import Iterator
from pathlib import Path

from arealite.core.ledger.store import EpisodeRow, Ledger, RolloutRow
from arealite.utils.rundir import RunDir

SAMPLES = 8
STEP_S = 20.0
STARTED = 1_790_000_000.0
SERVERS = ("10.0.0.1:30000", "10.0.0.1:30001", "10.0.0.2:30000")
HOSTILE = (
    "<script>window.pwned = 1</script>",
    '<img src=x onerror="window.pwned = 1">',
    "</textarea></title></style><svg onload='window.pwned = 1'>",
    "javascript:alert(1) {{constructor.constructor('window.pwned = 1')()}} ${window.pwned = 1}",
    "\u202etxet desrever\u202c \u200b zero width \ufeff",
    "a" * 5_000,
    "Z̴̡̢̛͓͇̩̥͊̔a̸l̷g̶o̵ 👩‍👩‍👧‍👦 日本語 العربية",
    "line\nbreaks\n\n\n\tand tabs    and spaces",
    "=cmd|' /C calc'!A0",
    "'; DROP TABLE rollouts; -- \" % _ \\",
)
_TEXT = """
the sum of both sides is therefore equal to so we get and then multiply by divide first second apples price each hour
minutes train speed total number answer because check again wait let us compute 12 7 42 1989 3.5 x y
"""
WORDS = _TEXT.split()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--rollouts", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    make_run(options.folder, options.steps, options.rollouts, options.seed)
    print(options.folder)


def make_run(folder: Path, steps: int = 20, rollouts: int = 400, seed: int = 0) -> RunDir:
    """Write a run directory with about so many rollouts."""
    rng, run_dir = random.Random(seed), RunDir(folder)
    run_dir.logs.mkdir(parents=True, exist_ok=True)
    groups = max(1, round(rollouts / steps / SAMPLES))
    write_config(run_dir, seed)
    write_ledger(run_dir, rng, steps, groups)
    write_stats(run_dir, rng, steps, groups)
    write_trace(run_dir, rng, steps)
    write_logs(run_dir, steps)
    run_dir.private.mkdir(mode=0o700, exist_ok=True)
    run_dir.key_path.write_text("the key of the servers")
    return run_dir


def write_config(run_dir: RunDir, seed: int) -> None:
    lr = 1e-6 * (seed + 1)
    run_dir.config_path.write_text(
        f"experiment_name: {run_dir.path.parent.name}\ntrial_name: {run_dir.path.name}\nseed: {seed}\n"
        f"actor:\n  path: model\n  optimizer:\n    lr: {lr}\nserver:\n  api_key: ${{oc.env:AREALITE_API_KEY}}\n"
        "gconfig:\n  n_samples: 8\n  stop: ['<|im_end|>']\n"
    )


def write_ledger(run_dir: RunDir, rng: random.Random, steps: int, groups: int) -> None:
    ledger = Ledger(run_dir.db_path)
    questions = [_sentence(rng, 30) for _ in range(max(20, groups * 4))]
    numbers = itertools.count()
    for step in range(steps):
        rows: list[RolloutRow] = []
        for _ in range(groups):
            rows += _group(ledger, rng, next(numbers), step, rng.choice(questions))
        for state, reason in (("stale", None), ("failed", f"TimeoutError: {HOSTILE[0]}"), ("rejected", "no signal")):
            if rng.random() < 0.3:
                now = STARTED + STEP_S * step
                row = EpisodeRow(
                    next(numbers), state, reason, max(0, step - 2), max(0, step - 2), None, SAMPLES, 900, 0.1
                )
                ledger.record(row._replace(started_at=now - 30, ended_at=now))
        if step % 100 == 57:
            ledger.event("alarm", f"the reward fell from 0.8 to 0.2 at step {step}. {HOSTILE[1]}")
        if step % 50 == 10:
            ledger.event("weights", f"published version {step + 1}")
        ledger.commit(lambda rows=rows: rows)
    for state in ("running", "buffered"):
        for _ in range(groups):
            ledger.record(EpisodeRow(next(numbers), state, start_version=steps, started_at=STARTED + STEP_S * steps))
    _evaluated(ledger, rng, steps)
    ledger.close()


def _group(ledger: Ledger, rng: random.Random, number: int, step: int, question: str) -> list[RolloutRow]:
    oldest = max(0, step - rng.choice((0, 0, 0, 1, 1, 2, 3, 4)))
    prompt = f"<|im_start|>system\nYou solve problems.<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n"
    rows = []
    for sample in range(SAMPLES):
        reward = float(rng.random() < 0.2 + 0.6 * step / (step + 150))
        words = rng.randint(20, 200)
        rows.append(
            RolloutRow(
                number, sample, step, reward, oldest, rng.randint(oldest, step), words + 40,
                prompt + "<|im_start|>assistant\n", _completion(rng, words, number),
            )
        )  # fmt: skip
    tokens, reward = sum(row.tokens for row in rows), sum(row.reward for row in rows) / SAMPLES
    ended = STARTED + STEP_S * step - rng.random() * 10
    row = EpisodeRow(number, "trained", None, oldest, oldest, step, SAMPLES, tokens, reward, ended - 30, ended)
    ledger.record(row)
    return rows


def _completion(rng: random.Random, words: int, number: int) -> str:
    text = _sentence(rng, words)
    if number % 10 == 3:
        text += "\n" + HOSTILE[(number // 10) % len(HOSTILE)]
    if number % 25 == 7:
        call = json.dumps({"name": "calculator", "arguments": {"expression": "12 * 7"}})
        turns = (
            f"<tool_call>\n{call}\n</tool_call><|im_end|>\n<|im_start|>user\n<tool_response>\n84\n</tool_response>"
            "<|im_end|>\n<|im_start|>assistant\n"
        )
        text = f"{text[:100]}\n{turns}{text[100:]}"
    return f"{text} \\boxed{{{rng.randint(0, 99)}}}<|im_end|>"


def _sentence(rng: random.Random, words: int) -> str:
    return " ".join(rng.choices(WORDS, k=words))


def _evaluated(ledger: Ledger, rng: random.Random, steps: int) -> None:
    rows = []
    for number, step in enumerate(range(0, steps + 1, max(1, steps // 5))):
        ledger.record(EpisodeRow(number, "evaluated", None, step, step, step, 1, 80, 0.5, source="direct"))
        rows.append(
            RolloutRow(number, 0, step, 0.5, step, step, 80, "What is 2 + 2?", _sentence(rng, 20), source="direct")
        )
    ledger.commit(lambda: rows)


def write_stats(run_dir: RunDir, rng: random.Random, steps: int, groups: int) -> None:
    lines = []
    for step in range(steps):
        lines += _stats_lines(rng, step, groups)
    run_dir.stats_path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def _stats_lines(rng: random.Random, step: int, groups: int) -> Iterator[dict[str, float | None]]:
    noise = rng.gauss(0.0, 0.03)
    reward = 0.2 + 0.6 * step / (step + 150) + noise
    trained = (step + 1) * groups
    line: dict[str, float | None] = {
        "step": step, "time": STARTED + STEP_S * (step + 1), "reward": reward, "reward/max": 1.0, "reward/min": 0.0,
        "reward/format": min(1.0, reward + 0.2), "reward/correct": reward,
        "answer_len": 300 + 100 * math.sin(step / 40),
        "entropy": 0.6 * math.exp(-step / 300) + 0.05 * abs(noise), "prox_kl": 0.001 + 0.01 * abs(noise),
        "behav_kl/k3": 0.002 + 0.01 * abs(noise), "staleness": rng.uniform(0.5, 2.0), "staleness/max": 4.0,
        "grad_norm": 0.5 + abs(noise), "loss": noise, "lr": 1e-6, "num_tokens": groups * SAMPLES * 400.0,
        "train_tokens_per_s": 20_000 + 500 * noise, "num_seqs": float(groups * SAMPLES), "trained": float(trained),
        "admitted": trained * 1.2, "buffered": float(groups), "stale": trained * 0.05, "rejected": trained * 0.05,
        "failed": trained * 0.01, "running": float(groups), "version": step + 1.0, "lag_mean": 1.0, "lag_max": 4.0,
        "wait_s": rng.uniform(0, 3), "time/step": STEP_S, "time/rollout": 4.0, "time/update": 12.0, "time/weights": 1.0,
        "rollout/prefix_hit_rate": 0.7, "clip_share": 0.01, "truncated_share": 0.02,
    }  # fmt: skip
    line |= {f"more/{i}": rng.random() for i in range(30)}
    if step % 100 == 57:
        line["alarm/reward"] = 1.0
    if step == 3:
        line["grad_norm"] = None
    yield line
    if step % 20 == 19:
        solved = max(0.0, min(1.0, reward))
        values = {"pass@1": solved, "pass@1/low": solved - 0.05, "pass@1/high": solved + 0.05, "maj@8": solved + 0.05}
        values |= {"length": 250.0, "version/min": step + 1.0, "version/max": step + 1.0}
        both = {f"eval/{name}/{key}": value for name in ("gsm8k", "math") for key, value in values.items()}
        yield {"step": step, "time": STARTED + STEP_S * (step + 1.5), **both}


def write_trace(run_dir: RunDir, rng: random.Random, steps: int) -> None:
    """Write trainer phases and spans of servers and weight updates, in Chrome's format."""
    with run_dir.trace_path.open("w") as file:
        file.write("[\n")

        def add(**event: object) -> None:
            file.write(json.dumps({"pid": 1, **event}) + ",\n")

        add(tid=1, name="process_name", ph="M", args={"name": "trainer"})
        for number, name in enumerate(SERVERS):
            add(tid=100 + number, name="thread_name", ph="M", args={"name": f"server {name}"})
        for step in range(steps):
            at = step * STEP_S
            for name, start, took in (("rollout", 0, 4), ("logp", 4, 2), ("update", 6, 12), ("weights", 18, 1)):
                add(tid=1, name=name, ph="X", ts=(at + start) * 1e6, dur=took * 1e6)
            for number in range(len(SERVERS)):
                start = at + 18 + 0.2 * number
                add(tid=100 + number, name="load", ph="X", ts=start * 1e6, dur=rng.uniform(2e5, 8e5))


def write_logs(run_dir: RunDir, steps: int) -> None:
    (run_dir.logs / "rank0.log").write_text("".join(f"step {i}: reward 0.5 {HOSTILE[i % 4]}\n" for i in range(steps)))
    (run_dir.logs / "server0.log").write_bytes(b"\x1b[31mred\x1b[0m \xff\xfe not UTF-8\n" * 50)


if __name__ == "__main__":
    main()
