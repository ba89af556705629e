"""Arguments of the variable-length attention kernel, which plain arithmetic replaces here."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from arealite.engine.fsdp import packed_attention as packed
from arealite.engine.fsdp.shared_prefix import Segment, SegmentPlan

LENGTHS = [5, 1, 9]


def varlen(query, key, value, starts_q, starts_k, longest_q, longest_k, *, scale, window_size):
    """Compute what `torch.nn.attention.varlen.varlen_attn` does, and check what it requires."""
    assert query.shape[-1] % 8 == 0, "head_size must be a multiple of 8"
    assert all(x.is_contiguous() for x in (query, key, value))
    outs = []
    for (begin_q, end_q), (begin_k, end_k) in zip(
        itertools.pairwise(starts_q.tolist()), itertools.pairwise(starts_k.tolist()), strict=True
    ):
        q, k, v = (x[a:b].transpose(0, 1) for x, a, b in (
            (query, begin_q, end_q), (key, begin_k, end_k), (value, begin_k, end_k),
        ))  # fmt: skip
        # The last query sees all keys.
        age = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1] - torch.arange(k.shape[1])
        seen = (age >= 0) & (age <= window_size[0] if window_size[0] >= 0 else True)
        sdpa = torch.nn.functional.scaled_dot_product_attention
        outs.append(sdpa(q, k, v, attn_mask=seen, scale=scale).transpose(0, 1))
    return torch.cat(outs)


@pytest.mark.parametrize("size", [8, 12])
@pytest.mark.parametrize("scaling", [None, 0.3])
def test_heads_of_any_size_fit_the_kernel(monkeypatch, size, scaling):
    monkeypatch.setattr(packed, "varlen_attn", varlen)
    monkeypatch.setattr(packed, "_GQA", {})
    torch.manual_seed(0)
    heads = [torch.randn(1, 4, sum(LENGTHS), size) for _ in range(3)]
    starts = torch.tensor([0, 5, 6, 15], dtype=torch.int32)
    layouts = packed.PackedLayout.make(starts, LENGTHS), packed.PackedLayout(packed.Varlen(starts, starts, 9, 9))
    module = torch.nn.Identity()
    expected, found = (
        packed.packed_attention(module, *heads, None, scaling=scaling, packed_layout=layout)[0] for layout in layouts
    )
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("compiled", [False, True])
def test_the_kernel_gets_the_path_of_each_segment(monkeypatch, window, compiled):
    """Both kernels compute the same attention over a tree, with the same gradients."""
    monkeypatch.setattr(packed, "varlen_attn", torch.compiler.disable(varlen))
    monkeypatch.setattr(packed, "_GQA", {})
    # A root of 5 tokens with children of 4 and 3 tokens, the first of which has a child of 2; a row of its own.
    segments = [Segment(0, 9, 0), Segment(9, 2, 9), Segment(11, 3, 5), Segment(14, 4, 0)]
    keys = [*range(9), *range(9), 9, 10, *range(5), 11, 12, 13, *range(14, 18)]
    plan = SegmentPlan(segments, torch.tensor(keys))
    torch.manual_seed(0)
    heads = [torch.randn(18, 2, 8, requires_grad=True) for _ in range(3)]
    weight = torch.randn(18, 2, 8)
    kernels = packed.Buckets(plan), packed.Varlen.of_segments(plan, torch.device("cpu"))
    results = []
    for kernel in kernels:
        attend = kernel.attend
        if compiled and isinstance(kernel, packed.Varlen):
            attend = torch.compile(kernel.attend, backend="aot_eager", dynamic=True)
        out = attend(*heads, None, window)
        results.append([out, *torch.autograd.grad((out * weight).sum(), heads)])
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)


def test_gradients_of_keys_that_many_segments_use_are_added_in_fp32():
    """A bf16 sum would stop growing at 256."""
    keys = torch.zeros(2, 1, 1, dtype=torch.bfloat16, requires_grad=True)
    index = torch.zeros(1024, dtype=torch.long)
    packed._repeat_keys(keys, index).sum().backward()
    assert keys.grad is not None and keys.grad.flatten().tolist() == [1024.0, 0.0]


def test_compiled_layers_are_not_compiled_again_for_other_lengths(monkeypatch):
    """Lengths are attributes of an object and must stay symbolic."""
    monkeypatch.setattr(packed, "varlen_attn", lambda q, k, v, cq, ck, lq, lk, **_: q * lq + cq.sum() + lk)
    monkeypatch.setattr(packed, "_GQA", {})
    counter = CompileCounter()

    @torch.compile(backend=counter, dynamic=True)
    def layer(x, packed_layout):
        return packed_layout.attend(x, x, x, 0.5, None)

    for lengths in ([5, 9], [7, 3, 4], [11, 30, 2, 6], [8, 8]):
        starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
        layout = packed.PackedLayout(packed.Varlen(starts, starts, max(lengths), max(lengths)))
        layer(torch.randn(sum(lengths), 2, 8), layout)
    assert counter.frame_count == 1
