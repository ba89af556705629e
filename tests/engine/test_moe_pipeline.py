"""Mixtures of experts in pipeline stages train like one rank, with recorded experts and expert groups."""

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from tests.engine.engine_testing import MODELS, Ranks
from tests.engine.test_expert_parallel import update_policy
from tests.engine.test_pipeline import check_like_one_rank

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def four_layers(tmp_path_factory):
    torch.manual_seed(0)
    config: Qwen3MoeConfig = MODELS["qwen3_moe"]()
    config.num_hidden_layers = 4
    folder = str(tmp_path_factory.mktemp("four_layers"))
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def four_ranks():
    ranks = Ranks(4)
    yield ranks
    ranks.close()


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3"])
def test_two_stages_train_like_one_rank(two_ranks, model_dirs, tmp_path, kind):
    check_like_one_rank(two_ranks, model_dirs[kind], "p2", 1, tmp_path)


@pytest.mark.parametrize(("layout", "stages"), [("d2p2e2", 2), ("p2c2e2", 1), ("p2t2", 2)])
def test_stages_with_other_parallelism(four_ranks, four_layers, tmp_path, layout, stages):
    check_like_one_rank(four_ranks, four_layers, layout, stages, tmp_path)


def test_recorded_experts_in_stages(two_ranks, four_layers, tmp_path):
    """Stages take their layers of the record, and all ranks have the statistics of all layers."""
    # Tokens of shared prefixes would be counted once in each micro-batch, and stages have more of these.
    settings = {"gradient_checkpointing": True, "share_prefix": False}
    expected = update_policy(0, four_layers, "d1", str(tmp_path), 4, settings)
    settings |= {"pipeline_stages_per_rank": 2}
    for answer in two_ranks.run(update_policy, four_layers, "p2", str(tmp_path), 4, settings):
        assert answer == pytest.approx(expected, rel=1e-4, abs=1e-4)
