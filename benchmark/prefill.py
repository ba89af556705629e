"""Measures how fast the embedded engine computes prompts, as a share of the GPU's peak.

    python benchmark/prefill.py shapes=[1.5b,7b] cases=[64x4096,16x16384]

Random weights, prompts that share nothing, one sampled token each; in process. The head computes the last token of a
prompt only, so its products do not count. Prints a line per case and one JSON line.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from common import describe_machine
from inference import SHAPES, make_jobs, make_model, params
from inference import Options as Workload

from arealite.api.cli_args import ServerConfig
from arealite.engine.fsdp.flops import FlopCounter, peak_flops
from arealite.inference.engine import Engine
from arealite.inference.sequence import Request
from arealite.utils.config import load_config


@dataclass
class Options:
    """Options of the benchmark."""

    shapes: list[str] = field(default_factory=lambda: ["1.5b", "7b"], metadata={"help": f"{', '.join(SHAPES)}."})
    cases: list[str] = field(default_factory=lambda: ["64x4096"], metadata={"help": "Prompts x tokens of each."})
    device: str = field(default="cuda", metadata={"help": "cuda or cpu."})
    max_prefill_tokens: int = field(default=8192, metadata={"help": "Prompt tokens of one step."})
    repeats: int = field(default=3, metadata={"help": "Runs of each case; the median counts."})


def main() -> None:
    options = load_config(sys.argv[1:], Options)
    results: dict[str, dict[str, Any]] = {}
    for shape in options.shapes:
        model = make_model(Workload(shape=shape), options.device)
        for case in options.cases:
            results[f"{shape}/{case}"] = found = measure(options, shape, case, model)
            share = "" if found["share_of_peak"] is None else f", {found['share_of_peak']:.1%} of the peak"
            print(f"{shape} {case}: {found['tokens_per_s']:,.0f} prompt tokens/s{share}", flush=True)
        del model
        gc.collect()
        torch.cuda.empty_cache()
    print(json.dumps({"benchmark": "prefill", **describe_machine(), **asdict(options), "results": results}))


def measure(options: Options, shape: str, case: str, model: Any) -> dict[str, Any]:
    """Compute all prompts `repeats` times, each time with other tokens."""
    number, length = map(int, case.split("x"))
    work = Workload(shape=shape, concurrency=number, waves=1, input_len=length, output_len=1)
    jobs, vocab = make_jobs(work, model.config.vocab_size), model.config.vocab_size
    config = ServerConfig(
        device=options.device,
        max_running_requests=number,
        context_length=length + 16,
        max_prefill_tokens=options.max_prefill_tokens,
    )
    engine, seconds = Engine(config, model=model).start(), []
    try:
        # The first run warms up: kernels are compiled.
        for repeat in range(options.repeats + 1):
            begin = time.perf_counter()
            prompts = [[(token + repeat) % vocab for token in job.prompt] for job in jobs]
            futures = [engine.submit(Request(p, params(job))) for p, job in zip(prompts, jobs, strict=True)]
            [future.result(600) for future in futures]
            seconds.append(time.perf_counter() - begin)
    finally:
        engine.close()
    took_s, peak = statistics.median(seconds[1:]), peak_flops(options.device)
    achieved = number * prompt_flops(model, length) / took_s
    return {
        "tokens_per_s": number * length / took_s,
        "tflops": achieved / 1e12,
        "share_of_peak": achieved / peak if peak else None,
    }


def prompt_flops(model: Any, length: int) -> float:
    """Return the floating-point operations of one prompt: products of layers, causal attention."""
    counter = FlopCounter(model)
    return 2.0 * counter.body * length + counter.attention * length * length


if __name__ == "__main__":
    main()
