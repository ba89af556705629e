"""Completions of models whose tokenizer drops the blank before the first word that it decodes, as Llama 2's does."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from arealite.agents.answers import make_answers
from arealite.api.cli_args import GenerationHyperparameters, InferenceEngineConfig, ServerConfig
from arealite.api.io_struct import ModelRequest, ModelResponse
from arealite.core.waits import NamedWait
from arealite.engine.embedded import EmbeddedEngine
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
        # SGLang's endpoint: the same text, and stop strings that begin with the blank.
        params = {"max_new_tokens": 6, "temperature": 0, "logit_bias": body["logit_bias"]}
        for prompt in ({"text": "aa"}, {"input_ids": ids_of(tokenizer, "a", "a"), "return_text": True}):
            assert generate(url, params, **prompt)["text"] == plain["text"]
            assert generate(url, params, **prompt, stream=True)["text"] == plain["text"]
            stopped = generate(url, {**params, "stop": [plain["text"][:2]]}, **prompt)
            assert stopped["text"] == "" and stopped["meta_info"]["completion_tokens"] == 1
    finally:
        assert stop(process) == 0


def test_the_engine_in_process_finds_stop_strings_that_begin_with_a_blank(tokenizer, tmp_path):
    """At the beginning of a continuation, too: after an interruption every word may be the first one."""
    sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes))
    one, other = ids_of(tokenizer, "\u2581a", "\u2581bb")
    head = model.lm_head.weight.data.zero_()
    head[one], head[other] = 1.0, -1.0  # one of them is always the likeliest token
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    server = ServerConfig(model_path=str(tmp_path), max_total_tokens=512, device="cpu")
    engine = EmbeddedEngine(InferenceEngineConfig(), server)
    engine.initialize(train_batch_size=1)
    try:
        gconfig = GenerationHyperparameters(max_new_tokens=4, temperature=0.0, stop=[" a", " bb"])
        asking = engine.agenerate(ModelRequest(ids_of(tokenizer, "a", "a"), gconfig))
        answer = engine.executor.run_coroutine(asking, NamedWait("the test", "an answer", 60))
        assert answer.stop_reason == "stop" and len(answer.output_tokens) == 1
    finally:
        engine.destroy()


def generate(url: str, params: dict[str, Any], **body: Any) -> dict[str, Any]:
    """Return the answer of /generate; of a stream its last chunk."""
    return send(f"{url}/generate", {**body, "sampling_params": params})[-1]


def post(url: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the choices of a completion, or those of all chunks of a stream."""
    bodies = send(f"{url}/v1/completions", body | {"temperature": 0})
    return [choice for each in bodies for choice in each["choices"]]


def send(url: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the JSON of an answer, or of all chunks of a stream."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        text = response.read().decode()
    return [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith(("data: {", "{"))]
