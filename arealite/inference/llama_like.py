"""Recognizes decoders whose layers are Llama's up to biases, head norms and windows.

The runners have faster forward passes for these (`cpu.lean_model`, `cuda.fused_model`); all others run as they are.
"""

from typing import Any

from transformers import PreTrainedModel

from arealite.utils.decoders import IMAGE_FAMILIES, has_vision

LLAMA_LIKE = (
    "LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer", "Qwen2VLDecoderLayer",
    "Qwen2_5_VLDecoderLayer",
)  # fmt: skip
# The same with experts in the place of the MLP.
LLAMA_LIKE_MIXTURES = ("MixtralDecoderLayer", "Qwen3MoeDecoderLayer")
_STATIC_ROPE = ("default", "linear", "llama3", "yarn")  # angles depend on the position alone


def body_of(model: PreTrainedModel) -> Any:
    """Return embedding and layers; of a vision-language model, those that read text."""
    is_vision = has_vision(model.config) and model.config.model_type in IMAGE_FAMILIES
    return model.base_model.language_model if is_vision else model.base_model


def is_llama_like(model: PreTrainedModel, with_experts: bool = False) -> bool:
    """Whether a layer consists of RMSNorm, rotary embedding, attention and a SiLU gate.

    `with_experts`: experts may take the place of the gate.
    """
    body = body_of(model)
    layers = getattr(body, "layers", None)
    known = LLAMA_LIKE + LLAMA_LIKE_MIXTURES if with_experts else LLAMA_LIKE
    if layers is None or type(layers[0]).__name__ not in known:
        return False
    rope = (body.config.rope_parameters or {}).get("rope_type", "default")
    return (
        rope in _STATIC_ROPE
        and body.config.hidden_act == "silu"
        and not any(_has_biases(layer.mlp) for layer in layers)
    )


def _has_biases(mlp: Any) -> bool:
    return not hasattr(mlp, "experts") and getattr(mlp.gate_proj, "bias", None) is not None


def attention_window(attention: Any) -> int | None:
    """Return the sliding window of a layer. Some families have it on the layer, others in the config."""
    return getattr(attention, "sliding_window", getattr(attention.config, "sliding_window", None))
