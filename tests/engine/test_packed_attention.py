"""Attention over packed sequences as the GPU's kernel is asked for it; the kernel itself is stood in for by plain arithmetic."""

from __future__ import annotations

import itertools

import pytest
import torch

from arealite.engine.fsdp import packed_attention as packed

LENGTHS = [5, 1, 9]


def varlen(query, key, value, starts_q, starts_k, longest_q, longest_k, *, scale, window_size):
    """What `torch.nn.attention.varlen.varlen_attn` computes, with what it refuses."""
    assert query.shape[-1] % 8 == 0, "head_size must be a multiple of 8"
    assert all(x.is_contiguous() for x in (query, key, value))
    outs = []
    for begin, end in itertools.pairwise(starts_q):
        q, k, v = (x[begin:end].transpose(0, 1) for x in (query, key, value))
        sdpa = torch.nn.functional.scaled_dot_product_attention
        outs.append(sdpa(q, k, v, is_causal=True, scale=scale).transpose(0, 1))
    return torch.cat(outs)


@pytest.mark.parametrize("size", [8, 12])
@pytest.mark.parametrize("scaling", [None, 0.3])
def test_heads_of_any_size_fit_the_kernel(monkeypatch, size, scaling):
    monkeypatch.setattr(packed, "varlen_attn", varlen)
    monkeypatch.setattr(packed, "_GQA", {})
    torch.manual_seed(0)
    heads = [torch.randn(1, 4, sum(LENGTHS), size) for _ in range(3)]
    starts = torch.tensor([0, 5, 6, 15], dtype=torch.int32)
    by_bucket = packed.attention_kwargs(starts, LENGTHS)
    lens = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": 9, "max_length_k": 9}
    attend = packed.packed_attention
    expected, _ = attend(torch.nn.Identity(), *heads, None, scaling=scaling, **by_bucket)
    found, _ = attend(torch.nn.Identity(), *heads, None, scaling=scaling, **lens)
    torch.testing.assert_close(found, expected)
