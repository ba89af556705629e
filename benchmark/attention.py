"""Measures decode attention over long contexts: time of one layer and memory bandwidth, for sizes of the kernel.

    python benchmark/attention.py                        bf16: 64 sequences of 8,192 tokens of the 1.5B shape, others
    python benchmark/attention.py sweep=true fp8=true    also other tile sizes, stages, warps; cache in FP8

Compares with a float32 reference first. `short` is the kernel for short contexts (one part of a sequence per program),
`runs` the one for long contexts. Prints a line per measurement and one JSON line. Needs a GPU.
"""

from __future__ import annotations

import itertools
import json
import sys
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from common import describe_machine

from arealite.inference.cuda import ops
from arealite.inference.cuda.cache import DeviceCache
from arealite.inference.cuda.ops import DeviceBatch
from arealite.inference.cuda.runs import Tuning, choose_tuning, plan_runs
from arealite.inference.loading import ModelShape
from arealite.utils.config import load_config

# KV heads, query heads of each, head size
HEADS = {"0.5b": (2, 7, 64), "1.5b": (2, 6, 128), "7b": (4, 7, 128), "30b-a3b": (4, 8, 128)}
# Sequences and tokens of each; 0: log-normal lengths
CASES = {
    "64x8k": (64, 8192), "32x16k": (32, 16384), "256x4k": (256, 4608), "4x16k": (4, 16384), "64 mixed": (64, 0),
    "256x160": (256, 160), "256x384": (256, 384), "256x640": (256, 640), "1024x384": (1024, 384),
}  # fmt: skip


@dataclass
class Options:
    """Options of the benchmark."""

    shape: str = field(default="1.5b", metadata={"help": f"{', '.join(HEADS)}."})
    cases: list[str] = field(default_factory=lambda: list(CASES), metadata={"help": "Numbers of sequences and tokens."})
    fp8: bool = field(default=False, metadata={"help": "Cache in FP8."})
    sweep: bool = field(default=False, metadata={"help": "Also measure other sizes of the kernel, on the first case."})
    block_sizes: list[int] = field(default_factory=lambda: [16], metadata={"help": "Tokens per block."})
    tunings: str = field(default="", metadata={"help": "Sizes to measure: block_n/stages/warps/programs,…"})


class Case:
    """Random queries and a random cache of sequences of some lengths."""

    def __init__(self, options: Options, name: str, block_size: int):
        num_kv, group, dim = HEADS[options.shape]
        torch.manual_seed(0)
        count, length = CASES[name]
        lengths = torch.full((count,), length)
        if length == 0:
            lengths = (torch.randn(count).exp() * 3000).clamp(64, 32768).int()
        per_row = -(-int(lengths.max()) // block_size)
        needed = -(-lengths // block_size)
        self.num_tokens = int(lengths.sum())
        total = int(needed.sum())
        shape = ModelShape(1, num_kv, dim, 8, 32768, ())
        dtype = torch.float8_e4m3fn if options.fp8 else torch.bfloat16
        self.cache = DeviceCache(shape, total + 1, block_size, dtype, torch.device("cuda"))
        self.bytes = self.num_tokens * shape.kv_bytes_per_token(dtype)
        if self.cache.scales is None:
            self.cache.data.normal_()
        else:
            self.cache.data.copy_(torch.randn(self.cache.data.shape, device="cuda", dtype=torch.bfloat16) * 60)
            for scale in self.cache.scales[0]:
                scale.uniform_(0.005, 0.02)
        blocks = (torch.randperm(total) + 1).int()
        table = torch.zeros(count + 1, per_row, dtype=torch.int32)
        start = 0
        for row, n in enumerate(needed.tolist()):
            table[row, :n] = blocks[start : start + n]
            start += n
        self.table = table.cuda()
        self.lengths = lengths
        self.rows = torch.arange(count, dtype=torch.int32, device="cuda")
        self.positions = (lengths - 1).int().cuda()
        self.q = torch.randn(count, num_kv * group, dim, device="cuda", dtype=torch.bfloat16)
        self.num_kv, self.scale = num_kv, dim**-0.5

    def run(self, tuning: Tuning | None, splits: int = 1) -> torch.Tensor:
        """One layer; without a tuning, with the kernel for short contexts."""
        plan = None if tuning is None else plan_runs(self.positions, self.num_kv, tuning)
        cache = self.cache
        where = self.table, self.rows, self.positions
        batch = DeviceBatch(cache.keys, cache.values, *where, splits=splits, scales=cache.scales, plan=plan)
        return ops.attend(self.q, batch, 0, self.scale, None)

    def reference(self, row: int) -> torch.Tensor:
        """Attention of one sequence in float32, [H, D]."""
        length = int(self.lengths[row])
        blocks = self.table[row].long()
        parts = []
        for i, cache in enumerate((self.cache.keys[0], self.cache.values[0])):
            part = cache[blocks] if cache.element_size() > 1 else cache.view(torch.uint8)[blocks].view(cache.dtype)
            part = part.float()
            if self.cache.scales is not None:
                part = part if i == 0 else part.permute(0, 3, 1, 2)
                part = part * self.cache.scales[0][i][blocks].transpose(1, 2)[..., None]
            parts.append(part.flatten(0, 1)[:length])
        q = self.q[row].float().unflatten(0, (self.num_kv, -1))
        weight = torch.softmax(torch.einsum("hgd,nhd->hgn", q, parts[0]) * self.scale, -1)
        return torch.einsum("hgn,nhd->hgd", weight, parts[1]).flatten(0, 1)

    def error(self, out: torch.Tensor) -> float:
        """Largest relative error of a few sequences."""
        errors = []
        for row in {0, len(self.lengths) // 2, len(self.lengths) - 1}:
            expected = self.reference(row)
            errors.append(((out[row].float() - expected).norm() / expected.norm()).item())
        return max(errors)


def measure(case: Case, tuning: Tuning | None, splits: int = 1) -> dict[str, float]:
    """Median time of a graph with 20 layers in microseconds per layer, bandwidth in TB/s, relative error."""
    error = case.error(case.run(tuning, splits))
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(20):
            case.run(tuning, splits)
    graph.replay()
    times = []
    for _ in range(5):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / 20)
    time = sorted(times)[2]
    return {"us": round(time, 1), "TB/s": round(case.bytes / time / 1e6, 3), "error": error}


def tunings(options: Options) -> list[Tuning]:
    """The sizes to measure."""
    if options.tunings:
        return [Tuning(*map(int, text.split("/"))) for text in options.tunings.split(",")]
    chosen = [choose_tuning(1 if options.fp8 else 2, *HEADS[options.shape][1:])]
    if not options.sweep:
        return chosen
    grid = itertools.product((32, 64, 128), (3, 4, 5), (2, 4, 8), (1, 2, 3, 4))
    element = 1 if options.fp8 else 2
    # What one multiprocessor's shared memory holds.
    fits = (t for t in (Tuning(*x) for x in grid) if t.block_n * 256 * element * (t.stages - 1) * t.programs < 215_000)
    return chosen + [t for t in fits if t.block_n * 256 * element * (t.stages - 1) * t.programs > 60_000 * element]


def main() -> None:
    options = load_config(sys.argv[1:], Options)
    results: list[dict[str, Any]] = []
    for block_size, (index, name) in itertools.product(options.block_sizes, enumerate(options.cases)):
        case = Case(options, name, block_size)
        ways: list[tuple[Tuning | None, int]] = [(None, 2**i) for i in range(6)]
        swept = options if index == 0 else replace(options, sweep=False)
        ways += [(t, 1) for t in tunings(swept)]
        for tuning, splits in ways:
            what = f"short, {splits} parts" if tuning is None else "runs " + "/".join(map(str, asdict(tuning).values()))
            try:
                found = measure(case, tuning, splits)
            except (RuntimeError, torch.OutOfMemoryError) as error:
                print(f"{name} {what}: {str(error)[:100]}", flush=True)
                continue
            results.append({"case": name, "block_size": block_size, "what": what} | found)
            print(f"{name:10} BS {block_size:3} {what:22} {found['us']:9.1f} us {found['TB/s']:6.2f} TB/s "
                  f"error {found['error']:.1e}", flush=True)  # fmt: skip
        del case
    print(json.dumps({"benchmark": "attention", **describe_machine(), **asdict(options), "results": results}))


if __name__ == "__main__":
    main()
