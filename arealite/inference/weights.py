"""New weights for a model that is being served: read, checked as a whole, then copied in place.

Called by the engine. An update that does not fit (a missing, unknown or misshapen tensor) is refused before the first
byte is copied, so the old weights stay whole. Names are those of `named_parameters()`; a tied head may be left out.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel

from arealite.api.errors import WeightUpdateError
from arealite.utils.shared_weights import SharedWeights

Weights = dict[str, torch.Tensor]


def read_folder(path: str | Path) -> Weights:
    """All tensors of a Hugging Face folder (one safetensors file, or several with an index)."""
    folder = Path(path)
    if not folder.is_dir():
        raise WeightUpdateError(f"{folder} is not a folder: give the path of a saved model")
    index = folder / "model.safetensors.index.json"
    if index.exists():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    else:
        names = ["model.safetensors"]
    weights: Weights = {}
    for name in names:
        try:
            with safe_open(folder / name, framework="pt") as file:
                weights.update((key, file.get_tensor(key)) for key in file.keys())  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise WeightUpdateError(f"cannot read {folder / name}: {error}") from error
    return weights


class SharedReader:
    """Maps shared weight files; maps one again only when the trainer has made a new file under the same name."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[tuple[int, int], SharedWeights]] = {}

    def read(self, path: str) -> Weights:
        try:
            stat = Path(path).stat()
        except OSError as error:
            raise WeightUpdateError(
                f"cannot attach shared weights {path}: {error.strerror}"
            ) from error
        identity = (stat.st_dev, stat.st_ino)
        if path not in self._known or self._known[path][0] != identity:
            self._known[path] = (identity, SharedWeights.attach(path))
        return self._known[path][1].tensors


def match_weights(
    model: PreTrainedModel, weights: Weights, source: str
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs (tensor of the model, its new value), or `WeightUpdateError` if the two do not fit exactly."""
    targets: Weights = dict(model.named_parameters())
    aliases = set(model.state_dict()) - set(targets)  # tied heads and persistent buffers
    missing = sorted(set(targets) - set(weights))
    extra = sorted(set(weights) - set(targets) - aliases)
    if missing or extra:
        kind, names = ("lacks", missing) if missing else ("has unknown", extra)
        raise WeightUpdateError(
            f"{source} {kind} {len(names)} tensor(s), first {names[0]!r}: it is not a checkpoint of this model. "
            "The old weights are still served"
        )
    for name, target in targets.items():
        if weights[name].shape != target.shape:
            raise WeightUpdateError(
                f"{source}: {name} has shape {list(weights[name].shape)}, the model's is {list(target.shape)}. "
                "The old weights are still served"
            )
    return [(target, weights[name]) for name, target in targets.items()]


@torch.no_grad()
def copy_weights(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for target, value in pairs:
        target.copy_(value)


def fingerprint(model: PreTrainedModel) -> str:
    """A hash of all weights, the same on every server that holds the same numbers in the same type."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.named_parameters()):
        digest.update(name.encode())
        flat = tensor.detach().contiguous().cpu().view(torch.uint8).reshape(-1)
        digest.update(flat.numpy().data)
    return digest.hexdigest()
