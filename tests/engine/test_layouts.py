"""Four ranks with data, tensor and context parallelism combined train like one rank."""

import pytest
import torch

from arealite.api.alloc_mode import AllocationMode
from arealite.api.io_struct import SaveLoadMeta
from arealite.engine.sft.lm_engine import FSDPLMEngine
from arealite.utils.data import select_rows
from tests.engine.engine_testing import SPEC, Ranks, engine_config, random_batch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
LENGTHS = [3, 17, 9, 9, 30, 5, 12, 2]


def _train(rank, path, layout, folder):
    parallel = AllocationMode.from_str(layout).train
    engine = FSDPLMEngine(engine_config(path, max_tokens_per_mb=30), parallel)
    engine.initialize(SPEC)
    answers = []
    for step in range(2):
        batch = random_batch(LENGTHS, seed=step)
        if parallel.data == 2:
            batch = select_rows(batch, [[0, 1, 2, 3, 4, 5], [6, 7]][engine.layout.dp_rank])
        stats = engine.train_lm(batch)
        answers.append([stats["loss"], stats["grad_norm"], stats["num_tokens"]])
    sharded = SaveLoadMeta(f"{folder}/{layout}", "dcp", with_optim=True)
    exported = SaveLoadMeta(f"{folder}/{layout}_hf", "hf")
    engine.save(sharded)
    engine.save(exported)
    engine.load(sharded)
    engine.load(exported)
    answers.append([engine.train_lm(batch)["loss"], 0.0, 0.0])
    return answers


@pytest.mark.parametrize(
    ("kind", "layout"),
    [("qwen2", "d2t2"), ("qwen2", "d2c2"), ("qwen2", "t2c2"), ("qwen3_moe", "d2t2"), ("three_heads", "c4")],
)  # fmt: skip
def test_combined_layouts_train_like_one_rank(model_dirs, four_ranks, tmp_path, kind, layout):
    check_like_one_rank(model_dirs[kind], four_ranks, tmp_path, layout)


@pytest.mark.soak
def test_data_tensor_and_context_parallel_on_eight_ranks(model_dirs, tmp_path):
    ranks = Ranks(8)
    try:
        check_like_one_rank(model_dirs["qwen2"], ranks, tmp_path, "d2t2c2")
    finally:
        ranks.close()


def check_like_one_rank(path, ranks, tmp_path, layout):
    expected = torch.tensor(_train(0, path, "d1", str(tmp_path)))
    answers = ranks.run(_train, path, layout, str(tmp_path), timeout_s=400)
    assert all(answer == answers[0] for answer in answers)
    assert torch.tensor(answers[0]).allclose(expected, rtol=1e-5)

    one = FSDPLMEngine(engine_config(path, max_tokens_per_mb=30))
    one.initialize(SPEC)
    one.load(SaveLoadMeta(str(tmp_path / layout), "dcp", with_optim=True))
    assert one.train_lm(random_batch(LENGTHS, seed=1))["loss"] == pytest.approx(expected[2, 0].item(), rel=1e-5)
