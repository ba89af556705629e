"""Checks that saved weights, adapters and optimizer states fit an engine, before they are loaded.

Files of adapters hold the factors of `scale·B·A`; the scale is a setting. With another one, or without some of the
adapters, the loaded model would be a different one, without any error. In the same way the 8-bit codes of moments would
be read as the moments themselves.
"""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig

from arealite.api.errors import CheckpointError
from arealite.api.train_args import TrainEngineConfig
from arealite.utils import distributed

# What PEFT adds to a plain low-rank product.
_UNSUPPORTED = ("use_dora", "alpha_pattern")
# Names in sharded checkpoints, followed by the value and by the name of a tensor.
_ALPHA, _MODEL = "lora_alpha/", "model/"


def alpha_of(config: TrainEngineConfig) -> int:
    """Return the alpha of an engine's adapters."""
    return config.lora_alpha or 2 * config.lora_rank


def alpha_mark(config: TrainEngineConfig) -> dict[str, torch.Tensor]:
    """Return what names the alpha of adapters in a sharded checkpoint; nothing without adapters."""
    return {f"{_ALPHA}{alpha_of(config)}": torch.zeros(1)} if config.lora_rank else {}


def check_sharded(path: str, config: TrainEngineConfig, metadata: Mapping[str, Any], with_optim: bool) -> None:
    """Raise if a sharded checkpoint has adapters of another rank or alpha, or moments of another kind."""
    _check_rank(path, config, {name: entry.size for name, entry in metadata.items() if name.startswith(_MODEL)})
    _check_alpha_mark(path, config, metadata)
    if with_optim:
        _check_moments(path, config, metadata)


def check_tensors(
    path: str, state: Mapping[str, torch.Tensor], metadata: Mapping[str, Any], names: Collection[str]
) -> None:
    """Raise on all ranks if a checkpoint and the engine have other tensors, or tensors of other shapes.

    `state` has the tensors of this rank, `names` are those of the whole model. Weights that only the checkpoint has are
    refused too: without its last layers a model loads, but computes something else.
    """
    saved = {name.removeprefix(_MODEL) for name in metadata if name.startswith(_MODEL)}
    given, wanted = _adapted(saved), _adapted(names)
    if given != wanted:
        raise CheckpointError(
            f"{path} has adapters of {_listed(given)}, and this engine has adapters of {_listed(wanted)}: set "
            "lora_rank and lora_targets as they were"
        )
    bad = ""
    for name, tensor in state.items():
        found = metadata.get(name)
        if found is None or tuple(found.size) != tuple(tensor.shape):
            shape = "missing" if found is None else tuple(found.size)
            bad = bad or f"{name} is {shape}, expected {tuple(tensor.shape)}"
    if not bad and (extra := sorted(saved.difference(names))):
        bad = f"it has {len(extra)} tensors that this engine lacks, such as {extra[0]}"
    # Pipeline stages have different tensors.
    if any(distributed.all_gather_rows(torch.tensor([bool(bad)]))[0].tolist()):
        raise CheckpointError(
            f"{path} does not fit this engine: {bad or 'tensors of another pipeline stage differ'}. It belongs to "
            "another model, or was saved without the optimizer"
        )


def check_depth(path: str, config: PreTrainedConfig) -> None:
    """Raise if a Hugging Face folder is of a model with more or fewer layers than the engine's.

    Names of tensors do not tell: files may hold more than a model reads, such as layers for multi-token prediction.
    """
    file, text = Path(path) / "config.json", config.get_text_config()
    if not file.exists():
        return
    try:
        settings = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read ({error}): give a folder that was saved completely") from error
    key = text.attribute_map.get("num_hidden_layers", "num_hidden_layers")
    given, wanted = settings.get("text_config", settings).get(key), getattr(text, key, None)
    if None not in (given, wanted) and given != wanted:
        raise CheckpointError(f"{path} is of another model: it has {given} layers, and this engine has {wanted}")


def _adapted(names: Iterable[str]) -> set[str]:
    """Return the layers with adapters, without the numbers of their blocks."""
    layers = (name.partition(".lora_A.")[0] for name in names if ".lora_A." in name)
    return {layer.rpartition(".")[2] for layer in layers}


def _listed(layers: Collection[str]) -> str:
    return ", ".join(sorted(layers)) or "no layer"


def _check_moments(path: str, config: TrainEngineConfig, names: Collection[str]) -> None:
    """Raise if saved moments are 8-bit codes and the optimizer has numbers, or the other way round.

    Before its first step an optimizer has no moments.
    """
    assert config.optimizer is not None
    kind = config.optimizer.type
    has_moments = any(name.startswith("optim/") for name in names)
    is_coded = any(name.startswith("optim/") and name.endswith("/exp_avg_scale") for name in names)
    if has_moments and is_coded != (kind == "adamw_8bit"):
        saved = "adamw_8bit" if is_coded else "adamw or adamw_bf16"
        raise CheckpointError(
            f"{path} has the states of optimizer.type={saved}, and this engine has optimizer.type={kind}, which stores "
            f"them in another way. Set optimizer.type={saved}, or start a new run from saved weights"
        )


def _check_alpha_mark(path: str, config: TrainEngineConfig, names: Iterable[str]) -> None:
    """Raise if the tensors of a sharded checkpoint name another alpha than that of the engine."""
    saved = [name.removeprefix(_ALPHA) for name in names if name.startswith(_ALPHA)]
    if config.lora_rank and saved and saved != [str(alpha_of(config))]:
        raise _wrong_alpha(path, saved[0], config)


def _check_rank(path: str, config: TrainEngineConfig, shapes: Mapping[str, Sequence[int]]) -> None:
    """Raise if saved adapters are of another rank; `shapes` are those of saved tensors."""
    ranks = {shape[0] for name, shape in shapes.items() if ".lora_A." in name}
    if config.lora_rank and ranks and ranks != {config.lora_rank}:
        saved = ", ".join(map(str, sorted(ranks)))
        advice = f"Set lora_rank={saved}" if len(ranks) == 1 else "An engine has one rank for all layers"
        raise CheckpointError(
            f"{path} has adapters of rank {saved}, and this engine has lora_rank={config.lora_rank}. {advice}"
        )


def check_adapter_folder(
    path: str, config: TrainEngineConfig, found: Mapping[str, tuple[Path, Sequence[int]]], wanted: Collection[str]
) -> None:
    """Raise if a PEFT folder holds other adapters than the engine's.

    `found` has the file and the shape of each of its tensors, `wanted` are the names of the engine's tensors.
    """
    if not config.lora_rank:
        return
    settings = _read_settings(Path(path) / "adapter_config.json")
    _check_rank(path, config, {name: shape for name, (_, shape) in found.items()})
    extra = sorted(set(found) - set(wanted))
    if extra:
        raise CheckpointError(
            f"{path} has adapters that this engine lacks, such as {extra[0]}: set lora_targets as they were"
        )
    given = [key for key in _UNSUPPORTED if settings.get(key)]
    if given:
        raise CheckpointError(f"{path} has adapters with {', '.join(given)}, which this engine does not train")
    alpha = float(settings["lora_alpha"])
    if settings.get("use_rslora"):
        alpha *= config.lora_rank**0.5
    if abs(alpha - alpha_of(config)) > 1e-6 * alpha:
        raise _wrong_alpha(path, f"{alpha:g}", config)


def _read_settings(file: Path) -> dict[str, Any]:
    try:
        settings = json.loads(file.read_text())
        float(settings["lora_alpha"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise CheckpointError(f"{file} cannot be read ({error!r}): it is not the folder of an adapter") from error
    return settings


def _wrong_alpha(path: str, saved: str, config: TrainEngineConfig) -> CheckpointError:
    return CheckpointError(
        f"{path} has adapters trained with lora_alpha={saved}, and this engine has lora_alpha={alpha_of(config)}: they "
        f"would be scaled by another factor. Set lora_alpha={saved}"
    )
