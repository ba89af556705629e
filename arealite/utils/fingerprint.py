"""Fingerprints of weights: cheap enough to compare trainer and servers after every update, per tensor.

Up to 4,096 elements spread evenly over a tensor are hashed, in the type of whoever holds the copy. That catches a tensor that was not updated,
was taken from another place, or was half written; it is no checksum of every bit (`/weights_checker` has one).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch

MAX_ELEMENTS = 4096
# Name of a tensor → its type (as `float32`) and its hash.
Fingerprints = dict[str, tuple[str, str]]
# SGLang tells the first eight bytes of the SHA-256 of a tensor's bytes.
SHA256 = "sha256:"
# SGLang and vLLM keep these matrices as one, rows after rows.
_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def fingerprint(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> str:
    """Hash of a sample of `tensor`, converted to `dtype` first."""
    sample = tensor.detach().reshape(-1)[:: stride(tensor.numel())]
    return digest(sample.to(dtype or tensor.dtype), tensor.shape)


def stride(numel: int) -> int:
    """Every so many elements belong to the sample."""
    return max(1, numel // MAX_ELEMENTS)


def digest(sample: torch.Tensor, shape: torch.Size) -> str:
    """Hash of the sample of a tensor of that shape."""
    raw = sample.contiguous().cpu().view(torch.uint8).numpy()
    person = ",".join(map(str, shape)).encode()[:16]
    return hashlib.blake2b(raw.data, digest_size=8, person=person).hexdigest()


def fingerprints(tensors: Iterable[tuple[str, torch.Tensor]]) -> Fingerprints:
    return {name: (str(t.dtype).removeprefix("torch."), fingerprint(t)) for name, t in tensors}


def first_mismatch(published: dict[str, torch.Tensor], held: Fingerprints) -> str | None:
    """The name of a published tensor that a server holds differently; None if all agree.

    Tensors that only the server has (a tied head) follow from others and are not compared. An adapter's must all be there.
    """
    lacking = (name for name in published if ".lora_" in name and name not in held)
    if (missing := next(lacking, None)) is not None:
        return missing
    for name, (dtype, digest) in held.items():
        tensor = _as_held(published, name)
        if tensor is None:
            continue
        make = _sha256 if digest.startswith(SHA256) else fingerprint
        if make(tensor, getattr(torch, dtype)) != digest:
            return name
    return None


def _as_held(published: dict[str, torch.Tensor], name: str) -> torch.Tensor | None:
    """The published tensor of that name, put together if a server fuses it from several."""
    for fused, parts in _FUSED.items():
        if f".{fused}." in name:
            found = [published.get(name.replace(fused, part)) for part in parts]
            whole = [tensor for tensor in found if tensor is not None]
            return torch.cat(whole) if len(whole) == len(parts) else None
    return published.get(name)


def _sha256(tensor: torch.Tensor, dtype: torch.dtype) -> str:
    raw = tensor.detach().to(dtype).contiguous().cpu().reshape(-1).view(torch.uint8).numpy()
    return SHA256 + hashlib.sha256(raw.data).hexdigest()[:16]
