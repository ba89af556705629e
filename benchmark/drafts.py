"""Compares the embedded engine with and without speculative decoding on text that repeats itself.

Used by `inference.py` with `draft_tokens`. The weights are random, but for embedding and head: every token belongs to
one of 24 places of a circle, and is followed by the next place with a probability of 0.9, by any token otherwise. So
the share of accepted tokens does not depend on what a small model has learned. All requests are sent at once, with
log-normal lengths; the tail is the time from when 8 of them are left. Both sides sample the same tokens.
"""

from __future__ import annotations

import copy
import math
import statistics
import time
from typing import Any

import torch
from transformers import PreTrainedModel

from arealite.api.cli_args import ServerConfig
from arealite.inference.drafts.lookup import MAX_SEQUENCES
from arealite.inference.drafts.planning import DeviceDrafts
from arealite.inference.engine import Engine
from arealite.inference.sequence import Request, SampleOutput, SamplingParams

PLACES = 24
NEXT = 0.9  # probability of the next place


@torch.no_grad()
def repeat_itself(model: PreTrainedModel) -> None:
    """Change embedding and head so that text goes round in a circle, with jumps."""
    vocab, hidden = model.get_input_embeddings().weight.shape
    embedding = model.get_input_embeddings().weight
    codes = torch.randn(PLACES, hidden, generator=torch.Generator().manual_seed(0)).to(embedding)
    head = torch.zeros_like(embedding)
    scale = math.log(NEXT / (1 - NEXT) * (vocab - 1)) / hidden
    head[:PLACES] = scale * codes[torch.arange(-1, PLACES - 1) % PLACES]
    model.config.tie_word_embeddings = False
    model.get_output_embeddings().weight = torch.nn.Parameter(head)
    embedding.copy_(codes[torch.arange(vocab) % PLACES])
    for name, parameter in model.named_parameters():
        if "o_proj" in name or "down_proj" in name:
            parameter *= 0.02


def make_requests(count: int, input_len: int, median: int, longest: int) -> list[tuple[list[int], SamplingParams]]:
    """Prompts at different places of the circle, and log-normal lengths."""
    lengths = torch.randn(count, generator=torch.Generator().manual_seed(1)).exp_() * median
    lengths = lengths.clamp_(8, longest).int().tolist()
    starts = (7 * torch.arange(count)).tolist()
    prompts = [[(start + i) % PLACES for i in range(input_len)] for start in starts]
    return [
        (prompt, SamplingParams(max_new_tokens=length, sampling_seed=i, ignore_eos=True))
        for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
    ]


def measure(engine: Engine, jobs: list[tuple[list[int], SamplingParams]]) -> tuple[float, float, list[SampleOutput]]:
    """Return seconds of all requests and of the tail, and the outputs."""
    ends: list[float] = []
    begin = time.perf_counter()
    futures = [engine.submit(Request(prompt, params)) for prompt, params in jobs]
    for future in futures:
        future.add_done_callback(lambda _: ends.append(time.perf_counter()))
    outputs = [future.result(600)[0] for future in futures]
    ends.sort()
    left = min(MAX_SEQUENCES, len(jobs) - 1)
    return ends[-1] - begin, ends[-1] - ends[-1 - left], outputs


def compare(model: PreTrainedModel, options: Any) -> dict[str, float]:
    """Measure both sides in turn; prints a table, returns medians and their ratios."""
    repeat_itself(model)
    jobs = make_requests(options.concurrency, options.input_len, options.median, options.max_output)
    context = min(max(4096, options.input_len + options.max_output + 16), model.config.max_position_embeddings)
    engines = [
        Engine(
            ServerConfig(max_running_requests=options.concurrency, context_length=context, draft_tokens=count),
            model=copy.deepcopy(model),
        ).start()
        for count in (0, options.draft_tokens)
    ]
    runs: list[list[tuple[float, float, list[SampleOutput]]]] = [[], []]
    try:
        for _ in range(options.repeats):
            for engine, found in zip(engines, runs, strict=True):
                engine.flush_cache().result(60)
                found.append(measure(engine, jobs))
        rate = engines[1].stats()["draft_acceptance_rate"]
        planned = engines[1].scheduler.drafts
        if isinstance(planned, DeviceDrafts):
            shares = ", ".join(f"{count}: {planned.costs[count]:.2f}" for count in (1, 2, 4, 8))
            print(f"a step with drafts takes longer by these shares, by the number of sequences: {shares}")
    finally:
        for engine in engines:
            engine.close()
    return _report(runs, rate)


def _report(runs: list[list[tuple[float, float, list[SampleOutput]]]], rate: float) -> dict[str, float]:
    names = ("all requests", f"last {MAX_SEQUENCES} requests")
    plain, drafted = ([statistics.median(run[i] for run in side) for i in range(2)] for side in runs)
    ratios = [statistics.median(a[i] / b[i] for a, b in zip(*runs, strict=True)) for i in range(2)]
    print(f"{'seconds, median':24} {'no drafts':>10} {'drafts':>10} {'ratio':>7}")
    for i, name in enumerate(names):
        print(f"{name:24} {plain[i]:10.2f} {drafted[i]:10.2f} {ratios[i]:7.2f}")
    pairs = list(zip(runs[0][0][2], runs[1][0][2], strict=True))
    same = sum(one.token_ids == other.token_ids for one, other in pairs)
    num_tokens = sum(len(one.token_ids) for one, _ in pairs)
    gaps = (
        abs(a - b)
        for one, other in pairs
        if one.token_ids == other.token_ids
        for a, b in zip(one.logprobs, other.logprobs, strict=True)
    )
    gap = max(gaps, default=math.nan)
    print(f"{num_tokens} tokens; {same} of {len(pairs)} outputs are equal, largest difference of log-probs {gap:.1e}")
    return {
        "plain_s": plain[0],
        "drafts_s": drafted[0],
        "plain_tail_s": plain[1],
        "drafts_tail_s": drafted[1],
        "ratio": ratios[0],
        "tail_ratio": ratios[1],
        "acceptance_rate": rate,
    }
