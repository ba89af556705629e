"""The engine in process: a training loop, interruption, weights from disk and memory."""

import asyncio
from concurrent.futures import Future
from contextlib import closing
from dataclasses import replace

import pytest
import torch
from transformers import Qwen2ForCausalLM

from arealite.api.cli_args import GenerationHyperparameters, InferenceEngineConfig, ServerConfig
from arealite.api.errors import RequestError, ServerError, WaitTimeout, WeightUpdateError
from arealite.api.io_struct import ModelRequest, WeightUpdateMeta
from arealite.core.ledger.reading import open_ledger, read_events, read_rollout, read_servers
from arealite.core.waits import NamedWait
from arealite.engine.embedded import EmbeddedEngine
from arealite.engine.remote.base import Piece
from arealite.engine.remote.progress import Progress
from arealite.trainer.trace import Trace
from arealite.utils.trace.episode_clock import EpisodeClock, use_clock
from arealite.utils.trace.trace_file import read_trace
from arealite.weights.process_group import fill_outbox
from arealite.workflow.rlvr import RLVRWorkflow


@pytest.fixture
def make(model_path):
    made = []

    def build(batch_size=4, context_length=None, ledger_path=None, **config):
        server = ServerConfig(
            model_path=str(model_path),
            context_length=context_length,
            device="cpu",
            dtype="float32",
            max_total_tokens=8192,
            deterministic=True,
        )
        engine = EmbeddedEngine(InferenceEngineConfig(batch_timeout_s=60, **config), server, 1, ledger_path)
        engine.initialize(train_batch_size=batch_size)
        made.append(engine)
        return engine

    yield build
    for engine in made:
        engine.destroy()


def run(engine, coroutine):
    return engine.executor.run_coroutine(coroutine, NamedWait("the test", "an answer", 60))


def test_tokens_are_told_while_they_are_generated(make):
    engine, told = make(), []
    gconfig = GenerationHyperparameters(max_new_tokens=6, ignore_eos=True)
    asking = ModelRequest([1, 2, 3], gconfig, on_tokens=lambda *news: told.append(news))
    response = run(engine, engine.agenerate(asking))
    pairs = zip(response.output_tokens, response.output_logprobs, strict=True)
    assert told == [(0, i, [token], [pytest.approx(value)]) for i, (token, value) in enumerate(pairs)]


def length(completion, **data):
    return float(len(completion))


@pytest.mark.parametrize("mode", ["abort", "in_place"])
def test_a_loop_without_any_server(make, model_path, tokenizer, mode):
    engine = make(max_head_offpolicyness=1, pause_mode=mode)
    gconfig = GenerationHyperparameters(n_samples=2, max_new_tokens=16)
    workflow = RLVRWorkflow(length, gconfig, tokenizer, reward_inline=True)
    data = [[{"prompt": f"say {i}"} for i in range(j, j + 4)] for j in range(0, 16, 4)]
    for version in range(4):
        batch = engine.prepare_batch(data, workflow)
        assert version - batch["versions"][batch["versions"] >= 0].min() <= 1
        engine.update_weights(WeightUpdateMeta("disk", str(model_path), version + 1))
    engine.executor.staleness.counts.check()
    assert engine.stats()["trained"] == 16 and engine.stats()["failed"] == 0


def test_a_group_equals_single_requests_and_new_weights_are_used(make, model_path):
    engine = make()
    gconfig = GenerationHyperparameters(n_samples=3, max_new_tokens=12, ignore_eos=True)
    prompt = list(range(5, 12))
    group = run(engine, engine.agenerate_group(ModelRequest(prompt, gconfig, seed=4)))
    for i, sample in enumerate(group):
        single = run(engine, engine.agenerate(ModelRequest(prompt, gconfig, seed=4 + i)))
        assert single.output_tokens == sample.output_tokens
    model = Qwen2ForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    for parameter in model.parameters():
        parameter.data.mul_(-1.5)
    fill_outbox("embedded", model.named_parameters())
    engine.update_weights(WeightUpdateMeta("broadcast", "embedded", 1))
    after = run(engine, engine.agenerate(ModelRequest(prompt, gconfig, seed=4)))
    assert after.output_tokens != group[0].output_tokens and set(after.output_versions) == {1}


def test_episodes_know_the_tokens_of_their_answers(make):
    engine, gconfig = make(), GenerationHyperparameters(n_samples=3, max_new_tokens=12, ignore_eos=True)

    async def episode():
        clock = EpisodeClock()
        use_clock(clock)
        await engine.agenerate_group(ModelRequest([5, 6, 7], gconfig, seed=4))
        await engine.agenerate(ModelRequest([5, 6, 7], replace(gconfig, max_new_tokens=7), seed=4))
        return clock.stop()

    parts = run(engine, episode())
    assert [tokens for part in parts if part.kind == "generate" for tokens in part.answers] == [12, 12, 12, 7]


def test_an_answer_ends_where_the_context_does(make):
    engine = make(context_length=32)
    gconfig = GenerationHyperparameters(n_samples=2, max_new_tokens=100, ignore_eos=True)
    request = ModelRequest([5, 6, 7], gconfig, seed=1)
    answers = run(engine, engine.agenerate_group(request))
    answers.append(run(engine, engine.agenerate(request)))
    assert {(len(a.output_tokens), a.stop_reason) for a in answers} == {(29, "length")}
    with pytest.raises(RequestError, match="32 tokens"):
        run(engine, engine.agenerate(ModelRequest([5] * 32, gconfig, seed=1)))


def test_non_finite_weights_are_reported(make, model_path):
    engine = make()
    model = Qwen2ForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    model.model.norm.weight.data.fill_(float("nan"))
    fill_outbox("broken", model.named_parameters())
    with pytest.raises(WeightUpdateError, match=r"norm\.weight holds NaN"):
        engine.update_weights(WeightUpdateMeta("broadcast", "broken", 1))
    engine.engine.model.model.norm.weight.fill_(float("nan"))
    gconfig = GenerationHyperparameters(max_new_tokens=8)
    with pytest.raises(ServerError, match="gave up on a request"):
        run(engine, engine.agenerate(ModelRequest([5, 6], gconfig)))


def test_a_stop_string_is_found_wherever_an_interruption_falls(make, tokenizer, monkeypatch):
    engine = make()
    prompt = tokenizer.encode("say 1")
    plain = GenerationHyperparameters(max_new_tokens=40, temperature=0.0, ignore_eos=True)
    free = run(engine, engine.agenerate(ModelRequest(prompt, plain))).output_tokens
    stop = tokenizer.decode(free[20:26])
    gconfig = replace(plain, stop=[stop])
    whole = run(engine, engine.agenerate(ModelRequest(prompt, gconfig)))
    assert whole.stop_reason == "stop" and len(whole.output_tokens) <= 26
    ask, cut_at = engine.ask, [0]

    async def interrupted(progress, count):
        (piece,) = await ask(progress, count)
        if progress.num_sends > 1:
            return [piece]
        parts = (piece.tokens, piece.logprobs, piece.versions)
        return [Piece(*(part[: cut_at[0]] for part in parts), "abort")]

    monkeypatch.setattr(engine, "ask", interrupted)
    for cut_at[0] in range(len(whole.output_tokens)):
        again = run(engine, engine.agenerate(ModelRequest(prompt, gconfig)))
        assert again.output_tokens == whole.output_tokens, f"interrupted after {cut_at[0]} tokens"
        assert again.num_interruptions == 1 and len(again.output_logprobs) == len(again.output_tokens)


def test_an_interruption_inside_a_character_of_a_stop_string_drops_its_bytes():
    """Byte-level vocabularies have up to three tokens for a dash: the next piece must bring all of them again."""
    for stop, kept in (("\u2014", 6), ("\u00e9\u2014", 4), ("#", 8)):
        progress = Progress(ModelRequest([1], GenerationHyperparameters(max_new_tokens=20, stop=[stop])), None)
        progress.add(Piece(list(range(8)), [0.0] * 8, [0] * 8, "abort"))
        assert progress.tokens == list(range(kept)), stop


@pytest.mark.parametrize("mode", [pytest.param("abort", marks=pytest.mark.slow), "in_place"])
def test_penalties_see_the_whole_answer_over_updates(make, model_path, mode):
    """Requests in flight continue inside the engine, which knows their tokens."""
    engine = make(pause_mode=mode)
    gconfig = GenerationHyperparameters(max_new_tokens=60, temperature=0.0, ignore_eos=True, frequency_penalty=1000.0)
    asked = engine.agenerate(ModelRequest([5, 6, 7], gconfig))
    future = asyncio.run_coroutine_threadsafe(asked, engine.executor.runner.loop)
    version = 0
    while not future.done():
        version += 1
        engine.update_weights(WeightUpdateMeta("disk", str(model_path), version))
    answer = future.result(0)
    assert len(set(answer.output_versions)) > 1, "no update met it"
    assert len(set(answer.output_tokens)) == 60 and answer.num_interruptions == 0


def test_an_update_that_takes_too_long_is_a_named_timeout(make, model_path, monkeypatch):
    engine = make(setup_timeout_s=0.05)
    monkeypatch.setattr(engine.engine, "update", lambda *_: Future())
    with pytest.raises(WaitTimeout, match=r"rollout.setup_timeout_s\) for version 1"):
        engine.update_weights(WeightUpdateMeta("disk", str(model_path), 1))


def test_what_the_engine_does_is_recorded(make, tokenizer, tmp_path):
    engine = make(batch_size=2, ledger_path=tmp_path / "run.sqlite")
    workflow = RLVRWorkflow(length, GenerationHyperparameters(n_samples=2, max_new_tokens=4), tokenizer)
    batch = engine.prepare_batch([[{"prompt": "say 1"}, {"prompt": "say 2"}]], workflow)
    batch["advantages"] = torch.ones(batch["input_ids"].shape)
    engine.set_version(1)
    engine.record_event("alarm", "a text", level="alarm")
    engine.destroy()
    with closing(open_ledger(tmp_path / "run.sqlite")) as db:
        (server,) = read_servers(db)
        (event,) = read_events(db)
        detail = read_rollout(db, "stream", 1, 1)
    assert server["address"] == "embedded" and server["columns"]["kv_used"][0] == 0.0
    assert event["step"] == 1 and event["text"] == "a text"
    assert detail is not None and detail["token_columns"]["advantage"] == [1.0] * detail["tokens"]
    assert "".join(detail["token_columns"]["text"]) == detail["prompt"] + detail["completion"]


def test_a_trace_has_episodes_waits_and_weight_updates(make, model_path, tokenizer, tmp_path):
    trace = Trace(tmp_path / "trace.json")
    engine = make(batch_size=2, ledger_path=tmp_path / "run.sqlite")
    workflow = RLVRWorkflow(length, GenerationHyperparameters(n_samples=2, max_new_tokens=4), tokenizer)
    for version in range(2):
        with trace.phase("rollout"):
            engine.prepare_batch([[{"prompt": "say 1"}, {"prompt": "say 2"}]], workflow)
        engine.update_weights(WeightUpdateMeta("disk", str(model_path), version + 1))
    trace.close()
    lanes = {(lane.group, lane.name): [span[2] for span in lane.spans] for lane in read_trace(tmp_path / "trace.json")}
    assert "rollout" in lanes["trainer", "steps"] and "wait: batch" in lanes["trainer", "steps"]
    assert "wait: staleness limit" in lanes["trainer", "admission"]
    assert lanes["weights", "embedded"] == ["load v1", "load v2"] and lanes["server", "embedded"]
    # With no staleness allowed an episode of the first batch is the first in its lane.
    assert lanes["rollout", "episodes 00"][:3] == ["episode 0", "generate", "reward"]
