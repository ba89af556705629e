"""The fleet with real servers that fail, hang, recover, join, leave or hold wrong weights."""

import asyncio
import re
import signal
import time
from contextlib import closing

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from arealite.api.cli_args import GenerationHyperparameters, InferenceEngineConfig
from arealite.api.errors import RequestError, ServerError, WaitTimeout, WeightUpdateError
from arealite.api.io_struct import ModelRequest, WeightUpdateMeta
from arealite.core.ledger.reading import open_ledger, read_events, read_servers
from arealite.core.waits import NamedWait
from arealite.engine.remote.fleet import Fleet
from arealite.engine.remote.progress import Piece
from arealite.engine.sglang_remote import RemoteSGLangEngine
from arealite.utils.names import elastic_names
from arealite.utils.network import free_port
from arealite.utils.rundir import RunDir
from arealite.weights.fingerprint import fingerprint, fingerprints, first_mismatch
from tests.server_process import server_process

TOKENS = 150


@pytest.fixture(scope="module")
def steady_process(model_path):
    with server_process(model_path, deterministic="true") as server:
        yield server


@pytest.fixture
def steady(steady_process, model_path):
    """A server that outlives the tests, with the weights it started with."""
    path = {"model_path": str(model_path), "weight_version": "0"}
    steady_process.post("update_weights_from_disk", **path, reset_version=True)
    return steady_process


@pytest.fixture
def connect(tmp_path):
    engines = []

    def make(*servers, **config):
        options = {"setup_timeout_s": 30.0, "request_timeout_s": 60.0, "health_timeout_s": 3.0}
        config = InferenceEngineConfig(**{**options, **config})
        engine = RemoteSGLangEngine(config, ledger_path=tmp_path / "run" / "run.sqlite")
        engine.initialize([s.address for s in servers])
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.destroy()


def run(engine, coroutine, timeout_s=60):
    return engine.executor.run_coroutine(coroutine, NamedWait("the test", "an answer", timeout_s))


def background(engine, coroutine):
    return asyncio.run_coroutine_threadsafe(coroutine, engine.executor.runner.loop)


def request(seed, max_new_tokens=TOKENS):
    gconfig = GenerationHyperparameters(max_new_tokens=max_new_tokens, ignore_eos=True)
    return ModelRequest(list(range(5, 15)), gconfig, seed=seed)


def until(condition, timeout_s=60.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.02)


def is_open(engine, server):
    known = engine.router.servers.get(server.address)
    return known is not None and known.is_open


def other_weights(model_path, folder, seed=9):
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter), alpha=0.5)
    model.save_pretrained(folder)
    return str(folder)


def test_a_restarted_server_gets_the_current_weights_before_its_first_request(model_path, tmp_path, connect, steady):
    port = free_port()
    weights = other_weights(model_path, tmp_path / "other")
    with server_process(model_path, port=port, deterministic="true") as first:
        engine = connect(steady, first)
        engine.update_weights(WeightUpdateMeta("disk", weights, 1))
        expected = [run(engine, engine.agenerate(request(i))).output_tokens for i in range(2)]
        futures = [background(engine, engine.agenerate(request(i % 2))) for i in range(8)]
        until(lambda: first.get("server_info")["running"] > 0)
        first.signal(signal.SIGKILL)
        # nothing is lost, nothing is doubled
        assert [f.result(60).output_tokens for f in futures] == expected * 4
    with server_process(model_path, port=port, deterministic="true") as second:
        until(lambda: is_open(engine, second))
        assert second.get("model_info")["weight_version"] == "1"
        assert second.get("weights_checker") == steady.get("weights_checker")


def test_a_server_joins_and_leaves_and_its_requests_continue(model_path, tmp_path, connect, steady):
    weights = other_weights(model_path, tmp_path / "other")
    engine = connect(steady)
    engine.update_weights(WeightUpdateMeta("disk", weights, 1))
    expected = run(engine, engine.agenerate(request(3))).output_tokens
    folders = f"[{tmp_path}]"
    with server_process(model_path, deterministic="true", join=tmp_path / "run", weight_folders=folders) as guest:
        until(lambda: is_open(engine, guest))
        assert guest.get("model_info")["weight_version"] == "1"
        futures = [background(engine, engine.agenerate(request(3))) for _ in range(6)]
        until(lambda: guest.get("server_info")["running"] > 0)
        guest.signal(signal.SIGTERM)
        answers = [f.result(60) for f in futures]
        assert all(a.output_tokens == expected for a in answers)
        # what was stopped came back with its tokens and went on: that is an interruption, not a new start
        assert any(a.num_interruptions for a in answers)
        until(lambda: guest.address not in engine.router.servers)
    engine.update_weights(WeightUpdateMeta("disk", weights, 2))
    assert set(run(engine, engine.agenerate(request(3))).output_versions) == {2}


def test_a_server_with_another_model_is_refused_and_the_job_continues(model_path, tmp_path, connect, steady, capfd):
    other = Qwen2Config.from_pretrained(model_path)
    other.vocab_size += 64
    Qwen2ForCausalLM(other).save_pretrained(tmp_path / "larger")
    engine = connect(steady)
    engine.update_weights(WeightUpdateMeta("disk", str(model_path), 1))
    with server_process(tmp_path / "larger", join=tmp_path / "run", weight_folders=f"[{model_path}]") as guest:
        said = []
        until(lambda: said.append(capfd.readouterr().out) or "no requests" in "".join(said))
        words = rf"warning: {guest.address} gets no requests.*model.embed_tokens.weight has shape"
        assert re.search(words, "".join(said))
        assert not is_open(engine, guest)
        assert len(run(engine, engine.agenerate(request(1))).output_tokens) == TOKENS


def test_a_server_whose_lease_expires_stays_while_it_answers(model_path, tmp_path, connect, steady):
    """The holder of a lease may be suspended (Ctrl+Z), or a clock may jump: the server has not left."""
    engine = connect(steady)
    with server_process(model_path, deterministic="true") as guest:
        leases = elastic_names(RunDir(tmp_path / "run"))
        leases.publish(f"server/{guest.address}", guest.address)
        until(lambda: is_open(engine, guest))
        leases.close()
        living, looks = engine.fleet.members.living, []
        engine.fleet.members.living = lambda: looks.append(living()) or looks[-1]
        until(lambda: len(looks) > 2)
        assert looks[0] == set() and is_open(engine, guest)
    until(lambda: guest.address not in engine.router.servers)


def test_a_hanging_server_loses_its_requests_and_recovers_later(model_path, connect, steady):
    with server_process(model_path, deterministic="true") as one:
        engine = connect(one, steady, health_timeout_s=1.5)
        futures = [background(engine, engine.agenerate(request(i))) for i in range(4)]
        until(lambda: one.get("server_info")["running"] > 0)
        one.signal(signal.SIGSTOP)
        assert all(len(f.result(60).output_tokens) == TOKENS for f in futures)
        assert not is_open(engine, one)
        one.signal(signal.SIGCONT)
        until(lambda: is_open(engine, one))
        assert len(run(engine, engine.agenerate(request(9))).output_tokens) == TOKENS
        samples = {sample.address: sample for sample in run(engine, engine.take_samples())}
        assert samples[steady.address].kv_used is not None and samples[steady.address].generated_tokens > 0
        engine.destroy()
        with closing(open_ledger(engine.ledger_path)) as db:
            events = [(event["level"], event["text"]) for event in read_events(db)]
            assert {server["address"] for server in read_servers(db)} == set(samples)
        assert any(level == "warning" and "is lost" in text for level, text in events)
        assert any(level == "info" and "is open with version" in text for level, text in events)


@pytest.mark.timeout(120)
def test_rollout_workers_mirror_lost_servers_and_versions():
    """Workers check no health themselves: they mirror the trainer's fleet."""

    async def both_sides():
        owner, worker = (Fleet(InferenceEngineConfig(), Silent()) for _ in range(2))  # pyright: ignore
        for address in ("a:1", "b:1"):
            owner.router.open(owner.router.add(address))
        owner.router.servers["a:1"].version = 7  # in the middle of an update
        worker.mirror(owner.state())
        versions = {s.address: s.version for s in worker.router.servers.values()}
        hanging = worker.router.servers["b:1"]

        async def ask():
            with hanging.track_request():
                await asyncio.Event().wait()

        task = asyncio.create_task(ask())
        await asyncio.sleep(0)
        owner.lose(owner.router.servers["b:1"], ServerError("silent"))
        worker.mirror(owner.state())
        with pytest.raises(ServerError, match="was lost before it answered"):
            await asyncio.wait_for(task, 10)
        owner.router.open(owner.router.servers["b:1"])
        worker.mirror(owner.state())
        await owner.close()
        return versions, hanging.is_open and not hanging.is_lost

    assert asyncio.run(both_sides()) == ({"a:1": 7, "b:1": 0}, True)


class Silent:
    """A client that reaches no server."""

    async def probe(self, server):
        raise ServerError("silent")


def test_the_deadline_of_a_request_is_for_all_attempts(model_path, connect, steady):
    engine = connect(steady, request_timeout_s=1.0, health_timeout_s=60.0)

    async def no_answer(server, progress, count):
        await asyncio.Event().wait()

    engine.client.generate = no_answer
    with pytest.raises(WaitTimeout, match=r"rollout.request_timeout_s.*\n.*\n.*very slow"):
        run(engine, engine.agenerate(request(1)))


def test_a_server_of_another_run_is_noticed(model_path, connect, steady):
    assert not connect(steady).has_other_weights()
    steady.post("update_weights_from_disk", model_path=str(model_path), weight_version="20")
    assert connect(steady).has_other_weights()


def test_an_update_does_not_wait_for_a_server_that_hangs(model_path, connect, steady):
    with server_process(model_path, deterministic="true") as one:
        engine = connect(one, steady, health_timeout_s=1.5, setup_timeout_s=600.0)
        one.signal(signal.SIGSTOP)
        engine.update_weights(WeightUpdateMeta("disk", str(model_path), 1))
        assert not is_open(engine, one) and is_open(engine, steady)
        one.signal(signal.SIGCONT)
        until(lambda: is_open(engine, one))
        assert one.get("model_info")["weight_version"] == "1"


def test_segments_make_the_same_tokens_as_one_piece(model_path, connect, steady):
    whole = connect(steady)
    pieces = connect(steady, segment_tokens=16)
    a = run(whole, whole.agenerate(request(3)))
    b = run(pieces, pieces.agenerate(request(3)))
    assert a.output_tokens == b.output_tokens and b.stop_reason == "length" and b.num_interruptions == 0
    assert torch.allclose(torch.tensor(a.output_logprobs), torch.tensor(b.output_logprobs), atol=1e-4)
    # weights that are not what was published stop the run and are named
    folder = model_path
    torn = Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    torn.model.layers[1].mlp.up_proj.weight.data[3] += 1
    held = fingerprints(torn.named_parameters())
    whole.client.fingerprints = lambda server: asyncio.sleep(0, held)
    with pytest.raises(WeightUpdateError, match=r"tensor model.layers.1.mlp.up_proj.weight differs"):
        whole.update_weights(WeightUpdateMeta("disk", str(folder), 1))


def test_an_answer_ends_where_the_context_does(model_path, connect):
    """A continuation of a prompt that fills the context would be refused."""
    with server_process(model_path, context_length="32") as server:
        engine = connect(server, segment_tokens=8)
        gconfig = GenerationHyperparameters(n_samples=3, max_new_tokens=TOKENS, ignore_eos=True)
        for length in (3, 8):  # 8: a segment ends where the context does
            prompt = ModelRequest(list(range(5, 5 + length)), gconfig, seed=1)
            answers = run(engine, engine.agenerate_group(prompt))
            answers.append(run(engine, engine.agenerate(prompt)))
            assert [len(answer.output_tokens) for answer in answers] == [32 - length] * 4
            assert all(answer.stop_reason == "length" for answer in answers)
        too_long = ModelRequest([5] * 32, gconfig, seed=1)
        with pytest.raises(RequestError, match="32 tokens"):
            run(engine, engine.agenerate(too_long))


def test_fingerprints_see_type_shape_and_place():
    a = torch.arange(10000, dtype=torch.float32).view(100, 100)
    assert fingerprint(a) == fingerprint(a.clone()) != fingerprint(a.view(10, 1000))
    assert fingerprint(a.bfloat16()) == fingerprint(a, torch.bfloat16) != fingerprint(a)
    torn = a.clone()
    torn[50:] = 0
    held = fingerprints({"good": a, "torn": torn}.items())
    assert first_mismatch({"good": a, "torn": a, "unknown": a}, held) == "torn"
    assert first_mismatch({"good": a}, held) is None


def test_requests_of_a_session_go_to_the_same_server(monkeypatch):
    engine = RemoteSGLangEngine(InferenceEngineConfig())
    used = {"a": set(), "b": set(), None: set()}

    async def generate(server, progress, count):
        used[progress.request.metadata.get("session")].add(server.address)
        await asyncio.sleep(0)
        return [Piece([1], [0.0], [0], "stop")]

    async def scenario():
        for address in ("one:1", "two:1", "three:1"):
            engine.router.open(engine.router.add(address))
        for _ in range(10):
            sessions = [{"session": "a"}, {}, {"session": "b"}, {}]
            await asyncio.gather(*(engine.agenerate(ModelRequest([1], metadata=own)) for own in sessions))

    monkeypatch.setattr(engine, "_generate", generate)
    asyncio.run(asyncio.wait_for(scenario(), 30))
    assert len(used["a"]) == len(used["b"]) == 1 and len(used[None]) > 1
