"""Measures decode steps before a server takes requests: few and many sequences, short and long ones.

A run rarely has all loads: servers of an asynchronous run are always full of answers of all lengths, and in a
synchronous run all answers have about the same length, and the last ones run alone. Predictions of one from the other
need the steps of both, without a trainer that works beside them. The trial takes a fraction of a second and leaves no
state.
"""

import math
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from arealite.inference.core import EngineCore
from arealite.inference.sequence import Request, SamplingParams
from arealite.inference.timing.step_times import StepTimes
from arealite.utils.step_context import StepContext

# Of the whole trial, and the clock that counts them. On CPU a trainer starts on the same cores meanwhile.
_MAX_SECONDS = {"cpu": 0.9, "cuda": 0.6}
_CLOCK = {"cpu": time.thread_time, "cuda": time.perf_counter}
# Sequences of a step. On CPU kernels change between 8 and 16.
_LOADS = {"cpu": (1, 4, 8, 16, 64, 256), "cuda": tuple(1 << i for i in range(16))}
# Those with which different lengths are measured, too, and with the first also long contexts. Attention on CPU is
# called once for each power of two of lengths, which is most of what different lengths cost with 64 sequences and
# little with many.
_MIXED_LOADS = {"cpu": (64, 256), "cuda": (64,)}
# Steps that fill caches and pipelines, and steps that are timed.
_FILLING_STEPS = {"cpu": 1, "cuda": 3}
_TIMED_STEPS = {"cpu": 5, "cuda": 4}
# Those of many sequences on CPU, which vary less.
_MANY, _TIMED_WITH_MANY = 64, 3
_REPEATS = {"cpu": 3, "cuda": 3}
_PROMPT_TOKENS, _LONG_PROMPT = 16, {"cpu": 256, "cuda": 1024}
# Steps of one trial at most, with those that compute prompts.
_MAX_STEPS = 16


def measure_steps(core: EngineCore, times: StepTimes) -> None:
    """Add steps with 1 sequence and more to `times`, until time is over or the engine is full.

    Steps of 64 sequences are measured with short ones, with long ones, and with different lengths, on CPU also steps of
    256 with short ones and with different lengths. Everything is measured three times, because a trainer that starts
    meanwhile makes some steps slower. The fastest counts on CPU; on GPUs it is the middle one, because steps that were
    in flight when the clock started are too fast.
    """
    num_blocks, size = core.scheduler.pool.num_usable, core.config.block_size
    blocks = 1 + -(-(_PROMPT_TOKENS + _MAX_STEPS) // size)
    most = min(core.scheduler.slots.num_slots, num_blocks // (2 * blocks))
    # With drafts a step makes any number of tokens.
    if core.config.draft_tokens or core.max_len < _PROMPT_TOKENS + _MAX_STEPS:
        return
    device = core.weights.model.device.type
    longest = min(_LONG_PROMPT[device], core.max_len - _MAX_STEPS) // size * size
    knows_lengths = longest >= 2 * _PROMPT_TOKENS and not core.config.deterministic
    trials: list[tuple[int, list[int]]] = []
    for load in (load for load in _LOADS[device] if load <= most):
        trials.append((load, [_PROMPT_TOKENS]))
        if load in _MIXED_LOADS[device] and knows_lengths and longest // size + load * blocks <= num_blocks:
            trials.append((load, _mixed(longest)))
            if load == _MIXED_LOADS[device][0]:
                trials.append((load, [longest]))
    end = _CLOCK[device]() + _MAX_SECONDS[device]
    measured: dict[int, list[_Steps]] = {}
    for _ in range(_REPEATS[device]):
        for number, trial in enumerate(trials):
            found = _measure(core, *trial, end)
            if found is not None:
                measured.setdefault(number, []).append(found)
    for repeats in measured.values():
        counts = 0 if device == "cpu" else (len(repeats) - 1) // 2
        times.add(*sorted(repeats, key=lambda steps: steps.seconds)[counts])
    core.scheduler.reset()
    core.post.generated_tokens = 0


def _mixed(longest: int) -> list[int]:
    """Return eight lengths as those of answers in an asynchronous run: exponentially distributed."""
    return [max(1, min(longest, round(-longest / 3 * math.log(1 - (i + 0.5) / 8)))) for i in range(8)]


class _Steps(NamedTuple):
    """What `StepTimes.add` takes."""

    sequences: int
    prompt_tokens: int
    seconds: float
    cpu_s: float
    context: StepContext
    steps: int


def _measure(core: EngineCore, load: int, prompts: Sequence[int], end: float) -> _Steps | None:
    """Time steps of `load` sequences after prompts of these lengths, each the start of the longest."""
    device = core.weights.model.device.type
    now = _CLOCK[device]
    if now() > end:
        return None
    tokens = (np.arange(1, max(prompts) + 1) * 7919 % core.shape.vocab_size).tolist()
    params = SamplingParams(n=load // len(prompts), max_new_tokens=_MAX_STEPS, ignore_eos=True, sampling_seed=0)
    requests = [Request(tokens[:length], params) for length in prompts]
    for request in requests:
        core.add(request)
    _fill(core, load, _FILLING_STEPS[device])
    before, contexts = core.post.generated_tokens, []
    times = [(time.perf_counter(), time.thread_time())]
    wanted = _TIMED_WITH_MANY if device == "cpu" and load >= _MANY else _TIMED_STEPS[device]
    while len(contexts) < wanted and not requests[0].future.done():
        core.step()
        contexts.append(core.context)
        times.append((time.perf_counter(), time.thread_time()))
    steps, made = len(contexts), core.post.generated_tokens - before
    for request in requests:
        core.abort(request.rid)
    # Otherwise sequences waited, or the model's values were not finite.
    if steps == 0 or made != steps * load:
        return None
    context = StepContext(*(sum(values) / steps for values in zip(*contexts, strict=True)))
    seconds, cpu_s = (_total(np.diff(values), device) for values in zip(*times, strict=True))
    return _Steps(load, 0, seconds, cpu_s, context, steps)


def _total(seconds: np.ndarray, device: str) -> float:
    """Return the seconds of all steps.

    On CPU the median leaves out those that others disturbed. On GPUs steps overlap.
    """
    return float(seconds.sum() if device == "cuda" else len(seconds) * np.median(seconds))


def _fill(core: EngineCore, load: int, num_steps: int) -> None:
    """Step until all sequences decode, and `num_steps` more."""
    slots = core.scheduler.slots
    for _ in range(_MAX_STEPS - num_steps - 6):
        core.step()
        if int(np.count_nonzero(slots.decoding)) == load:
            break
    for _ in range(num_steps):
        core.step()
