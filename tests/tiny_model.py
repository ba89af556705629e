"""A tokenizer with one token per character, and a model folder of some thousand parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789 .,:;?!#+-*/=()<>$'\"\n\\{}ABCDEFGHIJKLMNOPQRSTUVWXYZ|_"


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer with one token per character and a chat template."""
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", *CHARACTERS])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()  # no spaces between tokens
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    return tokenizer


def make_spaced_tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer that adds a space to the beginning of every text, as those of SentencePiece do."""
    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.Prepend(" ")
    return tokenizer


def make_model(folder: Path, tokenizer: PreTrainedTokenizerFast | None = None, seed: int = 0, **settings: Any) -> None:
    """Write a random Qwen2 model with these `settings` and a tokenizer, by default the one above, to `folder`."""
    tokenizer = tokenizer or make_tokenizer()
    torch.manual_seed(seed)
    defaults = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    Qwen2ForCausalLM(Qwen2Config(**defaults | settings)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
