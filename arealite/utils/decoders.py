"""Loads Hugging Face decoders and rejects those that trainer and server cannot compute.

A token may attend to all earlier tokens, or to a window of them, and to nothing else: recurrent states, chunks or a
view of later tokens can be neither paged nor packed. The config shows most of it. `check_trial` finds the rest by
comparing log-probs with the model's own forward pass (in servers of one rank, and in trainers without tensor or
context parallelism).
"""

import inspect
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
    logging,
)

from arealite.api.errors import ConfigError
from arealite.utils.model_config import check_model

TRIAL_TOKENS = 24
# Families whose images enter the decoder as embeddings and nowhere else.
IMAGE_FAMILIES = ("qwen2_vl", "qwen2_5_vl", "llava")
_LAYER_TYPES = {"full_attention", "sliding_attention"}
# These families put the window into the mask only and do not pass it to the attention function.
_WINDOW_IN_MASK_ONLY = {"doge", "phimoe", "qwen2_moe"}
# Names of the norms of queries and keys, beside `q_proj`.
_HEAD_NORMS = ("q_norm", "k_norm", "q_layernorm", "k_layernorm")
_ELSEWHERE = "use another model, or serve it with sglang or vllm"
# Exceptions that transformers raises for a damaged config or damaged weights.
_LOAD_ERRORS = (
    OSError, ValueError, RuntimeError, LookupError, ImportError, TypeError, AttributeError, ZeroDivisionError,
    AssertionError, StrictDataclassError,
)  # fmt: skip


def read_model_config(path: str | Path, scalar_head: bool = False) -> PreTrainedConfig:
    """Return a model's config; with `scalar_head` that of a critic or reward model, without images."""
    check_model(path)
    with model_errors(path):
        config = AutoConfig.from_pretrained(path)
    mappings = [AutoModelForCausalLM._model_mapping]
    mappings += [] if scalar_head else [AutoModelForImageTextToText._model_mapping]
    if not any(type(config) in mapping for mapping in mappings):
        no_images = "critics and reward models are text models: use one, or an algorithm without a critic, such as grpo"
        raise ConfigError(
            f"model type {config.model_type!r} in {path} is not a causal language model of the installed transformers: "
            + (no_images if has_vision(config) and scalar_head else _ELSEWHERE)
        )
    check_decoder(config)
    check_head(path, config.architectures or (), config.num_labels or 0, scalar_head)
    return config


def check_head(path: str | Path, classes: Iterable[str], num_labels: int, scalar_head: bool) -> None:
    """Raise `ConfigError` for a classifier that cannot be the model that is wanted.

    With tied embeddings a classifier has all weights of a language model, and would write noise.
    """
    found = next((name for name in classes if name.endswith("ForSequenceClassification")), None)
    if found and not scalar_head:
        raise ConfigError(
            f"{path} is a reward model or critic ({found}), which generates no text: give a language model. Scores "
            "come from LocalRewardModel (docs/rewards.md)"
        )
    if found and num_labels != 1:
        raise ConfigError(
            f"{path} is a classifier ({found}) with {num_labels} labels, and a reward model or critic has one: give a "
            "language model, which gets a new head, or a classifier of one label"
        )


@contextmanager
def model_errors(path: str | Path) -> Iterator[None]:
    """Turn what transformers raises for a damaged model into a `ConfigError` of one line."""
    try:
        yield
    except SafetensorError as error:
        raise ConfigError(
            f"the weights in {path} are damaged or incomplete ({error}): copy or download them again"
        ) from error
    except ConfigError:
        raise
    except _LOAD_ERRORS as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(f"cannot load a model from {path}: {reason}. Check its config.json and weights") from error


def check_decoder(config: PreTrainedConfig) -> None:
    """Raise `ConfigError` if the config has layers that mix tokens in an unsupported way."""
    text = config.get_text_config()
    unknown = set(getattr(text, "layer_types", None) or ()) - _LAYER_TYPES
    if unknown:
        raise ConfigError(
            f"model type {text.model_type!r} has layers of type {sorted(map(str, unknown))}; supported are "
            f"{sorted(_LAYER_TYPES)}: " + _ELSEWHERE
        )
    window = getattr(text, "sliding_window", None)
    if window and text.model_type in _WINDOW_IN_MASK_ONLY and window < text.max_position_embeddings:
        raise ConfigError(
            f"model type {text.model_type!r} does not pass its sliding_window of {window} to its attention: "
            f"{_ELSEWHERE}"
        )
    if getattr(text, "use_bidirectional_attention", None) in (True, "all"):
        raise ConfigError(f"model type {text.model_type!r} lets tokens attend to later ones: {_ELSEWHERE}")


def has_vision(config: PreTrainedConfig) -> bool:
    """Return whether the config is that of a vision-language model."""
    return getattr(config, "vision_config", None) is not None


def language_model(model: PreTrainedModel) -> Any:
    """Return the decoder: a part of a vision-language model, or the whole of a text model."""
    return getattr(model.base_model, "language_model", model)


def rope_positions(
    model: PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor, grids: torch.Tensor
) -> torch.Tensor | None:
    """Return positions `[3, B, T]` in time, height and width; None if the model has none.

    `grids [K, 3]` has the patches of each image in the order of the placeholders.
    """
    find = getattr(model.base_model, "get_rope_index", None)
    if find is None:
        return None
    inputs = {"input_ids": ids, "attention_mask": mask, "image_grid_thw": grids}
    if "mm_token_type_ids" in inspect.signature(find).parameters:
        inputs["mm_token_type_ids"] = (ids == model.config.image_token_id).int()
    return find(**inputs)[0]


def check_interface(model: type[PreTrainedModel]) -> None:
    """Raise `ConfigError` if the model's attention cannot be replaced, or if it is recurrent."""
    if getattr(model, "_is_stateful", False):
        raise ConfigError(f"{model.__name__} carries a state along the sequence: {_ELSEWHERE}")
    if not model._supports_attention_backend:
        raise ConfigError(f"{model.__name__} does not attend through transformers' attention interface: {_ELSEWHERE}")


def load_decoder(
    auto_class: Any, folder: str | Path, *, has_new_head: bool = False, **settings: Any
) -> PreTrainedModel:
    """Load a model; raise `ConfigError` if weights are missing in `folder`, except those of a new head.

    transformers would fill them with random numbers. A new head starts at 0: values of a random one are several times
    larger than rewards, and their noise destroys a policy before the critic has learned.
    """
    verbosity = logging.get_verbosity()
    # transformers would warn about missing weights, which are an error here.
    logging.set_verbosity_error()
    try:
        with model_errors(folder):
            model, info = auto_class.from_pretrained(folder, output_loading_info=True, **settings)
    finally:
        logging.set_verbosity(verbosity)
    body = f"{model.base_model_prefix}."
    missing = sorted(n for n in info["missing_keys"] if n.startswith(body) or not has_new_head)
    if missing:
        raise ConfigError(
            f"the weights in {folder} are incomplete, or another model's: {len(missing)} tensor(s) of "
            f"{type(model).__name__} are missing, first {missing[0]!r}: copy or download them again"
        )
    for name in info["missing_keys"]:
        torch.nn.init.zeros_(model.get_parameter(name))
    return model


def tensor_plan(config: PreTrainedConfig) -> dict[str, str]:
    """Return the model's tensor-parallel plan: a style for each module name below the decoder.

    Some versions of transformers include the embeddings, which the engines split by their own rules.
    """
    text = config.get_text_config()
    plan = getattr(text, "base_model_tp_plan", None) or {}
    plan = {module: style for module, style in plan.items() if module.startswith("layers.")}
    # Plans of GLM-4.5 and Phi leave out the norms of single heads: a rank has the gradient of its own heads only.
    style = "replicated_with_grad_allreduce"
    if text.model_type == "cohere" and text.use_qk_norm:
        style = "norm_with_weights_per_head"
    split = [module for module in plan if module.endswith(".q_proj") and plan[module] == "colwise"]
    return {module.replace("q_proj", norm): style for module in split for norm in _HEAD_NORMS} | plan


def original_length(config: PreTrainedConfig) -> int | None:
    """Return the length up to which a `longrope` model's angles depend on the position alone, or None.

    One longer sequence changes the angles of its whole batch.
    """
    ropes = getattr(config.get_text_config(), "rope_parameters", None) or {}
    for rope in (ropes, *(part for part in ropes.values() if isinstance(part, dict))):
        if rope.get("rope_type") == "longrope":
            return int(rope["original_max_position_embeddings"])
    return None


def check_trial(model: PreTrainedModel, ids: torch.Tensor, logprobs: torch.Tensor) -> None:
    """Raise `ConfigError` if `logprobs` of the last `ids` differ from the model's own forward pass."""
    config: Any = model.config
    names = {"": model.config, **{key: getattr(model.config, key) for key in model.config.sub_configs}}
    before = {key: part._attn_implementation for key, part in names.items() if part is not None}
    config._attn_implementation = "eager"
    with torch.no_grad():
        logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
    config._attn_implementation = before
    own = logits.float().log_softmax(-1).gather(1, ids[1:, None])[-len(logprobs) :, 0]
    # Rounding adds up over layers and may route a few tokens to other experts. An unsupported computation changes
    # nearly all.
    tolerance = 0.1 if logits.dtype == torch.float32 else 0.5
    gap = (own.cpu() - logprobs).abs().quantile(0.75).item()
    if gap > tolerance:
        raise ConfigError(
            f"{type(model).__name__} computes attention in an unsupported way: on {len(ids)} test tokens, log-probs "
            f"are off by {gap:.2g} from those of its own forward pass. {_ELSEWHERE.capitalize()}"
        )
