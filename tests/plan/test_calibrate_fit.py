"""Costs that a calibration finds in an engine whose costs are known."""

from types import SimpleNamespace

import pytest

from arealite.plan import calibrate


class KnownEngine:
    """Computes all requests at once: a pass of prompts, then decode steps."""

    def __init__(self):
        self.now, self.waiting = 0.0, []

    def submit(self, request):
        self.waiting.append(request)
        return SimpleNamespace(result=self.compute)

    def compute(self, _timeout_s):
        count = len(self.waiting)
        for request in self.waiting[:1]:
            self.now += 5e-3 + 5e-5 * count * len(request.prompt)
            self.now += (request.params.max_new_tokens - 1) * (2e-3 + 1e-4 * count)
        self.waiting = []


def test_passes_of_prompts_are_not_taken_for_decode_steps(monkeypatch):
    engine = KnownEngine()
    monkeypatch.setattr(calibrate.time, "perf_counter", lambda: engine.now)
    cost = calibrate._fit_server(engine, 100, "cpu", 32, 416, 48)
    assert (cost.base_s(1), cost.base_s(64)) == pytest.approx((2.1e-3, 8.4e-3), rel=0.02)
    assert cost.prompt_s == pytest.approx(5e-5, rel=0.1)
