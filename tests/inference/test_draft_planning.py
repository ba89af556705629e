"""Tests of drafts with several steps in flight, on a runner that follows a formula instead of a model.

It keeps state of its own, as a GPU does: the host learns tokens when it collects a step.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from arealite.api.cli_args import ServerConfig
from arealite.inference import core
from arealite.inference.core import EngineCore
from arealite.inference.drafts.lookup import MAX_SEQUENCES, look_up
from arealite.inference.drafts.planning import WINDOW, DeviceDrafts
from arealite.inference.runner import Runner, Step, StepResult
from arealite.inference.sequence import Request, SamplingParams
from arealite.inference.slots import Journal
from tests.inference.conftest import make_model

VOCAB = 96


def next_token(tokens: list[int]) -> int:
    """Text that goes round in a circle of 12 tokens, with jumps."""
    last, at = tokens[-1], len(tokens)
    return (last + 1) % 12 if (7 * at + 3 * last) % 9 else at * 31 % VOCAB


class FormulaRunner(Runner):
    """Knows tokens, room and tickets of slots as they were sent with the last launch."""

    max_in_flight = 3

    def __init__(self, model: Any, shape: Any, config: ServerConfig):
        self.device, self.config = torch.device("cpu"), config
        assert config.max_total_tokens is not None
        self.num_blocks = config.max_total_tokens // config.block_size + 1
        self.num_slots = config.max_running_requests or 256
        self.kinds: list[bool] = []  # of steps: with drafts or without
        self.in_flight: list[bool] = []

    def attach(self, slots) -> None:
        self.slots = slots
        self.journal = slots.journal = Journal()
        self.texts: dict[int, list[int]] = {}
        self.room: dict[int, int] = {}

    def measure_drafts(self) -> np.ndarray:
        return np.full(MAX_SEQUENCES + 1, 0.2)

    def clear_blocks(self, blocks: list[int]) -> None: ...

    def launch(self, plan) -> Step:
        slots, journal = self.slots, self.journal
        for slot in journal.taken:
            self.texts[slot] = slots.tokens[slot, : slots.length[slot]].tolist()
        for slot in {*journal.taken, *journal.grown}:
            self.room[slot] = int(slots.num_blocks[slot]) * self.config.block_size
        journal.taken.clear()
        journal.grown.clear()
        assert all(kind == plan.has_drafts for kind in self.in_flight), "both kinds are in flight"
        rows = [self._sample(slot, plan.has_drafts) for slot in plan.slots.tolist()]
        if not rows:
            return lambda: None
        if not plan.has_drafts:
            # The host must know where the tokens of such steps are.
            assert [at for at, *_ in rows] == slots.length[plan.slots].tolist()
        self.kinds.append(plan.has_drafts)
        self.in_flight.append(plan.has_drafts)
        return partial(self._read, plan.slots, slots.ticket[plan.slots], rows)

    def _sample(self, slot: int, has_draft: bool) -> tuple[int, list[int], int]:
        """Position of the first new token, the tokens, and the length of the draft."""
        text, limit = self.texts[slot], int(self.slots.limit[slot])
        at, draft = len(text), []
        if has_draft:
            if at >= limit:
                return at, [], 0
            most = min(self.config.draft_tokens, self.room[slot] - at, limit - 1 - at)
            draft = look_up(np.array(text), most, shortest=1).tolist()
        assert at + len(draft) <= self.room[slot], "a token has no block"
        for i in range(len(draft) + 1):
            text.append(next_token(text))
            if i < len(draft) and text[-1] != draft[i]:
                break
        return at, text[at:], len(draft)

    def _read(self, slots, tickets, rows) -> StepResult | None:
        self.in_flight.pop(0)
        result = None
        for i in reversed(range(max(len(tokens) for _, tokens, _ in rows))):
            index = [j for j, (_, tokens, _) in enumerate(rows) if len(tokens) > i]
            at = np.array([rows[j][0] + i for j in index])
            tokens = np.array([rows[j][1][i] for j in index])
            result = StepResult(slots[index], tickets[index], at, tokens, -0.01 * at, None, following=result)
        if result is not None:
            result.num_drafted = sum(drafted for *_, drafted in rows)
        return result


@pytest.fixture
def make_core(monkeypatch):
    monkeypatch.setattr(core, "make_runner", FormulaRunner)
    model = make_model()

    def make(**settings: Any) -> EngineCore:
        chosen: dict[str, Any] = {"max_total_tokens": 2048, "block_size": 4, "draft_tokens": 5} | settings
        made = EngineCore(ServerConfig(**chosen), SimpleNamespace(model=model))  # pyright: ignore[reportArgumentType]
        made.attach()
        return made

    return make


def expected(prompt: list[int], count: int, stop: int) -> list[int]:
    text = list(prompt)
    while len(text) < len(prompt) + count and (len(text) == len(prompt) or text[-1] != stop):
        text.append(next_token(text))
    return text[len(prompt) :]


def add_requests(engine: EngineCore, count: int, seed: int) -> list[Request]:
    generator = np.random.default_rng(seed)
    requests = []
    for i in range(count):
        prompt = generator.integers(0, 12, generator.integers(1, 30)).tolist()
        limits: dict[str, Any] = {"max_new_tokens": int(generator.integers(1, 60)), "stop_token_ids": [60]}
        penalty = 1.1 if i % 6 == 5 else 1.0  # no drafts while that one runs
        params = SamplingParams(**limits, repetition_penalty=penalty, ignore_eos=True)
        requests.append(Request(prompt, params, rid=f"{seed}-{i}"))
        engine.add(requests[-1])
    return requests


def check(requests: list[Request]) -> None:
    for request in requests:
        (output,) = request.future.result(0)
        tokens = expected(request.prompt.tolist(), request.params.max_new_tokens, 60)
        if output.finish_reason["type"] == "abort":
            tokens = tokens[: len(output.token_ids)]
        assert output.token_ids == tokens
        at = len(request.prompt) + np.arange(len(tokens))
        np.testing.assert_allclose(output.logprobs, -0.01 * at, rtol=1e-6)


@pytest.mark.parametrize("room", [2048, 200, 128])
def test_tokens_and_ends_are_those_of_the_formula(room: int, make_core):
    engine = make_core(max_total_tokens=room, max_running_requests=6)
    for seed in range(6):
        requests = add_requests(engine, 10, seed)
        for _ in range(15):
            engine.step()
        # Between two steps: a new version, an abort, and a start from the beginning.
        engine.set_version(seed)
        engine.abort(requests[1].rid)
        if seed % 2:
            engine.pause("retract")
            engine.resume()
        requests += add_requests(engine, 2, 100 + seed)
        while engine.can_step:
            engine.step()
        check(requests)
    pool, drafts = engine.scheduler.pool, engine.scheduler.drafts
    assert pool.num_free == pool.num_usable
    assert isinstance(drafts, DeviceDrafts) and 0 < drafts.accepted_tokens <= drafts.drafted_tokens
    assert engine.scheduler.num_preemptions > 0 or room == 2048


def test_steps_with_drafts_overlap(make_core):
    engine = make_core()
    request = Request(list(range(12)) * 3, SamplingParams(max_new_tokens=60, ignore_eos=True))
    engine.add(request)
    for _ in range(3):
        engine.step()
    assert len(engine._in_flight) == 2 and engine.runner.kinds == [False, True, True]
    while engine.can_step:
        engine.step()
    check([request])
    # Before the first step nothing decodes, so it has no drafts.
    assert all(engine.runner.kinds[1:])
    assert len(engine.runner.kinds) < 30


def test_no_drafts_for_many_sequences_or_those_that_ask_for_more(make_core):
    engine = make_core()
    requests = [Request([1, 2, 3], SamplingParams(n=MAX_SEQUENCES + 1, max_new_tokens=20, ignore_eos=True))]
    asks = [{"repetition_penalty": 1.1}, {"logit_bias": {1: 1.0}}, {"min_new_tokens": 20}]
    requests += [Request([1, 2], SamplingParams(max_new_tokens=20, ignore_eos=True, **ask)) for ask in asks]
    requests.append(Request([1, 2], SamplingParams(max_new_tokens=20, ignore_eos=True), num_top_logprobs=2))
    for request in requests:
        engine.add(request)
        while engine.can_step:
            engine.step()
        assert not any(engine.runner.kinds), request.params


def test_drafts_pause_while_they_do_not_pay(make_core):
    engine = make_core()
    engine.scheduler.drafts.costs[:] = 99.0
    engine.add(Request([1, 2, 3], SamplingParams(max_new_tokens=250, ignore_eos=True)))
    while engine.can_step:
        engine.step()
    changes = np.flatnonzero(np.diff(engine.runner.kinds))
    # With drafts, without, and so on.
    assert np.diff(changes)[:4].tolist() == [WINDOW, WINDOW, WINDOW, 2 * WINDOW]
