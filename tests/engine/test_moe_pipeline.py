"""Mixtures of experts in pipeline stages train like one rank, with recorded experts and expert groups."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from arealite.api.alloc_mode import AllocationMode
from arealite.api.io_struct import SaveLoadMeta
from arealite.engine.sft.lm_engine import FSDPLMEngine
from arealite.utils.data import select_rows
from tests.engine.engine_testing import MODELS, SPEC, engine_config, random_batch
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


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3"])
def test_two_stages_train_like_one_rank(two_ranks, model_dirs, tmp_path, kind):
    check_like_one_rank(two_ranks, model_dirs[kind], "p2", 1, tmp_path)


@pytest.mark.parametrize(("layout", "stages"), [("d2p2e2", 2), ("p2c2e2", 1), ("p2t2", 2)])
def test_stages_with_other_parallelism(four_ranks, four_layers, tmp_path, layout, stages):
    check_like_one_rank(four_ranks, four_layers, layout, stages, tmp_path)


def _move_biases(rank, path, layout, folder):
    """Two steps; the checkpoint of the first one is loaded before the second."""
    config = replace(engine_config(path, max_tokens_per_mb=30), router_bias_update_rate=0.05)
    engine = FSDPLMEngine(config, AllocationMode.from_str(layout).train)
    engine.initialize(SPEC)
    meta = SaveLoadMeta(f"{folder}/{layout}-dcp", "dcp", with_optim=True)
    batch = random_batch([3, 17, 9, 9, 30, 5, 12, 2])
    if engine.dp_size == 2:
        # The second rank has fewer micro-batches: it runs fillers, which do not count.
        batch = select_rows(batch, [[0, 1, 2, 3, 4, 6], [5, 7]][engine.layout.dp_rank])
    engine.train_lm(batch)
    engine.save(meta)
    engine.train_lm(batch)
    engine.load(meta)
    engine.train_lm(batch)
    engine.save(SaveLoadMeta(f"{folder}/{layout}", "hf"))
    return [name for name, _ in engine.gather_weights()]


@pytest.mark.parametrize("layout", ["d2e2", "p2", "c2"])
def test_correction_biases_on_ranks(two_ranks, model_dirs, tmp_path, layout):
    path = model_dirs["deepseek_v3"]
    names = _move_biases(0, path, "d1", str(tmp_path))
    assert all(answer == names for answer in two_ranks.run(_move_biases, path, layout, str(tmp_path)))
    one, two, before = (
        load_file(f"{folder}/model.safetensors") for folder in (tmp_path / "d1", tmp_path / layout, path)
    )
    (bias,) = (name for name in one if name.endswith("e_score_correction_bias"))
    assert bias in names
    torch.testing.assert_close(two[bias], one[bias])
    assert not torch.equal(one[bias], before[bias])


def test_recorded_experts_in_stages(two_ranks, four_layers, tmp_path):
    """Stages take their layers of the record, and all ranks have the statistics of all layers."""
    # Tokens of shared prefixes would be counted once in each micro-batch, and stages have more of these.
    settings = {"gradient_checkpointing": True, "share_prefix": False}
    expected = update_policy(0, four_layers, "d1", str(tmp_path), 4, settings)
    settings |= {"pipeline_stages_per_rank": 2}
    for answer in two_ranks.run(update_policy, four_layers, "p2", str(tmp_path), 4, settings):
        assert answer == pytest.approx(expected, rel=1e-4, abs=1e-4)
