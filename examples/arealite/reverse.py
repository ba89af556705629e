"""The demo's task: write five letters backwards (`abcde>` → `edcba`). A CPU learns it in a minute.

Contains all parts of a task: a tokenizer, a model, rows of data and a reward. `demo.py` and `reverse_grpo.py` use it.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

LETTERS = "abcdefghijklmnopqrstuvwxyz"
LENGTH = 5


def reverse_reward(
    prompt: str, completion: str, prompt_ids: list[int], completion_ids: list[int], **data: Any
) -> float:
    """Return 1 for the exact answer, else 0."""
    return float(completion == data["answer"])


def make_rows(count: int, seed: int, held_out: bool = False) -> list[dict[str, str]]:
    """Return random words. One word in eight, chosen by its letters, is only in the validation set (`held_out`)."""
    rng = random.Random(seed)
    rows = []
    while len(rows) < count:
        word = "".join(rng.choices(LETTERS, k=LENGTH))
        if (sum(map(ord, word)) % 8 == 0) == held_out:
            rows.append({"prompt": f"{word}>", "answer": word[::-1]})
    return rows


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per character."""
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", ">", *LETTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()  # no spaces between tokens
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", clean_up_tokenization_spaces=False
    )


def make_model(folder: Path, seed: int) -> None:
    """Save a Qwen2 decoder with 0.4M random parameters as a Hugging Face model."""
    torch.manual_seed(seed)
    tokenizer = make_tokenizer()
    config = Qwen2Config(
        vocab_size=32,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def supervised_batch(rows: list[dict[str, str]], tokenizer: PreTrainedTokenizerFast) -> dict[str, torch.Tensor]:
    """Return prompts and answers as a batch for supervised training. Only the answers are trained on."""
    texts = [row["prompt"] + row["answer"] for row in rows]
    input_ids = torch.tensor([[*tokenizer.encode(t), tokenizer.eos_token_id] for t in texts])
    loss_mask = torch.zeros_like(input_ids)
    loss_mask[:, LENGTH + 1 :] = 1
    return {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids), "loss_mask": loss_mask}
