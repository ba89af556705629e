"""Older and newer versions of SGLang and vLLM, as stub servers: missing endpoints are worked around or named."""

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

from arealite.api.cli_args import GenerationHyperparameters, InferenceEngineConfig
from arealite.api.errors import ConfigError
from arealite.api.io_struct import ModelRequest, WeightUpdateMeta
from arealite.core.waits import NamedWait
from arealite.engine.remote.base import Piece, Progress
from arealite.engine.remote.server import Server
from arealite.engine.sglang_remote import RemoteSGLangEngine
from arealite.engine.vllm_remote import _BY_COMPLETIONS, RemotevLLMEngine
from arealite.weights.process_group import ProcessGroupTransport, fill_outbox

OLD_SGLANG = {
    **{"/health": {}, "/get_model_info": {"weight_version": "default"}, "/generate": {}},
    **{"/get_server_info": {"version": "0.5.17", "tp_size": 2, "device": "cuda", "dtype": "auto"}},
    **{"/pause_generation": {}, "/continue_generation": {}, "/update_weights_from_disk": {}},
    **{"/init_weights_update_group": {}, "/update_weights_from_distributed": {}},
}
OLD_VLLM = {
    **{"/health": {}, "/version": {"version": "0.24.0"}, "/pause": {}, "/resume": {}},
    **{"/v1/completions": {}, "/collective_rpc": {"results": ["cuda"]}},
}


class Stub:
    """A server with these endpoints only. `endpoints` maps a path to an answer or a function; records all requests."""

    def __init__(self, endpoints: dict[str, object]):
        self.asked: list[str] = []
        self.bodies: list[dict] = []
        answers = {**endpoints, "/openapi.json": {"paths": {path: {} for path in endpoints}}}
        stub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                path = self.path.split("?")[0]
                given = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                stub.asked.append(path)
                stub.bodies.append(json.loads(given or b"{}"))
                answer = answers.get(path, {"detail": "Not Found"})
                answer = answer(stub.bodies[-1]) if callable(answer) else answer
                body = json.dumps(answer).encode()
                self.send_response(200 if path in answers else 404)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_POST = do_GET

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def connect() -> Iterator[Callable]:
    made: list = []

    def make(cls: type, endpoints: dict[str, object], **config) -> tuple:
        stub = Stub(endpoints)
        engine = cls(InferenceEngineConfig(setup_timeout_s=20, **config))
        made.append((stub, engine))
        engine.initialize([stub.address], train_batch_size=1)
        return stub, engine, engine.router.servers[stub.address]

    yield make
    for stub, engine in made:
        engine.destroy()
        stub.server.shutdown()
        stub.server.server_close()


def test_older_sglang_is_asked_under_its_names(connect):
    stub, engine, server = connect(RemoteSGLangEngine, OLD_SGLANG)
    assert (server.info.kind, server.num_ranks, server.info.device) == ("sglang", 2, "cuda")
    assert "/model_info" in stub.asked and "/get_server_info" in stub.asked
    engine.update_weights(WeightUpdateMeta("disk", "/weights", 1))
    assert "/update_weights_from_disk" in stub.asked and "/begin_weight_update" not in stub.asked
    assert "/weights_checker" not in stub.asked


def test_older_vllm_is_asked_by_completions_and_cannot_take_a_broadcast(connect):
    stub, _, server = connect(RemotevLLMEngine, OLD_VLLM)
    assert (server.info.kind, server.info.device, server.version) == (_BY_COMPLETIONS, "cuda", 0)
    assert "/weight_info" not in stub.asked


@pytest.mark.parametrize(
    ("cls", "endpoints", "lacks", "message"),
    [
        (RemoteSGLangEngine, OLD_SGLANG, "/pause_generation", "SGLang 0.5.17, which lacks /pause"),
        (RemotevLLMEngine, OLD_VLLM, "/pause", "vLLM 0.24.0 without /pause: 0.24 or later"),
    ],
)
def test_a_version_that_cannot_be_used_is_named_at_once(connect, cls, endpoints, lacks, message):
    rest = {path: answer for path, answer in endpoints.items() if path != lacks}
    with pytest.raises(ConfigError, match=message):
        connect(cls, rest)


def test_pipeline_stages_of_sglang_load_from_disk_only(connect):
    info = {"/get_server_info": {"version": "0.5.17", "pp_size": 2}}
    with pytest.raises(ConfigError, match=r"2 pipeline stages.*set rollout.weight_update=disk"):
        connect(RemoteSGLangEngine, OLD_SGLANG | info, weight_update="broadcast")


def test_the_version_is_sent_with_the_last_portion(connect, monkeypatch):
    session = {"/begin_weight_update": {}, "/end_weight_update": {}}
    stub, engine, _ = connect(RemoteSGLangEngine, OLD_SGLANG | session)

    async def connected(*_) -> None:
        pass

    monkeypatch.setattr(ProcessGroupTransport, "connect", connected)
    monkeypatch.setattr("arealite.weights.process_group.PORTION_BYTES", 1)
    fill_outbox("halves", [("a", torch.zeros(2)), ("b", torch.zeros(3, dtype=torch.bfloat16))])
    del stub.asked[:], stub.bodies[:]
    engine.update_weights(WeightUpdateMeta("broadcast", "halves", 3))
    update = "/update_weights_from_distributed"
    sent = [body for path, body in zip(stub.asked, stub.bodies, strict=True) if path == update]
    assert [body["names"] for body in sent] == [["a"], ["b"]]
    assert [body.get("weight_version") for body in sent] == [None, "3"]
    order = [path for path in stub.asked if path not in ("/health", "/openapi.json")]
    begin, end = ["/pause_generation", "/begin_weight_update"], ["/end_weight_update", "/continue_generation"]
    assert order == [*begin, update, update, *end]


class Restarting:
    """What SGLang and vLLM answer; `version` is what they call the weights they hold."""

    version = "default"
    is_right = False

    def load(self, body: dict) -> dict:
        self.version = body.get("weight_version") or body["new_version"]
        return {"success": True}

    def info(self, body: dict) -> dict:
        return {"weight_version": self.version}

    def sglang(self, body: dict) -> dict:
        reason = {"type": "length"}
        return {"meta_info": self.info({}) | {"output_token_logprobs": [[-1.0, 7, None]], "finish_reason": reason}}

    def vllm(self, body: dict) -> dict:
        spans = [{"version": self.version, "start": 0, "end": 1}]
        choice = {"index": 0, "token_ids": [7], "finish_reason": "length", "weight_versions": spans}
        return {"choices": [choice | {"logprobs": {"content": [{"logprob": -1.0}]}}]}

    def worker(self, body: dict) -> dict:
        return {"results": ["cuda" if body["method"] == "arealite_device" else None]}


@pytest.mark.parametrize("cls", [RemoteSGLangEngine, RemotevLLMEngine])
def test_a_server_restarted_between_two_requests_is_noticed(connect, cls):
    it = Restarting()
    if cls is RemoteSGLangEngine:
        does = {"/get_model_info": it.info, "/generate": it.sglang}
        endpoints = {**OLD_SGLANG, **does, "/update_weights_from_disk": it.load}
    else:
        does = {"/weight_info": it.info, "/inference/v1/generate": it.vllm}
        endpoints = {**OLD_VLLM, **does, "/collective_rpc": it.worker, "/update_weight_version": it.load}  # fmt: skip
    _, engine, server = connect(cls, endpoints)
    request = ModelRequest([1, 2], GenerationHyperparameters(max_new_tokens=1))
    wait = NamedWait("the test", "an answer", 20)
    engine.update_weights(WeightUpdateMeta("disk", "/weights", 3))
    first = engine.executor.run_coroutine(engine.agenerate(request), wait)
    it.version = "default"
    second = engine.executor.run_coroutine(engine.agenerate(request), wait)
    assert first.output_versions == second.output_versions == [3]
    assert (it.version, server.version) == ("3", 3), "it was not given the weights again"


def test_an_adapter_that_a_server_has_lost_is_loaded_again(connect):
    it, known = Restarting(), []

    def load(body: dict) -> dict:
        known.append(body["lora_name"])
        return {"success": True}

    def generate(body: dict) -> dict:
        if body["lora_path"] in known:
            return it.sglang(body)
        refusal = {"type": "abort", "status_code": 400, "message": f"no LoRA {body['lora_path']}"}
        return {"meta_info": {"output_token_logprobs": [], "finish_reason": refusal}}

    does = {"/get_model_info": it.info, "/generate": generate, "/load_lora_adapter": load}
    _, engine, _ = connect(RemoteSGLangEngine, {**OLD_SGLANG, **does, "/update_weight_version": it.load})  # fmt: skip
    engine.update_weights(WeightUpdateMeta("disk", "/adapter", 3, is_adapter=True))
    known.clear()
    it.version = "default"
    request = ModelRequest([1, 2], GenerationHyperparameters(max_new_tokens=1))
    wait = NamedWait("the test", "an answer", 20)
    assert engine.executor.run_coroutine(engine.agenerate(request), wait).output_versions == [3]
    assert known == ["v3"]


@pytest.mark.parametrize("cls", [RemoteSGLangEngine, RemotevLLMEngine])
def test_an_adapter_that_a_server_does_not_unload_costs_nothing_else(connect, caplog, cls):
    it, asked = Restarting(), []

    def unload(body: dict) -> dict:
        asked.append(body["lora_name"])
        return {"success": False, "error_message": "it is busy"}

    if cls is RemoteSGLangEngine:
        does = {"/get_model_info": it.info, "/generate": it.sglang, "/load_lora_adapter": {"success": True}}
        endpoints = {**OLD_SGLANG, **does, "/update_weight_version": it.load, "/unload_lora_adapter": unload}
    else:
        # Without the endpoint it answers 404.
        does = {"/weight_info": it.info, "/inference/v1/generate": it.vllm, "/v1/load_lora_adapter": {}}
        endpoints = {**OLD_VLLM, **does, "/collective_rpc": it.worker, "/update_weight_version": it.load}
    _, engine, server = connect(cls, endpoints)
    for version in (3, 4):
        engine.update_weights(WeightUpdateMeta("disk", "/adapter", version, is_adapter=True))
    assert (server.adapter, server.version, it.version, server.is_open) == ("v4", 4, "4", True)
    assert "keeps the adapter v3 in its memory: " in caplog.text
    assert asked == (["v3"] if cls is RemoteSGLangEngine else [])


@pytest.mark.parametrize("cls", [RemoteSGLangEngine, RemotevLLMEngine])
def test_requests_name_the_adapter_of_a_server_that_left_and_joins_again(connect, cls):
    """Its version is the current one, but without the name of the adapter it would generate with the base model."""
    it, named = Restarting(), []

    def generate(body: dict) -> dict:
        named.append(body.get("lora_path") or body.get("model"))
        return it.sglang(body) if cls is RemoteSGLangEngine else it.vllm(body)

    if cls is RemoteSGLangEngine:
        does = {"/get_model_info": it.info, "/generate": generate, "/load_lora_adapter": {"success": True}}
        endpoints = {**OLD_SGLANG, **does, "/update_weight_version": it.load}
    else:
        does = {"/weight_info": it.info, "/inference/v1/generate": generate, "/v1/load_lora_adapter": {}}
        endpoints = {**OLD_VLLM, **does, "/collective_rpc": it.worker, "/update_weight_version": it.load}
    _, engine, server = connect(cls, endpoints)
    engine.update_weights(WeightUpdateMeta("disk", "/adapter", 3, is_adapter=True))

    async def leave_and_join() -> list[int]:
        engine.fleet._remove(server)
        engine.fleet._add(server.address)
        request = ModelRequest([1, 2], GenerationHyperparameters(max_new_tokens=1))
        return (await engine.agenerate(request)).output_versions

    assert engine.executor.run_coroutine(leave_and_join(), NamedWait("the test", "an answer", 20)) == [3]
    assert named == ["v3"]


@pytest.mark.parametrize("cls", [RemoteSGLangEngine, RemotevLLMEngine])
def test_a_version_that_is_trained_again_does_not_use_the_prefixes_of_the_first_one(connect, cls):
    """A run that goes back to a checkpoint, or resumes on the same servers, has other weights of the same version."""
    it, keys = Restarting(), list[str]()

    def generate(body: dict) -> dict:
        keys.append(body.get("extra_key") or body["cache_salt"])
        return it.sglang(body) if cls is RemoteSGLangEngine else it.vllm(body)

    if cls is RemoteSGLangEngine:
        does = {"/get_model_info": it.info, "/generate": generate}
        endpoints = {**OLD_SGLANG, **does, "/update_weights_from_disk": it.load}
    else:
        does = {"/weight_info": it.info, "/inference/v1/generate": generate, "/collective_rpc": it.worker}
        endpoints = {**OLD_VLLM, **does, "/update_weight_version": it.load}
    _, engine, server = connect(cls, endpoints, pause_mode="in_place")
    request = ModelRequest([1, 2], GenerationHyperparameters(max_new_tokens=1))
    for version in (1, 1, 2, 1):
        if len(keys) != 1:
            engine.update_weights(WeightUpdateMeta("disk", "/weights", version))
        engine.executor.run_coroutine(engine.agenerate(request), NamedWait("the test", "an answer", 20))
    assert keys[0] == keys[1], "the same weights have the same prefixes"
    assert len(set(keys)) == 3
    worker = Server(server.address)
    assert Server(server.address).cache_key != worker.cache_key, "another process has loaded other weights"


@pytest.mark.parametrize(("mode", "version"), [("abort", 2), ("in_place", 1)])
def test_tokens_of_a_request_in_flight_during_an_update_count_as_old(connect, mode, version):
    """An older SGLang reports the last version only. After an update in place, earlier tokens may be older."""
    it = Restarting()

    def generate(body: dict) -> dict:
        # An update begins.
        it.version, engine.fleet.updater.version = "2", 2
        return it.sglang(body)

    does = {"/get_model_info": it.info, "/generate": generate, "/update_weights_from_disk": it.load}
    _, engine, _ = connect(RemoteSGLangEngine, OLD_SGLANG | does, pause_mode=mode)
    engine.update_weights(WeightUpdateMeta("disk", "/weights", 1))
    request = ModelRequest([1, 2], GenerationHyperparameters(max_new_tokens=1))
    wait = NamedWait("the test", "an answer", 20)
    answer = engine.executor.run_coroutine(engine.agenerate(request), wait)
    assert answer.output_versions == [version]


def test_an_empty_piece_drops_no_token():
    """With stop strings an interruption drops the last tokens; without a new token it drops none."""
    gconfig = GenerationHyperparameters(max_new_tokens=50, stop=["12345"])
    progress = Progress(ModelRequest([1], gconfig), seed=1)
    ten = [7] * 10
    progress.add(Piece(ten, [-1.0] * 10, [0] * 10, "abort"))
    assert len(progress.tokens) == 6
    for number in (0, 2):
        progress.add(Piece(ten[:number], [-1.0] * number, [0] * number, "abort"))
        assert len(progress.tokens) == len(progress.logprobs) == len(progress.versions) == 6


def test_samples_that_vllm_has_not_started_keep_their_index_and_seed(connect):
    """A sample that was aborted before its first token has no entry; the others keep their indices."""

    def generate(body: dict) -> dict:
        params = body["sampling_params"]
        tokens = [params["seed"]] * (2 if params["n"] > 1 else params["max_tokens"])
        reason = "abort" if params["n"] > 1 else "length"
        entry = {"token_ids": tokens, "logprobs": {"content": [{"logprob": -1.0}] * len(tokens)}}
        if params["n"] == 1:
            return {"choices": [{"index": 0, "finish_reason": reason, **entry}]}
        return {"choices": [{"index": i, "finish_reason": reason, **entry} for i in (2, 0)]}

    stub, engine, _ = connect(RemotevLLMEngine, {**OLD_VLLM, "/inference/v1/generate": generate})
    request = ModelRequest([1], GenerationHyperparameters(n_samples=3, max_new_tokens=4), seed=50)
    wait = NamedWait("the test", "an answer", 20)
    answers = engine.executor.run_coroutine(engine.agenerate_group(request), wait)
    assert [len(answer.output_tokens) for answer in answers] == [4, 4, 4]
    sent = [(len(b["token_ids"]), b["sampling_params"]["seed"]) for b in stub.bodies if "token_ids" in b]
    assert len(sent) == 4 and sent[0] == (1, 50), sent
    assert (1, 51) in sent[1:], f"the second sample was not begun anew with its own seed: {sent}"


def test_version_spans_that_do_not_match_the_tokens_are_an_error(connect):
    it = Restarting()

    def generate(body: dict) -> dict:
        answer = it.vllm(body)
        if not it.is_right:
            answer["choices"][0]["weight_versions"][0]["end"], it.is_right = 3, True
        return answer

    does = {"/weight_info": {"weight_version": "0"}, "/inference/v1/generate": generate}
    _, engine, server = connect(RemotevLLMEngine, {**OLD_VLLM, **does})
    it.version = "0"
    request = ModelRequest([1, 2], GenerationHyperparameters(max_new_tokens=1))
    wait = NamedWait("the test", "an answer", 20)
    answer = engine.executor.run_coroutine(engine.agenerate(request), wait)
    assert answer.output_versions == [0] and "weight_versions" in server.last_error
