"""The counting task: images of coloured shapes, drawn on the fly in the columns of CLEVR-count.

Contains all parts of a task: images, questions, a reward, and a vision-language model of the Qwen2-VL or the LLaVA kind
that is small enough for two CPU cores. `clevr_count_sft.py` and `clevr_count_grpo.py` use it.

    python examples/arealite/clevr_count.py FOLDER [llava | qwen2_vl]     # write the small model
"""

from __future__ import annotations

import io
import random
import re
import sys
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForImageTextToText,
    CLIPVisionConfig,
    LlavaConfig,
    LlavaProcessor,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2VLConfig,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from arealite.api.cli_args import DatasetConfig
from arealite.dataset import load_dataset, map_rows, require_columns

COLOURS = [(220, 40, 40), (40, 200, 60), (50, 80, 230), (230, 200, 50)]
MAX_COUNT, NUM_ROWS = 9, 8192
# An image has 4 × 4 cells of 8 × 8 pixels, and a cell holds at most one shape.
CELLS, CELL = 4, 8
_SPECIAL = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>", "<image>"]


def count_reward(prompt: str, completion: str, prompt_ids: list[int], completion_ids: list[int], **data: Any) -> float:
    """Return 1 if the last number of the answer is the right one, else 0.

    Answers of the dataset may stand in tags: `<answer> 3 </answer>`.
    """
    found, expected = (re.findall(r"\d+", text) for text in (completion, str(data["answer"])))
    return float(bool(found and expected) and int(found[-1][:9]) == int(expected[-1]))


def draw(rng: random.Random, count: int) -> bytes:
    """Return an encoded image of `count` squares and discs of several colours."""
    image = Image.new("RGB", (CELLS * CELL, CELLS * CELL), (20, 20, 20))
    canvas = ImageDraw.Draw(image)
    for cell in rng.sample(range(CELLS * CELLS), count):
        x, y = cell % CELLS * CELL + 1, cell // CELLS * CELL + 1
        shape = canvas.ellipse if rng.random() < 0.5 else canvas.rectangle
        shape((x, y, x + CELL - 3, y + CELL - 3), fill=rng.choice(COLOURS))
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def make_rows(count: int, seed: int) -> list[dict[str, Any]]:
    """Return rows with the columns of CLEVR-count: `images`, `problem` and `answer`."""
    rng, rows = random.Random(seed), []
    for _ in range(count):
        number = rng.randint(1, MAX_COUNT)
        rows.append({"images": [draw(rng, number)], "problem": "<image>how many?", "answer": str(number)})
    return rows


def load_rows(config: DatasetConfig, seed: int) -> list[dict[str, Any]]:
    """Return generated rows, or those of a dataset with the same columns."""
    if config.path == "generated":
        return make_rows(NUM_ROWS, seed)
    return map_rows(load_dataset(config), lambda row: require_columns(row, "images", "problem", "answer"), config.path)


def make_tokenizer(kind: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per character, and a chat template with images."""
    characters = "abcdefghijklmnopqrstuvwxyz0123456789 ?:\n"
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", *characters])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", clean_up_tokenization_spaces=False
    )
    tokenizer.add_special_tokens({"additional_special_tokens": _SPECIAL})
    image = "<image>" if kind == "llava" else "<|vision_start|><|image_pad|><|vision_end|>"
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for p in m['content'] %}"
        "{% if p['type'] == 'image' %}" + image + "{% else %}{{ p['text'] }}{% endif %}{% endfor %}{% endif %}"
        "{% endfor %}"
    )
    return tokenizer


def make_model(folder: Path, kind: str = "llava", seed: int = 1) -> None:
    """Save a random model of about 0.3M parameters, with its processor, as a Hugging Face model."""
    torch.manual_seed(seed)
    tokenizer = make_tokenizer(kind)
    AutoModelForImageTextToText.from_config(_config(kind, tokenizer)).save_pretrained(folder)
    size = CELLS * CELL
    if kind == "llava":
        images = CLIPImageProcessorPil(size={"shortest_edge": size}, crop_size={"height": size, "width": size})
        settings = {"patch_size": CELL, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
        LlavaProcessor(images, tokenizer, **settings).save_pretrained(folder)
    else:
        limits = {"shortest_edge": size * size, "longest_edge": size * size}
        settings = {"patch_size": CELL // 2, "temporal_patch_size": 1, "merge_size": 2, "size": limits}
        Qwen2VLImageProcessorPil(**settings).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _config(kind: str, tokenizer: PreTrainedTokenizerFast) -> PreTrainedConfig:
    text: dict[str, Any] = dict(
        vocab_size=len(tokenizer), hidden_size=96, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    if kind == "llava":
        vision = CLIPVisionConfig(
            hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
            image_size=CELLS * CELL, patch_size=CELL, projection_dim=64,
        )  # fmt: skip
        return LlavaConfig(
            vision_config=vision, text_config=Qwen2Config(**text),
            image_token_index=tokenizer.convert_tokens_to_ids("<image>"), image_seq_length=CELLS * CELLS,
        )  # fmt: skip
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 4, 4]}
    vision = dict(
        depth=1, embed_dim=64, hidden_size=96, mlp_ratio=2, num_heads=2, patch_size=CELL // 2, spatial_merge_size=2,
        temporal_patch_size=1, in_channels=3,
    )  # fmt: skip
    names = ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]
    image, video, start, end = tokenizer.convert_tokens_to_ids(names)
    return Qwen2VLConfig(
        text_config=text, vision_config=vision, image_token_id=image, video_token_id=video,
        vision_start_token_id=start, vision_end_token_id=end, tie_word_embeddings=True,
    )  # fmt: skip


if __name__ == "__main__":
    make_model(Path(sys.argv[1]), *sys.argv[2:3])
