"""Measures what frozen layers in low bits cost: a linear layer in bf16, FP8 and NF4, forward and with backward pass.

    python benchmark/low_bit.py                                        the widest layer of 32B, 8,192 tokens
    python benchmark/low_bit.py outputs=5120 inputs=5120 tokens=32768

`equal codes` is the share of the codes that this device and the host quantize to alike. Prints a table and one JSON
line.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field

import torch
from common import describe_machine, print_table
from torch import nn
from torch.utils.benchmark import Timer

from arealite.engine.fsdp.low_bit import LowBitLinear, dequantize, quantize
from arealite.utils.config import load_config


@dataclass
class Options:
    """Options of the benchmark."""

    outputs: int = field(default=27648, metadata={"help": "Rows of the weight."})
    inputs: int = field(default=5120, metadata={"help": "Columns of the weight."})
    tokens: int = field(default=8192, metadata={"help": "Tokens of a micro-batch."})
    repeats: int = field(default=20, metadata={"help": "Runs of each measurement."})


def milliseconds(statement: str, repeats: int, **names: object) -> float:
    return 1e3 * Timer(statement, globals=names).timeit(repeats).mean


def measure(kind: str, linear: nn.Linear, x: torch.Tensor, repeats: int) -> dict[str, float]:
    """Milliseconds of a layer and of dequantizing it, and the share of equal codes."""
    layer, found = linear, {}
    if kind != "bf16":
        layer = LowBitLinear(linear, kind, str(x.device))
        codes, _ = quantize(linear.weight.detach().cpu(), kind)
        found["equal codes"] = (layer.codes.cpu() == codes).float().mean().item()
        call = "dequantize(layer.codes, layer.scales, kind, dtype)"
        names = {"dequantize": dequantize, "layer": layer, "kind": kind, "dtype": x.dtype}
        found["dequantize"] = milliseconds(call, repeats, **names)
    found["forward"] = milliseconds("layer(x)", repeats, layer=layer, x=x.detach())
    grad = torch.ones(len(x), linear.out_features, dtype=x.dtype, device=x.device)
    found["forward and backward"] = milliseconds("layer(x).backward(grad)", repeats, layer=layer, x=x, grad=grad)
    return found


def main() -> None:
    options = load_config(sys.argv[1:], Options)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    linear = nn.Linear(options.inputs, options.outputs, bias=False, device=device, dtype=torch.bfloat16)
    linear.requires_grad_(False)
    x = torch.randn(options.tokens, options.inputs, device=device, dtype=torch.bfloat16, requires_grad=True)
    results = {kind: measure(kind, linear, x, options.repeats) for kind in ("bf16", "fp8", "nf4")}
    columns = ["forward", "forward and backward", "dequantize", "equal codes"]
    rows = [[kind, *(f"{row[c]:.4g}" if c in row else "-" for c in columns)] for kind, row in results.items()]
    print_table(["weights", *(f"{column}, ms" for column in columns[:3]), columns[3]], rows)
    print(json.dumps({"benchmark": "low_bit", **vars(options), **describe_machine(), "results": results}))


if __name__ == "__main__":
    main()
