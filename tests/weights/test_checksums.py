"""Checksums of weights."""

import zlib

import pytest
import torch
from torch import nn

from arealite.weights import checksums


def test_checksums_leave_the_weights_as_they_are():
    model = nn.Linear(4, 3)
    before = checksums.take(model)
    # FSDP frees gathered weights by resizing their storage; torch forbids that once an array shares it.
    assert all(p.untyped_storage().resizable() for p in model.parameters())
    with torch.no_grad():
        model.bias[1] += 1
    changed = checksums.take(model)
    assert changed["weight"] == before["weight"] and changed["bias"] != before["bias"]


def test_checksums_are_those_of_each_tensor_alone():
    model = nn.Module()
    tensors = {"a": torch.randn(3, 5), "b": torch.randn(7).bfloat16(), "none": torch.zeros(0), "c": torch.randn(2)}
    for name, tensor in tensors.items():
        model.register_parameter(name, nn.Parameter(tensor))
    sums = checksums.take(model)
    assert list(sums) == list(tensors)
    for name, tensor in tensors.items():
        crc, mean = sums[name]
        assert crc == zlib.crc32(tensor.view(torch.uint8).numpy().tobytes()), name
        assert mean == pytest.approx(float(tensor.double().mean()) if tensor.numel() else 0.0), name
