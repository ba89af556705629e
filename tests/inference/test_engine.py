"""Tests of the engine: tokens and log-probs against Hugging Face, pauses, aborts, preemption, failures."""

from __future__ import annotations

import gc
import itertools
import sys
import threading
from pathlib import Path

import pytest
import torch

from arealite.api.errors import RequestError, ServerError, WeightUpdateError
from arealite.api.io_struct import WeightUpdateMeta
from arealite.inference.sequence import Request, SamplingParams
from arealite.inference.weights import WeightSource
from tests.inference.conftest import (
    FAMILIES,
    assert_greedy,
    forward_logprobs,
    generate,
    make_model,
    prompts,
    run,
    submit,
    submit_and_see_start,
)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_generate_and_logprobs_equal_a_forward_pass(family, make_engine):
    model = make_model(family)
    engine = make_engine(model, max_prefill_tokens=16)
    asked = prompts(12)
    futures = [
        submit(engine, p, temperature=0.0, max_new_tokens=20, ignore_eos=i % 2 == 0) for i, p in enumerate(asked)
    ]
    for i, (prompt, future) in enumerate(zip(asked, futures, strict=True)):
        (output,) = future.result(30)
        eos = None if i % 2 == 0 else 96
        assert_greedy(model, prompt, output.token_ids, 20, eos)
        if i < 2:
            assert output.token_ids == generate(model, prompt, 20, eos)
        logprobs = forward_logprobs(model, prompt, output.token_ids)
        torch.testing.assert_close(torch.tensor(output.logprobs), logprobs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", ["qwen2", "qwen2-window"])
def test_sampled_logprobs_are_those_of_the_tempered_distribution(family, make_engine):
    model = make_model(family)
    engine = make_engine(model)
    for prompt in prompts(4, low=3):
        for output in run(engine, prompt, n=3, temperature=0.7, top_p=0.9, max_new_tokens=30):
            expected = forward_logprobs(model, prompt, output.token_ids, 0.7)
            torch.testing.assert_close(torch.tensor(output.logprobs), expected, atol=1e-4, rtol=0)


def test_raw_logprobs_on_request(make_engine):
    model = make_model()
    engine = make_engine(model)
    params = SamplingParams(temperature=0.5, repetition_penalty=1.3, max_new_tokens=10)
    (output,) = engine.submit(Request([1, 2, 3], params, want_raw_logprobs=True)).result(30)
    expected = forward_logprobs(model, [1, 2, 3], output.token_ids)
    torch.testing.assert_close(torch.tensor(output.raw_logprobs), expected, atol=1e-4, rtol=0)


def test_group_computes_its_prompt_once(make_engine):
    model = make_model()
    engine = make_engine(model)
    prompt = prompts(1, low=22, high=23)[0]
    outputs = run(engine, prompt, n=8, max_new_tokens=6, ignore_eos=True)
    assert len({tuple(output.token_ids) for output in outputs}) > 1
    assert [output.cached_tokens for output in outputs] == [0] + [21] * 7
    for output in outputs:
        expected = forward_logprobs(model, prompt, output.token_ids)
        torch.testing.assert_close(torch.tensor(output.logprobs), expected, atol=1e-4, rtol=0)


def test_next_turn_reuses_blocks_of_previous_turn(make_engine):
    model = make_model()
    engine = make_engine(model)
    prompt = prompts(1, low=10, high=11)[0]
    (first,) = run(engine, prompt, temperature=0.0, max_new_tokens=15, ignore_eos=True)
    longer = prompt + first.token_ids + [5, 6, 7]
    (second,) = run(engine, longer, temperature=0.0, max_new_tokens=5, ignore_eos=True)
    assert second.cached_tokens == 24  # of 10 + 15 tokens 24 have KV, six full blocks of 4
    assert second.token_ids == generate(model, longer, 5, None)


def test_prompts_with_a_common_prefix_run_in_one_step(make_engine):
    model = make_model()
    engine = make_engine(model)
    (prompt,) = prompts(1, low=70, high=71)
    asked = [prompt, [*prompt[:60], 5, 6], [*prompt[:62], 1, 2, 3], [*prompt[:60], 7]]
    engine.pause("in_place").result(10)
    futures = [submit(engine, p, temperature=0.0, max_new_tokens=8, ignore_eos=True) for p in asked]
    engine.resume().result(10)
    outputs = [future.result(30)[0] for future in futures]
    assert [output.cached_tokens for output in outputs] == [0, 60, 60, 60]
    for prompt, output in zip(asked, outputs, strict=True):
        expected = forward_logprobs(model, prompt, output.token_ids)
        torch.testing.assert_close(torch.tensor(output.logprobs), expected, atol=1e-4, rtol=0)


def test_preemption_does_not_change_tokens(make_engine):
    model = make_model()
    asked = prompts(10, low=4, high=12)
    roomy = make_engine(model)
    tight = make_engine(model, max_total_tokens=100)
    results = []
    for engine in (roomy, tight):
        futures = [
            submit(engine, p, max_new_tokens=40, ignore_eos=True, sampling_seed=i, n=2) for i, p in enumerate(asked)
        ]
        results.append([[o.token_ids for o in f.result(60)] for f in futures])
    assert tight.stats()["preemptions"] > 0
    assert results[0] == results[1]
    assert tight.stats()["free_blocks"] == tight.stats()["total_blocks"]


def test_samples_depend_only_on_seed_and_position(make_engine):
    engine = make_engine(make_model())
    prompt = prompts(1, low=9, high=10)[0]
    alone = run(engine, prompt, max_new_tokens=20, sampling_seed=7, ignore_eos=True)[0].token_ids
    crowd = [submit(engine, p, max_new_tokens=30) for p in prompts(20, seed=3)]
    again = run(engine, prompt, max_new_tokens=20, sampling_seed=7, ignore_eos=True)[0].token_ids
    continued = run(engine, prompt + alone[:8], max_new_tokens=12, sampling_seed=7, ignore_eos=True)[0].token_ids
    grouped = run(engine, prompt, max_new_tokens=20, sampling_seed=6, n=2, ignore_eos=True)
    other = run(engine, prompt, max_new_tokens=20, sampling_seed=8, ignore_eos=True)[0].token_ids
    [future.result(30) for future in crowd]
    assert alone == again == alone[:8] + continued == grouped[1].token_ids
    assert other != alone


def test_deterministic_mode_does_not_depend_on_the_batch(make_engine):
    model = make_model()
    results = []
    for num_others in (0, 9):
        engine = make_engine(model, deterministic=True, max_total_tokens=160)
        others = [submit(engine, p, max_new_tokens=25) for p in prompts(num_others, seed=5)]
        (output,) = run(engine, [3, 1, 4, 1, 5], max_new_tokens=25, sampling_seed=1, ignore_eos=True)
        [future.result(60) for future in others]
        results.append((output.token_ids, output.logprobs))
    assert results[0] == results[1]


def test_stop_token_stop_string_length_and_minimum(make_engine, tokenizer):
    model = make_model()
    engine = make_engine(model, tokenizer)
    greedy = {"temperature": 0.0, "ignore_eos": True}
    (whole,) = run(engine, [9, 8], max_new_tokens=12, **greedy)
    assert whole.finish_reason == {"type": "length", "length": 12}
    stop_id = whole.token_ids[4]
    first = whole.token_ids.index(stop_id)
    (stopped,) = run(engine, [9, 8], max_new_tokens=12, stop_token_ids=[stop_id], **greedy)
    assert stopped.finish_reason == {"type": "stop", "matched": stop_id}
    assert stopped.token_ids == whole.token_ids[: first + 1]
    (late,) = run(engine, [9, 8], max_new_tokens=12, min_new_tokens=12, stop_token_ids=[stop_id], **greedy)
    assert len(late.token_ids) == 12 and stop_id not in late.token_ids
    text = tokenizer.decode(whole.token_ids)
    word = text[3:5]
    (by_text,) = run(engine, [9, 8], max_new_tokens=12, stop=[word], **greedy)
    assert by_text.finish_reason == {"type": "stop", "matched": word}
    assert by_text.text == text[: text.index(word)]


def test_eos_ids_outside_the_vocabulary_are_ignored(make_engine):
    model = make_model()
    model.generation_config.eos_token_id = [96, 500, -1]
    engine = make_engine(model)
    assert engine.shape.eos_ids == (96,)
    (output,) = run(engine, [1, 2, 3], max_new_tokens=6, min_new_tokens=6)
    assert len(output.token_ids) == 6 and 96 not in output.token_ids


def test_abort_returns_partial_outputs_and_frees_blocks(make_engine):
    engine = make_engine(make_model(), context_length=250)
    endless = {"max_new_tokens": 200, "ignore_eos": True}
    kept = submit(engine, [1, 2], rid="kept", **endless)
    ended = submit(engine, [1, 2, 3], rid="ended", n=2, **endless)
    assert engine.abort("ended").result(10) == 1
    for output in ended.result(10):
        assert output.finish_reason["type"] == "abort"
        assert len(output.token_ids) == len(output.logprobs) < 200
    assert engine.abort("unknown").result(10) == 0
    assert len(kept.result(30)[0].token_ids) == 200
    assert engine.stats()["free_blocks"] == engine.stats()["total_blocks"]


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_pause_and_resume_do_not_change_tokens(mode, make_engine):
    engine = make_engine(make_model())
    expected = run(engine, [5, 4, 3], max_new_tokens=240, sampling_seed=3, ignore_eos=True)
    future = submit_and_see_start(engine, [5, 4, 3], max_new_tokens=240, sampling_seed=3, ignore_eos=True)
    assert engine.pause(mode).result(10) == 1
    late = submit(engine, [1], max_new_tokens=2)
    assert not future.done() and not late.done()
    engine.resume().result(10)
    assert future.result(30)[0].token_ids == expected[0].token_ids
    assert late.result(30)[0].token_ids


def test_pause_by_abort_ends_running_requests_and_queues_new_ones(make_engine):
    engine = make_engine(make_model())
    future = submit_and_see_start(engine, [5, 4, 3], max_new_tokens=200, sampling_seed=3, ignore_eos=True)
    engine.pause("abort").result(10)
    (part,) = future.result(10)
    assert part.finish_reason["type"] == "abort"
    late = submit(engine, [1], max_new_tokens=2)
    assert engine.stats()["free_blocks"] == engine.stats()["total_blocks"]
    assert not late.done()
    engine.resume().result(10)
    assert late.result(10)


def test_broken_sequence_does_not_affect_shared_blocks(make_engine, monkeypatch):
    monkeypatch.setattr(SamplingParams, "check", lambda *_: None)  # so that forbidding all tokens breaks a sequence
    model = make_model()
    engine = make_engine(model)
    (prompt,) = prompts(1, low=70, high=71)
    greedy = {"temperature": 0.0, "ignore_eos": True}
    forbid_all = {"max_new_tokens": 4, "logit_bias": dict.fromkeys(range(97), -torch.inf)}
    running = submit_and_see_start(engine, prompt, max_new_tokens=150, **greedy)
    for output in run(engine, prompt, n=3, **forbid_all):
        assert output.finish_reason["status_code"] == 500
    (again,) = run(engine, prompt, max_new_tokens=20, **greedy)
    expected = running.result(60)[0].token_ids
    assert_greedy(model, prompt, expected, 150, None)
    assert again.token_ids == expected[:20]
    run(engine, [1, 2, 3, 4], **forbid_all)  # its only block is full when it fails
    (after,) = run(engine, [1, 2, 3, 4, 5], max_new_tokens=20, **greedy)
    assert after.cached_tokens == 0
    assert after.token_ids == generate(model, [1, 2, 3, 4, 5], 20, None)
    pool = engine.scheduler.pool
    assert pool.num_free == pool.num_usable and not pool.spoilt


def test_blocks_with_nan_are_zeroed_before_reuse(make_engine):
    model = make_model()
    engine = make_engine(model, max_total_tokens=160)
    for parameter in engine.model.parameters():
        parameter.fill_(torch.nan)
    asked = prompts(6, low=20, high=30)
    for future in [submit(engine, p, n=2, max_new_tokens=4) for p in [*asked, *asked]]:
        assert all("status_code" in output.finish_reason for output in future.result(30))
    good = dict(model.named_parameters())
    engine.update(WeightSource.received(good, 2), flush_cache=False).result(30)
    greedy = {"temperature": 0.0, "max_new_tokens": 12, "ignore_eos": True}
    for prompt, future in [(p, submit(engine, p, **greedy)) for p in asked]:
        assert future.result(30)[0].token_ids == generate(model, prompt, 12, None)


def test_invalid_requests_are_rejected(make_engine):
    engine = make_engine(make_model())
    bad = [
        ([], {}),
        ([97], {}),
        ([-1], {}),
        ([1] * 256, {}),
        ([1], {"temperature": -1.0}),
        ([1], {"temperature": float("nan")}),
        ([1], {"temperature": 1e-40}),  # logits divided by it would overflow
        ([1], {"top_p": 0.0}),
        ([1], {"n": 0}),
        ([1], {"n": 10**6}),
        ([1], {"max_new_tokens": 0}),
        ([1], {"max_new_tokens": 10**400}),
        ([1], {"top_k": 10**400}),
        ([1], {"top_p": float("inf")}),
        ([1], {"logit_bias": {500: 1.0}}),
        ([1], {"stop_token_ids": [97]}),
        ([1], {"stop": ["x"]}),  # no tokenizer
        ([1], {"sampling_seed": 2**70}),
    ]
    for prompt, params in bad:
        with pytest.raises(RequestError):
            submit(engine, prompt, **params)
    future = submit(engine, [1], rid="same", max_new_tokens=100)
    with pytest.raises(RequestError, match="in use"):
        submit(engine, [1], rid="same").result(10)
    future.result(10)
    assert len(run(engine, [1] * 255, max_new_tokens=50)[0].token_ids) == 1  # cut at the context


@pytest.mark.parametrize("content", [b"", b"root:x:0:0:root:/root:/bin/bash\n" * 9, b"\2" + b"\0" * 7 + b"[]"])
def test_file_without_shared_weights_is_rejected(content, make_engine, tmp_path):
    engine = make_engine(make_model())
    (tmp_path / "segment").write_bytes(content)
    with pytest.raises(WeightUpdateError, match="does not hold shared weights"):
        engine.update(WeightSource.published(WeightUpdateMeta("shm", str(tmp_path / "segment"), 1)))
    assert run(engine, [1], max_new_tokens=2)[0].version_spans == [(0, 0, 2)]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_cancelled_request_with_a_used_id_does_not_fail_the_loop(make_engine):
    engine = make_engine(make_model())
    go_on = threading.Event()
    held = engine._call(lambda: go_on.wait(30))
    first = submit(engine, [1, 2], rid="same", max_new_tokens=4, ignore_eos=True)
    second = submit(engine, [1, 2], rid="same", max_new_tokens=4)
    assert second.cancel()
    go_on.set()
    assert held.result(30) and len(first.result(30)[0].token_ids) == 4
    assert len(run(engine, [3], max_new_tokens=4, ignore_eos=True)[0].token_ids) == 4


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_failed_step_fails_all_pending_and_later_requests(make_engine):
    engine = make_engine(make_model())

    def explode(plan):
        raise MemoryError("no room")

    engine.core.runner.launch = explode
    futures = [submit(engine, [1, 2], max_new_tokens=50) for _ in range(3)]
    for future in futures:
        with pytest.raises(ServerError, match="no room"):
            future.result(10)
    assert isinstance(engine.failure, MemoryError)
    with pytest.raises(ServerError, match="no room"):
        submit(engine, [1])


def test_random_load_loses_no_block_and_answers_every_request(make_engine):
    engine = make_engine(make_model(), max_total_tokens=400, max_running_requests=12)
    random = torch.Generator().manual_seed(1)
    futures = []
    for i, prompt in enumerate(prompts(150, seed=9)):
        draw = torch.randint(0, 20, (3,), generator=random).tolist()
        futures.append(submit(engine, prompt, rid=str(i), n=1 + draw[0] % 3, max_new_tokens=1 + draw[1]))
        if draw[2] == 0:
            engine.abort(str(i - draw[1]))
        if draw[2] == 1:
            engine.pause("retract" if draw[1] % 2 else "in_place")
            engine.set_version(i)
            engine.resume()
        if draw[2] == 2:
            engine.pause("abort")
            engine.resume()
    for future in futures:
        for output in future.result(60):
            spans = output.version_spans
            assert output.finish_reason["type"] in ("stop", "length", "abort")
            ends = [0] + [end for _, _, end in spans]
            assert [start for _, start, _ in spans] == ends[:-1]
            assert ends[-1] == len(output.token_ids)
            assert all(a[0] < b[0] for a, b in itertools.pairwise(spans))
    stats = engine.stats()
    assert stats["running"] == stats["waiting"] == 0
    assert stats["free_blocks"] == stats["total_blocks"]


def test_requests_continue_after_release_and_resume_of_memory(make_engine):
    engine = make_engine(make_model())
    expected = run(engine, [5, 4, 3], max_new_tokens=200, sampling_seed=3, ignore_eos=True)
    future = submit_and_see_start(engine, [5, 4, 3], max_new_tokens=200, sampling_seed=3, ignore_eos=True)
    engine.release_memory().result(10)
    assert engine.core.runner is None and not future.done()
    engine.resume_memory().result(10)
    assert future.result(30)[0].token_ids == expected[0].token_ids
    assert engine.stats()["free_blocks"] == engine.stats()["total_blocks"]


@pytest.fixture
def frequent_switches():
    """Make Python switch threads very often, to provoke race conditions."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(usual)


def test_stats_can_be_read_while_requests_run(make_engine, frequent_switches):
    engine = make_engine(make_model(), max_running_requests=2)
    engine.pause("in_place").result(10)
    futures = [submit(engine, [1 + i % 90], n=2, max_new_tokens=1) for i in range(300)]
    engine.set_version(1).result(10)  # the loop has queued all requests
    assert engine.stats()["waiting"] == 600
    assert engine.abort(None).result(10) == 300 and engine.stats()["waiting"] == 0
    engine.resume().result(10)
    futures += [submit(engine, [1 + i % 90], max_new_tokens=1) for i in range(300)]
    while not futures[-1].done():
        engine.stats()
    assert all(future.result(10) for future in futures)
    assert engine.stats()["waiting"] == 0


@pytest.mark.soak
def test_memory_does_not_grow_over_ten_thousand_requests(make_engine):
    engine = make_engine(make_model(), max_running_requests=64)

    def wave() -> int:
        futures = [submit(engine, [i % 90, 3], max_new_tokens=3) for i in range(10_000)]
        assert sum(len(future.result(300)) for future in futures) == 10_000
        del futures
        gc.collect()
        return int(Path("/proc/self/statm").read_text().split()[1])

    wave()
    before = wave()
    after = [wave() for _ in range(2)][-1]
    assert after - before < 4000, f"resident memory grew by {after - before} pages"
    assert engine.stats()["free_blocks"] == engine.stats()["total_blocks"]
