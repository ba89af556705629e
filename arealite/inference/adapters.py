"""LoRA adapters in PEFT folders: reads them and checks that the embedded engine can merge them.

Used by `ServedWeights`. An adapter is `W + scale·B·A` on linear layers and nothing else. Anything that changes the
model in another way (DoRA, trained biases, whole modules, an initialization that moves the base weights) is rejected by
name, before any weight is changed.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from arealite.api.errors import WeightUpdateError
from arealite.weights.disk import ADAPTER_STEM, read_tensors
from arealite.weights.files import read_json
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
_MAX_PATTERNS = 10_000
# What patterns may consist of, and how often what makes matching slow may occur: repetitions and alternatives.
_MAX_LENGTH = 256
_PLAIN = re.compile(r"(?:[\w$^|().-]|\\[.d]|\[[0-9-]+\]|(?:\\d|\[0-9\])\+|\.\*)*")
_SLOW = {"+*": 2, "(": 2, "|": 32}
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
    settings = read_json(folder / SETTINGS)
    if not isinstance(settings, dict):
        raise WeightUpdateError(f"{folder / SETTINGS} must hold an object, got {type(settings).__name__}")
    _check_settings(settings, folder)
    pairs: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in tensors.items():
        found = re.fullmatch(re.escape(_PREFIX) + r"(.+)\.lora_([AB])\.weight", key)
        if found is None:
            raise WeightUpdateError(f"{folder} holds {key!r:.100}, which is neither a lora_A nor a lora_B weight")
        pairs.setdefault(found[1], {})[found[2]] = tensor
    layers = {f"{module}.weight": _low_rank(module, pair, settings, folder) for module, pair in pairs.items()}
    return Adapter(layers, tensors)


def _check_settings(settings: dict[str, Any], folder: Path) -> None:
    rejected = ["peft_type"] if settings.get("peft_type") != "LORA" else []
    rejected += [key for key in _UNSUPPORTED if settings.get(key)]
    rejected += ["bias"] if settings.get("bias", "none") != "none" else []
    rejected += ["init_lora_weights"] if settings.get("init_lora_weights", True) not in _PLAIN_STARTS else []
    if rejected:
        given = ", ".join(f"{key}={_shown(settings.get(key))}" for key in rejected)
        raise WeightUpdateError(
            f"{folder} is an adapter with {given}; the embedded engine merges plain LoRA "
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
    if not isinstance(patterns, dict) or len(patterns) > _MAX_PATTERNS:
        raise WeightUpdateError(
            f"{folder / SETTINGS}: {patterns_name} must map at most {_MAX_PATTERNS} patterns to numbers"
        )
    value = next((v for p, v in patterns.items() if _matches(p, module, folder)), settings.get(name))
    # NaN fails this comparison too.
    if not (isinstance(value, int | float) and abs(value) < _HUGE):
        raise WeightUpdateError(f"{folder / SETTINGS}: {name} of {module} must be a finite number, got {_shown(value)}")
    return value


def _matches(pattern: str, module: str, folder: Path) -> bool:
    r"""Return whether PEFT's `(.*\.)?(pattern)$` matches the module, within milliseconds."""
    is_short = all(sum(map(pattern.count, marks)) <= most for marks, most in _SLOW.items())
    try:
        if not is_short or max(len(pattern), len(module)) > _MAX_LENGTH or not _PLAIN.fullmatch(pattern):
            raise ValueError("only module names, . \\d+ [0-9]+ .* and (a|b) are supported, and few of them")
        # One attempt for each part of the name, in place of `(.*\.)?`.
        starts = [0, *(i + 1 for i, character in enumerate(module) if character == ".")]
        return any(re.compile(pattern).fullmatch(module, start) for start in starts)
    except (re.error, ValueError) as error:
        raise WeightUpdateError(
            f"{folder / SETTINGS}: a key of rank_pattern or alpha_pattern cannot be used ({error})"
        ) from None


def _shown(value: Any) -> str:
    """Return a setting for a message: flags and names as they are, of anything else its type."""
    is_plain = isinstance(value, bool | int | float | None) or re.fullmatch(r"\w{1,20}", str(value))
    return f"{value!s:.20}" if is_plain else type(value).__name__
