"""Tests of products of few tokens that are divided over the inputs; without a GPU, Triton's interpreter runs them."""

from __future__ import annotations

import importlib.util
import os
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from arealite.inference.fp8 import Fp8Linear, quantize
from arealite.inference.loading import ModelShape

GPU = torch.cuda.is_available()
if not GPU:
    os.environ["TRITON_INTERPRET"] = "1"
DEVICE = torch.device("cuda" if GPU else "cpu")
DTYPE = torch.bfloat16 if GPU else torch.float32
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
]


def random_weight(num_outputs: int, num_inputs: int) -> torch.Tensor:
    torch.manual_seed(0)
    return (torch.randn(num_outputs, num_inputs) * num_inputs**-0.5).to(DEVICE, DTYPE)


@pytest.mark.parametrize("num_tokens", [1, 5, 64])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(128, 512), (64, 112), (192, 640)])
def test_parts_add_up_to_the_product(num_tokens, num_outputs, num_inputs, monkeypatch):
    split_k = pytest.importorskip("arealite.inference.cuda.split_k")
    monkeypatch.setattr(split_k, "num_multiprocessors", lambda device: 132)
    weight = random_weight(num_outputs, num_inputs)
    bias = torch.randn(num_outputs, device=DEVICE, dtype=DTYPE)
    layer = split_k.split_product(partial(F.linear, weight=weight, bias=bias), weight, bias)
    x = torch.randn(num_tokens, num_inputs, device=DEVICE, dtype=DTYPE)
    found = layer(x)
    assert isinstance(found, split_k.Parts) and found.sums.shape[0] > 1
    torch.testing.assert_close(
        found.sums.sum(0) + bias, (x.double() @ weight.double().t() + bias).float(), rtol=1e-3, atol=1e-3
    )
    many = torch.randn(65, num_inputs, device=DEVICE, dtype=DTYPE)
    assert torch.equal(layer(many), F.linear(many, weight, bias))


@pytest.mark.parametrize("adds_parts", [True, False])
def test_weights_in_fp8(adds_parts, monkeypatch):
    split_k = pytest.importorskip("arealite.inference.cuda.split_k")
    monkeypatch.setattr(split_k, "num_multiprocessors", lambda device: 132)
    linear = nn.Linear(1024, 128).to(DEVICE, torch.bfloat16)
    fp8 = Fp8Linear.of(linear)
    layer = split_k.split_product(fp8, fp8.weight, fp8.bias, adds_parts)
    x = quantize(torch.randn(7, 1024, device=DEVICE))
    found = layer(x)
    assert isinstance(found, split_k.Parts) == adds_parts
    if adds_parts:
        found = (found.sums.sum(0) + linear.bias).to(torch.bfloat16)
    torch.testing.assert_close(found, fp8(x), rtol=1e-2, atol=1e-2)


def test_layers_that_cannot_be_divided_stay():
    split_k = pytest.importorskip("arealite.inference.cuda.split_k")
    for layer in (nn.Linear(64, 100, bias=False), nn.Linear(64, 64), nn.Linear(63, 64, bias=False), nn.Identity()):
        assert split_k.split_linear(layer.to(DEVICE)) is layer
    on_ranks = Fp8Linear(*(x.to(DEVICE) for x in (torch.zeros(64, 64), torch.ones(64))), None, lambda x: x)
    assert split_k.split_linear(on_ranks) is on_ranks


@pytest.mark.parametrize(
    ("tiles", "steps", "expected"),
    # Queries, keys and values, output, down and gate of the 1.5B shape on 132 multiprocessors; one step cannot be cut.
    [(32, 12, 4), (24, 12, 4), (24, 70, 5), (280, 12, 1), (2, 1, 1)],
)
def test_number_of_parts(tiles, steps, expected):
    split_k = pytest.importorskip("arealite.inference.cuda.split_k")
    assert split_k.choose_parts(tiles, steps, 132) == expected


def test_readers_add_parts():
    split_k = pytest.importorskip("arealite.inference.cuda.split_k")
    from arealite.inference.cuda import ops
    from arealite.inference.cuda.cache import DeviceCache

    torch.manual_seed(0)
    residual = torch.randn(5, 64, device=DEVICE)
    weight = torch.randn(64, device=DEVICE, dtype=DTYPE)
    sums = torch.randn(3, 5, 64, device=DEVICE)
    mine, other = residual.clone(), residual.clone()
    found = ops.add_norm(split_k.Parts(sums, None), mine, weight, 1e-6)
    expected = ops.add_norm((sums[0] + sums[1] + sums[2]).to(DTYPE), other, weight, 1e-6)
    assert torch.equal(found, expected) and torch.equal(mine, other)

    num_heads, num_kv, dim = 4, 2, 16
    sums = torch.randn(2, 5, (num_heads + 2 * num_kv) * dim, device=DEVICE)
    bias = torch.randn(sums.shape[-1], device=DEVICE, dtype=DTYPE)
    table = torch.tensor([[1, 2], [0, 0]], dtype=torch.int32, device=DEVICE)
    at = torch.zeros(5, dtype=torch.int32, device=DEVICE), torch.arange(5, dtype=torch.int32, device=DEVICE)
    cos, sin = torch.randn(2, 64, dim, device=DEVICE).to(DTYPE)
    for cache_type in (DTYPE, torch.float8_e4m3fn):
        written = []
        for qkv in (split_k.Parts(sums, bias), (sums[0] + sums[1] + bias.float()).to(DTYPE)):
            cache = DeviceCache(ModelShape(1, num_kv, dim, 8, 64, ()), 3, 4, cache_type, DEVICE)
            batch = ops.DeviceBatch(cache.keys, cache.values, table, *at, scales=cache.scales)
            q = ops.rope_and_write(qkv, batch, 0, cos, sin, num_heads, None)
            written.append([q, cache.keys[0].float(), cache.values[0].float(), *(cache.scales or [()])[0]])
        assert all(torch.equal(one, two) for one, two in zip(*written, strict=True))
