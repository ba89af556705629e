"""JSON made by whole arrays says what was put in, to the last bit."""

from __future__ import annotations

import json

import numpy as np
import pytest

from arealite.inference.http.json_arrays import encode_tokens


@pytest.mark.parametrize("count", [0, 1, 63, 64, 5000])
@pytest.mark.parametrize("scale", [1e-45, 1e-38, 1e-9, 1.0, 30.0])
def test_numbers_come_back_as_they_were(count, scale):
    rng = np.random.default_rng(count)
    logprobs = (-np.abs(rng.standard_normal(count)) * scale).astype(np.float32)
    special = np.array([0.0, -0.0, -1.0, -10.0, -0.1, -9.9999999, -99.999999, -1e-3], np.float32)
    logprobs[: len(special)] = special[:count]
    ids = rng.integers(0, 151936, count)
    ids[:7] = [0, 9, 10, 999, 1000, 100000, 151935][:count]
    id_text, entry_text = encode_tokens(ids.tolist(), logprobs.tolist(), 151936)
    assert json.loads(f"[{id_text}]") == ids.tolist()
    entries = json.loads(f"[{entry_text}]")
    assert [entry[1:] for entry in entries] == [[token, None] for token in ids.tolist()]
    assert np.array_equal(np.array([e[0] for e in entries], np.float32), logprobs)
