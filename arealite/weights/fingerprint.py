"""Fingerprints of tensors: cheap enough to compare trainer and servers after every update.

A fingerprint is a hash of up to 4,096 elements spread evenly over a tensor, in the dtype of the copy. It catches a
tensor that was not updated, came from another place, or was half written. It is no checksum of every bit
(`/weights_checker` has one).
"""

import hashlib
from collections.abc import Iterable, Mapping

import torch

MAX_ELEMENTS = 4096
# Name of a tensor → its dtype (such as `float32`) and its hash.
Fingerprints = dict[str, tuple[str, str]]
# SGLang reports the first eight bytes of the SHA-256 of a tensor's bytes.
SHA256 = "sha256:"
# Elements of a tensor, `stride` apart, and its shape.
Sample = tuple[torch.Tensor, torch.Size]
# SGLang and vLLM concatenate the rows of these matrices.
_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def fingerprint(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> str:
    """Return the hash of a sample of `tensor`, converted to `dtype` first."""
    return _digests([(tensor, dtype or tensor.dtype)])[0]


def stride(numel: int) -> int:
    """Return the distance between two elements of the sample."""
    return max(1, numel // MAX_ELEMENTS)


def digest(sample: torch.Tensor, shape: torch.Size) -> str:
    """Return the hash of the sample of a tensor of that shape."""
    raw = sample.contiguous().cpu().view(torch.uint8).numpy()
    person = ",".join(map(str, shape)).encode()[:16]
    return hashlib.blake2b(raw.data, digest_size=8, person=person).hexdigest()


def fingerprints(
    tensors: Iterable[tuple[str, torch.Tensor]], samples: Mapping[str, Sample] | None = None
) -> Fingerprints:
    """Return the fingerprint of each tensor; of those in `samples`, that of the sample."""
    named = {name: _sample(tensor, tensor.dtype) for name, tensor in tensors} | dict(samples or {})
    types = [str(sample.dtype).removeprefix("torch.") for sample, _ in named.values()]
    return dict(zip(named, zip(types, _hash(list(named.values())), strict=True), strict=True))


def _digests(tensors: Iterable[tuple[torch.Tensor, torch.dtype]]) -> list[str]:
    """Return hashes of samples, each in its dtype."""
    return _hash([_sample(tensor, dtype) for tensor, dtype in tensors])


def _sample(tensor: torch.Tensor, dtype: torch.dtype) -> Sample:
    return tensor.detach().reshape(-1)[:: stride(tensor.numel())].to(dtype), tensor.shape


def _hash(found: list[Sample]) -> list[str]:
    """Return hashes of samples. One transfer for all: a busy GPU answers late."""
    samples, shapes = [sample for sample, _ in found], [shape for _, shape in found]
    if samples and all(sample.is_cuda for sample in samples):
        raw = [sample.contiguous().view(torch.uint8) for sample in samples]
        samples = torch.cat(raw).cpu().split([len(part) for part in raw])
    return [digest(sample, shape) for sample, shape in zip(samples, shapes, strict=True)]


def first_mismatch(published: dict[str, torch.Tensor], held: Fingerprints) -> str | None:
    """Return the name of a tensor in which a server differs from what was published; None if all agree.

    Tensors that only the server has (a tied head) follow from others and are not compared. An adapter's tensors must
    all be there.
    """
    absent = (name for name in published if ".lora_" in name and name not in held)
    if (missing := next(absent, None)) is not None:
        return missing
    names = [name for name in held if _parts(published, name)]
    whole = ((_joined(published, name), getattr(torch, held[name][0])) for name in names)
    hashed_whole = any(held[name][1].startswith(SHA256) for name in names)
    ours = [_sha256(*pair) for pair in whole] if hashed_whole else _digests(whole)
    wrong = (name for name, text in zip(names, ours, strict=True) if held[name][1] != text)
    return next(wrong, None)


def _parts(published: dict[str, torch.Tensor], name: str) -> list[torch.Tensor]:
    """Return the published tensors that a server fuses under that name; none if one is missing."""
    names = [name]
    for fused, parts in _FUSED.items():
        if f".{fused}." in name:
            names = [name.replace(fused, part) for part in parts]
    return [published[n] for n in names] if published.keys() >= set(names) else []


def _joined(published: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    parts = _parts(published, name)
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _sha256(tensor: torch.Tensor, dtype: torch.dtype) -> str:
    raw = tensor.detach().to(dtype).contiguous().cpu().reshape(-1).view(torch.uint8).numpy()
    return SHA256 + hashlib.sha256(raw.data).hexdigest()[:16]
