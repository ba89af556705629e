"""Writes a run directory like that of a long run, for tests and measurements of the dashboard.

    python -m tests.dashboard.make_run FOLDER [--steps 500] [--rollouts 100000] [--seed 0]

The run has several servers, stale and failed episodes, alarms, evaluations, conversations with tools, and texts that
would do harm if a page took them as HTML.
"""

import argparse
import contextlib
import itertools
import json
import math
import random
import re
import sqlite3
import struct
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from arealite.core.ledger.images import image_name
from arealite.core.ledger.rollouts import RolloutRow
from arealite.core.ledger.store import AgeRow, EpisodeRow, Ledger, TimesRow
from arealite.core.ledger.token_record import TokenRecord
from arealite.utils.rundir import RunDir

SAMPLES = 8
IMAGE = 0x1234  # hash of the one image
STEP_S = 20.0
# Seconds between two samples of a server.
SAMPLE_S = 2.0
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
# What a tool answers, between two turns of the model.
OBSERVATION = r"(?s)(\n<\|im_start\|>user\n<tool_response>.*?<\|im_start\|>assistant\n)"
# Numbers of all tokens so far.
TOKEN_IDS: dict[str, int] = {}


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
    write_config(run_dir, seed, steps)
    write_ledger(run_dir, rng, steps, groups)
    write_stats(run_dir, rng, steps, groups)
    write_trace(run_dir, rng, steps)
    write_logs(run_dir, steps)
    write_image(run_dir)
    run_dir.private.mkdir(mode=0o700, exist_ok=True)
    run_dir.key_path.write_text("the key of the servers")
    return run_dir


def write_config(run_dir: RunDir, seed: int, steps: int) -> None:
    lr = 1e-6 * (seed + 1)
    run_dir.config_path.write_text(
        f"experiment_name: {run_dir.path.parent.name}\ntrial_name: {run_dir.path.name}\nseed: {seed}\n"
        f"total_train_steps: {steps}\n"
        f"actor:\n  path: model\n  optimizer:\n    lr: {lr}\nserver:\n  api_key: ${{oc.env:AREALITE_API_KEY}}\n"
        "rollout:\n  max_head_offpolicyness: 4\ngconfig:\n  n_samples: 8\n  stop: ['<|im_end|>']\n"
    )


def write_image(run_dir: RunDir) -> None:
    """Write the image of all prompts that have one: 24 × 16 pixels, red."""
    rows = b"".join(b"\0" + 24 * b"\xff\0\0" for _ in range(16))
    chunks = (b"IHDR", struct.pack(">2I5B", 24, 16, 8, 2, 0, 0, 0)), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")
    png = b"\x89PNG\r\n\x1a\n"
    for kind, data in chunks:
        png += struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    folder = run_dir.path / "rollouts" / "images"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{image_name(IMAGE)}.png").write_bytes(png)


def write_ledger(run_dir: RunDir, rng: random.Random, steps: int, groups: int) -> None:
    ledger = Ledger(run_dir.db_path)
    questions = [_sentence(rng, 30) for _ in range(max(20, groups * 4))]
    numbers = itertools.count()
    for step in range(steps):
        rows: list[RolloutRow] = []
        for _ in range(groups):
            rows += _group(ledger, rng, next(numbers), step, rng.choice(questions))
        _lost_episodes(ledger, rng, numbers, step)
        ages = Counter(min(step, step - row.oldest_version) for row in rows)
        ledger.commit(
            lambda rows=rows: rows,
            lambda ages=ages, step=step: [AgeRow(step, *pair, 100 * pair[1]) for pair in ages.items()],
        )
    for state in ("running", "buffered"):
        for _ in range(groups):
            ledger.record(EpisodeRow(next(numbers), state, start_version=steps, started_at=STARTED + STEP_S * steps))
    _evaluated(ledger, rng, steps)
    ledger.close()
    with contextlib.closing(sqlite3.connect(run_dir.db_path)) as db, db:
        _write_events(db, steps)
        db.executemany("INSERT INTO vocabulary VALUES (?,?)", [(i, text.encode()) for text, i in TOKEN_IDS.items()])
        db.executemany(f"INSERT INTO servers VALUES ({','.join('?' * 11)})", _server_samples(rng, steps))


def _lost_episodes(ledger: Ledger, rng: random.Random, numbers: Iterator[int], step: int) -> None:
    for state, reason in (("stale", None), ("failed", f"TimeoutError: {HOSTILE[0]}"), ("rejected", "no signal")):
        if rng.random() < 0.3:
            now, start = STARTED + STEP_S * step, max(0, step - 2)
            row = EpisodeRow(next(numbers), state, reason, start, start, None, SAMPLES, 900, 0.1, now - 30, now)
            ledger.record(row)


def _write_events(db: sqlite3.Connection, steps: int) -> None:
    """Write events at the times of their steps; the ledger would write the present time."""
    events = [(STARTED, "start", f"started with {steps} steps", None, "info")]
    for step in range(steps):
        at = STARTED + STEP_S * step
        if step % 100 == 57:
            events.append((at, "alarm", f"the reward fell from 0.8 to 0.2. {HOSTILE[1]}", step, "alarm"))
        if step % 50 == 10:
            events.append((at, "server", f"{SERVERS[2]} was lost: {HOSTILE[2]}", step, "warning"))
            events.append((at + 5, "server", f"{SERVERS[2]} joined", step, "info"))
    db.executemany("INSERT INTO events VALUES (?,?,?,?,?)", events)


def _server_samples(rng: random.Random, steps: int) -> Iterator[tuple[object, ...]]:
    totals = [[0, 0, 0, 0.0] for _ in SERVERS]
    for number in range(int(steps * STEP_S / SAMPLE_S)):
        at = number * SAMPLE_S
        for index, (address, total) in enumerate(zip(SERVERS, totals, strict=True)):
            load = 0.5 + 0.4 * math.sin(at / 60 + 2 * index) + rng.uniform(0, 0.1)
            for i, more in enumerate((2000, 1400, 5000 * load, SAMPLE_S * min(1.0, load))):
                total[i] += more
            counters = (*(int(value) for value in total[:3]), total[3])
            version, running = int(at / STEP_S), int(64 * load)
            yield (STARTED + at, address, version, 1, running, max(0, running - 50), min(1.0, load), *counters)


def _group(ledger: Ledger, rng: random.Random, number: int, step: int, question: str) -> list[RolloutRow]:
    oldest = max(0, step - rng.choice((0, 0, 0, 1, 1, 2, 3, 4)))
    prompt = f"<|im_start|>system\nYou solve problems.<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n"
    prompt += "<|im_start|>assistant\n"
    rows = []
    for sample in range(SAMPLES):
        reward = float(rng.random() < 0.2 + 0.6 * step / (step + 150))
        completion, newest = _completion(rng, rng.randint(20, 200), number), rng.randint(oldest, step)
        record, count, answer = _record(rng, prompt, completion, oldest, newest, with_trainer=sample % 3 < 2)
        turns, images = (2 if number % 25 == 7 else 1), (1 if number % 40 == 11 else 0)
        parts = {"correct": reward, "format": float(rng.random() < 0.9)}
        row = RolloutRow(number, sample, step, reward, oldest, newest, count, prompt, completion)
        # Tokens of some answers are not kept.
        record = None if number % 20 == 19 else record
        rows.append(
            row._replace(
                answer_tokens=answer,
                turns=turns,
                images=images,
                truncated=sample == 7,
                parts=parts,
                record=record,
                image_names=(IMAGE,) if images and sample < 4 else (),
            )
        )
    tokens, reward = sum(row.tokens for row in rows), sum(row.reward for row in rows) / SAMPLES
    ended = STARTED + STEP_S * step - rng.random() * 10
    row = EpisodeRow(number, "trained", None, oldest, oldest, step, SAMPLES, tokens, reward, ended - 30, ended)
    ledger.record(row)
    reward_s = 0.2 + 0.015 * (37 * number % 100)
    ledger.record_times(TimesRow(number, ended, json.dumps([["generate", 30 - reward_s], ["reward", reward_s]])))
    return rows


def _tokenize(text: str) -> list[int]:
    pieces = re.findall(r"<\|\w+\|>| ?\w+|\s|\W", text)
    return [TOKEN_IDS.setdefault(piece, len(TOKEN_IDS)) for piece in pieces]


def _record(
    rng: random.Random, prompt: str, completion: str, oldest: int, newest: int, with_trainer: bool
) -> tuple[bytes, int, int]:
    """Return the tokens of a rollout, their number, and how many were generated."""
    before, answer, is_written = _tokenize(prompt), [], []
    for i, part in enumerate(re.split(OBSERVATION, completion[:2000])):
        tokens = _tokenize(part)
        answer += tokens
        is_written += [i % 2 == 0] * len(tokens)
    n = len(before) + len(answer)
    generated = np.array([False] * len(before) + is_written)
    cut = len(before) + rng.randint(0, len(answer))
    versions = np.where(generated, np.where(np.arange(n) < cut, oldest, newest), -1)
    noise = np.random.default_rng(rng.getrandbits(32))
    logprobs = np.where(generated, -noise.exponential(0.4, n), 0.0).astype(np.float32)
    train_logp = (logprobs + noise.normal(0, 0.02, n)).astype(np.float32) if with_trainer else None
    advantages = np.where(generated, rng.gauss(0, 1), 0.0).astype(np.float32) if with_trainer else None
    record = TokenRecord(np.array(before + answer), generated, versions, logprobs, train_logp, advantages)
    return record.to_bytes(), n, sum(is_written)


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
    """Write phases of the trainer, weight updates, counters of servers, episodes and rewards, in Chrome's format."""
    with run_dir.trace_path.open("w") as file:
        file.write("[\n")
        file.writelines(json.dumps(event) + ",\n" for event in _trace_events(rng, steps))


def _trace_events(rng: random.Random, steps: int) -> Iterator[dict[str, object]]:
    names = {1: ["trainer"], 2: ["publish", *SERVERS], 3: SERVERS, 4: [f"slot {i}" for i in range(4)], 5: ["rewards"]}
    for pid, group in ((1, "trainer"), (2, "weights"), (3, "server"), (4, "rollout"), (5, "reward")):
        yield {"pid": pid, "tid": 0, "name": "process_name", "ph": "M", "args": {"name": group}}
        for tid, name in enumerate(names[pid]):
            yield {"pid": pid, "tid": tid, "name": "thread_name", "ph": "M", "args": {"name": name}}
    for step in range(steps):
        yield from _trace_of_step(rng, step)


def _trace_of_step(rng: random.Random, step: int) -> Iterator[dict[str, object]]:
    def span(pid: int, tid: int, name: str, start: float, took: float, **args: object) -> dict[str, object]:
        at = STARTED + STEP_S * step + start
        return {"pid": pid, "tid": tid, "name": name, "ph": "X", "ts": at * 1e6, "dur": took * 1e6, "args": args}

    for name, start, took in (("rollout", 0, 4), ("logp", 4, 2), ("update", 6, 12), ("weights", 18, 1)):
        yield span(1, 0, name, start, took)
    yield span(1, 0, "wait: batch", 0.5, 3.0, missing=4, running=16)
    yield span(2, 0, f"publish v{step + 1}", 18, 0.3)
    for tid, address in enumerate(SERVERS):
        yield span(2, 1 + tid, f"load v{step + 1}", 18.3, rng.uniform(0.2, 0.8), version=step + 1)
        at = (STARTED + STEP_S * step) * 1e6
        counts = {"running": rng.randint(0, 64), "waiting": rng.randint(0, 9), "kv_used": rng.random()}
        yield {"pid": 3, "tid": tid, "name": address, "ph": "C", "ts": at, "args": counts}
    for tid in range(4):
        start = rng.uniform(0, 8)
        yield span(4, tid, "episode", start, 9, episode=step * 4 + tid, state="trained", version=step)
        yield span(4, tid, "generate", start + 0.1, 7, server=SERVERS[tid % 3], tokens=400)
    yield span(5, 0, "reward", 14, 0.2, episode=step, rows=SAMPLES)


def write_logs(run_dir: RunDir, steps: int) -> None:
    (run_dir.logs / "rank0.log").write_text("".join(f"step {i}: reward 0.5 {HOSTILE[i % 4]}\n" for i in range(steps)))
    (run_dir.logs / "server0.log").write_bytes(b"\x1b[31mred\x1b[0m \xff\xfe not UTF-8\n" * 50)


if __name__ == "__main__":
    main()
