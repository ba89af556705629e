"""The forward pass of Llama-like decoders without modules, whose overhead dominates in small models.

Used by the CPU runner. It reads the parameters of the Hugging Face modules, so weight updates in place reach it, and
equals their forward pass up to the order of sums (tests/inference/test_lean_model.py).
"""

from typing import Any

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from arealite.inference.cpu.attention import PagedBatch
from arealite.inference.llama_like import attention_window


class LeanDecoder:
    """Embedding, layers and head of a Llama-like model."""

    def __init__(self, model: PreTrainedModel, max_len: int):
        body: Any = model.base_model
        self.embedding, self.norm = body.embed_tokens.weight, body.norm
        self.head: Any = model.get_output_embeddings()
        self.layers = [_Layer(layer) for layer in body.layers]
        cos, sin = body.rotary_emb(self.embedding[:1], torch.arange(max_len + 1)[None])
        half = sin.shape[-1] // 2
        self.cos = cos[0, :, None]  # [max_len + 1, 1, D]
        # With the sign included, a rotation only swaps the halves of x.
        self.sin = torch.cat([-sin[..., :half], sin[..., half:]], -1)[0, :, None]

    def hidden(self, ids: torch.Tensor, batch: PagedBatch) -> torch.Tensor:
        """Last hidden states [N, hidden] of tokens `ids` [N]; writes their keys and values to the cache."""
        x = F.embedding(ids, self.embedding)
        cos, sin = self.cos[batch.positions], self.sin[batch.positions]
        for index, layer in enumerate(self.layers):
            layer.add_to(x, index, cos, sin, batch)
        return _norm(x, self.norm)

    def logits(self, ids: torch.Tensor, batch: PagedBatch) -> torch.Tensor:
        """Logits [N, V] of tokens `ids` [N]."""
        return F.linear(self.hidden(ids, batch), self.head.weight, self.head.bias)


class _Layer:
    """The parameters of one layer. `out` and `down` are modules, which sum over ranks."""

    def __init__(self, layer: Any):
        attention, mlp = layer.self_attn, layer.mlp
        self.norm1, self.norm2 = layer.input_layernorm, layer.post_attention_layernorm
        self.q, self.k, self.v = ((p.weight, p.bias) for p in (attention.q_proj, attention.k_proj, attention.v_proj))
        self.q_norm = getattr(attention, "q_norm", None)
        self.k_norm = getattr(attention, "k_norm", None)
        self.out, self.down = attention.o_proj, mlp.down_proj
        self.gate, self.up = mlp.gate_proj.weight, mlp.up_proj.weight
        self.head_dim, self.scale = attention.head_dim, attention.scaling
        self.window = attention_window(attention)

    def add_to(self, x: torch.Tensor, index: int, cos: torch.Tensor, sin: torch.Tensor, batch: PagedBatch) -> None:
        """Add the layer's output to the residual stream `x` [N, hidden]."""
        h = _norm(x, self.norm1)
        heads = (len(x), -1, self.head_dim)
        q, k, v = (F.linear(h, *weights).view(heads) for weights in (self.q, self.k, self.v))
        if self.q_norm is not None:
            q, k = _norm(q, self.q_norm), _norm(k, self.k_norm)
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        mixed = batch.attend(index, q, k, v, self.scale, self.window)
        x += self.out(mixed.flatten(1))
        h = _norm(x, self.norm2)
        x += self.down(F.silu(F.linear(h, self.gate), inplace=True).mul_(F.linear(h, self.up)))


def _norm(x: torch.Tensor, norm: Any) -> torch.Tensor:
    return F.rms_norm(x, norm.weight.shape, norm.weight, norm.variance_epsilon)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)
