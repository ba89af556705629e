"""Arguments of the variable-length attention kernel, which plain arithmetic replaces here."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from arealite.engine.fsdp import packed_attention as packed

LENGTHS = [5, 1, 9]


def varlen(query, key, value, starts_q, starts_k, longest_q, longest_k, *, scale, window_size):
    """Compute what `torch.nn.attention.varlen.varlen_attn` does, and check what it requires."""
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
    layouts = packed.PackedLayout.make(starts, LENGTHS), packed.PackedLayout(packed.Varlen(starts, starts, 9, 9))
    module = torch.nn.Identity()
    expected, found = (
        packed.packed_attention(module, *heads, None, scaling=scaling, packed_layout=layout)[0] for layout in layouts
    )
    torch.testing.assert_close(found, expected)


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
