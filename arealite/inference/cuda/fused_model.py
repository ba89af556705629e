"""Forward passes on CUDA: fused kernels for Llama-like decoders, the Hugging Face forward for others.

The fused pass joins query/key/value and gate/up weights once; the modules' parameters become views of the joined
tensors, so that weight updates in place reach both. It equals the Hugging Face forward up to the order of sums
(tests/inference/test_cuda_runner.py).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from arealite.inference.cuda import ops as cuda_ops
from arealite.inference.cuda.experts import expert_parts, has_grouped_kernels, use_grouped_kernels
from arealite.inference.cuda.ops import DeviceBatch
from arealite.inference.cuda.split_k import Parts, Product, split_linear, split_product
from arealite.inference.fp8 import Fp8Linear
from arealite.inference.llama_like import attention_window, body_of, is_llama_like


def make_decoder(model: PreTrainedModel, max_len: int) -> FusedDecoder | PlainDecoder:
    """Return the fastest forward pass for this model."""
    use_grouped_kernels(model)
    return FusedDecoder(model, max_len) if is_llama_like(model, with_experts=True) else PlainDecoder(model)


class FusedDecoder:
    """Embedding, layers and head of a Llama-like model as few kernels."""

    def __init__(self, model: PreTrainedModel, max_len: int):
        self.model = model
        self.body = body_of(model)
        self.head: Any = model.get_output_embeddings()
        config = model.config.get_text_config()
        self.num_heads = config.num_attention_heads
        # Not rounded between layers: a third less error for a few bytes (benchmark/results/inference.md).
        self.residual_type = torch.float32
        self.layers = [_FusedLayer(layer) for layer in self.body.layers]
        # Weights are in FP8, and activations are quantized by the kernels that make them.
        self.fp8 = isinstance(self.body.layers[0].self_attn.o_proj, Fp8Linear)
        # Cosines and sines, [max_len + 1, D]
        self.tables = self.angles(torch.arange(max_len + 1, device=self.head.weight.device)[None])

    def angles(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines [N, D] at positions [1, N], or [3, N] in time, height and width."""
        probe = torch.zeros(1, dtype=self.head.weight.dtype, device=positions.device)
        if "mrope_section" in (self.body.config.rope_parameters or {}):
            positions = positions.expand(3, -1)[:, None]
        found: list[torch.Tensor] = []
        for part in self.body.rotary_emb(probe, positions):
            if part.dim() == 4:  # older versions of transformers join the three in each layer
                sections = 2 * list(self.body.config.rope_parameters["mrope_section"])
                part = torch.cat([m[i % 3] for i, m in enumerate(part.split(sections, dim=-1))], dim=-1)
            found.append(part[0].contiguous())
        return found[0], found[1]

    def hidden(self, ids: torch.Tensor, batch: DeviceBatch) -> torch.Tensor:
        """Last hidden states [N, hidden] of tokens `ids` [N]; writes their keys and values to the cache."""
        return self.run(F.embedding(ids, self.body.embed_tokens.weight), batch, *self.tables)

    def run(self, embeddings: torch.Tensor, batch: DeviceBatch, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """The same of embeddings [N, hidden], with the tables of angles to which `batch` refers."""
        residual = embeddings.to(self.residual_type)
        delta = None
        for index, layer in enumerate(self.layers):
            x = cuda_ops.add_norm(delta, residual, layer.norm1.weight, layer.eps, self.fp8)
            qkv = layer.qkv(x)
            q = cuda_ops.rope_and_write(qkv, batch, index, cos, sin, self.num_heads, layer.head_norms)
            mixed = cuda_ops.attend(q, batch, index, layer.scale, layer.window)
            mixed = mixed.flatten(1)
            # A module, which sums over ranks in tensor parallel.
            delta = layer.out(cuda_ops.quantize(mixed) if self.fp8 else mixed)
            x = cuda_ops.add_norm(delta, residual, layer.norm2.weight, layer.eps, layer.mlp.fp8)
            delta = layer.mlp(x)
        return cuda_ops.add_norm(delta, residual, self.body.norm.weight, self.layers[0].eps)

    def logits(self, ids: torch.Tensor, batch: DeviceBatch, out: torch.Tensor) -> None:
        """Write logits to `out`. Into float32 they are not rounded: the product's sums are float32 anyway."""
        hidden, weight = self.hidden(ids, batch), self.head.weight.t()
        if out.dtype == hidden.dtype:
            torch.mm(hidden, weight, out=out)
        else:
            torch.mm(hidden, weight, out_dtype=out.dtype, out=out)
        if self.head.bias is not None:
            out += self.head.bias


class PlainDecoder:
    """Any Hugging Face decoder, through the attention interface (`inference.attention`)."""

    def __init__(self, model: PreTrainedModel):
        self.model = model

    def hidden(self, ids: torch.Tensor, batch: DeviceBatch) -> torch.Tensor:
        return self._run(self.model.base_model, ids, batch).last_hidden_state[0]

    def logits(self, ids: torch.Tensor, batch: DeviceBatch, out: torch.Tensor) -> None:
        out.copy_(self._run(self.model, ids, batch).logits[0])

    def _run(self, module: nn.Module, ids: torch.Tensor, batch: DeviceBatch) -> Any:
        return module(input_ids=ids[None], position_ids=batch.positions[None], use_cache=False, paged=batch)


class _FusedLayer:
    """The parameters of one decoder layer, joined where one product replaces several."""

    def __init__(self, layer: Any):
        attention = layer.self_attn
        self.mlp = _Experts(layer.mlp) if hasattr(layer.mlp, "experts") else _Mlp(layer.mlp)
        self.norm1, self.norm2 = layer.input_layernorm, layer.post_attention_layernorm
        self.eps = self.norm1.variance_epsilon
        projections = [attention.q_proj, attention.k_proj, attention.v_proj]
        self.qkv = _join_layers(projections, adds_parts=True)
        self.out = split_linear(attention.o_proj)
        self.scale = attention.scaling
        self.window = attention_window(attention)
        self.head_norms = None
        if hasattr(attention, "q_norm"):
            q_norm, k_norm = attention.q_norm, attention.k_norm
            self.head_norms = (q_norm.weight, k_norm.weight, q_norm.variance_epsilon)


class _Mlp:
    """A SiLU gate as two products; with `fp8`, of quantized tokens."""

    def __init__(self, mlp: Any):
        self.gate_up = _join_layers([mlp.gate_proj, mlp.up_proj], adds_parts=False)
        self.down = split_linear(mlp.down_proj)
        self.fp8 = isinstance(mlp.down_proj, Fp8Linear)
        assert isinstance(mlp.act_fn, type(ACT2FN["silu"]))

    def __call__(self, x: Any) -> torch.Tensor | Parts:
        return self.down(cuda_ops.silu_mul(self.gate_up(x), self.fp8))


class _Experts:
    """The router and the experts of a layer: the module of transformers, with the kernels of `experts`."""

    fp8 = False

    def __init__(self, block: Any):
        self.block = block

    def __call__(self, x: torch.Tensor) -> torch.Tensor | Parts:
        if not has_grouped_kernels(self.block.experts):
            return self.block(x[None])[0]
        _, shares, index = self.block.gate(x)
        return Parts(expert_parts(self.block.experts, x, index, shares), None)


def _join_layers(layers: list[Any], adds_parts: bool) -> Product:
    """One product for several layers with the same input, which is quantized if they are in FP8."""
    if isinstance(layers[0], Fp8Linear):
        joined = Fp8Linear.join(layers)
        return split_product(joined, joined.weight, joined.bias, adds_parts)
    has_bias = layers[0].bias is not None
    bias = _join([layer.bias for layer in layers]) if has_bias else None
    weight = _join([layer.weight for layer in layers])
    return split_product(partial(F.linear, weight=weight, bias=bias), weight, bias, adds_parts)


def _join(parameters: list[nn.Parameter]) -> torch.Tensor:
    """Join the parameters in one tensor; they become views of it."""
    joined = torch.cat([p.data for p in parameters])
    start = 0
    for parameter in parameters:
        size = parameter.shape[0]
        parameter.data = joined[start : start + size]
        start += size
    return joined
