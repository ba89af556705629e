"""Measures decode steps with few and with many sequences, before a server takes requests.

A run rarely has all loads: servers of an asynchronous run are always full, and the last answers of a synchronous batch
run alone. Predictions of one from the other need the steps of both, without a trainer that works beside them. The trial
takes a fraction of a second and leaves no state.
"""

import time

import numpy as np

from arealite.inference.core import EngineCore
from arealite.inference.sequence import Request, SamplingParams
from arealite.inference.timing.step_times import StepTimes

# Of the whole trial. On CPU a trainer starts on the same cores meanwhile.
_MAX_SECONDS = {"cpu": 0.2, "cuda": 0.6}
# Steps that fill caches and pipelines, and steps that are timed.
_FILLING_STEPS, _TIMED_STEPS = 3, 4
_PROMPT_TOKENS = 64


def measure_steps(core: EngineCore, times: StepTimes) -> None:
    """Add steps with 1, 2, 4, … sequences to `times`, until time is over or the engine is full."""
    prompt_tokens = min(_PROMPT_TOKENS, core.max_len // 2)
    blocks = 1 + -(-(prompt_tokens + 16) // core.config.block_size)
    most = min(core.config.max_running_requests, core.scheduler.pool.num_usable // (2 * blocks))
    # With drafts a step makes any number of tokens.
    if core.config.draft_tokens or core.max_len < prompt_tokens + 16:
        return
    end, load = time.perf_counter() + _MAX_SECONDS[core.weights.model.device.type], 1
    while load <= most and time.perf_counter() < end:
        _measure(core, times, load, prompt_tokens, end)
        load *= 2
    core.scheduler.reset()
    core.post.generated_tokens = 0


def _measure(core: EngineCore, times: StepTimes, load: int, prompt_tokens: int, end: float) -> None:
    """Time steps of `load` sequences after one prompt."""
    new_tokens = _FILLING_STEPS + _TIMED_STEPS + 6
    params = SamplingParams(n=load, max_new_tokens=new_tokens, ignore_eos=True, sampling_seed=0)
    prompt = (np.arange(1, prompt_tokens + 1) * 7919 % core.shape.vocab_size).tolist()
    request = Request(prompt, params)
    core.add(request)
    before = core.post.generated_tokens
    while core.post.generated_tokens - before < load * _FILLING_STEPS and not request.future.done():
        core.step()
    before, cpu_s, began = core.post.generated_tokens, time.thread_time(), time.perf_counter()
    steps = 0
    while steps < _TIMED_STEPS and time.perf_counter() < end and not request.future.done():
        core.step()
        steps += 1
    seconds, cpu_s = time.perf_counter() - began, time.thread_time() - cpu_s
    made = core.post.generated_tokens - before
    core.abort(request.rid)
    # Otherwise sequences waited, or the model's values were not finite.
    if steps and made == steps * load:
        times.add(load, 0, seconds, cpu_s, steps)
