"""Vision-language models: packed equals one row at a time, the model learns, ranks agree."""

import pytest
import torch
from transformers import (
    AutoModelForImageTextToText,
    CLIPVisionConfig,
    Glm4vConfig,
    LlavaConfig,
    Qwen2_5_VLConfig,
    Qwen2Config,
    Qwen3VLConfig,
)

from arealite.api.alloc_mode import AllocationMode, ParallelStrategy
from arealite.api.cli_args import PPOCriticConfig
from arealite.api.errors import AllocationError, ConfigError
from arealite.api.io_struct import SaveLoadMeta
from arealite.engine.fsdp.parallel import check_layout
from arealite.engine.fsdp_engine import FSDPEngine
from arealite.engine.ppo.critic import FSDPPPOCritic
from arealite.engine.sft.lm_engine import FSDPLMEngine
from arealite.utils.data import concat_padded, select_rows
from tests.engine.engine_testing import SPEC, engine_config

IMAGE = 60
TEXT = dict(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=128, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip


def qwen_config():
    vision = dict(
        depth=1, hidden_size=16, intermediate_size=32, num_heads=2, patch_size=2, spatial_merge_size=2,
        temporal_patch_size=1, in_channels=3, out_hidden_size=32, window_size=8, fullatt_block_indexes=[0],
    )  # fmt: skip
    rope = {"type": "mrope", "mrope_section": [1, 1, 2]}
    return Qwen2_5_VLConfig(
        text_config={**TEXT, "rope_scaling": rope}, vision_config=vision,
        image_token_id=IMAGE, video_token_id=61, vision_start_token_id=62, vision_end_token_id=63,
    )  # fmt: skip


def qwen3_config():
    """Its tower also adds features to the first layers of the decoder."""
    vision = dict(
        depth=2, hidden_size=16, intermediate_size=32, num_heads=2, patch_size=2, spatial_merge_size=2,
        temporal_patch_size=1, in_channels=3, out_hidden_size=32, num_position_embeddings=64,
        deepstack_visual_indexes=[0, 1],
    )  # fmt: skip
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
    return Qwen3VLConfig(
        text_config={**TEXT, "head_dim": 8, "rope_parameters": rope}, vision_config=vision,
        image_token_id=IMAGE, video_token_id=61, vision_start_token_id=62, vision_end_token_id=63,
    )  # fmt: skip


def glm_config():
    vision = dict(
        depth=2, hidden_size=16, intermediate_size=32, num_heads=2, patch_size=2, spatial_merge_size=2,
        temporal_patch_size=1, in_channels=3, out_hidden_size=32, image_size=8,
    )  # fmt: skip
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2], "partial_rotary_factor": 1.0}
    return Glm4vConfig(
        text_config={**TEXT, "head_dim": 8, "rope_parameters": rope}, vision_config=vision, image_token_id=IMAGE,
        video_token_id=61, image_start_token_id=62, image_end_token_id=63, video_start_token_id=0, video_end_token_id=1,
    )  # fmt: skip


def llava_config():
    vision = CLIPVisionConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        image_size=8, patch_size=4, projection_dim=16,
    )  # fmt: skip
    return LlavaConfig(
        vision_config=vision, text_config=Qwen2Config(**TEXT), image_token_index=IMAGE, image_seq_length=4
    )


CONFIGS = {"qwen": qwen_config, "llava": llava_config, "qwen3": qwen3_config, "glm": glm_config}


@pytest.fixture(scope="module")
def vlm_dirs(tmp_path_factory):
    torch.manual_seed(0)
    dirs = {}
    for name, config in CONFIGS.items():
        dirs[name] = str(tmp_path_factory.mktemp(name))
        AutoModelForImageTextToText.from_config(config()).save_pretrained(dirs[name])
    return dirs


def row(kind, length, num_images, seed):
    """One row: images first (four placeholder tokens each), then text."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 59, (1, length), generator=g)
    for i in range(num_images):
        ids[0, 1 + 6 * i] = 62
        ids[0, 2 + 6 * i : 6 + 6 * i] = IMAGE
    loss_mask = torch.ones(1, length, dtype=torch.long)
    loss_mask[0, : 1 + 6 * num_images] = 0
    batch = {"input_ids": ids, "attention_mask": torch.ones(1, length, dtype=torch.long), "loss_mask": loss_mask}
    if not num_images:
        return batch
    batch["image_index"] = torch.tensor([0])
    if kind == "qwen":  # a 4 × 4 grid of patches merges to 2 × 2 tokens
        batch["pixel_values"] = torch.randn(1, 16 * num_images, 3 * 2 * 2, generator=g)
        batch["image_grid_thw"] = torch.tensor([[[1, 4, 4]]]).repeat(1, num_images, 1)
    else:
        batch["pixel_values"] = torch.randn(1, num_images, 3, 8, 8, generator=g)
        batch["num_images"] = torch.tensor([num_images])
    return batch


def vlm_batch(kind):
    return concat_padded([row(kind, 14, 1, 0), row(kind, 9, 0, 1), row(kind, 21, 2, 2), row(kind, 16, 1, 3)])


def vlm_engine(path, parallel=None, **kwargs):
    engine = FSDPLMEngine(engine_config(path, max_tokens_per_mb=32, **kwargs), parallel)
    engine.initialize(SPEC)
    return engine


@pytest.mark.parametrize("name", CONFIGS)
def test_packed_rows_equal_single_rows_of_plain_transformers(vlm_dirs, name):
    kind = "llava" if name == "llava" else "qwen"
    engine = vlm_engine(vlm_dirs[name])
    plain = AutoModelForImageTextToText.from_pretrained(vlm_dirs[name], attn_implementation="eager")
    batch = vlm_batch(kind)
    found = engine.forward(batch)["logp"]
    for i, (length, images, seed) in enumerate([(14, 1, 0), (9, 0, 1), (21, 2, 2), (16, 1, 3)]):
        single = row(kind, length, images, seed)
        inputs = {"input_ids": single["input_ids"]}
        if images:
            inputs["pixel_values"] = single["pixel_values"][0]
        if images and kind == "qwen":
            inputs["image_grid_thw"] = single["image_grid_thw"][0]
            inputs["mm_token_type_ids"] = (single["input_ids"] == IMAGE).int()
        with torch.no_grad():
            logits = plain(**inputs).logits
        logp = logits[0, :-1].log_softmax(-1).gather(-1, single["input_ids"][0, 1:, None]).squeeze(-1)
        mask = single["loss_mask"][0, 1:].bool()
        torch.testing.assert_close(found[i, 1:length][mask], logp[mask], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", ["qwen", "llava"])
def test_the_language_model_learns_and_vision_is_frozen(vlm_dirs, kind, tmp_path):
    engine = vlm_engine(vlm_dirs[kind])
    before = {n: p.detach().clone() for n, p in engine.model.named_parameters()}
    batch = vlm_batch(kind)
    losses = [engine.train_lm(batch)["loss"] for _ in range(8)]
    assert losses[-1] < losses[0] - 0.2
    for name, parameter in engine.model.named_parameters():
        learned = "language_model" in name or "lm_head" in name
        assert torch.equal(parameter, before[name]) != learned, name
    engine.save(SaveLoadMeta(str(tmp_path / "export"), "hf"))
    loaded = AutoModelForImageTextToText.from_pretrained(tmp_path / "export")
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, engine.model.get_parameter(name)), name


def _losses_on_rank(rank, path, freeze_vision, lora_rank):
    torch.manual_seed(0)
    engine = vlm_engine(path, freeze_vision=freeze_vision, lora_rank=lora_rank)
    batch = vlm_batch("qwen")
    # Rank 1 has no images.
    rows = [0, 1, 2, 3] if rank is None else [[0, 2, 3], [1]][rank]
    return [engine.train_lm(select_rows(batch, rows))["loss"] for _ in range(4)]


@pytest.mark.parametrize(
    ("freeze_vision", "lora_rank"),
    [(True, 4), (False, 0), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((True, 0), (False, 4)))],
)
def test_ranks_with_and_without_images_train_like_one(vlm_dirs, two_ranks, freeze_vision, lora_rank):
    one = _losses_on_rank(None, vlm_dirs["qwen"], freeze_vision, lora_rank)
    two = two_ranks.run(_losses_on_rank, vlm_dirs["qwen"], freeze_vision, lora_rank)
    assert two[0] == two[1] == pytest.approx(one, rel=1e-5)


@pytest.mark.parametrize("targets", [[], ["down_proj"]])  # qwen has one in both towers
@pytest.mark.parametrize("kind", ["qwen", "llava"])
def test_a_frozen_vision_tower_gets_no_adapters(vlm_dirs, kind, targets, tmp_path):
    peft = pytest.importorskip("peft")
    engine = vlm_engine(vlm_dirs[kind], lora_rank=4, lora_targets=targets)
    adapters = [n for n, _ in engine.model.named_parameters() if "lora_" in n]
    assert adapters and all("language_model" in n for n in adapters)
    assert adapters == [n for n, p in engine.model.named_parameters() if p.requires_grad]
    engine.save(SaveLoadMeta(str(tmp_path / "adapter"), "hf"))
    plain = AutoModelForImageTextToText.from_pretrained(vlm_dirs[kind])
    adapted = peft.PeftModel.from_pretrained(plain, tmp_path / "adapter").base_model.model
    assert [n for n, _ in adapted.named_parameters() if "lora_" in n] == adapters


def test_a_critic_is_refused_with_what_to_do(vlm_dirs):
    with pytest.raises(
        ConfigError, match="critics and reward models are text models: use one, or an algorithm without"
    ):
        FSDPPPOCritic(engine_config(vlm_dirs["qwen"], PPOCriticConfig))


def test_context_parallel_is_rejected_for_images(vlm_dirs):
    engine = FSDPEngine(engine_config(vlm_dirs["qwen"]))
    with pytest.raises(AllocationError, match="set c1"):
        check_layout(ParallelStrategy(context=2), engine.hf_config, world_size=2)


def _tensor_parallel_losses(rank, path, layout):
    parallel = AllocationMode.from_str(layout).train
    engine = vlm_engine(path, parallel, freeze_vision=False)
    return [list(_picked(engine.train_lm(vlm_batch("qwen")))) for _ in range(3)]


def _picked(stats):
    return stats["loss"], stats["grad_norm"]


def test_tensor_parallel_trains_like_one(vlm_dirs, two_ranks):
    one = _tensor_parallel_losses(0, vlm_dirs["qwen"], "d1")
    two = two_ranks.run(_tensor_parallel_losses, vlm_dirs["qwen"], "t2")
    assert two[0] == two[1]
    assert torch.tensor(two[0]).allclose(torch.tensor(one), rtol=1e-4)


@pytest.mark.parametrize("kind", ["qwen", "llava"])
def test_the_vision_tower_is_trained_on_request(vlm_dirs, kind):
    """Its gradient equals that of plain transformers, one row at a time."""
    engine = vlm_engine(vlm_dirs[kind], freeze_vision=False)
    plain = AutoModelForImageTextToText.from_pretrained(vlm_dirs[kind], attn_implementation="eager")
    batch = vlm_batch(kind)
    found = {}
    engine.config.optimizer.gradient_clipping = 0.0
    engine.optimizer.step = lambda: found.update(
        {n: p.grad.clone() for n, p in engine.model.named_parameters() if p.grad is not None}
    )
    engine.train_lm(batch)
    mask = batch["loss_mask"].bool()
    for length, images, seed in [(14, 1, 0), (9, 0, 1), (21, 2, 2), (16, 1, 3)]:
        single = row(kind, length, images, seed)
        inputs = {"input_ids": single["input_ids"]}
        if images:
            inputs["pixel_values"] = single["pixel_values"][0]
        if images and kind == "qwen":
            inputs["image_grid_thw"] = single["image_grid_thw"][0]
            inputs["mm_token_type_ids"] = (single["input_ids"] == IMAGE).int()
        logp = plain(**inputs).logits[0, :-1].log_softmax(-1)
        logp = logp.gather(-1, single["input_ids"][0, 1:, None]).squeeze(-1)
        trained = single["loss_mask"][0, 1:].bool()
        (-logp[trained].sum() / mask[:, 1:].sum()).backward()
    tower = {n: p.grad for n, p in plain.named_parameters() if "vision" in n or "visual" in n}
    assert sum(grad is not None and bool(grad.any()) for grad in tower.values()) > 5
    for name, grad in tower.items():
        if grad is not None:
            torch.testing.assert_close(found[name], grad, atol=1e-6, rtol=1e-3, msg=name)


@pytest.mark.parametrize("kind", ["qwen", "llava"])
def test_rows_that_share_images_compute_them_once(vlm_dirs, kind):
    """Same log-probs as with a copy of the images for each row; the vision tower sees each image once."""
    engine = FSDPLMEngine(engine_config(vlm_dirs[kind], max_tokens_per_mb=128))
    engine.initialize(SPEC)
    rows = [row(kind, 14, 1, 0), row(kind, 14, 1, 0), row(kind, 9, 0, 1), row(kind, 14, 1, 3)]
    copied = concat_padded(rows)
    shared = dict(copied)
    shared["image_index"] = torch.tensor([0, 0, -1, 2])
    body, sizes = engine.model.base_model, []
    features = body.get_image_features
    body.get_image_features = lambda *args, **kwargs: sizes.append(len(kwargs["pixel_values"])) or features(**kwargs)
    apart = engine.forward(copied)["logp"]
    copied_size = sum(sizes)
    sizes.clear()
    assert torch.allclose(engine.forward(shared)["logp"], apart, atol=1e-6)
    assert 3 * sum(sizes) == 2 * copied_size
