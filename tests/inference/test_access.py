"""Who may talk to a server, about what, and for how long: keys, hosts, paths, versions, limits on connections."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import select
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from arealite.api.cli_args import ServerConfig
from arealite.api.errors import RequestError
from arealite.api.io_struct import WeightUpdateMeta
from arealite.inference.engine import Engine
from arealite.inference.http.access import Access
from arealite.inference.http.server import make_app
from arealite.inference.weight_receiver import WeightReceiver
from arealite.inference.weights import WeightSource
from arealite.utils.http import connections
from arealite.utils.http import server as http_server
from arealite.utils.http.connections import Connections
from arealite.weights import host_memory
from arealite.weights.host_memory import SharedWeights
from tests.inference.conftest import make_model, run, served, submit_and_see_start
from tests.tiny_model import make_tokenizer

KEY = "secret-ключ"
JSON = {"Content-Type": "application/json"}
BEARER = b"Authorization: Bearer " + KEY.encode() + b"\r\n"


def ask(address: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> tuple[int, Any]:
    """Return status and JSON of one request on a connection of its own."""
    connection = http.client.HTTPConnection(address, timeout=30)
    try:
        data = None if body is None else json.dumps(body)
        connection.request("GET" if body is None else "POST", path, data, {**(JSON if body else {}), **(headers or {})})
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


def connect(address: str) -> socket.socket:
    host, port = address.split(":")
    return socket.create_connection((host, int(port)), timeout=30)


def talk(address: str, raw: bytes) -> bytes:
    """Send bytes and read until the server closes the connection."""
    with connect(address) as sock:
        sock.sendall(raw)
        return b"".join(iter(lambda: sock.recv(65536), b""))


def test_every_route_but_health_needs_the_key(make_engine):
    engine = make_engine(make_model())
    routes = [route for route in make_app(engine, ServerConfig()).router.routes() if route.method != "HEAD"]
    assert len(routes) > 20
    with served(engine, api_key=KEY) as address:
        for route in routes:
            path = (route.resource.canonical if route.resource else "").replace("{name}", "x")
            for line in (b"", b"Authorization: Bearer wrong\r\n", b"Authorization: Bearer \xff\xfe\xd0\r\n"):
                head = f"{route.method} {path} HTTP/1.1\r\nHost: localhost\r\n".encode()
                # The connection ends with the answer: nobody without the key holds one.
                answer = talk(address, head + line + b"Content-Type: application/json\r\nContent-Length: 0\r\n\r\n")
                assert answer.startswith(b"HTTP/1.1 200" if path == "/health" else b"HTTP/1.1 401"), answer
        assert b"HTTP/1.1 401" in talk(address, b"GET /nowhere HTTP/1.1\r\nHost: localhost\r\n\r\n")
        head = b"GET /model_info HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        assert talk(address, head + BEARER + b"\r\n").startswith(b"HTTP/1.1 200")
        assert talk(address, head + BEARER.replace(b"Bearer", b"Basic") + b"\r\n").startswith(b"HTTP/1.1 401")


def test_names_that_dns_could_point_here_are_no_hosts(make_engine):
    with served(make_engine(make_model())) as address:
        for host in ("localhost", "localhost:1", "127.0.0.1:80", "[::1]:80", "10.1.2.3", "LOCALHOST"):
            assert ask(address, "/model_info", headers={"Host": host})[0] == 200
        for host in ("evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil", "[::1", "a b"):
            status, answer = ask(address, "/model_info", headers={"Host": host})
            assert status in (400, 403) and "localhost" in answer["message"]


def test_web_pages_of_other_origins_cannot_post(make_engine):
    engine = make_engine(make_model())
    with served(engine) as address:
        for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""):
            status, answer = ask(address, "/pause_generation", {"mode": "abort"}, {"Content-Type": kind})
            assert status == 415 and "application/json" in answer["message"]
        page = {"Origin": "http://evil.example", **JSON}
        assert ask(address, "/pause_generation", {"mode": "abort"}, page)[0] == 403
        raw = b"POST /release_memory_occupation HTTP/1.1\r\nHost: localhost\r\nOrigin: null\r\nContent-Length: 0\r\n"
        assert talk(address, raw + b"Connection: close\r\n\r\n").startswith(b"HTTP/1.1 403")
        assert not engine.core.paused and engine.core.runner is not None
        assert (
            ask(address, "/continue_generation", {"a": 1}, {"Content-Type": "application/json; charset=utf-8"})[0]
            == 200
        )


def test_weights_are_loaded_from_the_folders_of_the_run_only(tmp_path, monkeypatch):
    run_folder, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    for folder in (run_folder / "weights", elsewhere, tmp_path / "run-2"):
        folder.mkdir(parents=True)
    (run_folder / "out").symlink_to(elsewhere)
    access = Access(ServerConfig(weight_folders=[str(run_folder)], model_path=str(tmp_path / "model")))
    for path in (run_folder / "weights" / "v1", tmp_path / "model", Path("/dev/shm/arealite-1234")):
        assert access.weight_path(str(path)) == str(path)
    outside = [
        elsewhere,
        run_folder / "out",
        run_folder / ".." / "elsewhere",
        tmp_path / "run-2",
        "/dev/shm/other",
        "\0",
    ]
    for path in outside:
        with pytest.raises(RequestError, match=r"outside the folders|not a path"):
            access.weight_path(str(path))
    anywhere = Access(ServerConfig())
    assert anywhere.weight_path(str(elsewhere)) == str(elsewhere)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(RequestError, match="another user"):
        anywhere.weight_path(str(elsewhere))


def test_versions_neither_jump_nor_go_back_by_chance(make_engine):
    with served(make_engine(make_model())) as address:
        for version, status in (
            (5, 200),
            (5, 200),
            (6, 200),
            (5, 409),
            (2007, 409),
            (2**31, 400),
            ("٣", 400),
            (1006, 200),
        ):
            found, answer = ask(address, "/update_weight_version", {"weight_version": version})
            assert found == status, (version, answer)
        status, answer = ask(address, "/update_weight_version", {"weight_version": 10**6})
        assert status == 409 and "holds 1006" in answer["message"] and "1006 to 2006" in answer["message"]
        for version in (0, 10**6):
            body = {"weight_version": version, "reset_version": True}
            assert ask(address, "/update_weight_version", body) == (
                200, {"success": True, "weight_version": str(version)},
            )  # fmt: skip


def test_half_sent_requests_are_closed(make_engine, monkeypatch):
    monkeypatch.setattr(connections, "HEADER_SWEEPS", 1)
    monkeypatch.setattr(connections, "_SWEEP_INTERVAL_S", 0.05)
    monkeypatch.setattr(connections, "_LINGER_S", 0.05)
    monkeypatch.setattr(http_server, "BODY_TIMEOUT_S", 0.2)
    with served(make_engine(make_model())) as address:
        assert b" 408 " in talk(address, b"")
        assert b" 408 " in talk(address, b"GET /health HTTP/1.1\r\nHost: local")
        whole = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
        with connect(address) as sock:
            sock.sendall(whole)
            assert sock.recv(65536).startswith(b"HTTP/1.1 200")
            sock.sendall(whole[:-1])
            assert b" 408 " in sock.recv(65536)
        head = b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        with connect(address) as sock:
            sock.sendall(head + b"Content-Length: 100\r\n\r\n{")
            assert b" 408 " in sock.recv(65536)
        # A connection that has sent a request and waits for its next one is not late.
        idle = http.client.HTTPConnection(address, timeout=30)
        for _ in range(2):
            idle.request("GET", "/health")
            assert idle.getresponse().read() == b'{"status":"ok"}'
            select.select([idle.sock], [], [], 0.5)
        idle.close()


def test_strangers_do_not_hold_all_connections(make_engine, monkeypatch):
    monkeypatch.setattr(Connections, "limit", 8)
    with served(make_engine(make_model())) as address:
        idle = [connect(address) for _ in range(30)]
        assert ask(address, "/health") == (200, {"status": "ok"})
        for sock in idle:
            sock.close()
        held = [http.client.HTTPConnection(address, timeout=30) for _ in range(8)]
        for connection in held:
            connection.request("GET", "/health")
            assert connection.getresponse().read() == b'{"status":"ok"}'
        status, answer = ask(address, "/health")
        assert status == 503 and "8 connections" in answer["message"]
        for connection in held:
            connection.close()
        while ask(address, "/health")[0] != 200:
            pass


def test_half_sent_bodies_without_the_key_do_not_hold_all_connections(make_engine, monkeypatch):
    monkeypatch.setattr(Connections, "limit", 8)
    with served(make_engine(make_model()), api_key=KEY) as address:
        held = []
        for _ in range(8):
            held.append(connect(address))
            held[-1].sendall(b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
            assert held[-1].recv(65536).startswith(b"HTTP/1.1 401")
        assert ask(address, "/health") == (200, {"status": "ok"})
        for sock in held:
            sock.close()


def test_connections_beyond_the_limit_are_closed_at_once_if_they_are_many(make_engine, monkeypatch):
    monkeypatch.setattr(Connections, "limit", 1)
    monkeypatch.setattr(connections, "_MAX_REFUSED", 2)
    monkeypatch.setattr(connections, "_LINGER_S", 30.0)
    with served(make_engine(make_model())) as address:
        first, *others = [connect(address) for _ in range(5)]
        answers = []
        for sock in others:
            with contextlib.suppress(ConnectionResetError):
                answers.append(sock.recv(65536)[9:12])
        assert [answer for answer in answers if answer] == [b"503"] * 2
        for sock in (first, *others):
            sock.close()


@pytest.mark.parametrize("stream", [False, True])
def test_a_second_request_with_an_id_does_not_end_the_first(stream, make_engine):
    engine = make_engine(make_model())
    with served(engine) as address:
        first = submit_and_see_start(engine, [1, 2], rid="same", max_new_tokens=200, ignore_eos=True)
        go_on = threading.Event()
        engine._call(lambda: go_on.wait(30))
        body = json.dumps({"input_ids": [1], "rid": "same", "stream": stream})
        with connect(address) as sock:
            head = "POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            sock.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
            wait_until(lambda: len(engine._inbox) == 2)
        wait_until(lambda: len(engine._inbox) == 3)
        go_on.set()
        assert len(first.result(30)[0].token_ids) == 200


def wait_until(condition: Any) -> None:
    """Poll: the other side has no way to notify the test."""
    pause = threading.Event()
    for _ in range(3000):
        if condition():
            return
        pause.wait(0.01)
    raise AssertionError("it never came true")


def test_a_request_that_forbids_every_token_is_the_clients_error(make_engine):
    model = make_model()
    with served(make_engine(model)) as address:
        vocabulary = range(model.config.vocab_size)
        none = {str(token): float("-inf") for token in vocabulary}
        body = {"input_ids": [1], "sampling_params": {"logit_bias": none}}
        status, answer = ask(address, "/generate", body)
        assert status == 400 and "every token" in answer["message"]
        del none[str(model.config.eos_token_id)]
        assert ask(address, "/generate", body)[0] == 200
        body["sampling_params"]["min_new_tokens"] = 1
        assert ask(address, "/generate", body)[0] == 400


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(make_engine, monkeypatch):
    engine = make_engine(small_vocabulary_model(), tokenizer=make_tokenizer())
    with served(engine) as address:
        assert engine.max_characters == 1 << 16
        monkeypatch.setattr(engine.tokenizer, "encode", lambda *_, **__: pytest.fail("tokenized"))
        text = "a" * (engine.max_characters + 1)
        for path, body in (
            ("/generate", {"text": text}),
            ("/v1/completions", {"prompt": ["a", text][1:]}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}),
        ):
            status, answer = ask(address, path, body)
            assert status == 400 and "characters" in answer["message"], answer


def test_too_many_prompts_are_refused_before_they_are_tokenized(make_engine, monkeypatch):
    engine = make_engine(small_vocabulary_model(), tokenizer=make_tokenizer())
    monkeypatch.setattr(engine.tokenizer, "encode", lambda *_, **__: pytest.fail("tokenized"))
    with served(engine) as address:
        for prompt in (["a"] * 2049, [[1]] * 2049):
            status, answer = ask(address, "/v1/completions", {"prompt": prompt, "n": 2})
            assert status == 400 and "2049 prompts with n=2" in answer["message"], answer


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"text": "a" * 5000}),
        ("/v1/completions", {"prompt": "a" * 5000}),
        ("/v1/completions", {"prompt": ["a" * 2500, "b" * 2500]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a" * 5000}]}),
    ],
)
def test_the_server_answers_while_it_tokenizes_a_long_text(path, body, make_engine, monkeypatch):
    engine = make_engine(small_vocabulary_model(), tokenizer=make_tokenizer())
    began, go_on = threading.Event(), threading.Event()

    def encode(text: str, **settings: Any) -> list[int]:
        began.set()
        assert go_on.wait(30)
        return [1, 2, 3]

    monkeypatch.setattr(engine.tokenizer, "encode", encode)
    with served(engine) as address:
        answers = []
        asking = threading.Thread(target=lambda: answers.append(ask(address, path, body)))
        asking.start()
        assert began.wait(30)
        assert ask(address, "/health") == (200, {"status": "ok"})
        go_on.set()
        asking.join(30)
        assert answers[0][0] == 200


def small_vocabulary_model() -> PreTrainedModel:
    model = make_model()
    assert model.config.vocab_size >= len(make_tokenizer())
    return model


def test_a_standing_server_releases_the_weights_of_ended_runs(make_engine, tmp_path):
    engine: Engine = make_engine(make_model())
    weights = dict(engine.model.named_parameters())
    shared = SharedWeights.create(tmp_path / "segment", weights)
    for name, tensor in weights.items():
        shared.tensors[name].copy_(tensor)
    SharedWeights.detach(shared.path)  # as if another process had made it
    meta = WeightUpdateMeta("shm", str(shared.path), 1)
    engine.update(WeightSource.published(meta)).result(30)
    engine.release_removed()
    run(engine, [1], max_new_tokens=1)
    assert shared.path in host_memory._mapped
    shared.path.unlink()
    engine.release_removed()
    run(engine, [1], max_new_tokens=1)
    assert shared.path not in host_memory._mapped
    with torch.no_grad():
        shared.tensors["model.norm.weight"].fill_(1)  # who still uses it keeps it


@pytest.mark.parametrize("shape", [[1 << 40], [2**62, 2**62], [2**31] * 5])
def test_a_broadcast_larger_than_the_model_is_refused_before_it_is_received(shape):
    receiver = WeightReceiver()
    group: Any = object()  # it is not asked
    receiver._group, receiver._name = group, "g"
    body = {"group_name": "g", "names": ["a"], "dtypes": ["float32"], "shapes": [shape]}
    with pytest.raises(RequestError, match="names, dtypes and shapes"):
        receiver.receive(body, 1 << 20)
