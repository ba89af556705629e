"""Compares rollout in bf16, with a KV cache in FP8, with weights in FP8, and with both, on a GPU.

    python benchmark/rollout_fp8.py shape=7b concurrency=64 input_len=4096 output_len=512
    python benchmark/rollout_fp8.py model=FOLDER concurrency=64 output_len=256

The log-probs of the tokens that each engine has sampled are compared with those of the Hugging Face model in bf16 with
float32 logits: what a trainer would see. `mismatch_kl` estimates the KL divergence of the two policies, `held_tokens`
is the size of the KV cache. With random weights (`shape`), differences of log-probs say little: use real ones. Prints
a table and one JSON line.
"""

from __future__ import annotations

import copy
import gc
import json
import sys
import time
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from common import describe_machine, print_table
from inference import SHAPES, Job, compare_logprobs, make_jobs, make_model, params
from inference import Options as InferenceOptions
from transformers import PreTrainedModel

from arealite.api.cli_args import ServerConfig
from arealite.inference.engine import Engine
from arealite.inference.sequence import Request, SampleOutput
from arealite.utils.config import load_config

VARIANTS = {"bf16": {}, "cache": {"kv_cache_dtype": "fp8"}, "weights": {"weight_dtype": "fp8"}}
VARIANTS["both"] = VARIANTS["cache"] | VARIANTS["weights"]


@dataclass
class Options:
    """Options of the benchmark."""

    model: str = field(default="", metadata={"help": "Folder of real weights (and text prompts); empty: random ones."})
    shape: str = field(default="1.5b", metadata={"help": f"Random weights: {', '.join(SHAPES)}."})
    concurrency: int = field(default=64, metadata={"help": "Sequences decoded at once."})
    input_len: int = field(default=128, metadata={"help": "Prompt tokens (random weights)."})
    output_len: int = field(default=512, metadata={"help": "Sampled tokens."})
    compared: int = field(default=32, metadata={"help": "Sequences whose log-probs are compared; 0: none."})
    repeats: int = field(default=2, metadata={"help": "Runs of each variant; the fastest counts."})
    variants: list[str] = field(default_factory=lambda: list(VARIANTS), metadata={"help": ", ".join(VARIANTS)})
    server: ServerConfig = field(default_factory=lambda: ServerConfig(block_size=64))


def measure(options: Options, model: PreTrainedModel, jobs: list[Job], variant: str) -> dict[str, Any]:
    """Tokens per second, memory and log-probs of one variant; `model` stays as it is."""
    longest = max(len(job.prompt) + job.max_new_tokens for job in jobs) + 16
    sizes = {"max_running_requests": options.concurrency, "context_length": longest}
    served = copy.deepcopy(model)
    engine = Engine(replace(options.server, **sizes, **VARIANTS[variant]), model=served).start()
    weight_bytes = sum(p.nbytes for p in served.parameters())
    speeds, outputs = [], list[SampleOutput]()
    try:
        for _ in range(options.repeats):
            begin = time.perf_counter()
            futures = [engine.submit(Request(job.prompt, params(job))) for job in jobs]
            outputs = [future.result(600)[0] for future in futures]
            speeds.append(sum(len(o.token_ids) for o in outputs) / (time.perf_counter() - begin))
        pool = engine.scheduler.pool
        held_tokens = pool.num_usable * pool.block_size
    finally:
        engine.close()
    del engine, served
    gc.collect()
    torch.cuda.empty_cache()
    some = options.compared
    gaps = compare_logprobs(model, [job.prompt for job in jobs[:some]], outputs[:some]) if some else {}
    sizes = {"weights_gib": weight_bytes / 2**30, "held_tokens": held_tokens}
    return {"tokens_per_s": max(speeds), **sizes, **{n.removeprefix("logprob_"): v for n, v in gaps.items()}}


def main() -> None:
    options = load_config(sys.argv[1:], Options)
    if unknown := set(options.variants) - VARIANTS.keys():
        sys.exit(f"variants has {sorted(unknown)}: use {', '.join(VARIANTS)}")
    workload = InferenceOptions(model=options.model, shape=options.shape, concurrency=options.concurrency)
    workload = replace(workload, waves=1, input_len=options.input_len, output_len=options.output_len)
    model = make_model(workload, "cuda")
    jobs = make_jobs(workload, model.config.get_text_config().vocab_size)
    results = {}
    for variant in options.variants:
        results[variant] = measure(options, model, jobs, variant)
        print(f"{variant}: {results[variant]}", flush=True)
    rows = [[name, *(f"{value:,.4g}" for value in found.values())] for name, found in results.items()]
    print_table(["FP8", *results[options.variants[0]]], rows)
    about = asdict(options) | {"results": results}
    print(json.dumps({"benchmark": "rollout_fp8", **about, **describe_machine()}))


if __name__ == "__main__":
    main()
