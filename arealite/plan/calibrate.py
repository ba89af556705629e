"""Measures this machine with a real model in about two minutes, for `arealite plan --calibrate`.

The embedded engine decodes several numbers of sequences after short and long prompts, and a training engine takes steps
over several numbers of tokens. Costs are fitted to the times. Nothing else should run meanwhile.
"""

import logging
import time
from collections.abc import Callable, Iterator
from statistics import median

import torch

from arealite.api.cli_args import OptimizerConfig, ServerConfig, TrainEngineConfig
from arealite.api.errors import ConfigError
from arealite.api.io_struct import Batch, FinetuneSpec
from arealite.core.foresee.core_sharing import CoreUse
from arealite.engine.sft.lm_engine import FSDPLMEngine
from arealite.inference.engine import Engine
from arealite.inference.sequence import Request, SamplingParams
from arealite.plan.costs import ServerCost, TrainCost, UpdateCost
from arealite.plan.measured import Measured, fit
from arealite.plan.workload import Distribution, Workload
from arealite.utils.memory.model_size import ModelSize, read_model_size
from arealite.utils.trace.cpu_clock import num_cores

logger = logging.getLogger("arealite.plan")

_SEQUENCES = {"cpu": (1, 4, 16, 64), "cuda": (1, 16, 64, 256)}
_TOKENS = {"cpu": (512, 2048), "cuda": (8192, 32768)}
_NEW_TOKENS, _NUM_PROMPTS = 48, 4
_TIMEOUT_S = 600.0
_MAX_RUNNING = 256


def measure(path: str) -> Measured:
    """Return the costs of the model at `path` on this machine, with the workload of the demo."""
    size = read_model_size(path)
    if size is None:
        raise ConfigError(f"{path} has no config.json with the sizes of a model")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    server = _measure_server(path, size, device)
    train = _measure_training(path, size, device)
    numbers = Distribution("constant", (64.0,)), Distribution("lognormal", (128.0, 0.8, 512.0))
    copy_s = _copy_s(size, device)
    return Measured(
        Workload(32, 8, *numbers),
        1,
        server,
        train,
        # Out of the trainer and into the server.
        UpdateCost(publish_s=copy_s, load_s=copy_s, pause_s=copy_s / 4),
        cores=None if device == "cuda" else CoreUse(num_cores()),
    )


def _measure_server(path: str, size: ModelSize, device: str) -> ServerCost:
    context = min(size.context, 1024)
    short, long = max(4, context // 16), max(8, context - 2 * _NEW_TOKENS)
    new_tokens = max(2, min(_NEW_TOKENS, context // 4))
    dtype = "bfloat16" if device == "cuda" else "float32"
    config = ServerConfig(
        model_path=path, device=device, dtype=dtype, max_running_requests=_MAX_RUNNING, context_length=context
    )
    engine = Engine(config).start()
    try:
        return _fit_server(engine, size.vocab, device, short, long, new_tokens)
    finally:
        engine.close()


def _fit_server(engine: Engine, vocab: int, device: str, short: int, long: int, new_tokens: int) -> ServerCost:
    generator = torch.Generator().manual_seed(1)

    def run(count: int, prompt: int, new: int) -> float:
        """Return the seconds until so many requests have their tokens; prompts are never in the cache."""
        prompts = torch.randint(0, vocab, (count, prompt), generator=generator).tolist()
        params = SamplingParams(n=1, max_new_tokens=new, ignore_eos=True)
        return _seconds(lambda: [f.result(_TIMEOUT_S) for f in [engine.submit(Request(p, params)) for p in prompts]])

    run(2, short, 2)
    # Prompts that come together share a pass.
    prompt_s = median(run(_NUM_PROMPTS, long, 1) for _ in range(3)) / (_NUM_PROMPTS * long)
    rows, seconds = [], []
    for prompt in (short, long):
        for count in _SEQUENCES[device][: None if prompt == short else 3]:
            prompts_s = run(count, prompt, 1)
            step_s = max(run(count, prompt, 1 + new_tokens) - prompts_s, 1e-5) / new_tokens
            rows.append((1.0, count, count * (prompt + new_tokens / 2)))
            seconds.append(step_s)
            logger.info("%d sequences of %d tokens: %.2f ms a step", count, prompt, 1e3 * step_s)
    step_s, sequence_s, context_s = fit(rows, seconds)
    if step_s + sequence_s <= 0:
        step_s = min(seconds)
    return ServerCost(step_s, sequence_s=sequence_s, context_s=context_s, prompt_s=prompt_s, max_running=_MAX_RUNNING)


def _measure_training(path: str, size: ModelSize, device: str) -> TrainCost:
    dtype = "bfloat16" if device == "cuda" else "float32"
    config = TrainEngineConfig(
        path=path, device=device, dtype=dtype, param_dtype=dtype, optimizer=OptimizerConfig(lr=1e-9)
    )
    engine = FSDPLMEngine(config)
    engine.initialize(FinetuneSpec(1, 1000, 1))
    try:
        length = min(128, size.context)
        rows, seconds = [], []
        for tokens in _TOKENS[device]:
            batch = _batch(tokens // length, length, size.vocab)
            engine.train_lm(dict(batch))
            took_s = median(_seconds(lambda batch=batch: engine.train_lm(dict(batch))) for _ in range(3))
            rows.append((1.0, tokens // length * length))
            seconds.append(took_s)
            logger.info("training step of %d tokens: %.3f s", tokens, took_s)
    finally:
        engine.destroy()
    step_s, token_s = fit(rows, seconds)
    return TrainCost(token_s, step_s=step_s)


def _batch(count: int, length: int, vocab: int) -> Batch:
    ids = torch.randint(0, vocab, (count, length), generator=torch.Generator().manual_seed(0))
    ones = torch.ones_like(ids)
    return {"input_ids": ids, "attention_mask": ones, "loss_mask": ones}


def _copy_s(size: ModelSize, device: str) -> float:
    """Return the seconds of one copy of all weights, by a copy of at most 256 MB."""
    item = 2 if device == "cuda" else 4
    total = item * size.parameters
    source = torch.ones(min(total, 256 << 20), dtype=torch.uint8)
    took_s = min(_times(source.clone, 3))
    return took_s * total / len(source)


def _times(act: Callable[[], object], count: int) -> Iterator[float]:
    for _ in range(count):
        yield _seconds(act)


def _seconds(act: Callable[[], object]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began
