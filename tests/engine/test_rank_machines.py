"""Trainer ranks on several machines, with links of limited speed; also a machine that is cut off."""

import contextlib
import time

import pytest
import torch

from arealite.api.alloc_mode import AllocationMode
from arealite.engine.sft.lm_engine import FSDPLMEngine
from arealite.utils.data import select_rows
from tests.engine.engine_testing import SPEC, Ranks, engine_config, random_batch
from tests.machines import machines

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
STEPS = 3
_engines = []


def _train(rank, path, layout, num_rows):
    """Train a few steps, keep the engine. Returns loss and norm of each step, and the seconds of the last one."""
    parallel = AllocationMode.from_str(layout).train
    engine = FSDPLMEngine(engine_config(path, collective_timeout_s=300.0 if num_rows > 8 else 12.0), parallel)
    engine.initialize(SPEC)
    _engines[:] = [engine]
    answers, seconds = [], 0.0
    for step in range(STEPS):
        batch = random_batch([8 + i % 5 for i in range(num_rows)], seed=step)
        share = num_rows // parallel.data
        first = share * (engine.layout.dp_rank if engine.layout else 0)
        began = time.perf_counter()
        stats = engine.train_lm(select_rows(batch, list(range(first, first + share))))
        seconds = time.perf_counter() - began
        answers.append([stats["loss"], stats["grad_norm"]])
    return answers, seconds


def _train_cut_off(rank):
    """Train once more. Returns the error."""
    try:
        _engines[0].train_lm(random_batch([8, 9]))
    except RuntimeError as error:
        return str(error)
    return ""


@contextlib.contextmanager
def ranks_on(world_size, places):
    ranks = Ranks(world_size, places)
    try:
        yield ranks
    finally:
        ranks.close()


@pytest.mark.parametrize(
    ("num_machines", "num_ranks", "layout"), [(2, 4, "d2t2"), pytest.param(16, 64, "d64", marks=pytest.mark.soak)]
)
def test_ranks_on_machines_train_like_one_rank(num_machines, num_ranks, layout, model_dirs):
    expected, _ = _train(0, model_dirs["qwen2"], "d1", max(8, num_ranks))
    with machines(num_machines, mbit=100) as net, ranks_on(num_ranks, net) as ranks:
        answers = ranks.run(_train, model_dirs["qwen2"], layout, max(8, num_ranks), timeout_s=500)
    assert all(torch.tensor(answer).allclose(torch.tensor(expected), rtol=1e-4) for answer, _ in answers)
    print(f"{num_machines} machines, {num_ranks} ranks: {max(seconds for _, seconds in answers):.2f} s for a step")


def test_ranks_do_not_wait_for_ever_for_a_machine_that_is_cut_off(model_dirs):
    with machines(2) as net, ranks_on(2, net) as ranks:
        ranks.run(_train, model_dirs["qwen2"], "d2", 8)
        net[1].partition()
        for error in ranks.run(_train_cut_off, timeout_s=90):
            assert "imed out" in error, error
