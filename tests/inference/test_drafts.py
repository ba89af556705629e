"""Tests of speculative decoding: tokens, log-probs, versions and ends are those of an engine without drafts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from arealite.api.cli_args import ServerConfig
from arealite.api.errors import ConfigError
from arealite.inference.drafts.lookup import MAX_SEQUENCES, NGRAM, look_up
from arealite.inference.engine import Engine
from arealite.inference.runner import StepResult, keep_accepted
from arealite.inference.sequence import Request, SampleOutput, SamplingParams
from arealite.inference.slots import SlotTable
from arealite.inference.weights import WeightSource
from tests.inference.conftest import FAMILIES, SMALL, make_model, run, submit

CIRCLE = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11] * 2


def repetitive_prompts(count: int, seed: int = 0) -> list[list[int]]:
    """Prompts that repeat a phrase of random tokens, with other tokens between."""
    generator = torch.Generator().manual_seed(seed)
    prompts = []
    for _ in range(count):
        phrase, between = torch.randint(0, 96, (2, 6), generator=generator).tolist()
        prompts.append(phrase + between[:2] + phrase + between[2:] + phrase[:4])
    return prompts


def copying_model(family: str = "qwen2", seed: int = 0):
    """A random model whose text mostly goes round in circles: tokens 0 to 11 in turn, or the same token (tied)."""
    model = make_model(family, seed)
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                parameter *= 0.02
        if embedding.data_ptr() != head.data_ptr():
            head[:12] += embedding[torch.arange(-1, 11) % 12]
    return model


def both(make_engine, model, **settings) -> list[Engine]:
    """An engine without drafts and one with."""
    tokenizer = settings.pop("tokenizer", None)
    return [make_engine(model, tokenizer, draft_tokens=count, **settings) for count in (0, 5)]


def assert_same(plain: list[SampleOutput], drafted: list[SampleOutput]) -> None:
    assert len(plain) == len(drafted)
    for one, other in zip(plain, drafted, strict=True):
        assert other.token_ids == one.token_ids
        assert (other.finish_reason, other.text, other.version_spans) == (
            one.finish_reason,
            one.text,
            one.version_spans,
        )
        torch.testing.assert_close(torch.tensor(other.logprobs), torch.tensor(one.logprobs), atol=2e-4, rtol=0)
        if one.raw_logprobs is not None:
            assert other.raw_logprobs is not None
            torch.testing.assert_close(
                torch.tensor(other.raw_logprobs), torch.tensor(one.raw_logprobs), atol=2e-4, rtol=0
            )


def test_look_up_continues_the_latest_occurrence():
    text = np.array([1, 2, 3, 9, 9, 1, 2, 3, 7, 8, 1, 2, 3])
    assert look_up(text, 3).tolist() == [7, 8, 1]
    assert look_up(text, 1).tolist() == [7]
    # The draft continues with its own beginning after the end of the text.
    assert look_up(text, 8).tolist() == [7, 8, 1, 2, 3, 7, 8, 1]
    assert look_up(np.array([4, 4, 4, 4]), 3).tolist() == [4, 4, 4]
    for nothing in ([], [1, 2, 3], [1, 2, 3, 4, 5, 6, 7], [5, 2, 3, 1, 2, 3]):
        assert look_up(np.array(nothing), 4).tolist() == []
    assert look_up(text, 0).tolist() == [] and NGRAM == 3


def test_tokens_are_kept_up_to_the_first_that_differs_from_its_draft():
    slots = SlotTable(3, 16, 4)
    slots.length[:], slots.num_drafts[:], slots.ticket[:] = [4, 6, 5], [2, 0, 3], [1, 2, 3]
    slots.tokens[0, 4:6], slots.tokens[2, 5:8] = [7, 8], [1, 2, 3]
    rows = np.array([2, 2, 2, 2, 1, 0, 0, 0])
    positions = np.array([5, 6, 7, 8, 6, 4, 5, 6])
    tokens = np.array([1, 9, 3, 4, 5, 7, 8, 6])  # slot 2 differs at its second token, slot 0 nowhere
    result = keep_accepted(StepResult(rows, slots.ticket[rows], positions, tokens, tokens * 0.5, None), slots)
    found, part = [], result
    while part is not None:
        found.append(list(zip(part.slots.tolist(), part.positions.tolist(), part.tokens.tolist(), strict=True)))
        part = part.following
    assert found == [[(2, 5, 1), (1, 6, 5), (0, 4, 7)], [(2, 6, 9), (0, 5, 8)], [(0, 6, 6)]]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_and_sampled_outputs_are_those_without_drafts(family, make_engine):
    plain, drafted = both(make_engine, copying_model(family))
    asked = [
        (prompt, {"max_new_tokens": 25, "sampling_seed": 5, **params})
        for prompt in (repetitive_prompts(1)[0], CIRCLE)
        for params in ({"temperature": 0.0}, {"temperature": 0.6, "n": 3})
    ]
    found = [[submit(engine, prompt, **params) for prompt, params in asked] for engine in (plain, drafted)]
    for futures in zip(*found, strict=True):
        assert_same(*(future.result(100) for future in futures))
    stats = drafted.stats()
    assert 0 < stats["accepted_tokens"] <= stats["drafted_tokens"]
    assert stats["draft_acceptance_rate"] == stats["accepted_tokens"] / stats["drafted_tokens"]
    assert plain.stats()["drafted_tokens"] == plain.stats()["draft_acceptance_rate"] == 0
    assert drafted.stats()["generated_tokens"] == plain.stats()["generated_tokens"]


CASES = [
    {"temperature": 0.4, "top_p": 0.7, "top_k": 20, "min_p": 0.01},
    {"temperature": 0.4, "repetition_penalty": 1.1, "frequency_penalty": 0.1, "presence_penalty": 0.1},
    {"temperature": 0.4, "logit_bias": {7: 2.0, 9: -100.0}, "min_new_tokens": 9, "stop_token_ids": [3, 7]},
    {"temperature": 0.0, "min_new_tokens": 6, "stop_token_ids": [2]},
]


@pytest.mark.parametrize("params", CASES, ids=lambda p: ",".join(p))
def test_sampling_parameters(params: dict[str, Any], make_engine):
    plain, drafted = both(make_engine, copying_model())
    for seed, prompt in enumerate([*repetitive_prompts(2), CIRCLE]):
        outputs = []
        for engine in (plain, drafted):
            settings = SamplingParams(n=2, max_new_tokens=30, sampling_seed=seed, **params)
            request = Request(prompt, settings, want_raw_logprobs=True, num_top_logprobs=3)
            outputs.append(engine.submit(request).result(60))
        assert_same(*outputs)
        for one, other in zip(*outputs, strict=True):
            tops = [[[token for token, _ in top] for top in output.top_logprobs] for output in (one, other)]
            assert tops[0] == tops[1] and len(tops[0]) == len(one.token_ids)
    assert drafted.stats()["accepted_tokens"] > 0


def test_the_longest_output_may_end_inside_a_draft(make_engine):
    plain, drafted = both(make_engine, copying_model(seed=1))
    for count in range(1, 9):
        outputs = [run(engine, CIRCLE, temperature=0.0, max_new_tokens=count) for engine in (plain, drafted)]
        assert_same(*outputs)
        assert outputs[1][0].finish_reason == {"type": "length", "length": count}
    assert drafted.stats()["generated_tokens"] == 36 and drafted.stats()["accepted_tokens"] > 0
    assert drafted.stats()["free_blocks"] == drafted.stats()["total_blocks"]


def test_stop_strings_end_inside_a_draft_and_streams_are_the_same(make_engine, tokenizer):
    model = copying_model()
    plain, drafted = both(make_engine, model, tokenizer=tokenizer)
    prompt = CIRCLE
    greedy: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 20, "ignore_eos": True}
    tokens = run(plain, prompt, **greedy)[0].token_ids
    for end in range(1, 9):
        stop = tokenizer.decode(tokens[end : end + 2])
        events, outputs = [], []
        for engine in (plain, drafted):
            seen: list = []
            params = SamplingParams(**greedy, stop=[stop])
            request = Request(
                prompt, params, on_progress=lambda i, token, lp, text, top, s=seen: s.append((token, text))
            )
            outputs.append(engine.submit(request).result(60))
            events.append(seen)
        assert_same(*outputs)
        assert events[0] == events[1]
    assert drafted.stats()["accepted_tokens"] > 0


def test_a_weight_update_and_a_pause_between_drafts(make_engine):
    """Tokens carry their versions, and those after an update are the tokens of the new weights."""
    model, other = copying_model(seed=0), copying_model(seed=1)
    weights = {name: tensor.detach().clone() for name, tensor in other.named_parameters()}
    prompt, count = CIRCLE, 40
    greedy = {"temperature": 0.0, "max_new_tokens": count, "ignore_eos": True}
    for keep in (False, True):
        plain, drafted = both(make_engine, model)
        (output,) = _updated(drafted, prompt, weights, keep, 20, greedy)
        (_, start, end), (_, again, last) = output.version_spans
        assert [version for version, *_ in output.version_spans] == [0, 7]
        assert start == 0 and end == again and last == count and end >= 20
        # Without drafts, the update comes after the same token.
        (expected,) = _updated(plain, prompt, weights, keep, end, greedy)
        assert_same([expected], [output])
        assert drafted.stats()["accepted_tokens"] > 0


def _updated(engine: Engine, prompt: list[int], weights: dict, keep: bool, after: int, params: dict):
    """Generate, and load `weights` after the step that brings token number `after`. Steps by hand."""
    core = engine.core
    engine.pause("in_place").result(30)
    request = Request(prompt, SamplingParams(**params))
    future = engine.submit(request)
    engine.set_version(0).result(30)  # the request has been added
    staged = core.stage(WeightSource.received(weights, 7))

    def advance() -> None:
        while core.post.num_sampled(request.sequences[0]) < after:
            core.step()
        core.swap(staged, 7, not keep, "")

    engine._call(advance).result(60)
    engine.resume().result(30)
    return future.result(60)


def test_drafts_wait_for_a_small_batch(make_engine):
    engine = make_engine(copying_model(), draft_tokens=4)
    params = {"temperature": 0.0, "max_new_tokens": 12, "ignore_eos": True}
    prompt = CIRCLE
    run(engine, prompt, n=MAX_SEQUENCES + 1, **params)
    assert engine.stats()["drafted_tokens"] == 0
    run(engine, prompt, n=MAX_SEQUENCES, **params)
    assert engine.stats()["drafted_tokens"] > 0


def test_a_full_cache_shortens_drafts_and_preempts_as_before(make_engine):
    model = copying_model()
    outputs = []
    for settings in ({}, {"draft_tokens": 6, "max_total_tokens": 100}):
        engine = make_engine(model, **settings)
        prompts = [*repetitive_prompts(3), CIRCLE]
        futures = [
            engine.submit(
                Request(p, SamplingParams(max_new_tokens=50, temperature=0.3, sampling_seed=3, ignore_eos=True))
            )
            for p in prompts
        ]
        outputs.append([output for future in futures for output in future.result(60)])
    assert_same(*outputs)
    stats = engine.stats()
    assert stats["preemptions"] > 0 and stats["accepted_tokens"] > 0
    assert stats["free_blocks"] == stats["total_blocks"]


def test_the_next_turn_reuses_blocks_of_accepted_drafts(make_engine):
    plain, drafted = both(make_engine, copying_model())
    prompt = CIRCLE
    turns = []
    for engine in (plain, drafted):
        (first,) = run(engine, prompt, temperature=0.3, sampling_seed=1, max_new_tokens=31, ignore_eos=True)
        longer = prompt + first.token_ids + [5, 6, 7]
        turns.append(run(engine, longer, temperature=0.0, max_new_tokens=9, ignore_eos=True))
    assert_same(*turns)
    assert turns[0][0].cached_tokens == turns[1][0].cached_tokens > len(prompt)
    assert drafted.stats()["accepted_tokens"] > 0


def test_constrained_answers(make_engine, tmp_path):
    pytest.importorskip("llguidance")
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from arealite.inference.grammar import Grammar
    from tests.inference.tool_model import write_tokenizer

    tokenizer = write_tokenizer(tmp_path)
    eos = tokenizer.eos_token_id
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**SMALL | {"vocab_size": len(tokenizer) + 11, "eos_token_id": eos})).eval()
    item = {"enum": ["red green blue", "red green"]}
    schema = {"type": "array", "items": item, "minItems": 6, "maxItems": 6}
    plain, drafted = both(make_engine, model, tokenizer=tokenizer)
    for seed in range(3):
        outputs = []
        for engine in (plain, drafted):
            grammar = Grammar(tokenizer, schema, engine.shape.vocab_size, engine.shape.eos_ids)
            params = SamplingParams(max_new_tokens=200, sampling_seed=seed)
            outputs.append(engine.submit(Request([1, 2, 3], params, want_text=True, grammar=grammar)).result(60))
        assert_same(*outputs)
    assert drafted.stats()["accepted_tokens"] > 0


def test_bad_values():
    cases: list[tuple[dict[str, Any], str]] = [
        ({"draft_tokens": -1}, "draft_tokens"),
        ({"draft_tokens": 65}, "draft_tokens"),
        ({"draft_tokens": 4, "deterministic": True}, "use one of them"),
    ]
    for settings, message in cases:
        with pytest.raises(ConfigError, match=message):
            ServerConfig(**settings).check()
