"""Attention on CUDA: arguments of both kernels, which plain arithmetic replaces here."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from arealite.engine.fsdp import packed_attention as packed
from arealite.engine.fsdp import varlen
from arealite.engine.fsdp.shared_prefix import Segment, SegmentPlan

LENGTHS = [5, 1, 9]


def flash(query, key, value, *rest, **options):
    """Compute what torch's variable-length kernel does, and check what it requires."""
    out, sums = torch.zeros_like(query), query.new_zeros(query.shape[1], len(query))
    for own, keys, seen in segments_of(query, key, value, *rest, **options):
        found = attention(*(as_row(x, part) for x, part in ((query, own), (key, keys), (value, keys))), seen, **options)
        out[own], sums[:, own] = found[0][0].transpose(0, 1), found[1][0, :, :, 0]
    return out, sums, None, None, None


def flash_backward(grad, query, key, value, out, sums, *rest, **options):
    grads = torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
    for own, keys, seen in segments_of(query, key, value, *rest, **options):
        parts = ((grad, own), (query, own), (key, keys), (value, keys), (out, own))
        found = gradients(*(as_row(x, part) for x, part in parts), sums[None, :, own, None], seen, **options)
        for target, part, row in zip(grads, (own, keys, keys), found, strict=True):
            target[part] = row[0].transpose(0, 1)
    return grads


def segments_of(query, key, value, starts_q, starts_k, *_, window_size_left, window_size_right, scale):
    assert query.shape[-1] % 8 == 0, "head_size must be a multiple of 8"
    assert all(x.is_contiguous() for x in (query, key, value)) and window_size_right == 0
    pairs = (itertools.pairwise(starts.tolist()) for starts in (starts_q, starts_k))
    for (begin_q, end_q), (begin_k, end_k) in zip(*pairs, strict=True):
        # The last query sees all keys.
        last = torch.arange(end_q - begin_q)[:, None] + end_k - begin_k - (end_q - begin_q)
        age = last - torch.arange(end_k - begin_k)
        seen = (age >= 0) & (age <= window_size_left if window_size_left >= 0 else True)
        yield slice(begin_q, end_q), slice(begin_k, end_k), seen


def as_row(x, part):
    return x[part].transpose(0, 1)[None]


def rows(query, key, value, bias, with_sums, dropout, causal, mask, *, scale):
    """Compute what cuDNN's kernel does."""
    assert with_sums and causal and bias is None and query.shape[2] % varlen.QUANTUM == 0
    return attention(query, key, value, torch.ones(query.shape[2], query.shape[2]).tril().bool(), scale)


def rows_backward(grad, query, key, value, out, sums, *_, scale):
    seen = torch.ones(query.shape[2], query.shape[2]).tril().bool()
    return gradients(grad, query, key, value, out, sums, seen, scale)


def attention(query, key, value, seen, scale, **_):
    scores = scores_of(query, key, seen, scale)
    sums = scores.logsumexp(-1, keepdim=True)
    return (scores - sums).exp() @ repeated(value, query), sums


def gradients(grad, query, key, value, out, sums, seen, scale, **_):
    """Use the given outputs and sums, as the kernels do."""
    share = (scores_of(query, key, seen, scale) - sums).exp()
    by_score = share * (grad @ repeated(value, query).mT - (grad * out).sum(-1, keepdim=True)) * scale
    groups = (key.shape[1], query.shape[1] // key.shape[1])
    of_keys = (x.unflatten(1, groups).sum(2) for x in (by_score.mT @ query, share.mT @ grad))
    return by_score @ repeated(key, query), *of_keys


def scores_of(query, key, seen, scale):
    return (query @ repeated(key, query).mT * scale).masked_fill(~seen, -torch.inf)


def repeated(x, query):
    return x.repeat_interleave(query.shape[1] // x.shape[1], dim=1)


@pytest.fixture(autouse=True)
def arithmetic(monkeypatch):
    kernels = {
        "_flash_attention_forward": flash,
        "_flash_attention_backward": flash_backward,
        "_scaled_dot_product_cudnn_attention": rows,
        "_scaled_dot_product_cudnn_attention_backward": rows_backward,
    }
    monkeypatch.setattr(varlen, "aten", SimpleNamespace(**kernels))
    monkeypatch.setattr(varlen, "has_fast_rows", lambda *_: True)
    monkeypatch.setattr(varlen, "QUANTUM", 4)


def force(monkeypatch, alone: bool) -> None:
    """Compute every segment alone, or none."""
    monkeypatch.setattr(varlen, "_TIME_OF_PAIR", -1.0 if alone else 1.0)
    monkeypatch.setattr(varlen, "_PAIRS_OF_CALL", 0.0)


@pytest.mark.parametrize("size", [8, 12])
@pytest.mark.parametrize("scaling", [None, 0.3])
@pytest.mark.parametrize("alone", [False, True])
def test_heads_of_any_size_fit_the_kernel(monkeypatch, size, scaling, alone):
    force(monkeypatch, alone)
    torch.manual_seed(0)
    heads = [torch.randn(1, 4, sum(LENGTHS), size) for _ in range(3)]
    starts = torch.tensor([0, 5, 6, 15], dtype=torch.int32)
    kernel = varlen.Varlen.of_rows(starts, LENGTHS, one_graph=False)
    assert bool(kernel.alone.any()) == alone
    layouts = packed.PackedLayout.make(starts, LENGTHS), packed.PackedLayout(kernel)
    module = torch.nn.Identity()
    expected, found = (
        packed.packed_attention(module, *heads, None, scaling=scaling, packed_layout=layout)[0] for layout in layouts
    )
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_the_kernel_gets_the_path_of_each_segment(monkeypatch, window, alone, compiled):
    """All kernels compute the same attention over a tree, with the same gradients."""
    force(monkeypatch, alone)
    # A root of 5 tokens with children of 4 and 3 tokens, the first of which has a child of 2; a row of its own.
    segments = [Segment(0, 9, 0), Segment(9, 2, 9), Segment(11, 3, 5), Segment(14, 4, 0)]
    keys = [*range(9), *range(9), 9, 10, *range(5), 11, 12, 13, *range(14, 18)]
    plan = SegmentPlan(segments, torch.tensor(keys))
    torch.manual_seed(0)
    heads = [torch.randn(18, count, 8, requires_grad=True) for count in (4, 2, 2)]
    weight = torch.randn(18, 4, 8)
    kernels = packed.Buckets(plan), varlen.Varlen.of_segments(plan, torch.device("cpu"), compiled)
    results = []
    for kernel in kernels:
        attend = kernel.attend
        if compiled and isinstance(kernel, varlen.Varlen):
            attend = torch.compile(kernel.attend, backend="aot_eager", dynamic=True)
        out = attend(*heads, None, window)
        results.append([out, *torch.autograd.grad((out * weight).sum(), heads)])
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)


def test_gradients_of_keys_that_many_segments_use_are_added_in_fp32():
    """A bf16 sum would stop growing at 256."""
    keys = torch.zeros(2, 1, 1, dtype=torch.bfloat16, requires_grad=True)
    index = torch.zeros(1024, dtype=torch.long)
    varlen._repeat_keys(keys, index).sum().backward()
    assert keys.grad is not None and keys.grad.flatten().tolist() == [1024.0, 0.0]


def test_compiled_layers_are_not_compiled_again_for_other_lengths(monkeypatch):
    """Lengths are attributes of an object and must stay symbolic, whichever kernel computes them."""
    force(monkeypatch, True)
    monkeypatch.setattr(varlen, "MAX_ALONE", 3)
    counter = CompileCounter()

    @torch.compile(backend=counter, dynamic=True)
    def layer(x, packed_layout):
        return packed_layout.attend(x, x, x, 0.5, None)

    chosen = set()
    for lengths in ([5, 9], [7, 3, 4], [11, 30, 2, 6], [8, 8]):
        starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
        kernel = varlen.Varlen.of_rows(starts, lengths, one_graph=True)
        chosen.add(bool(kernel.alone.any()))
        layer(torch.randn(sum(lengths), 2, 8), packed.PackedLayout(kernel))
    assert counter.frame_count == 1 and chosen == {True, False}


def test_gradients_are_added_in_a_fixed_order_if_results_must_repeat(monkeypatch):
    """The kernel does so only where torch refuses other kernels, not where it warns of them."""
    force(monkeypatch, False)
    modes = []

    def backward(*args, **options):
        modes.append(torch.get_deterministic_debug_mode())
        return flash_backward(*args, **options)

    monkeypatch.setattr(varlen.aten, "_flash_attention_backward", backward)
    heads = torch.randn(15, 2, 8, requires_grad=True)
    kernel = varlen.Varlen.of_rows(torch.tensor([0, 5, 6, 15], dtype=torch.int32), LENGTHS, one_graph=False)
    try:
        for repeats in (False, True):
            torch.use_deterministic_algorithms(repeats, warn_only=True)
            kernel.attend(heads, heads, heads, None, None).sum().backward()
            assert torch.get_deterministic_debug_mode() == int(repeats)
    finally:
        torch.use_deterministic_algorithms(False)
    # 0: any order; 2: a fixed order or an error.
    assert modes == [0, 2]


@pytest.mark.parametrize(
    ("queries", "keys", "alone"),
    [
        ([32_000], [32_000], True),
        ([8_000] * 4, [8_000] * 4, True),
        ([300] * 16, [300] * 16, False),
        ([4_000] * 20, [4_000] * 20, False),
        # Answers after a prompt; turns after a long history, whose queries would be computed for nothing.
        ([400, 9_000, 9_000], [400, 9_400, 9_400], True),
        ([500] * 4, [9_000] * 4, False),
    ],
)
def test_long_sequences_are_computed_alone(monkeypatch, queries, keys, alone):
    monkeypatch.setattr(varlen, "QUANTUM", 512)
    found = varlen.to_compute_alone(queries, keys, one_graph=False)
    assert found.shape == (varlen.MAX_ALONE, 4)
    assert [span[1] for span in found.tolist() if span[1]] == (queries if alone else [])
