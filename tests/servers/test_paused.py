"""SGLang and vLLM that are paused for long, or that a killed trainer has left paused, as stub servers.

SGLang's health check generates a token, so a paused SGLang does not answer it (and after 20 s says that it is ill).
"""

import threading

import pytest

from arealite.api.cli_args import GenerationHyperparameters
from arealite.api.errors import ServerError
from arealite.api.io_struct import ModelRequest
from arealite.core.waits import NamedWait
from arealite.engine.sglang_remote import RemoteSGLangEngine
from arealite.engine.vllm_remote import RemotevLLMEngine
from tests.servers.test_versions import OLD_SGLANG, OLD_VLLM, Restarting, connect  # noqa: F401


class Pausable(Restarting):
    """A server that generates only while it `runs`."""

    def __init__(self) -> None:
        self.runs = threading.Event()
        self.runs.set()
        self.checks = threading.Semaphore(0)

    def pause(self, body: dict) -> dict:
        self.runs.clear()
        return {}

    def resume(self, body: dict) -> dict:
        self.runs.set()
        return {}

    def health(self, body: dict) -> dict:
        assert self.runs.wait(20), "a paused server generates nothing"
        return {}

    def info(self, body: dict) -> dict:
        self.checks.release()
        return super().info(body)

    def sglang(self, body: dict) -> dict:
        return self.health(body) or super().sglang(body)

    def vllm(self, body: dict) -> dict:
        return self.health(body) or super().vllm(body)

    def endpoints(self, cls: type) -> dict[str, object]:
        if cls is RemotevLLMEngine:
            does = {"/weight_info": self.info, "/inference/v1/generate": self.vllm, "/collective_rpc": self.worker}
            return OLD_VLLM | does | {"/pause": self.pause, "/resume": self.resume}
        memory = {"/release_memory_occupation": {}, "/resume_memory_occupation": {}}
        does = {"/health": self.health, "/get_model_info": self.info, "/generate": self.sglang}
        does |= {"/pause_generation": self.pause, "/continue_generation": self.resume}
        return OLD_SGLANG | memory | does


def ask(engine) -> list[int]:
    request = ModelRequest([1, 2], GenerationHyperparameters(max_new_tokens=1))
    return engine.executor.run_coroutine(
        engine.agenerate(request), NamedWait("the test", "an answer", 20)
    ).output_tokens


@pytest.mark.parametrize("cls", [RemoteSGLangEngine, RemotevLLMEngine])
def test_a_server_that_a_killed_trainer_left_paused_generates_again(connect, monkeypatch, cls):  # noqa: F811
    monkeypatch.setattr("arealite.engine.sglang_remote.PROBE_TIMEOUT_S", 0.5)
    it = Pausable()
    it.pause({})
    _, engine, _ = connect(cls, it.endpoints(cls), request_timeout_s=10)
    assert ask(engine) == [7]


def test_a_vllm_that_a_killed_trainer_left_asleep_generates_again(connect):  # noqa: F811
    it = Pausable()
    it.pause({})
    sleeps = {"/is_sleeping": lambda body: {"is_sleeping": not it.runs.is_set()}, "/wake_up": it.resume}
    endpoints = it.endpoints(RemotevLLMEngine) | sleeps | {"/resume": {}}
    _, engine, _ = connect(RemotevLLMEngine, endpoints, request_timeout_s=10)
    assert ask(engine) == [7]


def test_sglang_is_told_to_free_and_allocate_its_cache_only_once(connect, monkeypatch):  # noqa: F811
    """Its scheduler would end with an error."""
    monkeypatch.setattr("arealite.engine.sglang_remote.PROBE_TIMEOUT_S", 0.5)
    it, calls = Pausable(), []
    ways = ("release", "resume")
    memory = {f"/{way}_memory_occupation": lambda body, way=way: calls.append(way) or {} for way in ways}
    _, engine, server = connect(RemoteSGLangEngine, it.endpoints(RemoteSGLangEngine) | memory)
    engine.offload()
    engine.offload()
    loop = engine.executor.runner.loop
    loop.call_soon_threadsafe(engine.fleet.suspect, server, ServerError("x"))
    engine.onload()
    assert ask(engine) == [7] and calls == ["release", "resume"]


def test_a_paused_sglang_is_not_given_up(connect):  # noqa: F811
    it = Pausable()
    _, engine, server = connect(RemoteSGLangEngine, it.endpoints(RemoteSGLangEngine), health_timeout_s=0.5)
    engine.offload()
    while it.checks.acquire(blocking=False):
        pass
    for _ in range(4):
        assert it.checks.acquire(timeout=20), "its health is not checked"
    assert not server.num_failures and not server.is_lost
    engine.onload()
    assert ask(engine) == [7]
