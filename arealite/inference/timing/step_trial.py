"""Measures decode steps with few and with many sequences, while a new engine has nothing to do.

A run rarely has all loads: servers of an asynchronous run are always full, and the last answers of a synchronous batch
run alone. Predictions of one from the other need the steps of both, without a trainer that works beside them. The trial
takes a fraction of a second and leaves no state.
"""

import time
from collections.abc import Callable

import numpy as np

from arealite.inference.core import EngineCore
from arealite.inference.sequence import Request, SamplingParams
from arealite.inference.timing.step_times import StepTimes

# The engine must have been idle for so long.
IDLE_S = 0.5
_MAX_SECONDS = 0.3
# Steps that fill caches and pipelines, and steps that are timed.
_FILLING_STEPS, _TIMED_STEPS = 3, 4
_PROMPT_TOKENS = 64


def measure_steps(core: EngineCore, times: StepTimes, is_wanted: Callable[[], bool]) -> None:
    """Add steps with 1, 2, 4, … sequences to `times`, until time is over or the engine is no longer idle."""
    if core.paused or core.runner is None or core.config.draft_tokens:
        return
    prompt_tokens = min(_PROMPT_TOKENS, core.max_len // 2)
    blocks = 1 + -(-(prompt_tokens + 16) // core.config.block_size)
    most = min(core.config.max_running_requests, core.scheduler.pool.num_usable // (2 * blocks))
    if core.max_len < prompt_tokens + 16:
        return
    began, load = time.perf_counter(), 1
    while load <= most and is_wanted():
        took_s = _measure(core, times, load, prompt_tokens)
        # The next load takes up to twice as long.
        if time.perf_counter() - began + 2 * took_s > _MAX_SECONDS:
            break
        load *= 2
    core.scheduler.reset()
    core.post.generated_tokens = 0


def _measure(core: EngineCore, times: StepTimes, load: int, prompt_tokens: int) -> float:
    """Time steps of `load` sequences after one prompt; returns the seconds of all of it."""
    began = time.perf_counter()
    params = SamplingParams(n=load, max_new_tokens=_FILLING_STEPS + _TIMED_STEPS + 6, ignore_eos=True, sampling_seed=0)
    prompt = (np.arange(1, prompt_tokens + 1) * 7919 % core.shape.vocab_size).tolist()
    request = Request(prompt, params)
    core.add(request)
    wanted, tokens = load * _FILLING_STEPS, core.post.generated_tokens
    while core.post.generated_tokens - tokens < wanted and not request.future.done():
        core.step()
    first, cpu_s, at = core.post.generated_tokens, time.thread_time(), time.perf_counter()
    steps = 0
    while steps < _TIMED_STEPS and not request.future.done():
        core.step()
        steps += 1
    seconds, cpu_s = time.perf_counter() - at, time.thread_time() - cpu_s
    made = core.post.generated_tokens - first
    core.abort(request.rid)
    # Otherwise sequences waited, or the model's values were not finite.
    if steps and made == steps * load:
        times.add(load, 0, seconds, cpu_s, steps)
    return time.perf_counter() - began
