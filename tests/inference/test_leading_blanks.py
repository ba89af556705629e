"""Completions of models whose tokenizer drops the blank before the first word that it decodes, as Llama 2's does."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from arealite.agents.answers import make_answers
from arealite.api.io_struct import ModelResponse
from arealite.protocol.answer import token_text
from arealite.protocol.completions import parse
from arealite.protocol.detokenizer import IncrementalText, decode, token_before
from tests.inference.test_server import start, stop
from tests.tiny_model import make_tokenizer

WORDS = ["\u2581a", "\u2581bb", "\u2581\u2581", "\u2581"]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    names = ["<unk>", "<s>", "</s>", "a", "b", *WORDS]
    made = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[], unk_token="<unk>"))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    made.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, clean_up_tokenization_spaces=False, **special)


def ids_of(tokenizer: Any, *names: str) -> list[int]:
    return tokenizer.convert_tokens_to_ids(list(names))


def test_a_blank_behind_a_prompt_is_kept_and_the_one_at_the_beginning_is_not(tokenizer):
    words = ids_of(tokenizer, "\u2581a", "\u2581bb", "b")
    for prompt, text in (([1, *ids_of(tokenizer, "a")], " a bbb"), ([1], "a bbb")):
        before = token_before(tokenizer, prompt)
        assert decode(tokenizer, words, True, None, before) == text
        incremental = IncrementalText(tokenizer, ["zz"], True, None, before)
        assert "".join(map(incremental.add, words)) == text
        sample = ModelResponse(prompt, words, [0.0] * 3, [0] * 3, "stop")
        (answer,) = make_answers(tokenizer, [sample], parse({"prompt": prompt}), "", [])
        assert answer.text == text
    assert [token_text(tokenizer, token) for token in ids_of(tokenizer, *WORDS, "b")] == [" a", " bb", "  ", " ", "b"]
    # Tokenizers that drop nothing are decoded as they are.
    assert token_before(make_tokenizer(), [5]) is None and token_before(None, [5]) is None


def test_completions_of_the_embedded_server_continue_the_prompt(tokenizer, tmp_path):
    sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    process = start(f"model_path={tmp_path}", "max_total_tokens=512")
    try:
        url = process.stdout.readline().split()[-1]
        words = ids_of(tokenizer, "\u2581a", "\u2581bb")
        body = {"prompt": "aa", "max_tokens": 6, "logit_bias": {str(word): 100 for word in words}, "logprobs": 0}
        (plain,) = post(url, body)
        assert plain["text"].startswith(" ") and plain["text"] == "".join(plain["logprobs"]["tokens"])
        assert (
            post(url, body | {"prompt": ["aa", "b"], "echo": True, "logprobs": None})[0]["text"] == f"aa{plain['text']}"
        )
        streamed = post(url, body | {"stream": True})
        assert "".join(choice["text"] for choice in streamed) == plain["text"]
        stopped = post(url, body | {"stop": [plain["text"][:2]]})
        assert stopped[0]["text"] == ""
    finally:
        assert stop(process) == 0


def post(url: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the choices of a completion, or those of all chunks of a stream."""
    head = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body | {"temperature": 0}).encode(), head)
    with urllib.request.urlopen(request, timeout=60) as response:
        text = response.read().decode()
    bodies = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith(("data: {", "{"))]
    return [choice for each in bodies for choice in json.loads(each)["choices"]]
