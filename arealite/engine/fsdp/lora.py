"""Low-rank adapters (LoRA) with PEFT: injects, merges and saves them.

The model keeps its class; adapted linear layers hold `base_layer`, `lora_A` and `lora_B`. With
`rollout.weight_update=disk` servers get the adapter alone, otherwise merged weights under the model's own names.
Checkpoints are adapter folders that `PeftModel.from_pretrained` reads. The scalar head of critics and reward models is
new, so it is trained and saved in full.
"""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from arealite.api.cli_args import TrainEngineConfig
from arealite.api.errors import ConfigError
from arealite.api.train_args import untrainable_target
from arealite.engine.adapter_files import alpha_of
from arealite.engine.fsdp.parallel import whole
from arealite.utils.decoders import has_vision, language_model
from arealite.utils.routing import num_experts

_ADAPTER = "default"
# PEFT takes them for those of older transformers, where experts were modules, also in shared experts.
_OF_EXPERTS = {"gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"}
# Name of the scalar head in models for sequence classification.
_HEAD = "score"


def add_adapters(model: PreTrainedModel, config: TrainEngineConfig) -> None:
    """Freeze the model and add trainable adapters of `lora_rank` to the chosen linear layers."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise ConfigError("lora_rank needs the package peft: pip install peft") from error
    targets = [name for name in config.lora_targets if name != _HEAD]
    settings = LoraConfig(
        r=config.lora_rank,
        lora_alpha=alpha_of(config),
        lora_dropout=0.0,
        bias="none",
        target_modules=targets if config.lora_targets else _all_targets(model),
        exclude_modules=_frozen_towers(model, config),
        task_type="SEQ_CLS" if hasattr(model, _HEAD) else "CAUSAL_LM",
    )
    try:
        inject_adapter_in_model(settings, model, adapter_name=_ADAPTER)
    except ValueError as error:
        names = {n.rsplit(".", 1)[-1] for n, m in model.named_modules() if isinstance(m, nn.Linear)}
        raise ConfigError(
            f"lora_targets={list(config.lora_targets)} fits no layer of the model: choose from {sorted(names)}"
        ) from error
    _check_targets(model, settings)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_adapter(name) or _is_head(name))
    if has_vision(model.config) and not config.freeze_vision:
        # Images bring gradients to the input of the first layer. FSDP needs them on ranks without images too.
        model.enable_input_require_grads()


def _all_targets(model: PreTrainedModel) -> str | list[str]:
    """Return the linear layers; of mixtures without the names by which PEFT adapts experts and routers."""
    if not num_experts(model.config):
        return "all-linear"
    names = {n.rpartition(".")[2] for n, m in language_model(model).base_model.named_modules() if type(m) is nn.Linear}
    return sorted(names - _OF_EXPERTS)


def _check_targets(model: PreTrainedModel, settings: Any) -> None:
    """Reject adapters that no gradient would reach, or that servers do not merge: those of experts.

    Log-probs are computed from the weight of the head in chunks, not by calling it. Adapters of embeddings have other
    names, which servers do not read.
    """
    head, names = model.get_output_embeddings(), sorted(settings.target_parameters or ())
    names += [name for name, module in model.named_modules() if module is head and hasattr(module, "lora_A")]
    names += [
        name.partition(".lora_embedding_")[0] for name, _ in model.named_parameters() if "lora_embedding_" in name
    ]
    if names:
        raise ConfigError(untrainable_target(names[0]))


def _frozen_towers(model: PreTrainedModel, config: TrainEngineConfig) -> str | None:
    """Return a pattern of the modules without adapters: a frozen vision tower and its projector."""
    if not (has_vision(model.config) and config.freeze_vision):
        return None
    towers = (n for n, m in model.base_model.named_children() if m is not language_model(model))
    return rf"{model.base_model_prefix}\.({'|'.join(towers)})\..*"


def _is_head(name: str) -> bool:
    return name.startswith(f"{_HEAD}.")


def is_adapter(name: str) -> bool:
    return ".lora_A." in name or ".lora_B." in name


def plain_name(name: str) -> str:
    """Return a parameter's name in the model without adapters."""
    return name.replace(".base_layer.", ".")


def merged(model: nn.Module, name: str, value: torch.Tensor) -> torch.Tensor:
    """Return `W + scale·B·A` for the weight of an adapted layer, other values unchanged. Collective."""
    if not name.endswith(".base_layer.weight"):
        return value
    layer: Any = model.get_submodule(name.removesuffix(".base_layer.weight"))
    down, up = (whole(side[_ADAPTER].weight).float() for side in (layer.lora_A, layer.lora_B))
    return value + (layer.scaling[_ADAPTER] * (up @ down)).to(value.dtype)


def file_name(name: str) -> str | None:
    """Return the name in PEFT's files of an adapter's parameter, or of a scalar head; None for others."""
    if not (is_adapter(name) or _is_head(name)):
        return None
    return "base_model.model." + name.replace(f".{_ADAPTER}.", ".")


def save_settings(model: PreTrainedModel, folder: Path, base_model: str) -> None:
    """Write PEFT's `adapter_config.json`."""
    settings: Any = model.peft_config[_ADAPTER]
    settings.base_model_name_or_path = base_model
    settings.modules_to_save = [_HEAD] if hasattr(model, _HEAD) else None
    settings.save_pretrained(str(folder))
