"""Every endpoint gets malformed requests from a fixed seed: no 500, no hang, and the server stays as it was."""

from __future__ import annotations

import json
import random
import socket
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import pytest

from arealite.api.cli_args import ServerConfig
from arealite.inference.engine import Engine
from arealite.inference.http.server import make_app
from arealite.inference.sequence import SamplingParams
from tests.inference.conftest import make_model, served
from tests.tiny_model import make_tokenizer

SEED = 15
TIMEOUT_S = 20
NUM_TRIALS = 40
METHODS = [b"GET", b"POST", b"PUT", b"DELETE", b"HEAD", b"OPTIONS", b"PATCH", b"TRACE", b"BREW", b"get", b"\xff"]
HEADERS = [
    b"Authorization: Bearer \xff\xfe", b"Authorization: " + b"x" * 7000, b"Content-Type: text/plain",
    b"Content-Type: \xff", b"Content-Type: application/json; charset=\xff", b"Host: evil.example", b"Host: [::1",
    b"Host: \xd0\x96", b"Origin: null", b"Origin: http://[", b"Content-Encoding: gzip", b"Content-Encoding: what",
    b"Transfer-Encoding: chunked", b"Content-Length: -1", b"Content-Length: 99999999999999999999",
    b"Expect: 100-continue", b"Expect: 200-ok", b"Upgrade: websocket\r\nConnection: upgrade", b"X" * 9000 + b": x",
    b"no colon", b": empty", b"A: b\r\n folded", b"Range: bytes=0-", b"Cookie: " + b";" * 4000, b"Accept: \x00",
]  # fmt: skip
QUERIES = [
    "?", "?probe=", "?probe=/etc/passwd", "?probe=../../x.cuda", "?tensors=1", "?probe=%00", "?probe=%ff", "?a[]=1",
    "?probe=" + "/x" * 900, "?probe=/dev/zero", "?probe=/dev/stdin", "?probe=/proc/self/mem", "#f", "?tensors=%f0%28",
]  # fmt: skip
PATHS = [
    "/", "//", "/..", "/%2e%2e/etc/passwd", "/generate/", "/v1/models/", "/v1/models/../../x", "/v1/models/%ff", "*",
    "/v1/models/" + "x" * 5000, "/GENERATE", "/generate%00", "http://evil.example/generate", "/v1/models/%0d%0aX:y",
]  # fmt: skip
HEADS = [b"", b"GET", b"GET /health", b"GET /health HTTP/9.9", b"GET /health HTTP/1.1\r\n" * 3, b"\x16\x03\x01"]
# Names of fields that handlers read, so that random bodies get past the first check.
FIELDS = [
    "text", "input_ids", "sampling_params", "rid", "stream", "return_text", "return_raw_logprob", "abort_all", "mode",
    "model_path", "path", "weight_version", "reset_version", "flush_cache", "abort_all_requests", "lora_name", "model",
    "lora_path", "group_name", "backend", "names", "dtypes", "shapes", "prompt", "messages", "tools", "max_tokens", "n",
    "chat_template_kwargs", "temperature", "top_p", "top_k", "stop", "logit_bias", "logprobs", "return_token_ids",
    "stream_options", "response_format", "seed", "tool_choice", "parallel_tool_calls", "top_logprobs", "echo", "input",
    "instructions", "system", "stop_sequences", "include", "metadata", "thinking", "max_output_tokens", "truncation",
    "order", "flat_logprobs",
]  # fmt: skip
# For each endpoint, fields that a valid request has; the random ones replace or join them.
BASES: dict[str, dict[str, Any]] = {
    "/generate": {"input_ids": [1, 2]},
    "/v1/completions": {"prompt": [1, 2], "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
    "/v1/responses": {"input": [{"role": "user", "content": "hi"}], "max_output_tokens": 2},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
    "/update_weights_from_disk": {"model_path": "/nowhere"},
    "/update_weights_from_shm": {"path": "/nowhere"},
    "/load_lora_adapter": {"lora_name": "a", "lora_path": "/nowhere"},
    "/update_weights_from_stream": {
        "order": {
            "key": "k",
            "sources": ["127.0.0.1:9"],
            "version": 1,
            "round": 1,
            "member": 0,
            "parent": None,
            "num_children": 0,
        }
    },
    "/update_weights_from_distributed": {"group_name": "", "names": ["a"], "dtypes": ["float32"], "shapes": [[1]]},
}
VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2**31, 2**63, -(2**63), 10**30, 0.5, -0.0, 1e308, float("nan"), float("inf"),
    float("-inf"), "", "a", "x" * 5000, "\ud800", "\0", "/etc/passwd", "../../etc/passwd", "/dev/zero", "/dev/shm",
    "/proc/self/mem", "1", "-1", "9" * 400, "٣", "v7", [], {}, [[]], [1], [-1], [2**40], [None], ["a"], [True],
    {"a": 1}, {"1": 1}, {"role": "user"}, [{"role": "user", "content": "hi"}], [{"role": "\ud800", "content": "x"}],
    [{"role": "user", "content": [{"text": "a"}]}], {"type": "text"}, {"max_new_tokens": 3}, {"n": 10**9},
    {"stop": ["\ud800"]}, {"logit_bias": {"1": None}}, {"sampling_seed": 2**80}, ["float32"], [[1, 2]], [["a"]],
    [[2**62, 2**62]], "float32", "abort", "retract", {"include_usage": 1}, "{{ 7 * 7 }}", {"\ud800": 1},
    [{"type": "function", "function": {"name": "f", "parameters": {}}}], "required", {"type": "function", "name": "f"},
    [{"type": "function", "name": "f", "parameters": {"properties": 3}}], [{"name": "f", "input_schema": {}}],
    [{"type": "function_call_output", "call_id": "c", "output": "x"}], {"type": "json_object"}, {"type": "any"},
    [{"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{" * 900}}]}],
    [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "x"}]}], "none", 20, 3,
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]}],
    {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object", "$ref": "#"}}},
]  # fmt: skip
SAMPLING = sorted(f.name for f in fields(SamplingParams))
NORMAL = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}}
# What the endpoints that need no valid body have done.
UNDO = ("/continue_generation", "/resume_memory_occupation")


def nested(depth: int, kind: str) -> bytes:
    return {"list": b"[" * depth + b"]" * depth, "object": b'{"a":' * depth + b"1" + b"}" * depth}[kind]


def raw_bodies(rng: random.Random) -> Iterator[bytes]:
    """Yield bodies that are not JSON objects, or only just."""
    whole = json.dumps(NORMAL).encode()
    yield from (b"", b"{", b"null", b"[]", b'"a"', b"5", b"\xff\xfe", b"\x00" * 50, whole[: rng.randrange(len(whole))])
    yield from (nested(100_000, "list"), nested(5000, "object"), b"1" * 100_000, b'{"a": 1, "a": 2}', whole + whole)
    yield from (b'{"input_ids": ' + b"9" * 5000 + b"}", b'{"text": "\\ud800\\udc00\\ud800"}', b'{"input_ids": [1e999]}')
    yield bytes(rng.randrange(256) for _ in range(200))
    flipped = bytearray(whole)
    flipped[rng.randrange(len(flipped))] ^= 1 << rng.randrange(8)
    yield bytes(flipped)


def random_body(rng: random.Random, path: str) -> bytes:
    base = BASES.get(path, {})
    names = rng.sample(sorted(base), min(len(base), 1)) + rng.sample(FIELDS, rng.randrange(3))
    changed = {name: rng.choice(VALUES) for name in rng.sample(names, rng.randrange(len(names) + 1))}
    params = {name: rng.choice(VALUES) for name in rng.sample(SAMPLING, 2)}
    body = {**base, **changed}
    if path == "/generate":
        body.setdefault("sampling_params", {"max_new_tokens": 2, **params})
    return json.dumps(body).encode()


class Target:
    """A server that is asked over raw sockets."""

    def __init__(self, address: str):
        host, port = address.split(":")
        self.where = (host, int(port))

    def send(self, raw: bytes, is_whole: bool = True) -> int | None:
        """Return the status of the answer; None if the server has closed the connection without one."""
        with socket.create_connection(self.where, timeout=TIMEOUT_S) as sock:
            answer = b""
            try:
                sock.sendall(raw)
                if not is_whole:
                    sock.shutdown(socket.SHUT_WR)
                while part := sock.recv(65536):
                    answer += part
            except ConnectionError:
                pass
        answer = answer.removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")
        return int(answer.split(b" ", 2)[1]) if answer.startswith(b"HTTP/") else None

    def request(self, method: bytes, path: str, body: bytes = b"", *headers: bytes) -> int | None:
        lines = [method + b" " + path.encode() + b" HTTP/1.1", b"Connection: close"]
        for default in (b"Host: localhost", b"Content-Type: application/json", b"Content-Length: %d" % len(body)):
            name = default.split(b":")[0] + b":"
            if not any(line.startswith(name) for line in headers):
                lines.append(default)
        return self.send(b"\r\n".join([*lines, *headers]) + b"\r\n\r\n" + body)

    def ask(self, path: str, body: dict[str, Any]) -> Any:
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n"
        with socket.create_connection(self.where, timeout=TIMEOUT_S) as sock:
            sock.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
            answer = b"".join(iter(lambda: sock.recv(65536), b""))
        assert answer.startswith(b"HTTP/1.1 200"), answer
        return json.loads(answer.partition(b"\r\n\r\n")[2])

    def normal(self) -> list[int]:
        return self.ask("/generate", NORMAL)["output_ids"]


@pytest.fixture
def engine(make_engine) -> Engine:
    return make_engine(make_model(), tokenizer=make_tokenizer(), max_running_requests=8)


def test_malformed_requests(engine, caplog):
    rng = random.Random(SEED)
    app = make_app(engine, ServerConfig())
    routes = sorted(
        {(r.method, r.resource.canonical) for r in app.router.routes() if r.resource and r.method != "HEAD"}
    )
    weights = engine.fingerprint().result(30)
    statuses: set[int | None] = set()
    with served(engine) as address:
        target = Target(address)
        expected = target.normal()

        def check(what: tuple[Any, ...], status: int | None) -> None:
            statuses.add(status)
            assert status is None or status < 500, what

        for method, route in routes:
            path = route.replace("{name}", "x")
            for body in raw_bodies(rng):
                check((path, body[:80]), target.request(method.encode(), path, body))
            for _ in range(NUM_TRIALS):
                body = random_body(rng, path)
                check((path, body), target.request(method.encode(), path, body))
            for line in rng.sample(HEADERS, 8):
                body = random_body(rng, path)
                check((path, line[:80]), target.request(method.encode(), path, body, line))
            for wrong in rng.sample(METHODS, 3):
                check((path, wrong), target.request(wrong, path, b"{}"))
            for query in rng.sample(QUERIES, 4):
                check((path, query), target.request(method.encode(), path + query))
            for undo in UNDO:
                assert target.request(b"POST", undo, b"{}") == 200
            assert target.normal() == expected, path
        for path in PATHS:
            for method_name in (b"GET", b"POST"):
                check((path,), target.request(method_name, path, b"{}"))
        for head in (
            b"",
            b"GET",
            b"GET /health",
            b"GET /health HTTP/9.9",
            b"GET /health HTTP/1.1\r\n" * 3,
            b"\x16\x03\x01",
        ):
            check((head,), target.send(head, is_whole=False))
        assert target.normal() == expected
        assert engine.fingerprint().result(30) == weights
    assert {200, 400, 404, 405, 415} <= statuses
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("kind", ["list", "object"])
def test_values_too_deep_to_be_quoted_in_a_message(engine, caplog, kind):
    with served(engine) as address:
        target = Target(address)
        for path, base in {**BASES, "/abort_request": {}, "/update_weight_version": {}}.items():
            for name in ("rid", "mode", "weight_version", "stream", "logprobs", "stream_options", "flush_cache", *base):
                whole = json.dumps({**base, name: None}).encode()
                body = whole.replace(b": null", b": " + nested(990, kind))
                assert target.request(b"POST", path, body) == 400, (path, name)
    assert "Traceback" not in caplog.text


def test_malformed_requests_without_the_key_learn_nothing(engine):
    rng = random.Random(SEED)
    with served(engine, api_key="secret") as address:
        target = Target(address)
        for path in ("/generate", "/server_info", "/update_weights_from_shm", "/v1/models", "/pause_generation", "/x"):
            for line in HEADERS:
                status = target.request(b"POST", path, random_body(rng, path), line)
                assert status in (400, 401, 413, 417, None), (path, line, status)
        assert not engine.core.paused


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_ten_megabytes_of_text(engine, caplog, path):
    """Long texts are refused, wherever they are; the server answers others meanwhile and afterwards."""
    text = "x" * 10_000_000
    message = {"role": "user", "content": text}
    tool = {"name": "f", "description": text}
    bodies: dict[str, list[dict[str, Any]]] = {
        "/v1/completions": [{"prompt": text}, {"prompt": [text, "a"]}, {"prompt": "a", "stop": text}],
        "/v1/chat/completions": [
            {"messages": [message]},
            {"messages": [{"role": "user", "content": [{"type": "text", "text": text}]}]},
            {"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "function", "function": tool}]},
            {"messages": [{"role": text, "content": "a"}]},
        ],
        "/v1/responses": [{"input": text}, {"input": "a", "instructions": text}, {"input": [message]}],
        "/v1/messages": [{"messages": [message], "max_tokens": 1}, {"messages": [], "system": text, "max_tokens": 1}],
    }
    with served(engine) as address:
        target = Target(address)
        expected = target.normal()
        for body in bodies[path]:
            status = target.request(b"POST", path, json.dumps({"max_tokens": 2, **body}).encode())
            # The template of this model leaves out the tools.
            assert status == (200 if "tools" in body else 400), [*body]
        assert target.request(b"POST", path, b'{"messages": "\xff\xfe"}') == 400
        assert target.normal() == expected
    assert "Traceback" not in caplog.text
