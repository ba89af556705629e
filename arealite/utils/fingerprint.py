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


def fingerprint(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> str:
    """Hash of a sample of `tensor`, converted to `dtype` first."""
    flat = tensor.detach().reshape(-1)
    sample = flat[:: max(1, flat.numel() // MAX_ELEMENTS)].to(dtype or tensor.dtype)
    raw = sample.contiguous().cpu().view(torch.uint8).numpy()
    shape = ",".join(map(str, tensor.shape)).encode()
    return hashlib.blake2b(raw.data, digest_size=8, person=shape[:16]).hexdigest()


def fingerprints(tensors: Iterable[tuple[str, torch.Tensor]]) -> Fingerprints:
    return {name: (str(t.dtype).removeprefix("torch."), fingerprint(t)) for name, t in tensors}


def first_mismatch(published: dict[str, torch.Tensor], held: Fingerprints) -> str | None:
    """The name of a published tensor that a server holds differently; None if all agree.

    Tensors that only the server has (a tied head) follow from others and are not compared.
    """
    for name, (dtype, digest) in held.items():
        tensor = published.get(name)
        if tensor is not None and fingerprint(tensor, getattr(torch, dtype)) != digest:
            return name
    return None
