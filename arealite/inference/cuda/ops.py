"""Functions on tensors that launch the Triton kernels. Used by the fused model and the CUDA runner.

None of them allocates on the host or reads from the device, so every function can be captured in a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton

from arealite.inference.cuda import kernels as _kernels
from arealite.inference.cuda import prompt_kernels as _prompt_kernels
from arealite.inference.cuda import sample_kernels as _sample_kernels
from arealite.inference.cuda.runs import RunPlan, aligned_tokens, attend_runs
from arealite.inference.cuda.split_k import Parts, is_early, launch_options
from arealite.inference.fp8 import FP8, Quantized

# Type checkers do not know that a Triton kernel is indexed by its grid.
kernels: Any = _kernels
prompt_kernels: Any = _prompt_kernels
sample_kernels: Any = _sample_kernels
LOG2_E = 1.4426950408889634
_PARTS = 32  # of the vocabulary, sampled in parallel
# So many programs of decode attention hide each other's latency: with one warp each, more of them run at once.
_MANY_PROGRAMS = 1024


@dataclass
class DeviceBatch:
    """One forward pass on the device. Token i belongs to slot `rows[i]` at position `positions[i]`."""

    keys: list[torch.Tensor]  # per layer [num_blocks, BS, HKV, D], of which the last is dense
    values: list[torch.Tensor]  # likewise; in FP8 [num_blocks, HKV, D, BS]
    table: torch.Tensor  # [S + 1, MB] block tables of all slots
    rows: torch.Tensor  # [N]
    positions: torch.Tensor  # [N]
    rope: torch.Tensor | None = None  # [N] rows of the tables of angles; None: the positions
    splits: int = 1  # decode only: number of parts of a long sequence
    tile_first: torch.Tensor | None = None  # prefill only: first token and number of tokens of a tile
    tile_count: torch.Tensor | None = None
    # For a cache in FP8: per layer, scales of keys and of values [num_blocks, HKV, BS].
    scales: list[tuple[torch.Tensor, torch.Tensor]] | None = None
    plan: RunPlan | None = None  # decode only: contexts divided into runs, for layers without a window

    def attention(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """For models that use the attention interface: [1, H, N, D] in, [1, N, H, D] out."""
        write_cache(key[0], value[0], self, layer)
        query = query[0].transpose(0, 1)
        return attend(query, self, layer, scale, window, softcap, sinks).unsqueeze(0)


def tokens_per_tile(group: int) -> int:
    """Number of tokens in a prefill tile if `group` query heads share a KV head."""
    return max(1, 128 // group)


def add_norm(
    delta: torch.Tensor | Parts | None, residual: torch.Tensor, weight: torch.Tensor, eps: float, fp8: bool = False
) -> Any:
    """Add delta to residual in place; returns RMSNorm(residual) * weight.

    In the weight's type, or with `fp8` as `Quantized`.
    """
    n, size = residual.shape
    out = torch.empty_like(residual, dtype=FP8 if fp8 else weight.dtype)
    scales = torch.empty(n, 1, dtype=torch.float32, device=residual.device) if fp8 else residual
    block = triton.next_power_of_2(size)
    added, parts, _ = _as_parts(residual if delta is None else delta)
    early = is_early(residual)
    kernels.add_norm_kernel[(n,)](
        added, residual, weight, out, scales, size, eps, n * size,
        HAS_DELTA=delta is not None, PARTS=parts, EARLY=early, SCALED=fp8, BLOCK=block,
        num_warps=min(8, max(1, block // 256)), **launch_options(early),
    )  # fmt: skip
    return Quantized(out, scales) if fp8 else out


def _as_parts(x: torch.Tensor | Parts) -> tuple[torch.Tensor, int, torch.Tensor | None]:
    """A product's numbers or sums, the number of its parts, and the bias that has not been added."""
    return (x.sums, x.sums.shape[0], x.bias) if isinstance(x, Parts) else (x, 1, None)


def quantize(x: torch.Tensor, gated: bool = False) -> Quantized:
    """Quantize tokens [N, size]; with `gated`, silu(first half of x) * second half."""
    n, size = x.shape[0], x.shape[1] // 2 if gated else x.shape[1]
    out = torch.empty(n, size, dtype=FP8, device=x.device)
    scales = torch.empty(n, 1, dtype=torch.float32, device=x.device)
    block = min(16384, triton.next_power_of_2(size))
    kernels.quantize_kernel[(n,)](
        x, out, scales, size, GATED=gated, BLOCK=block, num_warps=min(16, max(1, block // 512))
    )
    return Quantized(out, scales)


def silu_mul(x: torch.Tensor, fp8: bool = False) -> Any:
    """silu(first half of x) * second half; with `fp8`, as `Quantized`."""
    if fp8:
        return quantize(x, gated=True)
    n, size = x.shape[0], x.shape[1] // 2
    out = torch.empty(n, size, dtype=x.dtype, device=x.device)
    block = 1024
    kernels.silu_mul_kernel[(n, triton.cdiv(size, block))](x, out, size, BLOCK=block)
    return out


def rope_and_write(
    qkv: torch.Tensor | Parts,
    batch: DeviceBatch,
    layer: int,
    cos: torch.Tensor,
    sin: torch.Tensor,
    num_heads: int,
    norms: tuple[torch.Tensor, torch.Tensor, float] | None,
) -> torch.Tensor:
    """Rotate queries and keys, and write the cache; returns the queries [N, H, D].

    They are a view of `qkv`, or if that has parts, of a new tensor.
    """
    made, parts, bias = _as_parts(qkv)
    n, width = made.shape[-2:]
    queries = made if parts == 1 else torch.empty(n, width, dtype=cos.dtype, device=cos.device)
    early = is_early(queries)
    keys, values = batch.keys[layer], batch.values[layer]
    block_size, num_kv, dim = keys.shape[1:]
    q_norm, k_norm, eps = norms or (cos, cos, 0.0)
    key_scales, value_scales = batch.scales[layer] if batch.scales else (cos, cos)
    kernels.rope_write_kernel[(n,)](
        made, queries if bias is None else bias, queries,
        batch.rows, batch.positions, batch.positions if batch.rope is None else batch.rope, cos, sin,
        q_norm, k_norm, keys, values, key_scales, value_scales, batch.table, batch.table.stride(0), eps,
        n * width, PARTS=parts, BIASED=bias is not None, EARLY=early,
        H=num_heads, HKV=num_kv, D=dim, BS=block_size, NORM=norms is not None, MOVED=batch.rope is not None,
        SCALED=batch.scales is not None,
        HALF=triton.next_power_of_2(dim // 2), HEADS=triton.next_power_of_2(num_heads + 2 * num_kv),
        KV_HEADS=triton.next_power_of_2(num_kv), **launch_options(early),
    )  # fmt: skip
    return queries.view(n, -1, dim)[:, :num_heads]


def write_cache(key: torch.Tensor, value: torch.Tensor, batch: DeviceBatch, layer: int) -> None:
    """Write keys and values [HKV, N, D] to the cache."""
    scales = batch.scales[layer] if batch.scales else (key, value)
    block_size, num_kv, dim = batch.keys[layer].shape[1:]
    for source, cache, scale in zip((key, value), (batch.keys[layer], batch.values[layer]), scales, strict=True):
        source = source if source.stride(-1) == 1 else source.contiguous()
        kernels.write_cache_kernel[(source.shape[1],)](
            source, cache, scale, batch.rows, batch.positions, batch.table, batch.table.stride(0),
            source.stride(0), source.stride(1), HKV=num_kv, D=dim, BS=block_size,
            SCALED=batch.scales is not None, TOKENS_LAST=batch.scales is not None and source is value,
            HEADS=triton.next_power_of_2(num_kv), WIDTH=triton.next_power_of_2(dim),
        )  # fmt: skip


def attend(
    q: torch.Tensor,
    batch: DeviceBatch,
    layer: int,
    scale: float,
    window: int | None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of queries [N, H, D] (last dimension dense) over the cache; returns [N, H, D].

    `softcap` bounds the scores by c·tanh(score / c); `sinks` [H] are scores of a key without a value.
    """
    if window is None and sinks is None and batch.tile_first is not None:
        return _attend_prompts(q, batch, layer, scale, softcap)
    if batch.plan is None or window is not None or sinks is not None:
        return _attend_tiles(q, batch, layer, scale, window, softcap, sinks)
    scales = batch.scales[layer] if batch.scales else None
    cap = None if softcap is None else softcap * LOG2_E
    at = batch.rows, batch.positions, batch.table
    return attend_runs(q, batch.keys[layer], batch.values[layer], scales, *at, batch.plan, scale * LOG2_E, cap)


def _attend_prompts(
    q: torch.Tensor, batch: DeviceBatch, layer: int, scale: float, softcap: float | None
) -> torch.Tensor:
    """Attention of a prefill without windows and sinks."""
    first, count = batch.tile_first, batch.tile_count
    assert first is not None and count is not None
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    constants = _constants(q, batch, layer, softcap)
    group = constants["G"]
    prompt_kernels.attend_prompt_kernel[(constants["HKV"], first.shape[0])](
        q, batch.keys[layer], batch.values[layer], *(batch.scales[layer] if batch.scales else (out, out)), out,
        batch.rows, batch.positions, batch.table, first, count,
        batch.table.stride(0), q.stride(0), q.stride(1), scale * LOG2_E, (softcap or 1.0) * LOG2_E,
        BLOCK_M=max(16, triton.next_power_of_2(tokens_per_tile(group) * group)),
        STAGES=2 if constants["PRECISE"] else 3, **constants, num_warps=8,
    )  # fmt: skip
    return out


def _attend_tiles(
    q: torch.Tensor,
    batch: DeviceBatch,
    layer: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention with one program for a tile of queries, or for a part of its context."""
    n, num_heads, dim = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    decode = batch.tile_first is None
    splits = batch.splits if decode else 1
    part = lse = out
    if splits > 1:
        part = torch.empty(splits, n, num_heads, dim, dtype=torch.float32, device=q.device)
        lse = torch.empty(splits, n, num_heads, dtype=torch.float32, device=q.device)
    tiles = n if batch.tile_first is None else batch.tile_first.shape[0]
    constants = _constants(q, batch, layer, softcap)
    group = constants["G"]
    rows = group if decode else tokens_per_tile(group) * group
    num_warps, num_stages = 2 if decode else 8, 2 if constants["PRECISE"] else 3
    has_many = decode and tiles * constants["HKV"] * splits >= _MANY_PROGRAMS
    if has_many and rows <= 16 and dim == 128 and not (constants["PRECISE"] or constants["SCALED"]):
        constants["BLOCK_N"], num_warps, num_stages = 32, 1, 2
    kernels.attend_kernel[(tiles, constants["HKV"], splits)](
        q, batch.keys[layer], batch.values[layer], *(batch.scales[layer] if batch.scales else (out, out)), out,
        part, lse, batch.rows, batch.positions, batch.table,
        batch.rows if decode else batch.tile_first,
        batch.rows if decode else batch.tile_count,
        q if sinks is None else sinks,
        n, batch.table.stride(0), q.stride(0), q.stride(1), scale * LOG2_E, (softcap or 1.0) * LOG2_E,
        BLOCK_M=max(16, triton.next_power_of_2(rows)),
        SPLITS=splits, WINDOW=window or 0, DECODE=decode, SINKS=sinks is not None, **constants,
        num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip
    if splits > 1:
        kernels.merge_splits_kernel[(n * num_heads,)](
            part, lse, out, n * num_heads, D=dim, WIDTH=constants["WIDTH"], SPLITS=splits, num_warps=1
        )
    return out


def _constants(q: torch.Tensor, batch: DeviceBatch, layer: int, softcap: float | None) -> dict[str, Any]:
    """Constants that the kernels of attention share."""
    block_size, num_kv = batch.keys[layer].shape[1:3]
    _, num_heads, dim = q.shape
    is_scaled = batch.scales is not None
    precise = q.dtype == torch.float32 and not is_scaled
    return {
        "H": num_heads, "HKV": num_kv, "G": num_heads // num_kv, "D": dim,
        "WIDTH": max(16, triton.next_power_of_2(dim)),  # 16 is the smallest size of a matrix product
        "BS": block_size, "ALIGNED": aligned_tokens(block_size), "BLOCK_N": 32 if precise else 64,
        "PRECISE": precise, "SOFTCAP": softcap is not None, "SCALED": is_scaled,
    }  # fmt: skip


def find_thresholds(
    logits: torch.Tensor,
    rows: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    thresholds: torch.Tensor,
) -> None:
    """Write the smallest tempered logit that may be sampled, for each row of logits, to `thresholds` [B]."""
    b, vocab = logits.shape
    sample_kernels.threshold_kernel[(b,)](
        logits, rows, temperature, top_k, top_p, min_p, thresholds, vocab,
        BLOCK=min(4096, triton.next_power_of_2(vocab)), HALVINGS=26, num_warps=16,
    )  # fmt: skip


def forbid(logits: torch.Tensor, lines: torch.Tensor, bits: torch.Tensor) -> None:
    """Set logits of the rows `lines` [M] to -inf where a bit of `bits` [M, ceil(V / 32)] is 0."""
    vocab, block = logits.shape[1], 2048
    sample_kernels.forbid_kernel[(lines.shape[0], triton.cdiv(vocab, block))](
        logits, lines, bits, vocab, bits.shape[1], BLOCK=block
    )


def sample(
    logits: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    thresholds: torch.Tensor,
    tokens: torch.Tensor,
    logprobs: torch.Tensor,
) -> None:
    """Sample a token and its log-prob for each row of logits [B, V] into `tokens` and `logprobs` [B]."""
    b, vocab = logits.shape
    best, peak, total = torch.empty(3, b, _PARTS, dtype=torch.float32, device=logits.device)
    token = torch.empty(b, _PARTS, dtype=torch.int32, device=logits.device)
    block = min(1024, triton.next_power_of_2(vocab))
    part_size = triton.cdiv(triton.cdiv(vocab, _PARTS), block) * block
    sample_kernels.sample_parts_kernel[(b, _PARTS)](
        logits, rows, positions, temperature, seeds, thresholds, best, token, peak, total, vocab, part_size,
        PARTS=_PARTS, BLOCK=block, FAST=logits.is_cuda, num_warps=4,
    )  # fmt: skip
    sample_kernels.finish_sample_kernel[(b,)](
        logits, rows, temperature, best, token, peak, total, tokens, logprobs, vocab, PARTS=_PARTS, num_warps=1
    )


def advance(rows: torch.Tensor, tokens: torch.Tensor, last_token: torch.Tensor, position: torch.Tensor) -> None:
    """Make sampled tokens the next inputs. The last slot is padding and stays as it is."""
    sample_kernels.advance_kernel[(rows.shape[0],)](
        rows, tokens, last_token, position, last_token.shape[0] - 1, num_warps=1
    )
