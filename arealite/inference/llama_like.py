"""Recognizes decoders whose layers are Llama's up to biases, head norms and windows.

The runners have faster forward passes for these (`cpu.lean_model`, `cuda.fused_model`); all others run as they are.
"""

from typing import Any

from transformers import PreTrainedModel

LLAMA_LIKE = ("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer")
_STATIC_ROPE = ("default", "linear", "llama3", "yarn")  # angles depend on the position alone


def is_llama_like(model: PreTrainedModel) -> bool:
    """Whether a layer consists of RMSNorm, rotary embedding, attention and a SiLU gate."""
    body: Any = model.base_model
    layers = getattr(body, "layers", None)
    if layers is None or type(layers[0]).__name__ not in LLAMA_LIKE:
        return False
    rope = (body.config.rope_parameters or {}).get("rope_type", "default")
    return (
        rope in _STATIC_ROPE
        and body.config.hidden_act == "silu"
        and not any(getattr(layer.mlp.gate_proj, "bias", None) is not None for layer in layers)
    )


def attention_window(attention: Any) -> int | None:
    """Return the sliding window of a layer. Some families have it on the layer, others in the config."""
    return getattr(attention, "sliding_window", getattr(attention.config, "sliding_window", None))
