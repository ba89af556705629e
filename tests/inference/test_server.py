"""Tests of the server as a real process: both protocols, weight updates, invalid input, startup errors."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from arealite.weights.host_memory import SharedWeights
from tests import warm_python

TIMEOUT_S = 60


class Client:
    """Blocking JSON calls to a server process."""

    def __init__(self, url: str, process: warm_python.WarmProcess, token: str | None = None):
        self.url, self.process, self.token = url, process, token

    def request(self, path: str, body=None, raw: bytes | None = None, token: str | None = None):
        data = raw if raw is not None else (None if body is None else json.dumps(body).encode())
        call = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        if token or self.token:
            call.add_header("Authorization", f"Bearer {token or self.token}")
        try:
            with urllib.request.urlopen(call, timeout=TIMEOUT_S) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    def __call__(self, path: str, body=None, expect: int = 200):
        status, raw = self.request(path, body)
        assert status == expect, raw
        return json.loads(raw)

    def generate(self, ids: list[int], **params):
        return self("/generate", {"input_ids": ids, "sampling_params": params})


def start(*arguments: str) -> warm_python.WarmProcess:
    return warm_python.start(
        ["-m", "arealite.cli.serve", "device=cpu", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def stop(process: warm_python.WarmProcess) -> int:
    process.terminate()
    try:
        return process.wait(20)
    finally:
        process.kill()


@pytest.fixture(scope="module")
def server(model_path: Path) -> Iterator[Client]:
    process = start(f"model_path={model_path}", "max_total_tokens=4096", "block_size=4")
    line = process.stdout.readline()
    assert "http://" in line, process.stderr.read()
    yield Client(line.split()[-1], process)
    assert stop(process) == 0


def test_generate_uses_sglangs_field_names(server):
    output = server.generate([5, 6, 7], max_new_tokens=4, ignore_eos=True, sampling_seed=1)
    meta = output["meta_info"]
    assert len(output["output_ids"]) == meta["completion_tokens"] == 4
    assert [entry[1] for entry in meta["output_token_logprobs"]] == output["output_ids"]
    assert meta["finish_reason"] == {"type": "length", "length": 4}
    assert meta["prompt_tokens"] == 3
    version = server("/model_info")["weight_version"]
    assert meta["weight_versions"] == [{"version": version, "start": 0, "end": 4}]
    group = server.generate([5, 6, 7], max_new_tokens=4, n=3, ignore_eos=True, sampling_seed=1)
    assert group[0]["output_ids"] == output["output_ids"] and len(group) == 3
    info = server("/server_info")
    assert info["running"] == 0 and info["free_blocks"] == info["total_blocks"]


def test_flat_logprobs_are_the_same_numbers(server):
    body = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 4, "ignore_eos": True, "sampling_seed": 1}}
    entries, flat = (server("/generate", {**body, "flat_logprobs": is_flat}) for is_flat in (False, True))
    assert flat["output_ids"] == entries["output_ids"]
    expected = [entry[0] for entry in entries["meta_info"]["output_token_logprobs"]]
    assert flat["meta_info"]["output_logprobs"] == expected
    assert "output_token_logprobs" not in flat["meta_info"]
    refused = server("/generate", {**body, "flat_logprobs": True, "stream": True}, expect=400)
    assert "flat_logprobs works without stream only" in str(refused)


@pytest.fixture(scope="module")
def tokenizer(model_path):
    return AutoTokenizer.from_pretrained(model_path)


def test_text_and_streaming(server, tokenizer):
    params = {"max_new_tokens": 6, "temperature": 0, "ignore_eos": True}
    whole = server("/generate", {"text": "abc", "sampling_params": params})
    assert whole["text"] == tokenizer.decode(whole["output_ids"])
    body = {"text": "abc", "sampling_params": params, "stream": True}
    status, raw = server.request("/generate", body)
    events = [line.removeprefix("data: ") for line in raw.decode().split("\n\n") if line]
    assert status == 200 and events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    assert [len(chunk["output_ids"]) for chunk in chunks] == [1, 2, 3, 4, 5, 6, 6]
    assert chunks[-1]["output_ids"] == whole["output_ids"] and chunks[-1]["text"] == whole["text"]
    assert chunks[-1]["meta_info"]["finish_reason"]["type"] == "length"


def test_openai_endpoints(server, tokenizer):
    (entry,) = server("/v1/models")["data"]
    assert entry["max_model_len"] == 512 and entry["created"] > 0
    assert server(f"/v1/models/{entry['id']}")["id"] == entry["id"]
    assert "is not served here" in server("/v1/models/gpt-4", expect=404)["message"]
    body = {"prompt": "abc", "max_tokens": 5, "temperature": 0, "logprobs": 0, "ignore_eos": True}
    choice = server("/v1/completions", {**body, "return_token_ids": True})["choices"][0]
    assert choice["text"] == tokenizer.decode(choice["token_ids"])
    assert len(choice["logprobs"]["token_logprobs"]) == 5
    several = server("/v1/completions", {"prompt": [[1, 2], [3]], "max_tokens": 2, "n": 2})
    assert [choice["index"] for choice in several["choices"]] == [0, 1, 2, 3]
    made = server("/server_info")["generated_tokens"]
    server("/v1/completions", {"prompt": [[1, 2], [99999]], "max_tokens": 400}, expect=400)
    server("/generate", {"input_ids": [1], "sampling_params": {"max_new_tokens": 1}})
    assert server("/server_info")["generated_tokens"] == made + 1  # the valid prompt was not run
    messages = [{"role": "user", "content": "hi"}]
    chat = server("/v1/chat/completions", {"messages": messages, "max_tokens": 3, "logprobs": True})
    assert chat["choices"][0]["message"]["role"] == "assistant"
    assert chat["usage"]["prompt_tokens"] == len(tokenizer.encode("<user>hi\n<assistant>"))
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    body = {"messages": [{"role": "user", "content": parts}], "max_tokens": 3, "temperature": 0}
    body |= {"return_token_ids": True, "logprobs": True}
    (choice,) = server("/v1/chat/completions", body)["choices"]
    assert choice["prompt_token_ids"] == tokenizer.encode("<user>hi\n<assistant>")
    entries = choice["logprobs"]["content"]
    assert "".join(entry["token"] for entry in entries) == choice["message"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in entries).decode() == choice["message"]["content"]
    assert all(entry["top_logprobs"] == [] for entry in entries)
    stream = {"messages": messages, "max_tokens": 3, "stream": True, "temperature": 0}
    status, raw = server.request("/v1/chat/completions", stream)
    assert status == 200 and raw.decode().rstrip().endswith("data: [DONE]")


def test_openai_stream_equals_the_whole_answer(server):
    body = {"messages": [{"role": "user", "content": "hi"}], "n": 2, "seed": 3, "max_tokens": 40}
    body |= {"logprobs": True, "tool_choice": "auto", "ignore_eos": True, "temperature": 2.0}
    body |= {"return_token_ids": True}
    text = server("/v1/chat/completions", body)["choices"][0]["message"]["content"]
    body["stop"] = [text[20:23], text[30:36]]
    whole = server("/v1/chat/completions", body)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    _, raw = server.request("/v1/chat/completions", body | options)
    events = [line.removeprefix("data: ") for line in raw.decode().split("\n\n") if line]
    *chunks, last = [json.loads(event) for event in events[:-1]]
    assert last["usage"] == whole["usage"] and last["choices"] == []
    for choice in whole["choices"]:
        pieces = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == choice["index"]]
        assert "".join(p["delta"].get("content", "") for p in pieces) == choice["message"]["content"]
        logprobs = [entry for p in pieces if p["logprobs"] for entry in p["logprobs"]["content"]]
        assert logprobs == choice["logprobs"]["content"]
        assert [id for p in pieces for id in p.get("token_ids", ())] == choice["token_ids"]
        assert pieces[-1]["prompt_token_ids"] == choice["prompt_token_ids"]
        assert pieces[-1]["finish_reason"] == choice["finish_reason"]


BAD = [
    ("/generate", b"{not json", "valid JSON"),
    ("/generate", b"[1]", "object"),
    ("/generate", b"{}", "text or input_ids"),
    ("/generate", b'{"input_ids": [1], "text": "a"}', "text or input_ids"),
    ("/generate", b'{"input_ids": "abc"}', "token ids"),
    ("/generate", b'{"input_ids": [999999]}', "vocabulary"),
    ("/generate", b"[" * 100_000, "valid JSON"),
    ("/generate", b'{"input_ids": [1], "sampling_params": {"n": 1000000000}}', "n must be"),
    ("/generate", b'{"input_ids": [1], "sampling_params": {"temperature": 1' + b"0" * 400 + b"}}", "too large"),
    ("/generate", b'{"input_ids": [1], "sampling_params": {"logit_bias": {"1": 1' + b"0" * 400 + b"}}}", "logit_bias"),
    ("/generate", b'{"input_ids": [1], "sampling_params": {"top_k": 1' + b"0" * 400 + b"}}", "top_k must be"),
    ("/abort_request", b'{"rid": ["x"]}', "rid must be a string"),
    ("/generate", b'{"input_ids": [99999999999999]}', "vocabulary"),
    ("/generate", b'{"input_ids": []}', "empty"),
    ("/generate", json.dumps({"input_ids": [1] * 600}).encode(), "600 tokens"),
    ("/generate", b'{"input_ids": [1], "sampling_params": {"temperature": "hot"}}', "temperature"),
    ("/generate", b'{"input_ids": [1], "sampling_params": {"top_p": 7}}', "top_p"),
    ("/generate", b'{"input_ids": [1], "sampling_params": {"temperature": NaN}}', "temperature"),
    ("/generate", b'{"input_ids": [1], "sampling_params": {"tempreature": 1}}', "tempreature"),
    ("/generate", b'{"input_ids": [1], "sampling_params": 3}', "sampling_params"),
    ("/generate", b'{"input_ids": [1], "image_data": "x"}', "image"),
    ("/generate", b'{"input_ids": [1], "stream": true, "sampling_params": {"n": -1}}', "n must"),
    ("/pause_generation", b'{"mode": "sideways"}', "sideways"),
    ("/abort_request", b"{}", "rid"),
    ("/abort_request", b'{"abort_all": "false"}', "abort_all must be true or false"),
    ("/update_weights_from_disk", b'{"model_path": "/", "flush_cache": "no"}', "flush_cache must"),
    ("/generate", b'{"input_ids": [1], "sampling_params": {"logit_bias": {"1_0": 1}}}', "'1_0'"),
    ("/generate", b'{"input_ids": [1], "sampling_params": {"logit_bias": {"1": true}}}', "True"),
    ("/update_weights_from_disk", b"{}", "model_path"),
    ("/update_weights_from_disk", b'{"model_path": "/nowhere"}', "not a folder"),
    ("/update_weights_from_shm", b'{"path": "/nowhere"}', "/nowhere"),
    ("/update_weights_from_disk", b'{"model_path": "/", "weight_version": "x"}', "weight_version"),
    ("/generate", b'{"text": "\\ud800"}', "Unicode"),
    ("/generate", b'{"input_ids": [true]}', "token ids"),
    ("/generate", b'{"input_ids": [1], "stream": "no"}', "stream must be"),
    ("/generate", b'{"input_ids": [1], "sampling_params": []}', "sampling_params"),
    ("/generate", b'{"input_ids": [1], "sampling_params": {"logit_bias": {"1": 1e300}}}', "1e+300"),
    ("/generate", json.dumps({"text": "a", "sampling_params": {"stop": ["x"] * 9999}}).encode(), "256"),
    ("/update_weights_from_disk", json.dumps({"model_path": "x" * 9999}).encode(), "cannot read"),
    ("/update_weights_from_disk", b'{"model_path": "/", "weight_version": -1}', "weight_version"),
    ("/update_weights_from_disk", b'{"model_path": "/", "weight_version": 1.5}', "weight_version"),
    (
        "/init_weights_update_group",
        b'{"master_address": "localhost", "master_port": 99999, "rank_offset": 1, "world_size": 2, "group_name": "g"}',
        "port 99999",
    ),
    (
        "/init_weights_update_group",
        b'{"master_address": "x", "master_port": 1e999, "rank_offset": 1, "world_size": 2, "group_name": "g"}',
        "infinity",
    ),
    ("/v1/chat/completions", b'{"messages": [{"role": "user"}], "top_logprobs": 5}', "top_logprobs"),
    (
        "/v1/chat/completions",
        b'{"messages": [{"role": "user"}], "chat_template_kwargs": {"return_tensors": "pt"}}',
        "chat_template_kwargs",
    ),
    ("/v1/completions", b'{"prompt": "a", "echo": true, "logprobs": 1}', "echo"),
    ("/v1/completions", b'{"prompt": "a", "logprobs": 21}', "between 0 and 20"),
    ("/v1/chat/completions", b'{"messages": [{"role": "user"}], "logprobs": "yes"}', "'yes'"),
    ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": 7}]}', "content"),
    (
        "/v1/chat/completions",
        b'{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]}',
        "image",
    ),
    ("/v1/completions", b'{"prompt": 3}', "prompt"),
    ("/v1/chat/completions", b'{"messages": []}', "messages"),
    ("/v1/chat/completions", b'{"messages": [3]}', "list of objects"),
]


@pytest.mark.parametrize(("path", "raw", "message"), BAD)
def test_invalid_input_gets_a_status_and_a_message(path, raw, message, server):
    status, answer = server.request(path, raw=raw)
    assert status == 400 and message in json.loads(answer)["error"]["message"]
    assert server("/health") == {"status": "ok"}


def test_unknown_paths_and_methods(server):
    assert server.request("/nope")[0] == 404
    assert server.request("/generate")[0] == 405


def test_weight_updates_from_disk_and_shared_memory(server, model_path, tmp_path):
    weights = load_file(model_path / "model.safetensors")
    before = server.generate([1, 2, 3], max_new_tokens=8, temperature=0, ignore_eos=True)
    old = server("/weights_checker")["fingerprint"]
    torch.manual_seed(0)  # with some other seeds a token repeats itself before and after
    changed = {name: tensor + torch.randn_like(tensor) for name, tensor in weights.items()}

    for invalid, message in (
        ({k: v for k, v in changed.items() if "layers.1.mlp.up" not in k}, "lacks"),
        (changed | {"surplus": torch.zeros(1)}, "unknown"),
        (changed | {"model.norm.weight": torch.zeros(3)}, "shape"),
        (changed | {"model.norm.weight": torch.zeros(32, dtype=torch.int64)}, "int64"),
        (changed | {"model.norm.weight": torch.full([32], torch.nan)}, "norm.weight holds NaN"),
        (changed | {"model.norm.weight": torch.full([32], -torch.inf)}, "infinity"),
        (changed | {"model.norm.weight": torch.full([32], 1e300, dtype=torch.float64)}, "more than torch.float32"),
        (changed | {"lm_head.weight": torch.zeros(3)}, "it is tied"),
    ):
        folder = tmp_path / message
        folder.mkdir()
        save_file(invalid, folder / "model.safetensors")
        body = {"model_path": str(folder), "weight_version": "9"}
        assert message in server("/update_weights_from_disk", body, expect=400)["message"]
    assert server("/weights_checker")["fingerprint"] == old

    tied = changed["model.embed_tokens.weight"].clone()
    save_file(changed | {"lm_head.weight": tied}, tmp_path / "model.safetensors")
    index = tmp_path / "model.safetensors.index.json"  # left over from an earlier save in several files
    index.write_text('{"weight_map": {"model.norm.weight": "gone.safetensors"}}')
    body = {"model_path": str(tmp_path), "weight_version": "7"}
    assert server("/update_weights_from_disk", body)["success"]
    assert server("/model_info")["weight_version"] == "7"
    after = server.generate([1, 2, 3], max_new_tokens=8, temperature=0, ignore_eos=True)
    assert after["output_ids"] != before["output_ids"]
    assert after["meta_info"]["weight_version"] == "7"

    shared = SharedWeights.create(tmp_path / "shm", weights)
    for name, tensor in weights.items():
        shared.tensors[name].copy_(tensor)
    body = {"path": str(shared.path), "weight_version": "8"}
    assert server("/update_weights_from_shm", body)["success"]
    again = server.generate([1, 2, 3], max_new_tokens=8, temperature=0, ignore_eos=True)
    assert again["output_ids"] == before["output_ids"]
    assert server("/weights_checker") == {"fingerprint": old, "weight_version": "8"}


def test_token_versions_across_an_update_in_place(server, model_path):
    results = []
    body = {"input_ids": [4, 5], "sampling_params": {"max_new_tokens": 500, "ignore_eos": True}}
    thread = threading.Thread(target=lambda: results.append(server("/generate", body)))
    thread.start()
    while server("/server_info")["running"] == 0:
        pass
    assert server("/pause_generation", {"mode": "in_place"})["num_paused_requests"] == 1
    update = {"model_path": str(model_path), "weight_version": "21", "flush_cache": True}
    server("/update_weights_from_disk", update)
    server("/continue_generation", {})
    thread.join(TIMEOUT_S)
    spans = results[0]["meta_info"]["weight_versions"]
    assert spans[-1]["version"] == "21" and spans[-1]["end"] == 500 and len(spans) == 2
    assert spans[0]["start"] == 0 and spans[0]["end"] == spans[1]["start"]


def test_disconnect_aborts_the_request(server):
    host, port = server.url.removeprefix("http://").split(":")
    body = json.dumps({"input_ids": [1], "sampling_params": {"max_new_tokens": 510, "n": 64}})
    with socket.create_connection((host, int(port)), timeout=10) as client:
        head = "POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(body)}\r\n\r\n"
        client.sendall((head + body).encode())
        while server("/server_info")["running"] == 0:
            pass
        made = server("/server_info")["generated_tokens"]
    while server("/server_info")["running"]:
        pass
    assert server("/server_info")["generated_tokens"] - made < 64 * 510
    assert server("/health_generate") == {"status": "ok"}


def test_server_out_of_file_descriptors_logs_once_and_recovers(model_path):
    process = start(f"model_path={model_path}", "max_total_tokens=256")
    client = Client(process.stdout.readline().split()[-1], process)
    limit = len(os.listdir(f"/proc/{process.pid}/fd")) + 4
    resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (limit, limit))
    host, port = client.url.removeprefix("http://").split(":")
    connections = [socket.create_connection((host, int(port)), timeout=10) for _ in range(9)]
    line = process.stderr.readline()
    assert "cannot accept connections" in line and str(limit) in line
    time.sleep(2.2)  # two more attempts of the event loop
    for connection in connections:
        connection.close()
    assert client("/health") == {"status": "ok"}
    assert stop(process) == 0
    assert process.stderr.read() == ""


def test_bearer_token(model_path):
    process = start(f"model_path={model_path}", "max_total_tokens=256", "api_key=secret")
    client = Client(process.stdout.readline().split()[-1], process)
    try:
        assert client.request("/health")[0] == 200
        assert client.request("/model_info")[0] == 401
        assert client.request("/model_info", token="wrong")[0] == 401
        assert client.request("/model_info", token="secret")[0] == 200
    finally:
        assert stop(process) == 0


def test_server_ends_while_it_waits_for_a_process_group(model_path):
    process = start(f"model_path={model_path}", "max_total_tokens=256")
    client = Client(process.stdout.readline().split()[-1], process)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(TIMEOUT_S)
        body = {"master_address": "127.0.0.1", "master_port": silent.getsockname()[1], "group_name": "g"}
        body |= {"rank_offset": 1, "world_size": 2}

        def join() -> None:
            with contextlib.suppress(OSError):
                client.request("/init_weights_update_group", body)

        joining = threading.Thread(target=join)
        joining.start()
        connection, _ = silent.accept()
        process.terminate()
        try:
            assert process.wait(10) == 0
        finally:
            process.kill()
            connection.close()
        joining.join(TIMEOUT_S)


def test_memory_endpoints(server):
    server("/release_memory_occupation", {})
    server("/resume_memory_occupation", {})
    assert len(server.generate([1, 2], max_new_tokens=3, ignore_eos=True)["output_ids"]) == 3
