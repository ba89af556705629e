"""Speed and memory of training. Prints a table and one JSON line.

    python benchmark/training.py                  CPU: packed compared with padded
    python benchmark/training.py --device cuda    MFU of the 1.5B and 0.5B shapes through the whole engine, memory of
                                                  log-probs, one sequence of 32k tokens
    … --part long                                 only the sequences of up to 32k tokens, with both kernels of attention
    … --part trl [--trl-python PYTHON]            one GRPO step compared with TRL's trainer on the same batch

Sequence lengths are log-normal, like answers to GSM8K. Models have random weights: nothing is downloaded. PYTHON is an
interpreter that has TRL.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from common import describe_machine
from transformers import AutoModelForCausalLM, Qwen2Config

from arealite.algo.advantages import normalize
from arealite.algo.logprobs import token_logprobs
from arealite.api.cli_args import OptimizerConfig, PPOActorConfig, TrainEngineConfig
from arealite.api.io_struct import Batch, FinetuneSpec
from arealite.engine.fsdp import varlen
from arealite.engine.ppo.actor import FSDPPPOActor
from arealite.engine.sft.lm_engine import FSDPLMEngine

SHAPES = {
    "1.5B": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12},
    "0.5B": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14},
    "tiny": {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "num_attention_heads": 4},
}  # fmt: skip


def make_config_folder(shape: str, vocab_size: int, folder: str) -> str:
    """Write the config of a model of this shape, without weights."""
    config = Qwen2Config(
        **SHAPES[shape], num_key_value_heads=2, vocab_size=vocab_size, tie_word_embeddings=True,
        max_position_embeddings=32768, architectures=["Qwen2ForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(folder)
    return folder


def lognormal_batch(num_tokens: int, mean: float, longest: int, vocab_size: int) -> Batch:
    """Make a batch of `num_tokens` in sequences of log-normal length. All tokens are trained."""
    g = torch.Generator().manual_seed(0)
    lengths: list[int] = []
    while sum(lengths) < num_tokens:
        draw = torch.empty(1).log_normal_(0.0, 0.6, generator=g).item() * mean
        lengths.append(int(min(max(draw, 16), longest, num_tokens - sum(lengths))))
    return fixed_batch(lengths, vocab_size)


def fixed_batch(lengths: list[int], vocab_size: int) -> Batch:
    """Make a batch of random tokens in sequences of these lengths."""
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(0, vocab_size, mask.shape, generator=g)
    return {"input_ids": ids * mask, "attention_mask": mask.long(), "loss_mask": mask.long()}


def grouped_batch(num_groups: int, group_size: int, num_prompt: int, mean: float, vocab_size: int) -> Batch:
    """Make a batch of groups that share a prompt, as in GRPO. Only the answers are trained."""
    g = torch.Generator().manual_seed(0)
    draws = torch.empty(num_groups * group_size).log_normal_(0.0, 0.6, generator=g) * mean
    batch = fixed_batch([num_prompt + int(n) for n in draws.clamp(16, 8 * mean)], vocab_size)
    first = torch.arange(len(draws)) // group_size * group_size
    batch["input_ids"][:, :num_prompt] = batch["input_ids"][first, :num_prompt]
    batch["loss_mask"][:, :num_prompt] = 0
    batch["group_ids"] = first
    return batch


def make_engine(path: str, device: str, **kwargs) -> FSDPLMEngine:
    dtype = "bfloat16" if device == "cuda" else "float32"
    config = TrainEngineConfig(
        path=path, init_from_scratch=True, device=device, dtype=dtype, param_dtype=dtype,
        optimizer=OptimizerConfig(lr=1e-5), **kwargs,
    )  # fmt: skip
    engine = FSDPLMEngine(config)
    with torch.device(device):
        engine.initialize(FinetuneSpec(1, 1000, 1))
    return engine


def timed_step(engine: FSDPLMEngine, batch: Batch, repeats: int, warmup: int) -> dict[str, float]:
    """Time training steps. Returns the statistics of the fastest step, its seconds and the peak memory."""
    cuda = engine.device == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    best: dict[str, float] = {}
    for i in range(warmup + repeats):
        start = time.perf_counter()
        # It ends with a copy to the host, so no synchronization is needed.
        stats = engine.train_lm(batch)
        seconds = time.perf_counter() - start
        if i >= warmup and seconds < best.get("seconds", float("inf")):
            best = {**stats, "seconds": seconds}
    if cuda:
        best["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return best


def matmul_peak() -> float:
    """FLOP/s of a large bf16 matrix product on random data: the reference for MFU."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for _ in range(3):
        a @ b
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(10):
        a @ b
    torch.cuda.synchronize()
    return 10 * 2 * 8192**3 / (time.perf_counter() - start)


def bench_mfu(shape: str, batch_kind: str, batch: Batch, peak: float, **kwargs) -> dict:
    """Tokens per second, MFU and peak memory of training steps of a model of this shape."""
    with tempfile.TemporaryDirectory() as folder:
        engine = make_engine(make_config_folder(shape, 151936, folder), "cuda", **kwargs)
    start = time.perf_counter()
    stats = timed_step(engine, batch, repeats=5, warmup=3)
    row = {
        "what": f"{shape} {batch_kind}",
        "settings": ", ".join(k for k, v in kwargs.items() if v is True) or "eager",
        "tokens_per_s": round(stats["num_tokens"] / stats["seconds"]),
        "mfu_of_measured_peak": round(stats["train_tflops"] * 1e12 / peak, 3),
        "peak_gib": round(stats["peak_gib"], 1),
        "warm_up_s": round(time.perf_counter() - start, 1),
        "loss": round(stats["loss"], 3),
    }
    engine.destroy()
    del engine
    gc.collect()
    torch.cuda.empty_cache()
    torch._dynamo.reset()
    return row


def bench_logprob_memory(num_tokens: int = 16384, vocab_size: int = 151936) -> dict:
    """Peak memory of log-probs and entropy, forward and backward, in chunks and with full logits."""
    hidden = torch.randn(num_tokens, 1536, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(vocab_size, 1536, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    ids = torch.randint(0, vocab_size, (num_tokens,), device="cuda")

    def chunked():
        return token_logprobs(hidden[:-1], weight, ids[1:], with_entropy=True)[0]

    def naive():
        logp = torch.nn.functional.linear(hidden, weight).float().log_softmax(-1)
        return logp[:-1].gather(1, ids[1:, None]).squeeze(1)

    peaks, seconds = [], []
    for function in (chunked, naive):
        hidden.grad = weight.grad = None
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function().sum().backward()
        peaks.append((torch.cuda.max_memory_allocated() - before) / 2**30)
        torch.cuda.synchronize()
        start = time.perf_counter()
        function().sum().backward()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return {
        "what": f"log-probs of {num_tokens} tokens, vocabulary {vocab_size}",
        "chunked_gib": round(peaks[0], 2), "naive_gib": round(peaks[1], 2),
        "share": round(peaks[0] / peaks[1], 3), "chunked_s": round(seconds[0], 4), "naive_s": round(seconds[1], 4),
    }  # fmt: skip


def run_cuda(quick: bool) -> list[dict]:
    peak = matmul_peak()
    rows = [{"what": "peak of a bf16 product", "tflops": round(peak / 1e12)}, bench_logprob_memory()]
    small = lognormal_batch(32768, 256, 1024, 151936)
    for shape, budget in (("1.5B", 16384), ("0.5B", 32768)):
        for compiled in (True,) if quick else (True, False):
            rows.append(
                bench_mfu(shape, "32k tokens, log-normal", small, peak, compile=compiled, max_tokens_per_mb=budget)
            )  # fmt: skip
            print(rows[-1], flush=True)
    groups = grouped_batch(num_groups=16, group_size=8, num_prompt=128, mean=128, vocab_size=151936)
    for shared in (False, True):
        kind = f"groups of 8, prompt of 128 computed {'once' if shared else 'eight times'}"
        rows.append(bench_mfu("1.5B", kind, groups, peak, compile=True, share_prefix=shared))
        print(rows[-1], flush=True)
    return [*rows, *bench_long(peak)]


def bench_long(peak: float) -> list[dict]:
    """Train on long sequences, with attention by both kernels in one run."""
    rows = []
    kinds = {"one sequence of 32k": [32768], "sequences of 14k, 9k, 6k, 4k": [14000, 9000, 6000, 3768]}
    for kind, lengths in kinds.items():
        batch = fixed_batch(lengths, 151936)
        for recompute, alone in ((True, True), (False, True), (False, False)):
            varlen.MAX_ALONE = 16 if alone else 0
            settings = {"compile": True, "gradient_checkpointing": recompute, "max_tokens_per_mb": 32768}
            row = bench_mfu("1.5B", f"{kind}, {'cuDNN' if alone else 'FlashAttention 2'}", batch, peak, **settings)
            rows.append(row)
            print(row, flush=True)
    return rows


# ------------------------------------------------------------------------------------ comparison with TRL


def grpo_batch(num_groups: int, group_size: int, scale: float, vocab_size: int) -> Batch:
    """Make a batch like GSM8K: log-normal lengths with medians of 100 and 200 times `scale`, groups share a prompt."""
    g = torch.Generator().manual_seed(0)
    prompts = torch.empty(num_groups).log_normal_(0.0, 0.3, generator=g) * 100 * scale
    answers = torch.empty(num_groups * group_size).log_normal_(0.0, 0.6, generator=g) * 200 * scale
    prompts = prompts.int().clamp(min=4).repeat_interleave(group_size)
    answers = answers.int().clamp(4, int(1024 * scale))
    batch = fixed_batch((prompts + answers).tolist(), vocab_size)
    first = torch.arange(len(answers)) // group_size * group_size
    position = torch.arange(batch["input_ids"].shape[1])
    in_prompt = position < prompts[:, None]
    batch["input_ids"] = torch.where(in_prompt, batch["input_ids"][first], batch["input_ids"])
    batch["loss_mask"] *= ~in_prompt
    rewards = torch.randint(0, 2, (len(answers),), generator=g).float()
    scores = normalize(rewards, first)
    return batch | {
        "group_ids": first, "rewards": rewards, "scores": scores,
        "advantages": scores[:, None] * batch["loss_mask"], "versions": batch["loss_mask"] - 1,
    }  # fmt: skip


def time_actor(path: str, device: str, batch: Batch, **kwargs) -> dict[str, float]:
    """Median seconds of `ppo_update` (one optimizer step), gradient norm of the first step, peak memory."""
    dtype = "bfloat16" if device == "cuda" else "float32"
    config = PPOActorConfig(
        path=path, device=device, dtype=dtype, param_dtype=dtype, prox_logp="first_pass", loss_mean="sequence",
        optimizer=OptimizerConfig(lr=1e-5, warmup_steps_proportion=0.0), **kwargs,
    )  # fmt: skip
    actor = FSDPPPOActor(config)
    actor.initialize(FinetuneSpec(1, 1000, 1))
    batch = batch | {"logprobs": actor.compute_logp(batch)}
    seconds, norms = [], []
    for _ in range(6):
        start = time.perf_counter()
        # The norm is on the host, so no synchronization is needed.
        norms.append(actor.ppo_update(batch)[0]["grad_norm"])
        seconds.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else 0.0
    actor.destroy()
    del actor
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    torch._dynamo.reset()
    return {"seconds": statistics.median(seconds[2:]), "grad_norm": norms[0], "peak_gib": peak}


def time_trl(python: str, path: str, batch_file: str, *options: str) -> dict[str, float]:
    """Run trl_step.py in another process. Returns its result, or an empty dict after an error, which is printed."""
    script = str(Path(__file__).with_name("trl_step.py"))
    command = [python, script, path, batch_file, *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("TRL {")]
    if not lines:
        print(done.stdout[-2000:], done.stderr[-4000:], sep="\n", flush=True)
        return {}
    return json.loads(lines[-1].removeprefix("TRL "))


def bench_trl(shape: str, device: str, python: str) -> list[dict]:
    """Time one GRPO step on the same batch and weights: TRL's trainer, our engine without and with shared prompts."""
    cuda = device == "cuda"
    batch = grpo_batch(8 if cuda else 4, 8, 1.0 if cuda else 0.1, 151936 if cuda else 512)
    real, cells = int(batch["attention_mask"].sum()), batch["attention_mask"].numel()
    with tempfile.TemporaryDirectory() as folder:
        make_config_folder(shape, 151936 if cuda else 512, folder)
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(Qwen2Config.from_pretrained(folder))
        model.to(torch.bfloat16 if cuda else torch.float32).save_pretrained(folder)
        del model
        gc.collect()
        torch.save(batch, f"{folder}/batch.pt")
        sides = {
            "TRL GRPOTrainer": lambda: time_trl(python, folder, f"{folder}/batch.pt", "16"),
            "TRL GRPOTrainer, torch_compile": lambda: time_trl(python, folder, f"{folder}/batch.pt", "16", "compile"),
            "ours, compiled, prompts not shared": lambda: time_actor(
                folder, device, batch, share_prefix=False, compile=True
            ),
            "ours, compiled": lambda: time_actor(folder, device, batch, compile=True),
        }
        rows = []
        for side, measure in sides.items():
            result = measure()
            seconds = result.get("seconds", float("inf"))
            what = f"GRPO step, {shape}, {real} tokens in {len(batch['rewards'])} sequences (padded {cells})"
            rows.append({"what": what, "side": side, "tokens_per_s": round(real / seconds), **result})
            print(rows[-1], flush=True)
    trl = min(row.get("seconds", float("inf")) for row in rows[:2])
    return [*rows, {"what": f"{shape} TRL's best / ours compiled", "speedup": round(trl / rows[-1]["seconds"], 2)}]


def run_cpu() -> list[dict]:
    """Time a step on a packed batch, and on the same batch padded to its longest sequence."""
    batch = lognormal_batch(4096, 64, 512, 512)
    padded = dict(batch)
    padded["attention_mask"] = torch.ones_like(batch["attention_mask"])
    seconds: dict[str, list[float]] = {"packed": [], "padded": []}
    with tempfile.TemporaryDirectory() as folder:
        path = make_config_folder("tiny", 512, folder)
        engines = {what: make_engine(path, "cpu", max_tokens_per_mb=1 << 20) for what in seconds}
        # Alternating, so that other load on the machine affects both.
        for _ in range(6):
            for what, data in (("packed", batch), ("padded", padded)):
                seconds[what].append(timed_step(engines[what], data, repeats=1, warmup=0)["seconds"])
    real = int(batch["attention_mask"].sum())
    medians = {what: statistics.median(times[1:]) for what, times in seconds.items()}
    rows: list[dict] = [
        {"what": what, "real_tokens_per_s": round(real / median), "seconds": round(median, 3)}
        for what, median in medians.items()
    ]
    speedup = round(medians["padded"] / medians["packed"], 2)
    return [
        *rows,
        {"what": "packed / padded", "fill": round(real / padded["attention_mask"].numel(), 2), "speedup": speedup},
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--quick", action="store_true", help="compiled runs only")
    parser.add_argument("--part", default="engine", choices=["engine", "long", "trl"])
    parser.add_argument("--trl-python", default=sys.executable, help="interpreter that has TRL")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.part == "trl":
        shapes = ("0.5B", "1.5B") if args.device == "cuda" else ("tiny",)
        rows = [row for s in shapes for row in bench_trl(s, args.device, args.trl_python)]
    elif args.part == "long":
        rows = bench_long(matmul_peak())
    else:
        rows = run_cuda(args.quick) if args.device == "cuda" else run_cpu()
    for row in rows:
        print("  ".join(f"{k}={v}" for k, v in row.items()))
    print(json.dumps({"benchmark": "training", **describe_machine(), "rows": rows}))


if __name__ == "__main__":
    main()
