"""LoRA adapters in PEFT folders: reads them and checks that the embedded engine can merge them.

Used by `ServedWeights`. An adapter is `W + scale·B·A` on linear layers and nothing else. Anything that changes the
model in another way (DoRA, trained biases, whole modules, an initialization that moves the base weights) is rejected by
name, before any weight is changed.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from arealite.api.errors import WeightUpdateError
from arealite.weights.disk import ADAPTER_STEM, read_tensors
from arealite.weights.transport import Weights

SETTINGS = "adapter_config.json"
_PREFIX = "base_model.model."
# PEFT settings that do more than add a low-rank product to linear layers.
_UNSUPPORTED = (
    "use_dora", "lora_bias", "fan_in_fan_out", "modules_to_save", "trainable_token_indices", "target_parameters",
    "layer_replication", "use_qalora", "use_bdlora", "alora_invocation_tokens", "arrow_config", "megatron_config",
)  # fmt: skip
# Above any rank, and any alpha that leaves weights finite.
_HUGE = 1e9
_PLAIN_STARTS = (True, False, "gaussian", "orthogonal", "eva", "kaiming")


class LowRank(NamedTuple):
    """The change of one layer's weight: `scale · up @ down`."""

    down: torch.Tensor  # A: [rank, in]
    up: torch.Tensor  # B: [out, rank]
    scale: float


@dataclass(frozen=True)
class Adapter:
    """`layers`: changes by the name of the weight. `tensors`: as they are in the file."""

    layers: dict[str, LowRank]
    tensors: Weights


def read_adapter(path: str | Path) -> Adapter:
    """Read the adapter in a PEFT folder; raises `WeightUpdateError` if it is torn or cannot be merged."""
    folder = Path(path)
    tensors = read_tensors(folder, ADAPTER_STEM)
    try:
        settings = json.loads((folder / SETTINGS).read_text())
    except (OSError, ValueError) as error:
        raise WeightUpdateError(f"cannot read {folder / SETTINGS}: {error}") from error
    if not isinstance(settings, dict):
        raise WeightUpdateError(f"{folder / SETTINGS} must hold an object, got {settings!r:.60}")
    _check_settings(settings, folder)
    pairs: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in tensors.items():
        found = re.fullmatch(re.escape(_PREFIX) + r"(.+)\.lora_([AB])\.weight", key)
        if found is None:
            raise WeightUpdateError(f"{folder} holds {key!r}, which is neither a lora_A nor a lora_B weight")
        pairs.setdefault(found[1], {})[found[2]] = tensor
    layers = {f"{module}.weight": _low_rank(module, pair, settings, folder) for module, pair in pairs.items()}
    return Adapter(layers, tensors)


def _check_settings(settings: dict[str, Any], folder: Path) -> None:
    rejected = [f"{key}={settings[key]}" for key in _UNSUPPORTED if settings.get(key)]
    rejected += [f"bias={settings['bias']}"] if settings.get("bias", "none") != "none" else []
    start = settings.get("init_lora_weights", True)
    rejected += [f"init_lora_weights={start}"] if start not in _PLAIN_STARTS else []
    if settings.get("peft_type") != "LORA":
        rejected.insert(0, f"peft_type={settings.get('peft_type')}")
    if rejected:
        raise WeightUpdateError(
            f"{folder} is an adapter with {', '.join(rejected)}; the embedded engine merges plain LoRA "
            "(peft_type=LORA, bias=none): push merged weights instead"
        )


def _low_rank(module: str, pair: dict[str, torch.Tensor], settings: dict[str, Any], folder: Path) -> LowRank:
    if set(pair) != {"A", "B"}:
        raise WeightUpdateError(f"{folder}: {module} has lora_{min(pair)} but not its counterpart")
    rank = _setting(settings, "r", "rank_pattern", module, folder)
    alpha = _setting(settings, "lora_alpha", "alpha_pattern", module, folder)
    if not rank > 0:
        raise WeightUpdateError(f"{folder / SETTINGS}: r of {module} must be above 0, got {rank}")
    down, up = pair["A"], pair["B"]
    if down.dim() != 2 or up.dim() != 2 or down.shape[0] != rank or up.shape[1] != rank:
        raise WeightUpdateError(
            f"{folder}: {module} has lora_A {list(down.shape)} and lora_B {list(up.shape)}, {SETTINGS} says rank {rank}"
        )
    return LowRank(down, up, alpha / (rank**0.5 if settings.get("use_rslora") else rank))


def _setting(settings: dict[str, Any], name: str, patterns_name: str, module: str, folder: Path) -> int | float:
    """Return a number by PEFT's rule: of the first pattern that matches the module, else the default."""
    patterns = settings.get(patterns_name) or {}
    try:
        matching = (v for p, v in patterns.items() if re.match(rf"(.*\.)?({p})$", module))
        value = next(matching, settings.get(name))
    except (re.error, AttributeError) as error:
        raise WeightUpdateError(
            f"{folder / SETTINGS}: {patterns_name} must map regular expressions to numbers, got "
            f"{patterns!r:.200}: {error}"
        ) from error
    # NaN fails this comparison too.
    if not (isinstance(value, int | float) and abs(value) < _HUGE):
        raise WeightUpdateError(f"{folder / SETTINGS}: {name} of {module} must be a finite number, got {value!r:.60}")
    return value
