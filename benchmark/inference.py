"""Measures throughput of the embedded engine and the error of its log-probs.

    python benchmark/inference.py                                    GPU: 0.5B, 256 sequences, 128 tokens in, 512 out
    python benchmark/inference.py shape=1.5b concurrency=256 http=true
    python benchmark/inference.py shape=30b-a3b                      Qwen3-30B-A3B: 128 experts, 8 of a token
    python benchmark/inference.py input_len=8192 concurrency=64 server.kv_cache_dtype=fp8 http=false
    python benchmark/inference.py workload=mixed groups=125          log-normal lengths 32-2048, groups of 8
    python benchmark/inference.py device=cpu                         also Hugging Face `generate`, for comparison
    python benchmark/inference.py device=cpu shape=27m draft_tokens=8 concurrency=16 median=64 max_output=400 repeats=3
                                                                     with and without speculative decoding, nothing else

Random weights of a known shape, random prompts, temperature 1, log-probs returned. Prints a table and one JSON line.
"""

from __future__ import annotations

import copy
import gc
import json
import os
import platform
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import drafts
import load
import torch
import transformers
from common import gap
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, Qwen2Config, Qwen3MoeConfig

from arealite.api.cli_args import ServerConfig
from arealite.api.io_struct import WeightUpdateMeta
from arealite.inference.engine import Engine
from arealite.inference.sequence import Request, SampleOutput, SamplingParams
from arealite.inference.weights import WeightSource
from arealite.utils.config import load_config
from arealite.weights.host_memory import SharedWeights

# hidden, mlp, layers, heads, KV heads, vocabulary, tied
SHAPES = {
    "tiny": (128, 384, 2, 4, 2, 32, True),
    "27m": (512, 1376, 8, 8, 4, 8192, True),
    "135m": (576, 1536, 30, 9, 3, 49152, True),
    "0.5b": (896, 4864, 24, 14, 2, 151936, True),
    "1.5b": (1536, 8960, 28, 12, 2, 151936, True),
    "7b": (3584, 18944, 28, 28, 4, 152064, False),
    "tiny-moe": (128, 384, 2, 4, 2, 32, True),
    "30b-a3b": (2048, 6144, 48, 32, 4, 151936, False),
    "30b-a3b-24": (2048, 6144, 24, 32, 4, 151936, False),
    "30b-a3b-12": (2048, 6144, 12, 32, 4, 151936, False),
}
# Shapes of Qwen3-MoE: experts, experts of a token, width of an expert, head size.
LONGEST = 65_536  # tokens of a sequence
EXPERTS = {"tiny-moe": (8, 2, 64, 32), "30b-a3b": (128, 8, 768, 128)}
# The same with some of its 48 layers, for quick comparisons.
EXPERTS |= dict.fromkeys(("30b-a3b-24", "30b-a3b-12"), EXPERTS["30b-a3b"])


@dataclass
class Options:
    """Options of the benchmark."""

    model: str = field(default="", metadata={"help": "Folder of real weights (and text prompts); empty: random ones."})
    shape: str = field(default="", metadata={"help": f"{', '.join(SHAPES)}; empty: 0.5b on cuda, tiny on cpu."})
    device: str = field(default="auto", metadata={"help": "cpu, cuda or auto."})
    workload: str = field(default="fixed", metadata={"help": "fixed, or mixed (log-normal output lengths)."})
    concurrency: int = field(default=256, metadata={"help": "Sequences decoded at once."})
    waves: int = field(default=2, metadata={"help": "Requests per concurrent slot (fixed workload)."})
    groups: int = field(default=125, metadata={"help": "Prompts of the mixed workload, eight samples each."})
    input_len: int = field(default=128, metadata={"help": "Prompt tokens."})
    output_len: int = field(default=512, metadata={"help": "Sampled tokens (fixed workload)."})
    median: int = field(default=256, metadata={"help": "Median output of the mixed workload."})
    max_output: int = field(default=2048, metadata={"help": "Longest output of the mixed workload."})
    sweep: list[int] = field(
        default_factory=list, metadata={"help": "Also measure these numbers of concurrent requests: [1,4,16]."}
    )
    draft_tokens: int = field(
        default=0, metadata={"help": "Only compare with and without drafts of so many tokens, on repetitive text."}
    )
    http: bool = field(default=True, metadata={"help": "Also measure through the HTTP server."})
    update: bool = field(default=True, metadata={"help": "Also measure a weight update under load."})
    profile: bool = field(default=False, metadata={"help": "Also print a profile of decode steps."})
    server: ServerConfig = field(default_factory=ServerConfig)  # e.g. server.kv_cache_dtype=fp8
    repeats: int = field(default=2, metadata={"help": "Runs of each measurement; the best counts."})


@dataclass
class Job:
    """One request of the workload."""

    prompt: list[int]
    max_new_tokens: int
    n: int


def main() -> None:
    options = load_config(sys.argv[1:], Options)
    cuda = options.device != "cpu" and torch.cuda.is_available()
    options.shape = options.shape or ("0.5b" if cuda else "tiny")
    results: dict[str, Any] = {}
    if options.draft_tokens:
        report(options, drafts.compare(make_model(options, "cuda" if cuda else "cpu"), options), cuda)
        return
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(options, "cuda" if cuda else "cpu")
        jobs = make_jobs(options, model.config.vocab_size)
        if options.http:
            model.save_pretrained(folder)
        if not cuda and not options.model:
            results["generate"] = best(options, lambda model=model: run_generate(options, model, jobs))
        results |= run_in_process(options, model, jobs, cuda)
        model = None
        gc.collect()
        torch.cuda.empty_cache()
        if options.http:
            results |= run_http(options, folder, jobs, cuda)
    report(options, results, cuda)


# ------------------------------------------------------------------------------------------------ workload


def make_model(options: Options, device: str) -> PreTrainedModel:
    if options.model:
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        return AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype).to(device).eval()
    hidden, mlp, layers, heads, kv_heads, vocab, tied = SHAPES[options.shape]
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": LONGEST,
        "tie_word_embeddings": tied,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if options.shape in EXPERTS:
        names = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "head_dim")
        sizes |= dict(zip(names, EXPERTS[options.shape], strict=True), norm_topk_prob=True)
        config = Qwen3MoeConfig(**sizes)
    else:
        config = Qwen2Config(**sizes)
    config.dtype = torch.bfloat16 if device == "cuda" else torch.float32
    default = torch.get_default_dtype()
    torch.set_default_dtype(config.dtype)
    try:
        with torch.device(device):
            return AutoModelForCausalLM.from_config(config).eval()
    finally:
        torch.set_default_dtype(default)


def make_jobs(options: Options, vocab: int) -> list[Job]:
    generator = torch.Generator().manual_seed(1)
    tokenizer = AutoTokenizer.from_pretrained(options.model) if options.model else None

    def prompt() -> list[int]:
        if tokenizer is not None:
            a, b, c, d = torch.randint(1, 50, (4,), generator=generator).tolist()
            return tokenizer.encode(
                f"Tom has {a} apples and buys {b} more. How many? {a} + {b} = {a + b}.\n"
                f"Ann has {c} pears and gives {d} to Bob. How many are left? Let us think."
            )
        return torch.randint(0, vocab, (options.input_len,), generator=generator).tolist()

    if options.workload == "fixed":
        return [Job(prompt(), options.output_len, 1) for _ in range(options.waves * options.concurrency)]
    # Log-normal, as lengths of reasoning traces: one in six is longer than 2.7 times the median.
    lengths = torch.randn(options.groups, generator=generator).exp_() * options.median
    lengths = lengths.clamp_(32, options.max_output).int().tolist()
    return [Job(prompt(), length, 8) for length in lengths]


def best(options: Options, measure: Any) -> float:
    return max(measure() for _ in range(options.repeats))


def params(job: Job) -> SamplingParams:
    return SamplingParams(n=job.n, max_new_tokens=job.max_new_tokens, ignore_eos=True)


# --------------------------------------------------------------------------------------------- measurements


def run_in_process(options: Options, model: PreTrainedModel, jobs: list[Job], cuda: bool) -> dict[str, Any]:
    plain = copy.copy(model.config._attn_implementation)
    begin = time.perf_counter()
    longest = max(len(job.prompt) + job.max_new_tokens for job in jobs)
    context = min(max(4096, longest + 16), model.config.max_position_embeddings)
    config = replace(options.server, max_running_requests=options.concurrency, context_length=context)
    engine = Engine(config, model=model).start()
    results: dict[str, Any] = {"engine_start_s": time.perf_counter() - begin}
    outputs: list[SampleOutput] = []

    def measure(jobs: list[Job] = jobs) -> float:
        begin = time.perf_counter()
        futures = [engine.submit(Request(job.prompt, params(job))) for job in jobs]
        groups = [future.result(600) for future in futures]
        outputs[:] = [output for group in groups for output in group]
        return sum(len(o.token_ids) for o in outputs) / (time.perf_counter() - begin)

    try:
        for count in options.sweep:
            some = [Job(job.prompt, options.output_len, 1) for job in (jobs * count)[:count]]
            results[f"at_once_{count}"] = best(options, lambda some=some: measure(some))
        results["in_process"] = best(options, measure)
        if options.update:
            results |= measure_update(engine, jobs[: options.concurrency])
        if options.profile and cuda:
            profile(engine, jobs)
    finally:
        engine.close()
    model.config._attn_implementation = plain
    prompts = [job.prompt for job in jobs for _ in range(job.n)]
    results |= compare_logprobs(model, prompts[:32], outputs[:32])
    return results


def measure_update(engine: Engine, jobs: list[Job]) -> dict[str, float]:
    """Measure how long a weight update through shared memory interrupts generation."""
    weights = {name: tensor.detach().cpu() for name, tensor in engine.model.named_parameters()}
    path = Path("/dev/shm") / f"arealite-bench-{secrets.token_hex(16)}"
    shared = SharedWeights.create(path, weights)
    try:
        for name, tensor in weights.items():
            shared.tensors[name].copy_(tensor)
        pauses = []
        futures = [engine.submit(Request(job.prompt, params(job))) for job in jobs]
        for version in range(1, 4):
            time.sleep(0.1)
            engine.update(WeightSource.published(WeightUpdateMeta("shm", str(path), version))).result(60)
            pauses.append(engine.stats()["last_update_s"])
        engine.abort().result(60)
        [future.result(60) for future in futures]
    finally:
        shared.unlink()
    return {"update_pause_ms": 1e3 * statistics.median(pauses)}


def profile(engine: Engine, jobs: list[Job]) -> None:
    futures = [engine.submit(Request(job.prompt, params(job))) for job in jobs]
    time.sleep(0.4)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as prof:
        time.sleep(0.1)
    print(prof.key_averages().table(sort_by="cuda_time_total", row_limit=18, max_name_column_width=60))
    engine.abort().result(60)
    [future.result(60) for future in futures]


@torch.inference_mode()
def compare_logprobs(model: PreTrainedModel, prompts: list[list[int]], outputs: list[SampleOutput]) -> dict[str, float]:
    """Compare the engine's log-probs with a forward pass of the Hugging Face model over prompt and output."""
    deltas = []
    weight = model.get_output_embeddings().weight
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = torch.tensor([prompt + output.token_ids], device=model.device)
        hidden = model.base_model(ids).last_hidden_state[0, len(prompt) - 1 : -1]
        logits = hidden.float() @ weight.float().t()
        deltas.append(_picked(logits, ids[0, len(prompt) :]) - torch.tensor(output.logprobs))
    return {f"logprob_{name}": value for name, value in gap(torch.cat(deltas)).items()}


def _picked(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    logits = logits.float()
    return (logits.gather(1, ids[:, None])[:, 0] - logits.logsumexp(-1)).cpu()


@torch.inference_mode()
def run_generate(options: Options, model: PreTrainedModel, jobs: list[Job]) -> float:
    """Measure Hugging Face `generate` on static batches, which run as long as their longest sequence."""
    begin, useful = time.perf_counter(), 0
    rows = [(job.prompt, job.max_new_tokens) for job in jobs for _ in range(job.n)]
    for start in range(0, len(rows), options.concurrency):
        part = rows[start : start + options.concurrency]
        ids = torch.tensor([prompt for prompt, _ in part])
        longest = max(length for _, length in part)
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=longest, do_sample=True, pad_token_id=0)
        useful += sum(length for _, length in part)
    return useful / (time.perf_counter() - begin)


def run_http(options: Options, folder: str, jobs: list[Job], cuda: bool) -> dict[str, Any]:
    """Measure an HTTP server under load from several processes; each sample of a group is one request."""
    begin = time.perf_counter()
    command = [sys.executable, "-m", "arealite.cli.serve", f"model_path={folder}"]
    command += [f"max_running_requests={options.concurrency}", f"device={'cuda' if cuda else 'cpu'}"]
    command += [f"{name}={value}" for name, value in _changed(options.server).items()]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        url = process.stdout.readline().split()[-1]
        threading.Thread(target=process.stdout.read, daemon=True).start()
        load.measure(url, "native", [([1], 1)], 1)
        results = {"start_to_first_token_s": time.perf_counter() - begin}
        requests = [(job.prompt, job.max_new_tokens) for job in jobs for _ in range(job.n)]
        results["through_http"] = best(options, lambda: load.measure(url, "native", requests, options.concurrency))
        return results
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


def report(options: Options, results: dict[str, Any], cuda: bool) -> None:
    for name, value in results.items():
        print(f"{name:24} {value:14,.4f}" if value < 10 else f"{name:24} {value:14,.1f}")
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    hardware = torch.cuda.get_device_name() if cuda else f"{os.cpu_count()} cores {platform.machine()}"
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    line = {"benchmark": "inference", "commit": commit, "hardware": hardware} | versions
    chosen = asdict(options) | {"server": _changed(options.server)}
    print(json.dumps(line | chosen | results))


def _changed(server: ServerConfig) -> dict[str, Any]:
    """Server settings that are not the defaults."""
    default = asdict(ServerConfig())
    return {name: value for name, value in asdict(server).items() if value != default[name]}


if __name__ == "__main__":
    main()
