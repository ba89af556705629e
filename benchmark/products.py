"""Compares products of few tokens with the weights of a layer: torch's (cuBLAS) and ours, in bf16 and in FP8.

    python benchmark/products.py                           1.5B shape, 8 and 64 tokens
    python benchmark/products.py shape=7b tokens=[1,64]

Each product runs in a graph with weights of many layers, which do not fit into the cache of the GPU. Ours returns parts
that the kernel which uses the product adds (`inference/cuda/split_k.py`). Needs a GPU. Prints a table
and one JSON line.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from common import describe_machine, print_table
from inference import SHAPES
from torch import nn

from arealite.inference.cuda.ops import quantize
from arealite.inference.cuda.split_k import SplitLinear, split_product
from arealite.inference.fp8 import Fp8Linear
from arealite.utils.config import load_config


@dataclass
class Options:
    """Options of the benchmark."""

    shape: str = field(default="1.5b", metadata={"help": "0.5b, 1.5b or 7b."})
    tokens: list[int] = field(default_factory=lambda: [8, 64], metadata={"help": "Numbers of tokens."})
    megabytes: int = field(default=1000, metadata={"help": "Weights of one graph."})


def main() -> None:
    options = load_config(sys.argv[1:], Options)
    hidden, mlp, _, heads, kv_heads, *_ = SHAPES[options.shape]
    qkv = hidden // heads * (heads + 2 * kv_heads)
    sizes = {"qkv": (qkv, hidden), "out": (hidden, hidden), "gate_up": (2 * mlp, hidden), "down": (hidden, mlp)}
    rows: list[list[str]] = []
    results: list[dict[str, Any]] = []
    for count in options.tokens:
        for name, (num_outputs, num_inputs) in sizes.items():
            found = measure(count, num_outputs, num_inputs, name != "gate_up", options.megabytes)
            results.append({"tokens": count, "product": name, **found})
            rows.append([str(count), name, *("-" if x is None else f"{x:.1f}" for x in found.values())])
    print_table(["tokens", "product", "bf16 torch, µs", "bf16 ours", "FP8 torch", "FP8 ours"], rows)
    print(json.dumps({"benchmark": "products", "shape": options.shape, **describe_machine(), "results": results}))


def measure(count: int, num_outputs: int, num_inputs: int, adds_parts: bool, megabytes: int) -> dict[str, float | None]:
    """Microseconds of one product in four ways; None where ours is torch's."""
    num_layers = max(2, megabytes * 1_000_000 // (2 * num_outputs * num_inputs))
    sizes = {"device": "cuda", "dtype": torch.bfloat16, "bias": False}
    layers = [nn.Linear(num_inputs, num_outputs, **sizes).requires_grad_(False) for _ in range(num_layers)]
    in_fp8 = [Fp8Linear.of(layer) for layer in layers]
    x = torch.randn(count, num_inputs, device="cuda", dtype=torch.bfloat16)
    plain = [partial(F.linear, weight=layer.weight) for layer in layers]
    split = [split_product(f, layer.weight, None, adds_parts) for f, layer in zip(plain, layers, strict=True)]
    has_split = isinstance(split[0], SplitLinear) and split[0].num_parts > 1
    return {
        "bf16_torch": microseconds([partial(f, x) for f in plain]),
        "bf16_ours": microseconds([partial(f, x) for f in split]) if has_split else None,
        "fp8_torch": microseconds([partial(f, quantize(x)) for f in in_fp8]),
        "fp8_ours": microseconds([partial(split_product(f, f.weight, None, adds_parts), quantize(x)) for f in in_fp8]),
    }


def microseconds(calls: list[Callable[[], object]]) -> float:
    """Median time of a call in a graph of all of them."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times: list[float] = []
    for _ in range(12):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(times[2:])


if __name__ == "__main__":
    main()
