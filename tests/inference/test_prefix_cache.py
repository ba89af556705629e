"""The prefix cache across turns of sessions and across weight updates."""

import random

import pytest
import torch

from arealite.inference.cpu.runner import CpuRunner
from arealite.inference.weights import WeightSource
from tests.inference.conftest import forward_logprobs, make_model, run, submit, submit_and_see_start

TURNS = 6


def tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(96) for _ in range(count)]


@pytest.mark.parametrize("num_samples", [1, 2])
def test_sessions_of_six_turns_reuse_what_was_computed(make_engine, num_samples):
    """Each turn continues the tokens of the last one: at least 90% of what can be reused is."""
    model = make_model()
    engine = make_engine(model, block_size=16, max_total_tokens=8192)
    rng = random.Random(0)
    histories = [tokens(rng, rng.randint(50, 70)) for _ in range(8)]
    computed = [0] * len(histories)
    repeatable, hits, asked = 0, 0, 0
    for _ in range(TURNS):
        futures = [submit(engine, h, n=num_samples, max_new_tokens=15, ignore_eos=True) for h in histories]
        for index, future in enumerate(futures):
            outputs, history = future.result(60), histories[index]
            repeatable += computed[index] + (num_samples - 1) * (len(history) - 1)
            hits += sum(output.cached_tokens for output in outputs)
            asked += num_samples * len(history)
            expected = forward_logprobs(model, history, outputs[-1].token_ids)
            torch.testing.assert_close(torch.tensor(outputs[-1].logprobs), expected, atol=1e-4, rtol=0)
            history = history + outputs[-1].token_ids
            # The last sampled token has no keys and values yet.
            computed[index] = len(history) - 1
            histories[index] = history + tokens(rng, rng.randint(8, 16))
    assert hits >= 0.9 * repeatable
    stats = engine.stats()
    assert (stats["prompt_tokens"], stats["cached_tokens"]) == (asked, hits)
    assert stats["prefix_hit_rate"] == pytest.approx(hits / asked)


def test_the_session_that_waited_longest_is_evicted_first(make_engine):
    engine = make_engine(make_model(), block_size=16, max_total_tokens=192)
    rng = random.Random(1)
    old, recent, new = (tokens(rng, 81) for _ in range(3))
    for prompt in (old, recent, old, recent, new):
        run(engine, prompt, max_new_tokens=1)
    # Three sessions of five full blocks do not fit into 12 blocks.
    assert run(engine, recent, max_new_tokens=1)[0].cached_tokens == 80
    assert run(engine, old, max_new_tokens=1)[0].cached_tokens < 80


@pytest.mark.parametrize("flush", [True, False], ids=["abort", "in_place"])
def test_new_requests_use_no_keys_of_older_weights(make_engine, flush):
    engine, other = make_engine(make_model()), make_model(seed=1)
    rng = random.Random(2)
    prompt, greedy = tokens(rng, 80), {"temperature": 0.0, "max_new_tokens": 10, "ignore_eos": True}
    (first,) = run(engine, prompt, **greedy)
    engine.update(WeightSource.received(dict(other.named_parameters()), 1), flush_cache=flush).result(30)
    history = prompt + first.token_ids + tokens(rng, 5)
    (second,) = run(engine, history, **greedy)
    assert second.cached_tokens == 0
    expected = forward_logprobs(other, history, second.token_ids)
    torch.testing.assert_close(torch.tensor(second.logprobs), expected, atol=1e-4, rtol=0)


def test_requests_in_flight_keep_their_keys_but_do_not_share_them(make_engine):
    engine, other = make_engine(make_model()), make_model(seed=1)
    prompt = tokens(random.Random(3), 60)
    engine.pause("in_place").result(10)
    running = submit(engine, prompt, n=2, max_new_tokens=20, ignore_eos=True)
    engine.resume().result(10)
    engine.update(WeightSource.received(dict(other.named_parameters()), 1), flush_cache=False).result(30)
    assert all(len(output.token_ids) == 20 for output in running.result(30))
    (late,) = run(engine, prompt, temperature=0.0, max_new_tokens=4, ignore_eos=True)
    expected = forward_logprobs(other, prompt, late.token_ids)
    torch.testing.assert_close(torch.tensor(late.logprobs), expected, atol=1e-4, rtol=0)
    stats = engine.stats()
    assert stats["free_blocks"] == stats["total_blocks"]


@pytest.mark.parametrize("flush", [True, False], ids=["abort", "in_place"])
def test_prefixes_are_kept_across_updates_on_request(make_engine, flush):
    engine, other = make_engine(make_model(), keep_prefix_across_updates=True), make_model(seed=1)
    prompt = tokens(random.Random(4), 81)
    run(engine, prompt, max_new_tokens=1)
    engine.update(WeightSource.received(dict(other.named_parameters()), 1), flush_cache=flush).result(30)
    assert run(engine, prompt, max_new_tokens=1)[0].cached_tokens == 80
    assert engine.flush_cache().result(10)
    assert run(engine, prompt, max_new_tokens=1)[0].cached_tokens == 0


def test_retracted_samples_share_their_prompt_again(make_engine, monkeypatch):
    engine, other = make_engine(make_model()), make_model(seed=1)
    prompt, num_samples = tokens(random.Random(6), 81), 8
    running = submit_and_see_start(engine, prompt, n=num_samples, max_new_tokens=300, ignore_eos=True)
    chunks, prefill = [], CpuRunner._prefill
    monkeypatch.setattr(CpuRunner, "_prefill", lambda runner, new: (chunks.extend(new), prefill(runner, new))[1])
    engine.update(WeightSource.received(dict(other.named_parameters()), 1), flush_cache=True).result(30)
    outputs = running.result(60)
    starts = [next(start for version, start, _ in output.version_spans if version == 1) for output in outputs]
    assert min(starts) > 0
    # All blocks of the prompt are full: only what was sampled is computed for each sample.
    assert sum(chunk.end - chunk.start for chunk in chunks) <= 80 + sum(starts)
    for first, output in zip(starts, outputs, strict=True):
        expected = forward_logprobs(other, prompt, output.token_ids)[first:]
        torch.testing.assert_close(torch.tensor(output.logprobs[first:]), expected, atol=1e-3, rtol=0)


def test_retracted_sequences_compute_all_keys_again(make_engine):
    engine, other = make_engine(make_model(), keep_prefix_across_updates=True), make_model(seed=1)
    prompt = tokens(random.Random(5), 81)
    run(engine, prompt, max_new_tokens=1)
    running = submit_and_see_start(engine, prompt, max_new_tokens=300, ignore_eos=True)
    engine.update(WeightSource.received(dict(other.named_parameters()), 1), flush_cache=True).result(30)
    (output,) = running.result(60)
    first = next(start for version, start, _ in output.version_spans if version == 1)
    assert first > 0
    expected = forward_logprobs(other, prompt, output.token_ids)[first:]
    torch.testing.assert_close(torch.tensor(output.logprobs[first:]), expected, atol=1e-3, rtol=0)
