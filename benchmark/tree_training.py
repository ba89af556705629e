"""Tokens per second of training on sessions: shared prefixes computed once, compared with unrolled rows.

    python benchmark/tree_training.py                                 CPU, a tiny model
    python benchmark/tree_training.py --device cuda --shape 0.5b      256 sessions of 6 turns

Prints a table and one JSON line. Two kinds of sessions:

    branches   Each turn is a row: the history without the thinking of earlier turns, then the thinking and the answer
               of this turn, which are trained. Turns branch off the history.
    samples    Each session is a row. The 8 sessions of a task share a long prompt and the first two turns.

Both sides train the same rows with the same engine, weights and token budget of micro-batches, one after the other.
Tokens per second count the tokens of the unrolled rows for both. `gradient_difference` is the norm of tree − unrolled,
divided by the norm of unrolled; `rounding` is the same between two unrolled runs that differ in the size of their
micro-batches. Models have random weights: nothing is downloaded.
"""

import argparse
import itertools
import json
import tempfile
import time
from dataclasses import replace

import torch
from common import describe_machine
from training import SHAPES, make_config_folder

from arealite.api.cli_args import OptimizerConfig, TrainEngineConfig
from arealite.api.io_struct import Batch, FinetuneSpec, Stat
from arealite.engine.fsdp_engine import FSDPEngine

TURNS = 6
GROUP_SIZE = 8
COMMON_TURNS = 2
# Mean numbers of tokens on CUDA; the CPU run divides them by 8.
PROMPT, LONG_PROMPT, THINKING, ANSWER, OBSERVATION = 512, 2048, 128, 96, 128


class Writer:
    """Random tokens, in pieces whose lengths vary like those of real text."""

    def __init__(self, vocab_size: int, scale: float):
        self.vocab_size, self.scale = vocab_size, scale
        self.random = torch.Generator().manual_seed(0)

    def piece(self, mean: int) -> list[int]:
        draw = torch.empty(1).log_normal_(0.0, 0.4, generator=self.random).item()
        length = max(1, round(mean * self.scale * draw))
        return torch.randint(0, self.vocab_size, (length,), generator=self.random).tolist()


Row = list[tuple[list[int], bool]]


def branching_rows(writer: Writer, num_sessions: int) -> list[Row]:
    rows: list[Row] = []
    for _ in range(num_sessions):
        history = writer.piece(PROMPT)
        for _ in range(TURNS):
            thinking, answer = writer.piece(THINKING), writer.piece(ANSWER)
            rows.append([(history, False), (thinking + answer, True)])
            history = history + answer + writer.piece(OBSERVATION)
    return rows


def sampled_rows(writer: Writer, num_sessions: int) -> list[Row]:
    rows: list[Row] = []
    for _ in range(max(1, num_sessions // GROUP_SIZE)):
        common: Row = [(writer.piece(LONG_PROMPT), False)]
        turn = [(OBSERVATION, False), (ANSWER, True)]
        common += [(writer.piece(mean), trained) for mean, trained in turn * COMMON_TURNS]
        for _ in range(GROUP_SIZE):
            rows.append(common + [(writer.piece(mean), trained) for mean, trained in turn * (TURNS - COMMON_TURNS)])
    return rows


def to_batch(rows: list[Row]) -> Batch:
    lengths = [sum(len(ids) for ids, _ in row) for row in rows]
    ids, trained = (torch.zeros(len(rows), max(lengths), dtype=torch.long) for _ in range(2))
    for i, row in enumerate(rows):
        ids[i, : lengths[i]] = torch.tensor(list(itertools.chain.from_iterable(part for part, _ in row)))
        trained[i, : lengths[i]] = torch.tensor([int(flag) for part, flag in row for _ in part])
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    advantages = torch.randn(len(rows), 1, generator=torch.Generator().manual_seed(1)) * trained
    return {"input_ids": ids, "attention_mask": mask, "loss_mask": trained, "advantages": advantages}


def make_engine(shape: str, vocab_size: int, args: argparse.Namespace) -> FSDPEngine:
    dtype = "bfloat16" if args.device == "cuda" else "float32"
    with tempfile.TemporaryDirectory() as folder:
        config = TrainEngineConfig(
            path=make_config_folder(shape, vocab_size, folder), init_from_scratch=True, device=args.device,
            dtype=dtype, param_dtype=dtype, compile=args.compile, max_tokens_per_mb=args.max_tokens_per_mb,
            # The weights stay as they are, so that all steps have the same gradient.
            optimizer=OptimizerConfig(lr=1e-30, weight_decay=0.0, gradient_clipping=0.0),
        )  # fmt: skip
        engine = FSDPEngine(config)
        with torch.device(args.device):
            engine.initialize(FinetuneSpec(1, 1000, 1))
    engine.warm_up()
    return engine


def policy_gradient(outputs: Batch, mb: Batch) -> tuple[torch.Tensor, dict[str, Stat]]:
    return -(outputs["logp"] * mb["advantages"]).sum(), {}


def step(engine: FSDPEngine, batch: Batch) -> dict[str, float]:
    """Run one training step. The norm of the gradient is on the host, so no synchronization is needed."""
    return engine.train_batch(batch, policy_gradient, lambda mb: mb["loss_mask"].sum())


def gradient(engine: FSDPEngine, batch: Batch) -> list[torch.Tensor]:
    """Run one step that changes no weights; return its gradient."""
    assert engine.optimizer is not None
    found, own_step = [], engine.optimizer.step
    parameters = list(engine.model.parameters())
    engine.optimizer.step = lambda: found.extend(p.grad.clone() for p in parameters)  # pyright: ignore
    step(engine, batch)
    engine.optimizer.step = own_step
    return found


def difference(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """|found − expected| / |expected| over all parameters."""
    pairs = zip(found, expected, strict=True)
    off = sum(float((a.float() - b.float()).square().sum()) for a, b in pairs)
    return (off / sum(float(b.float().square().sum()) for b in expected)) ** 0.5


def compare(engine: FSDPEngine, kind: str, batch: Batch, repeats: int) -> list[dict]:
    """Compare the gradients of both sides, then time both in turn."""
    gradients, seconds, stats = [], {False: [], True: []}, {}
    for share in seconds:
        engine.shares_prefix = share
        gradients.append(gradient(engine, batch))
    engine.shares_prefix, sizes = False, engine.memory
    engine.memory = replace(sizes, max_tokens_per_mb=sizes.max_tokens_per_mb // 2)
    rounding, off = (difference(found, gradients[0]) for found in (gradient(engine, batch), gradients[1]))
    engine.memory = sizes
    for _ in range(repeats):
        for share, times in seconds.items():
            engine.shares_prefix = share
            start = time.perf_counter()
            stats[share] = step(engine, batch)
            times.append(time.perf_counter() - start)
    rows: list[dict] = []
    for share, times in seconds.items():
        num_tokens = stats[share]["num_tokens"]
        rows.append({
            "what": f"{kind}, {'tree' if share else 'unrolled'}", "tokens_per_s": round(num_tokens / min(times)),
            "tokens": round(num_tokens), "computed": round(stats[share]["num_computed_tokens"]),
            "micro_batches": round(stats[share]["num_micro_batches"]), "seconds": round(min(times), 3),
            "loss": stats[share]["loss"], "tflops": round(stats[share]["train_tflops"], 1),
        })  # fmt: skip
    rows.append({
        "what": f"{kind}, tree / unrolled", "speedup": round(rows[1]["tokens_per_s"] / rows[0]["tokens_per_s"], 2),
        "fewer_tokens": round(rows[1]["tokens"] / rows[1]["computed"], 2),
        "gradient_difference": float(f"{off:.3g}"), "rounding": float(f"{rounding:.3g}"),
    })  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument(
        "--shape", type=str.lower, choices=[s.lower() for s in SHAPES], help="default: tiny on CPU, 0.5b on CUDA"
    )
    parser.add_argument("--sessions", type=int, help="default: 8 on CPU, 256 on CUDA")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, help="default: on CUDA")
    parser.add_argument("--max-tokens-per-mb", type=int, help="default: by memory on CUDA, 16384 on CPU")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    cuda = args.device == "cuda"
    args.compile = cuda if args.compile is None else args.compile
    vocab_size, scale = (151936, 1.0) if cuda else (512, 0.125)
    chosen = args.shape or ("0.5b" if cuda else "tiny")
    shape = next(name for name in SHAPES if name.lower() == chosen)
    sessions = args.sessions or (256 if cuda else 8)
    engine = make_engine(shape, vocab_size, args)
    rows = []
    for kind, make in (("branches", branching_rows), ("samples", sampled_rows)):
        batch = to_batch(make(Writer(vocab_size, scale), sessions))
        rows += compare(engine, f"{shape}, {sessions} sessions of {TURNS} turns, {kind}", batch, args.repeats)
        for row in rows[-3:]:
            print("  ".join(f"{k}={v}" for k, v in row.items()), flush=True)
    print(json.dumps({"benchmark": "tree_training", **describe_machine(), "rows": rows}))


if __name__ == "__main__":
    main()
