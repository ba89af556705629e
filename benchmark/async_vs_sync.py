"""How much faster is asynchronous training than synchronous, same machine, same work, same reward at the end?

    python benchmark/async_vs_sync.py [--case lognormal] [--case slow_reward] [--case one_gpu] [--runs 1] [--steps N]

Cases: `lognormal`, on CPU, has generations whose length varies by a factor of ten and more; `slow_reward`, on CPU, has
rewards that wait a second; `one_gpu` has the layers of a 0.5B model (random weights, a vocabulary of 1,024 tokens so
that it learns within the run) on one GPU that server and trainer share, with log-normal answers. Both sides run
through the launcher, with an embedded server and a trainer as two processes, over the same rows, seeds and lengths,
and alternate. Compared are the seconds per step (without the first steps, which fill the pipeline) and, with all
steps, the seconds until both had the same reward: the lower one of the two at the end (mean of five steps).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import torch
from common import describe_machine, print_table
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.utils.logging import disable_progress_bar

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples" / "arealite"
sys.path.insert(0, str(EXAMPLES))
from demo import supervise  # noqa: E402
from reverse import make_model, make_tokenizer  # noqa: E402

ETA = {"synchronous": 0, "asynchronous": 4}
# Steps.
NUM_FILLING = 5
GPU_SHAPE = dict(hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
                 num_key_value_heads=2, vocab_size=1024)  # fmt: skip
TINY_SHAPE = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
                  num_key_value_heads=1, vocab_size=512)  # fmt: skip


@dataclass(frozen=True)
class Case:
    env: dict[str, str]
    options: tuple[str, ...]
    steps: int
    shape: dict[str, int] = field(default_factory=dict)


ON_CPU = ("server.context_length=512", "server.max_total_tokens=131072")
ON_GPU = (
    "server.device=cuda", "server.dtype=bfloat16", "server.context_length=2304", "server.max_total_tokens=700000",
    "server.max_running_requests=512", "actor.device=cuda", "actor.dtype=bfloat16", "actor.max_tokens_per_mb=32768",
    "actor.ppo_n_minibatches=1", "actor.optimizer.lr=2e-4", "gconfig.max_new_tokens=2048",
    "train_dataset.batch_size=32",
)  # fmt: skip
HALVES = {"BENCH_TASK": "halves", "BENCH_SIGMA": "1.2"}
CASES = {
    "lognormal": Case({"BENCH_MEDIAN_TOKENS": "12", "BENCH_SIGMA": "1.2"}, ON_CPU, 110),
    "slow_reward": Case(
        {"BENCH_REWARD_WAIT_S": "1.0"},
        (*ON_CPU, "train_dataset.batch_size=32", "actor.optimizer.lr=2e-4", "total_train_epochs=2"), 160,
    ),
    "one_gpu": Case(
        {**HALVES, "BENCH_MEDIAN_TOKENS": "150", "BENCH_MAX_TOKENS": "2048"}, ON_GPU, 36, GPU_SHAPE
    ),
    # For trying `one_gpu` out without a GPU.
    "one_gpu_dry": Case(
        {**HALVES, "BENCH_MEDIAN_TOKENS": "16", "BENCH_MAX_TOKENS": "200"},
        (*ON_CPU, "train_dataset.batch_size=8", "gconfig.max_new_tokens=200", "actor.optimizer.lr=1e-3"),
        25, TINY_SHAPE,
    ),
}  # fmt: skip


def make_start(case: Case, work: Path) -> Path:
    """The weights that both sides start from."""
    if case.shape:
        folder = work / f"model-{case.shape['hidden_size']}"
        torch.manual_seed(0)
        config = Qwen2Config(**case.shape, tie_word_embeddings=True, eos_token_id=1, pad_token_id=0)
        Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
        make_tokenizer().save_pretrained(folder)
        return folder
    if not (work / "model").exists():
        make_model(work / "random", seed=1)
        config_path = work / "random" / "config.json"
        longer = json.loads(config_path.read_text()) | {"max_position_embeddings": 512}
        config_path.write_text(json.dumps(longer))
        supervise(work / "random", work / "model", seed=1)
    return work / "model"


def seconds_to(reward: float, rows: list[dict[str, float]]) -> float:
    """Until the mean reward of five steps in a row is this high."""
    first = next(
        i for i in range(5, len(rows) + 1) if statistics.mean(r["reward"] for r in rows[i - 5 : i]) >= reward
    )  # fmt: skip
    return sum(r["time/step"] for r in rows[:first])


def run(name: str, side: str, model: Path, work: Path, steps: int) -> list[dict[str, float]]:
    """The statistics of each step."""
    case, trial = CASES[name], f"{name}-{side}"
    command = [sys.executable, "-m", "arealite.launcher.local", "benchmark/async_task.py"]
    command += ["--config", str(EXAMPLES / "configs" / "demo.yaml"), f"actor.path={model}"]
    command += [f"rollout.max_head_offpolicyness={ETA[side]}", f"cluster.fileroot={work}"]
    command += [f"trial_name={trial}", f"total_train_steps={steps}", "stats_logger.console=false"]
    env = {**os.environ, **case.env}
    subprocess.run([*command, *case.options], check=True, cwd=ROOT, timeout=3600, env=env)
    lines = (work / "demo" / trial / "stats.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def summary(rows: list[dict[str, float]]) -> dict[str, float]:
    warm = rows[NUM_FILLING:]
    seconds = sum(r["time/step"] for r in warm)
    return {
        "seconds_per_step": seconds / len(warm),
        "first_reward": statistics.mean(r["reward"] for r in rows[:3]),
        "final_reward": statistics.mean(r["reward"] for r in rows[-5:]),
        "lag_mean": statistics.mean(r["lag_mean"] for r in warm),
        "trainer_idle": statistics.mean(r["idle/trainer"] for r in warm),
        "server_idle": statistics.mean(r.get("idle/server", 0.0) for r in warm),
        "trained_tokens_per_s": sum(r["num_seqs"] * r["answer_len"] for r in warm) / seconds,
        **{f"{part}_s": statistics.mean(r[f"time/{part}"] for r in warm) for part in PARTS},
    }


PARTS = ("rollout", "logp", "update", "weights")
COLUMNS = (
    "seconds_per_step", "seconds_to_it", "same_reward", "final_reward", "lag_mean", "trainer_idle", "server_idle",
    "rollout_s", "update_s", "weights_s",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--case", action="append", choices=list(CASES))
    parser.add_argument("--work", type=Path, help="keep the run directories here")
    options = parser.parse_args()
    disable_progress_bar()
    table, line = [], {"benchmark": "async_vs_sync", "speedup": {}, "measured": {}}
    with tempfile.TemporaryDirectory() as folder:
        work = options.work or Path(folder)
        for name in options.case or ("lognormal", "slow_reward"):
            model, steps = make_start(CASES[name], work), options.steps or CASES[name].steps
            sides: dict[str, list[dict[str, float]]] = {side: [] for side in ETA}
            for _ in range(options.runs):
                stats = {side: run(name, side, model, work, steps) for side in ETA}
                reward = min(summary(rows)["final_reward"] for rows in stats.values())
                for side, rows in stats.items():
                    took = {"same_reward": reward, "seconds_to_it": seconds_to(reward, rows)}
                    sides[side].append({**summary(rows), **took})
            median = {side: {k: statistics.median(r[k] for r in runs) for k in runs[0]} for side, runs in sides.items()}
            faster = {
                key: median["synchronous"][key] / median["asynchronous"][key]
                for key in ("seconds_per_step", "seconds_to_it")
            }
            line["speedup"][name], line["measured"][name] = faster, sides
            print(json.dumps({name: faster, "of": median}), flush=True)
            for side, values in median.items():
                table.append([name, side, *(f"{values[c]:.3f}" for c in COLUMNS)])
            cells = [f"{faster[c]:.2f}" if c in faster else "" for c in COLUMNS]
            table.append([name, "times as fast", *cells])
    print_table(["case", "side", *COLUMNS], table)
    print(json.dumps({**line, **describe_machine()}))


if __name__ == "__main__":
    main()
