"""Tests of decode attention by even runs and of the cache in FP8; without a GPU, Triton's interpreter runs them."""

from __future__ import annotations

import importlib.util
import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from arealite.api.cli_args import ServerConfig
from arealite.api.errors import ConfigError
from arealite.inference.loading import ModelShape, choose_cache_dtype
from arealite.inference.scheduler import Chunk
from tests.inference.conftest import forward_logprobs, generate, make_model, prompts, submit
from tests.inference.test_cuda_runner import GPU, SCALE, make_engine  # noqa: F401 (a fixture)

if not GPU:
    os.environ["TRITON_INTERPRET"] = "1"
DEVICE = torch.device("cuda" if GPU else "cpu")
KV_HEADS, GROUP, DIM = 2, 3, 16
# Lengths of sequences and tokens of each that attend.
LENGTHS = {
    "mixed": ([40, 1, 77, 300], [1, 1, 1, 1]),
    "one": ([333], [1]),
    "short": ([4, 1, 7, 9, 20], [1, 1, 1, 1, 1]),
    "drafts": ([90, 11, 77], [4, 1, 5]),
}


needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def fill_cache(lengths, block_size, fp8):
    """A cache with random content, the same in float32 [2, num_blocks, BS, HKV, D], and a table of blocks."""
    from arealite.inference.cuda.cache import DeviceCache

    torch.manual_seed(0)
    width = -(-max(lengths) // block_size)
    num_blocks = len(lengths) * width + 1
    cache_type = torch.float8_e4m3fn if fp8 else torch.float32
    shape = ModelShape(1, KV_HEADS, DIM, 8, 512, ())
    cache = DeviceCache(shape, num_blocks, block_size, cache_type, DEVICE)
    cache.data.copy_(torch.randn(cache.data.shape) * (50 if fp8 else 1))
    exact = cache.data[0].float()
    if cache.scales is not None:
        exact[1] = cache.values[0].float().permute(0, 3, 1, 2)
        for scale in cache.scales[0]:
            scale.copy_(torch.rand(scale.shape) * 0.05)
        exact = exact * torch.stack(cache.scales[0]).transpose(2, 3)[..., None]
    table = (torch.randperm(num_blocks - 1)[: len(lengths) * width].view(-1, width) + 1).int().to(DEVICE)
    return cache, exact, table


def place(lengths, counts):
    """Rows and positions of the last `counts` tokens of each sequence, and random queries."""
    rows = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts)).int().to(DEVICE)
    places = [torch.arange(n - c, n) for n, c in zip(lengths, counts, strict=True)]
    return rows, torch.cat(places).int().to(DEVICE), torch.randn(len(rows), KV_HEADS * GROUP, DIM, device=DEVICE)


def check_attention(out, exact, table, rows, positions, q, atol):
    out = out.cpu()
    for i, (row, position) in enumerate(zip(rows.tolist(), positions.tolist(), strict=True)):
        keys, values = exact[:, table[row].long()].flatten(1, 2)[:, : position + 1].cpu()
        heads = q[i].cpu().view(KV_HEADS, GROUP, DIM)
        weight = torch.softmax(torch.einsum("hgd,nhd->hgn", heads, keys) * DIM**-0.5, -1)
        expected = torch.einsum("hgn,nhd->hgd", weight, values).flatten(0, 1)
        torch.testing.assert_close(out[i], expected, atol=atol, rtol=atol)


@pytest.mark.gpu
@needs_triton
@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize(("block_size", "fp8"), [(4, False), (32, False), (4, True)])
def test_runs_equal_plain_attention(name, block_size, fp8, monkeypatch):
    runs = pytest.importorskip("arealite.inference.cuda.runs")
    lengths, counts = LENGTHS[name]
    cache, exact, table = fill_cache(lengths, block_size, fp8)
    rows, positions, q = place(lengths, counts)
    items = {}
    if max(counts) > 1:
        starts = [sum(counts[:i]) for i in range(len(counts))]
        first, count = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in (starts, counts))
        items = {"first": first, "count": count, "max_count": max(counts)}
    monkeypatch.setattr(runs, "_MIN_TILES", 1)
    plan = runs.plan_runs(positions, KV_HEADS, runs.Tuning(16, 2, 4, 1), **items)
    scales = cache.scales[0] if cache.scales else None
    scale = DIM**-0.5 * 1.4426950408889634
    out = runs.attend_runs(q, cache.keys[0], cache.values[0], scales, rows, positions, table, plan, scale, None)
    check_attention(out, exact, table, rows, positions, q, 2e-3 if fp8 else 1e-4)


@pytest.mark.gpu
@needs_triton
@pytest.mark.parametrize(("block_size", "fp8"), [(4, False), (32, False), (4, True)])
def test_prefill_equals_plain_attention(block_size, fp8):
    """Whole prompts, the next part of a long one, and one token."""
    ops = pytest.importorskip("arealite.inference.cuda.ops")
    from arealite.inference.cuda.packing import pack_chunks

    lengths, counts = [40, 1, 137, 300], [40, 1, 137, 90]
    cache, exact, table = fill_cache(lengths, block_size, fp8)
    rows, positions, q = place(lengths, counts)
    chunks = [Chunk(i, n - c, n) for i, (n, c) in enumerate(zip(lengths, counts, strict=True))]
    slots = SimpleNamespace(num_slots=4, tokens=np.zeros((4, 300), np.int32))
    tile_tokens, n = ops.tokens_per_tile(GROUP), len(rows)
    data = torch.from_numpy(pack_chunks(slots, chunks, n, 12, tile_tokens)).to(DEVICE)
    assert torch.equal(data[n : 3 * n].view(2, n), torch.stack([rows, positions]))
    first, count = data[3 * n :].view(2, 12)
    assert count.sum() == n
    assert positions[first[0]] + count[0] == 300  # the longest context comes first
    batch = ops.DeviceBatch(
        cache.keys, cache.values, table, rows, positions, tile_first=first, tile_count=count, scales=cache.scales
    )
    check_attention(
        ops.attend(q, batch, 0, DIM**-0.5, None), exact, table, rows, positions, q, 2e-3 if fp8 else 1e-4
    )  # fmt: skip


@pytest.mark.gpu
@needs_triton
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(("num_kv", "group", "dim"), [(2, 7, 64), (2, 6, 128), (8, 4, 128), (1, 8, 256), (3, 3, 80)])
def test_fp8_cache_holds_what_was_written(num_kv, group, dim, fused):
    ops = pytest.importorskip("arealite.inference.cuda.ops")
    from arealite.inference.cuda.cache import DeviceCache

    torch.manual_seed(0)
    n, num_heads = 19, num_kv * group
    cache = DeviceCache(ModelShape(1, num_kv, dim, 8, 64, ()), 4, 16, torch.float8_e4m3fn, DEVICE)
    qkv = torch.randn(n, (num_heads + 2 * num_kv), dim, device=DEVICE).to(torch.bfloat16 if GPU else torch.float32)
    expected = qkv[:, num_heads:].float().unflatten(1, (2, num_kv))  # [N, 2, HKV, D]
    table = torch.tensor([[2, 1], [0, 0]], dtype=torch.int32, device=DEVICE)
    at = torch.zeros(n, dtype=torch.int32, device=DEVICE), torch.arange(n, dtype=torch.int32, device=DEVICE)
    batch = ops.DeviceBatch(cache.keys, cache.values, table, *at, scales=cache.scales)
    if fused:
        cos = torch.ones(64, dim, dtype=qkv.dtype, device=DEVICE)
        ops.rope_and_write(qkv.flatten(1), batch, 0, cos, torch.zeros_like(cos), num_heads, None)
    else:
        key, value = qkv[:, num_heads:].unflatten(1, (2, num_kv)).permute(1, 2, 0, 3)
        ops.write_cache(key, value, batch, 0)
    for i, part in enumerate((cache.keys[0].float(), cache.values[0].float().permute(0, 3, 1, 2))):
        found = (part * cache.scales[0][i].transpose(1, 2)[..., None])[[2, 1]].flatten(0, 1)[:n]
        # 0.03 on a GPU; Triton's interpreter rounds some numbers to half of them.
        assert (found - expected[:, i]).norm() < 0.1 * expected[:, i].norm()


def use_runs(monkeypatch):
    """Let attention divide contexts of 16 and more tokens into runs."""
    monkeypatch.setattr("arealite.inference.cuda.runner.SHORT_CONTEXT", 16)
    monkeypatch.setattr("arealite.inference.cuda.runner.is_faster_in_runs", lambda lengths, *_: lengths.max() > 16)


@pytest.mark.gpu
@needs_triton
@pytest.mark.parametrize("family", ["qwen2", "qwen2-window", "gemma2-softcap"])
def test_greedy_equals_generate_in_long_contexts(family, make_engine, monkeypatch):  # noqa: F811
    use_runs(monkeypatch)
    model = make_model(family)
    engine = make_engine(model)
    asked = prompts(8 // SCALE, low=6, high=30)
    futures = [submit(engine, p, temperature=0.0, max_new_tokens=24 // SCALE, ignore_eos=True) for p in asked]
    for prompt, future in zip(asked, futures, strict=True):
        (output,) = future.result(120)
        assert output.token_ids == generate(model, prompt, 24 // SCALE, None)
        expected = forward_logprobs(model, prompt, output.token_ids)
        torch.testing.assert_close(torch.tensor(output.logprobs), expected, atol=1e-4, rtol=0)


@pytest.mark.gpu
@needs_triton
@pytest.mark.parametrize("fused", [True, False])
def test_cache_in_fp8_changes_logprobs_little(fused, make_engine, monkeypatch):  # noqa: F811
    if not fused:
        monkeypatch.setattr("arealite.inference.cuda.fused_model.is_llama_like", lambda *_, **__: False)
    model = make_model()
    # The engine's own check compares with the model's float32 keys.
    monkeypatch.setattr("arealite.inference.engine.check_trial", lambda *args: None)
    use_runs(monkeypatch)
    engine = make_engine(model, kv_cache_dtype="fp8")
    assert engine.core.runner.cache.data.dtype == torch.float8_e4m3fn
    for prompt in prompts(2, low=10, high=20):
        (output,) = submit(engine, prompt, max_new_tokens=8, sampling_seed=1, ignore_eos=True).result(120)
        delta = torch.tensor(output.logprobs) - forward_logprobs(model, prompt, output.token_ids)
        assert 0 < delta.abs().mean() < 0.25


@needs_triton
def test_runs_are_used_where_they_are_faster():
    from arealite.inference.cuda.runs import is_faster_in_runs

    even, one_long = np.full(256, 4500), np.array([16_000] + 63 * [1000])
    of_model = 2, 128  # KV heads, head size
    assert not is_faster_in_runs(even, 1, *of_model)
    assert is_faster_in_runs(one_long, 4, *of_model)
    assert is_faster_in_runs(np.full(32, 16_000), 1, *of_model)
    assert not is_faster_in_runs(np.full(32, 16_000), 8, *of_model)
    assert not is_faster_in_runs(np.full(32, 300), 4, *of_model)
    assert not is_faster_in_runs(np.full(64, 8000), 4, *of_model)
    assert is_faster_in_runs(np.full(64, 8000), 4, *of_model, element_size=1)


def test_type_of_the_cache():
    shape = ModelShape(2, 2, 128, 8, 512, ())
    assert choose_cache_dtype(ServerConfig(), torch.bfloat16) == torch.bfloat16
    assert choose_cache_dtype(ServerConfig(kv_cache_dtype="fp8"), torch.bfloat16) == torch.float8_e4m3fn
    assert shape.kv_bytes_per_token(torch.bfloat16) == 2 * 2 * 2 * 256
    assert shape.kv_bytes_per_token(torch.float8_e4m3fn) == 2 * 2 * 2 * (128 + 4)
    cases = (({"kv_cache_dtype": "int4"}, "use auto or fp8"), ({"kv_cache_dtype": "fp8", "device": "cpu"}, "CUDA only"))
    for settings, message in cases:
        with pytest.raises(ConfigError, match=message):
            ServerConfig(**settings).check()
