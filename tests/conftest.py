"""Shared small fixtures: a tiny tokenizer and model folder, a tiny dataset. Everything runs on one thread and offline."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

torch.set_num_threads(1)

CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789 .,:;?!#+-*/=()<>$'\"\n\\{}ABCDEFGHIJKLMNOPQRSTUVWXYZ|_"


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character, with a chat template."""
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()  # no spaces between tokens
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", clean_up_tokenization_spaces=False
    )
    made.chat_template = (
        "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    return made


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


def make_model(folder: Path) -> None:
    """A Qwen2 folder of some thousand random parameters, with the tokenizer above."""
    made = make_tokenizer()
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(made),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=made.eos_token_id,
        pad_token_id=made.pad_token_id,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    made.save_pretrained(folder)


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_model(folder)
    return folder


@pytest.fixture(scope="session")
def gsm8k_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made-up rows in the form of GSM8K."""
    path = tmp_path_factory.mktemp("gsm8k") / "train.jsonl"
    rows = [
        {"question": f"Tom has {i} pens and gets {i + 1}. How many?", "answer": f"{i}+{i + 1}\n#### {2 * i + 1}"}
        for i in range(32)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def start_launcher() -> Iterator[Callable[..., subprocess.Popen]]:
    """Start a script with a launcher; whatever the test comes to, it does not outlive it."""
    started: list[subprocess.Popen] = []

    def launch(script: Path, launcher: str, argv: list[str], **env: str) -> subprocess.Popen:
        command = [sys.executable, "-m", f"arealite.launcher.{launcher}", str(script), *argv]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        started.append(subprocess.Popen(command, env={**os.environ, **env}, **pipes))
        return started[-1]

    yield launch
    for process in started:
        if process.poll() is None:
            process.terminate()
            process.communicate(timeout=60)
