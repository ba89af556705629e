"""Vision-language models of some thousand parameters, with processors that need only Pillow."""

from __future__ import annotations

import io
from pathlib import Path

import torch
from PIL import Image, ImageDraw
from transformers import (
    AutoModelForImageTextToText,
    CLIPVisionConfig,
    LlavaConfig,
    LlavaProcessor,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2Config,
    Qwen2VLConfig,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tests.tiny_model import make_tokenizer

KINDS = ("qwen2_vl", "qwen2_5_vl", "llava")
_SPECIAL = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>", "<image>"]
_PARTS = (
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for part in m['content'] %}"
    "{% if part['type'] == 'image' %}PLACEHOLDER{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
)
_TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>" + _PARTS + "\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
PLACEHOLDERS = {"llava": "<image>"}
QWEN_PLACEHOLDER = "<|vision_start|><|image_pad|><|vision_end|>"


def placeholder(kind: str) -> str:
    """The text that stands for one image in a prompt."""
    return PLACEHOLDERS.get(kind, QWEN_PLACEHOLDER)


def make_vision_tokenizer(kind: str) -> PreTrainedTokenizerFast:
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": _SPECIAL})
    tokenizer.chat_template = _TEMPLATE.replace("PLACEHOLDER", placeholder(kind))
    return tokenizer


def make_vision_model(folder: Path | str, kind: str, seed: int = 0) -> None:
    """Write a random model of this kind with its processor to `folder`."""
    torch.manual_seed(seed)
    tokenizer = make_vision_tokenizer(kind)
    model = AutoModelForImageTextToText.from_config(_config(kind, tokenizer))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "language_model" not in name and "lm_head" not in name:
                parameter.mul_(5)  # so that images matter
    model.save_pretrained(folder)
    if kind == "llava":
        images = CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
        settings = {"patch_size": 4, "vision_feature_select_strategy": "full", "num_additional_image_tokens": 1}
        LlavaProcessor(images, tokenizer, **settings).save_pretrained(folder)
    else:
        limits = {"shortest_edge": 8 * 8, "longest_edge": 48 * 48}
        Qwen2VLImageProcessorPil(patch_size=4, temporal_patch_size=1, merge_size=2, size=limits).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _config(kind: str, tokenizer: PreTrainedTokenizerFast) -> PreTrainedConfig:
    text = dict(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    if kind == "llava":
        vision = CLIPVisionConfig(
            hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=16,
            patch_size=4, projection_dim=16,
        )  # fmt: skip
        image = tokenizer.convert_tokens_to_ids("<image>")
        return LlavaConfig(
            vision_config=vision, text_config=Qwen2Config(**text), image_token_index=image, image_seq_length=17,
            vision_feature_select_strategy="full",
        )  # fmt: skip
    text |= {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}}
    names = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
    image, video, start, end = tokenizer.convert_tokens_to_ids(list(names))
    common = dict(depth=1, patch_size=4, spatial_merge_size=2, temporal_patch_size=1, in_channels=3, num_heads=2)
    if kind == "qwen2_vl":
        vision, cls = {**common, "embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2}, Qwen2VLConfig
    else:
        vision = {**common, "hidden_size": 16, "intermediate_size": 32, "out_hidden_size": 32, "window_size": 16}
        vision["fullatt_block_indexes"], cls = [0], Qwen2_5_VLConfig
    return cls(
        text_config=text, vision_config=vision, image_token_id=image, video_token_id=video,
        vision_start_token_id=start, vision_end_token_id=end,
    )  # fmt: skip


def picture(seed: int = 0, size: tuple[int, int] = (32, 32), form: str = "PNG") -> bytes:
    """An encoded image of random rectangles."""
    generator = torch.Generator().manual_seed(seed)
    image = Image.new("RGB", size, "black")
    for _ in range(4):
        x, y, *colour = torch.randint(0, 256, (5,), generator=generator).tolist()
        x, y = x * size[0] // 300, y * size[1] // 300
        ImageDraw.Draw(image).rectangle((x, y, x + size[0] // 4, y + size[1] // 4), fill=tuple(colour))
    buffer = io.BytesIO()
    image.save(buffer, form)
    return buffer.getvalue()
