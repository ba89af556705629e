"""Tests of constrained decoding: every answer matches its schema, and log-probs are of the masked distribution."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from arealite.inference.engine import Engine
from tests.inference.conftest import SMALL
from tests.inference.test_http_errors import call, message
from tests.inference.tool_model import TOOL, write_tokenizer

pytest.importorskip("llguidance")
SCHEMA = {
    "type": "object",
    "properties": {"color": {"enum": ["red", "green"]}, "big": {"type": "boolean"}, "n": {"enum": [1, 22]}},
    "required": ["color", "big", "n"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 150}


@pytest.fixture(params=[False, True], ids=["", "deterministic"])
def engine(make_engine, tmp_path: Path, request) -> Engine:
    tokenizer = write_tokenizer(tmp_path)
    torch.manual_seed(0)
    # Some rows of the embedding are no tokens, as in most models.
    config = SMALL | {"vocab_size": len(tokenizer) + 11, "eos_token_id": tokenizer.eos_token_id}
    return make_engine(Qwen2ForCausalLM(Qwen2Config(**config)).eval(), tokenizer, deterministic=request.param)


def matches(text: str) -> bool:
    value = json.loads(text)
    kinds = value["color"] in ("red", "green"), isinstance(value["big"], bool), value["n"] in (1, 22)
    return all(kinds) and len(value) == 3


def test_every_answer_matches_the_schema(engine):
    body = CHAT | {"response_format": FORMAT, "temperature": 3.0, "n": 8}
    status, answer = call(engine, "/v1/chat/completions", body)
    assert status == 200
    texts = [choice["message"]["content"] for choice in answer["choices"]]
    assert all(map(matches, texts)) and len(set(texts)) > 2
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"stop"}
    plain = {
        "input": "hi",
        "max_output_tokens": 150,
        "text": {"format": {"type": "json_schema", "name": "s", "schema": SCHEMA}},
    }
    assert matches(call(engine, "/v1/responses", plain)[1]["output"][0]["content"][0]["text"])
    body = {"prompt": "x", "max_tokens": 150, "response_format": FORMAT}
    assert matches(call(engine, "/v1/completions", body)[1]["choices"][0]["text"])


def test_logprobs_are_of_the_masked_distribution(engine):
    body = CHAT | {"response_format": FORMAT, "temperature": 1.7, "logprobs": True, "top_logprobs": 20, "seed": 5}
    (choice,) = call(engine, "/v1/chat/completions", body)[1]["choices"]
    entries = choice["logprobs"]["content"]
    assert entries[0]["token"] == "{" and entries[0]["logprob"] == 0
    num_choices = 0
    for entry in entries:
        shares = [math.exp(top["logprob"]) for top in entry["top_logprobs"]]
        assert sum(shares) == pytest.approx(1, abs=1e-4)
        num_choices += sum(share > 0 for share in shares) > 1
    assert num_choices >= 3
    # Requests without a format in the same batch are as before.
    _, events = call(engine, "/v1/chat/completions", body | {"stream": True})
    pieces = [event["choices"][0]["delta"].get("content", "") for event in events]
    assert "".join(pieces) == choice["message"]["content"]


def test_any_object(engine):
    body = CHAT | {"response_format": {"type": "json_object"}, "temperature": 0.5}
    (choice,) = call(engine, "/v1/chat/completions", body)[1]["choices"]
    assert choice["message"]["content"].startswith("{")
    assert choice["finish_reason"] == "length" or isinstance(json.loads(choice["message"]["content"]), dict)


def test_an_empty_schema_allows_any_value(engine):
    anything = {"type": "json_schema", "json_schema": {"name": "any", "schema": {}}}
    body = CHAT | {"response_format": anything, "temperature": 3.0, "n": 16, "max_tokens": 1}
    _, answer = call(engine, "/v1/chat/completions", body)
    assert not all(choice["message"]["content"].startswith("{") for choice in answer["choices"])


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"ignore_eos": True}, "cannot be combined"),
    ({"min_tokens": 3}, "cannot be combined"),
    ({"tools": [TOOL]}, "no room for tool calls"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "what"}}}}, "cannot be followed"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}}, "cannot be followed"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": ["\ud800"]}}}}, "cannot be used"),
]


@pytest.mark.parametrize(("more", "expected"), REFUSED)
def test_refusals(engine, more, expected):
    status, answer = call(engine, "/v1/chat/completions", CHAT | {"response_format": FORMAT} | more)
    assert status == 400 and expected in message(answer)


def test_a_missing_library_is_named(engine, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    status, answer = call(engine, "/v1/chat/completions", CHAT | {"response_format": FORMAT})
    assert status == 400 and "arealite[structured]" in message(answer)
