"""Compares the engine's kernels for the experts of a layer with transformers' grouped products, on a GPU.

    python benchmark/experts.py [--tokens 16 64 256 1024 4096]

The layer has the shape of Qwen3-30B-A3B and random weights in bf16. Each number is a mean over 20 replays of a CUDA
graph with four layers. `difference` is the norm of the difference of both results over that of transformers'. Prints a
table and one JSON line.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import torch
from common import describe_machine, print_table
from transformers import AutoModelForCausalLM, Qwen3MoeConfig
from transformers.integrations.moe import grouped_mm_experts_forward

from arealite.inference.cuda.experts import forward_grouped
from arealite.utils.routing import expert_blocks

NUM_LAYERS, REPLAYS = 4, 20


def make_layers() -> list[Any]:
    """Return the experts of all layers, with random weights."""
    config = Qwen3MoeConfig(
        hidden_size=2048, num_hidden_layers=NUM_LAYERS, num_attention_heads=32, num_key_value_heads=4, head_dim=128,
        num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768, vocab_size=1024,
    )  # fmt: skip
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    layers = [block.experts for block in expert_blocks(model)]
    for experts in layers:
        for name in ("gate_up_proj", "down_proj"):
            torch.nn.init.normal_(getattr(experts, name), std=0.02)
    return layers


def layer_us(compute: Callable[[], Any]) -> float:
    """Return the microseconds of a layer in a CUDA graph of all layers."""
    compute()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        compute()
    graph.replay()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(REPLAYS):
        graph.replay()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / REPLAYS / NUM_LAYERS * 1e6


def measure(layers: list[Any], num_tokens: int) -> dict[str, float]:
    hidden = torch.randn(num_tokens, 2048, device="cuda", dtype=torch.bfloat16)
    shares, index = torch.randn(num_tokens, 128, device="cuda").softmax(-1).topk(8)
    given = hidden, index, (shares / shares.sum(-1, keepdim=True)).bfloat16()
    expected, found = (forward(layers[0], *given) for forward in (grouped_mm_experts_forward, forward_grouped))
    theirs = layer_us(lambda: [grouped_mm_experts_forward(layer, *given) for layer in layers])
    ours = layer_us(lambda: [forward_grouped(layer, *given) for layer in layers])
    difference = float((found - expected).float().norm() / expected.float().norm())
    return {"transformers_us": theirs, "ours_us": ours, "ratio": theirs / ours, "difference": difference}


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    parser.add_argument("--tokens", type=int, nargs="*", default=[16, 64, 256, 1024, 4096])
    options = parser.parse_args()
    torch.manual_seed(0)
    layers = make_layers()
    results = {count: measure(layers, count) for count in options.tokens}
    rows = [[str(count), *(f"{value:,.4g}" for value in found.values())] for count, found in results.items()]
    print_table(["tokens", *next(iter(results.values()))], rows)
    print(json.dumps({"benchmark": "experts", "results": results, **describe_machine()}))


if __name__ == "__main__":
    main()
