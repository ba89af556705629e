"""Experts divided over gloo ranks train like one rank: gradients, steps, checkpoints and published weights."""

import pytest

from tests.engine.engine_testing import Ranks
from tests.engine.test_pipeline import check_like_one_rank

FAMILIES = ["qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3"]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", FAMILIES)
def test_two_expert_ranks_train_like_one(two_ranks, model_dirs, tmp_path, kind):
    check_like_one_rank(two_ranks, model_dirs[kind], "d2e2", 1, tmp_path)


@pytest.fixture(scope="module")
def four_ranks():
    ranks = Ranks(4)
    yield ranks
    ranks.close()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("kind", "layout"),
    [("qwen3_moe", "d4e2"), ("mixtral", "d4e4"), ("deepseek_v3", "d4e2"), ("gpt_oss", "d2c2e2"),
     ("qwen3_moe", "d2c2e4"), ("qwen3_moe", "d2t2e2"), ("mixtral", "c2t2e2")],
)  # fmt: skip
def test_combined_with_other_parallelism(four_ranks, model_dirs, tmp_path, kind, layout):
    check_like_one_rank(four_ranks, model_dirs[kind], layout, 1, tmp_path)
