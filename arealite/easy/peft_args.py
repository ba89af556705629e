"""Translates PEFT's `LoraConfig` into configuration keys.

Reads attributes only: PEFT is not imported.
"""

import dataclasses
from typing import Any

from arealite.api.errors import ConfigError

Keys = dict[str, Any]

# Fields of PEFT's `LoraConfig` that are translated or checked, and those that change nothing here: what the adapters
# are for, and settings of options that are off.
_READ = {
    "r", "lora_alpha", "lora_dropout", "target_modules", "use_dora", "task_type", "peft_type", "auto_mapping",
    "peft_version", "base_model_name_or_path", "revision", "inference_mode", "fan_in_fan_out", "runtime_config",
    "layers_pattern", "megatron_core", "qalora_group_size", "ensure_weight_tying",
}  # fmt: skip


def read_peft(config: Any, section: str) -> Keys:
    """Return the keys of LoRA for a `LoraConfig` of PEFT; raises `ConfigError` for other methods."""
    if config is None:
        return {}
    rank = getattr(config, "r", None)
    if not isinstance(rank, int) or getattr(config, "use_dora", False):
        raise ConfigError(f"peft_config={type(config).__name__} is not supported: give a LoraConfig without DoRA")
    if getattr(config, "lora_dropout", 0):
        raise ConfigError(f"lora_dropout={config.lora_dropout} has no counterpart: set it to 0")
    _check_peft(config)
    found = {f"{section}.lora_rank": rank, f"{section}.lora_alpha": getattr(config, "lora_alpha", None)}
    targets = getattr(config, "target_modules", None)
    if targets is not None and targets != "all-linear":
        if isinstance(targets, str):
            raise ConfigError(f"target_modules={targets!r} is a pattern: give a list of names of layers")
        found[f"{section}.lora_targets"] = sorted(targets)
    return found


def _check_peft(config: Any) -> None:
    """Raise `ConfigError` for a setting of `LoraConfig` that would be left out, such as `use_rslora`."""
    fields = dataclasses.fields(config) if dataclasses.is_dataclass(config) else ()
    for field in fields:
        value = getattr(config, field.name)
        # The scalar head of a reward model is always trained and saved.
        is_kept = field.name == "modules_to_save" and value is not None and set(value) == {"score"}
        # What is off is None, False or empty; `init_lora_weights=False` is not.
        if field.name in _READ or is_kept or value == field.default or (not value and field.default is not True):
            continue
        raise ConfigError(
            f"{field.name}={value!r} of peft_config has no counterpart: leave it out{_advice(field.name)}"
        )


def _advice(name: str) -> str:
    """Return what to set instead of a field of `LoraConfig`."""
    by_name = {
        "use_rslora": ", and set lora_alpha to alpha * sqrt(r)",
        "exclude_modules": ", and name the layers that get adapters in target_modules",
        "modules_to_save": ", or train all weights without peft_config",
    }
    return by_name.get(name, "")
