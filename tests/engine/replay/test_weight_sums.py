"""Checksums of weights."""

import torch
from torch import nn

from arealite.engine.fsdp import weight_sums


def test_checksums_leave_the_weights_as_they_are():
    model = nn.Linear(4, 3)
    before = weight_sums.take(model)
    # FSDP frees gathered weights by resizing their storage; torch forbids that once an array shares it.
    assert all(p.untyped_storage().resizable() for p in model.parameters())
    with torch.no_grad():
        model.bias[1] += 1
    changed = weight_sums.take(model)
    assert changed["weight"] == before["weight"] and changed["bias"] != before["bias"]
