"""Compares the memory that `--dry-run` estimates with measured peaks on a GPU, for models of 0.5B to 32B.

    python -u benchmark/memory.py                          all parts, each in a process of its own
    python -u benchmark/memory.py --parts server-7B        some of them
    python -u benchmark/memory.py --parts large            what fits of 7B, 14B and 32B, with tokens/s

A trainer part makes one pass of log-probs and an update with full micro-batches, a server part serves 256 requests
and loads new weights. Random weights. `measured` is what the allocator has reserved at most, with CUDA's context
(nvidia-smi). Prints a line for each part as soon as it is known, then its numbers as JSON.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from common import describe_machine
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config

from arealite.api.cli_args import OptimizerConfig, PPOActorConfig, ServerConfig
from arealite.api.io_struct import Batch, FinetuneSpec
from arealite.engine.ppo.actor import FSDPPPOActor
from arealite.inference.engine import Engine
from arealite.inference.sequence import Request, SamplingParams
from arealite.inference.weights import WeightSource
from arealite.utils.memory.estimate import CUDA_CONTEXT, Needs, server_needs, training_needs
from arealite.utils.memory.model_size import read_model_size

# Qwen2.5: hidden, inner, layers, heads, KV heads, vocabulary, tied.
SHAPES = {
    "0.5B": (896, 4864, 24, 14, 2, 151936, True),
    "1.5B": (1536, 8960, 28, 12, 2, 151936, True),
    "7B": (3584, 18944, 28, 28, 4, 152064, False),
    "14B": (5120, 13824, 48, 40, 8, 152064, False),
    "32B": (5120, 27648, 64, 40, 8, 152064, False),
    "tiny": (64, 128, 2, 4, 2, 512, True),
}
ROW = 512
# Settings of the trainer parts, and how long each may take.
TRAINERS: dict[str, tuple[str, dict, float]] = {
    "train-0.5B": ("0.5B", {}, 40),
    "train-1.5B": ("1.5B", {}, 40),
    "train-7B": ("7B", {"param_dtype": "bfloat16"}, 60),
    "train-1.5B-recomputed-8bit": ("1.5B", {"gradient_checkpointing": True, "type": "adamw_8bit"}, 40),
    "train-7B-recomputed-bf16": (
        "7B",
        {"param_dtype": "bfloat16", "gradient_checkpointing": True, "type": "adamw_bf16", "max_tokens_per_mb": 8192},
        60,
    ),
    "train-0.5B-compiled": ("0.5B", {"compile": True, "param_dtype": "bfloat16"}, 60),
    "train-7B-bf16": ("7B", {"param_dtype": "bfloat16", "gradient_checkpointing": True, "type": "adamw_bf16"}, 60),
    "train-7B-lora": ("7B", {"param_dtype": "bfloat16", "gradient_checkpointing": True, "lora_rank": 16}, 60),
    "train-14B-8bit": ("14B", {"param_dtype": "bfloat16", "gradient_checkpointing": True, "type": "adamw_8bit"}, 90),
    "train-14B-lora": ("14B", {"param_dtype": "bfloat16", "gradient_checkpointing": True, "lora_rank": 16}, 90),
    "train-32B-lora": (
        "32B",
        {"param_dtype": "bfloat16", "gradient_checkpointing": True, "lora_rank": 16, "max_tokens_per_mb": 8192},
        120,
    ),
    "train-32B-lora-fp8": (
        "32B",
        {
            "param_dtype": "bfloat16",
            "gradient_checkpointing": True,
            "lora_rank": 16,
            "frozen_weight_dtype": "fp8",
            "max_tokens_per_mb": 8192,
        },
        120,
    ),
    "train-32B-lora-nf4": (
        "32B",
        {
            "param_dtype": "bfloat16",
            "gradient_checkpointing": True,
            "lora_rank": 16,
            "frozen_weight_dtype": "nf4",
            "max_tokens_per_mb": 8192,
        },
        120,
    ),
}
LARGE = (
    "train-7B-bf16", "train-7B-lora", "train-14B-8bit", "train-14B-lora", "train-32B-lora", "train-32B-lora-fp8",
    "train-32B-lora-nf4",
)  # fmt: skip
SERVERS: dict[str, tuple[str, dict, float]] = {
    "server-0.5B": ("0.5B", {"max_running_requests": 256}, 60),
    "server-1.5B": ("1.5B", {"mem_fraction": 0.4, "max_running_requests": 256}, 60),
    "server-7B": ("7B", {"max_running_requests": 256}, 60),
}
ORDER = ("train-0.5B", "train-1.5B", "train-7B", "server-0.5B", "server-1.5B", "server-7B")


def make_folder(shape: str, folder: Path) -> str:
    """Write the config of a model."""
    hidden, inner, layers, heads, kv_heads, vocab, tied = SHAPES[shape]
    config = Qwen2Config(
        hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, vocab_size=vocab, tie_word_embeddings=tied, max_position_embeddings=32768,
        bos_token_id=None, eos_token_id=None, architectures=["Qwen2ForCausalLM"],
    )  # fmt: skip
    path = folder / shape
    config.save_pretrained(path)
    return str(path)


def make_batch(num_rows: int, length: int, vocab: int) -> Batch:
    """Make full rows of random tokens with what an update needs."""
    ids = torch.randint(0, vocab, (num_rows, length))
    ones, groups = torch.ones_like(ids), torch.arange(num_rows) // 2
    mask = ones.clone()
    mask[:, :16] = 0
    rewards = torch.arange(num_rows).float() % 2
    advantages = (rewards - 0.5)[:, None] * mask
    return {
        "input_ids": ids, "attention_mask": ones, "loss_mask": mask, "group_ids": groups, "rewards": rewards,
        "advantages": advantages, "versions": mask - 1,
    }  # fmt: skip


def used_bytes() -> float:
    """Return the used memory of the first GPU, of all processes."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-i", "0"]
    return float(subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout) * 2**20


def run_trainer(part: str, path: str, device: str) -> dict:
    """Run log-probs and two updates; returns the peak."""
    settings = dict(TRAINERS[part][1])
    if device == "cpu":
        settings["compile"] = False
    optimizer = OptimizerConfig(type=settings.pop("type", "adamw"), lr=1e-6)
    config = PPOActorConfig(
        path=path, device=device, init_from_scratch=True, optimizer=optimizer, share_prefix=False, **settings
    )
    actor = FSDPPPOActor(config)
    # The weights of a single type are made on the device; FSDP copies them from the host.
    is_plain = config.param_dtype == config.dtype
    with torch.device(device if is_plain else "cpu"), _quick_init():
        actor.initialize(FinetuneSpec(1, 1000, 1))
    size = read_model_size(path)
    assert size is not None
    loaded = _reserved(device)
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    plan = actor.memory
    num_rows, length = (2 * max(1, plan.max_tokens_per_mb // ROW), ROW) if device == "cuda" else (4, 24)
    batch = make_batch(num_rows, length, size.vocab)
    batch["logprobs"] = actor.compute_logp(batch)
    after_logp = _reserved(device)
    # The first update makes the optimizer's states; the second one has them during its passes.
    seconds = 0.0
    for rows in (2, num_rows):
        begin = time.perf_counter()
        stats = actor.ppo_update({key: value[:rows] for key, value in batch.items()})[0]
        seconds = time.perf_counter() - begin
    needs = training_needs(size, config, plan, on_gpu=device == "cuda", step_tokens=num_rows * length)
    more = {
        "plan": vars(plan),
        "tokens_per_s": num_rows * length / seconds,
        "loaded": loaded,
        "after_logp": after_logp,
        "grad_norm": stats["grad_norm"],
    }
    return measure(needs, device) | more


def run_server(part: str, path: str, device: str) -> dict:
    """Serve requests at the largest concurrency and load new weights; returns the peak."""
    settings = SERVERS[part][1]
    config = ServerConfig(device=device, **settings)
    total = used_by_others = 0.0
    if device == "cuda":
        free, total = torch.cuda.mem_get_info()
        used_by_others = total - free
    with torch.device(device), _quick_init():
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        model = AutoModelForCausalLM.from_config(Qwen2Config.from_pretrained(path), dtype=dtype)
    engine = Engine(config, model).start()
    size = read_model_size(path)
    assert size is not None
    started = _reserved(device)
    params = SamplingParams(max_new_tokens=48, ignore_eos=True)
    prompts = torch.randint(0, size.vocab, (256 if device == "cuda" else 4, 256)).tolist()
    for future in [engine.submit(Request(prompt, params)) for prompt in prompts]:
        future.result(60)
    served = _reserved(device)
    new = {name: value.detach().cpu() for name, value in model.named_parameters()}
    engine.update(WeightSource.received(new, 1)).result(60)
    needs = server_needs(size, config, total or None, on_gpu=device == "cuda")
    blocks = engine.scheduler.pool.num_usable
    more = {
        "kv_tokens": blocks * engine.config.block_size,
        "started": started,
        "served": served,
        "before": used_by_others,
    }
    result = measure(needs, device) | more
    engine.close()
    return result


class _quick_init:
    """Leaves new weights as small constants: random numbers of billions of them take long on the host."""

    def __enter__(self) -> None:
        self._saved = PreTrainedModel._init_weights

        @torch.no_grad()
        def fill(model: PreTrainedModel, module: torch.nn.Module) -> None:
            for parameter in module.parameters(recurse=False):
                if parameter.device.type == "cuda" and parameter.dim() > 1:
                    parameter.normal_(std=0.02)
                elif parameter.device.type != "meta":
                    parameter.fill_(1.0 if parameter.dim() == 1 else 0.01)

        PreTrainedModel._init_weights = fill
        self._resets = {kind: kind.reset_parameters for kind in (torch.nn.Linear, torch.nn.Embedding)}
        for kind in self._resets:
            kind.reset_parameters = lambda module: None

    def __exit__(self, *_: object) -> None:
        PreTrainedModel._init_weights = self._saved
        for kind, reset in self._resets.items():
            kind.reset_parameters = reset


def _reserved(device: str) -> float:
    return torch.cuda.max_memory_reserved() if device == "cuda" else 0.0


def measure(needs: Needs, device: str) -> dict:
    """Compare an estimate with the peak of this process."""
    parts = {**needs.lasting, **needs.passing}
    row: dict = {"estimate": needs.total + CUDA_CONTEXT, "parts": parts | {"context": CUDA_CONTEXT}}
    if device == "cuda":
        torch.cuda.synchronize()
        reserved = torch.cuda.max_memory_reserved()
        context = used_bytes() - torch.cuda.memory_reserved()
        row |= {
            "measured": reserved + context, "context": context, "reserved": reserved,
            "allocated": torch.cuda.max_memory_allocated(),
        }  # fmt: skip
    return row


def in_child(function: Callable[..., dict], timeout_s: float, *args: str) -> dict:
    """Run a function in a forked process, so that imports are paid once and each part has a CUDA context of its own."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def work() -> None:
        try:
            sender.send(function(*args))
        except Exception as error:
            sender.send({"error": f"{type(error).__name__}: {error}"[:1500]})

    child = context.Process(target=work, daemon=True)
    child.start()
    try:
        result = receiver.recv() if receiver.poll(timeout_s) else {"error": f"not done after {timeout_s:.0f} s"}
    except EOFError:
        result = {"error": "the process ended without a result"}
    child.join(3)
    if child.is_alive():
        child.kill()
        child.join()
    return result


def report(part: str, row: dict, seconds: float) -> None:
    gib = {k: round(v / 2**30, 2) for k, v in row.items() if isinstance(v, float | int) and v > 1e6}
    if "error" in row:
        print(f"{part}: FAILED after {seconds:.1f} s: {row['error']}", flush=True)
        return
    parts = ", ".join(f"{name} {value / 2**30:.2f}" for name, value in row["parts"].items())
    ratio = f"{row['estimate'] / row['measured']:.3f} of measured {gib['measured']}" if "measured" in row else ""
    rate = f", {row['tokens_per_s']:,.0f} tokens/s" if "tokens_per_s" in row else ""
    print(f"{part}: estimate {gib['estimate']} GiB, {ratio}{rate} ({seconds:.1f} s)", flush=True)
    print(f"    estimated: {parts}", flush=True)
    print(f"    measured: {gib}  {row.get('plan', '')} kv_tokens={row.get('kv_tokens')}", flush=True)
    print("    JSON " + json.dumps({"part": part, "seconds": round(seconds, 1), **row}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--device", default="cuda", choices=["cuda", "cpu"], help="cpu: a tiny model, to try the script"
    )
    parser.add_argument("--parts", nargs="*", default=[*ORDER, *(p for p in TRAINERS if p not in (*ORDER, *LARGE))])
    parser.add_argument("--deadline", type=float, default=100.0, help="no part begins after so many seconds")
    args = parser.parse_args()
    # Asks the driver instead of the runtime, which must not be initialized before a fork.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        for part in LARGE if args.parts == ["large"] else args.parts:
            if time.perf_counter() - began > args.deadline:
                print(f"{part}: not run, the deadline has passed", flush=True)
                continue
            shape, _, timeout_s = (TRAINERS | SERVERS)[part]
            path = make_folder(shape if args.device == "cuda" else "tiny", Path(folder))
            run = run_trainer if part in TRAINERS else run_server
            start = time.perf_counter()
            report(part, in_child(run, timeout_s, part, path, args.device), time.perf_counter() - start)
    print(f"total {time.perf_counter() - began:.1f} s", flush=True)
    # Last: it initializes CUDA.
    print(json.dumps({"benchmark": "memory", **describe_machine()}), flush=True)


if __name__ == "__main__":
    main()
