"""Datasets: load rows, tokenize them, and batch them in an order that resumes exactly."""

from arealite.dataset.columns import map_rows, require_columns, require_text
from arealite.dataset.gsm8k import get_gsm8k_rl, get_gsm8k_sft
from arealite.dataset.loader import StatefulDataLoader
from arealite.dataset.rows import load_dataset
from arealite.dataset.sft import collate_sft, load_tokenizer, tokenize_sft

__all__ = [
    "StatefulDataLoader",
    "collate_sft",
    "get_gsm8k_rl",
    "get_gsm8k_sft",
    "load_dataset",
    "load_tokenizer",
    "map_rows",
    "require_columns",
    "require_text",
    "tokenize_sft",
]
