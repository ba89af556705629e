"""Checkpoints of an engine: Hugging Face folders for others, sharded DCP folders to resume from.

Everything is written beside its final place and renamed when complete: a crash or a full disk leaves the previous
checkpoint as it was, and training can go on. State is tensors only, no pickled objects. All functions are called by all
ranks together, and fail on all ranks together.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor

from arealite.api.errors import CheckpointError
from arealite.engine.hf_model import fill_parameters
from arealite.utils import distributed

if TYPE_CHECKING:
    from arealite.engine.fsdp_engine import FSDPEngine

_TYPE_NAMES = {
    torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64", torch.int64: "I64",
}  # fmt: skip
# Beside weights and config, what makes a folder complete for people and servers.
_COMPANIONS = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.jinja",
               "*.model", "preprocessor_config.json", "processor_config.json", "generation_config.json")  # fmt: skip


# ------------------------------------------------------------------------------------ Hugging Face folders


def tensor_specs(engine: FSDPEngine) -> list[tuple[str, torch.Size, torch.dtype]]:
    """Name, whole shape and published type of each parameter; tied ones once."""
    dtype = getattr(torch, engine.config.dtype)
    return [(name, p.shape, dtype) for name, p in engine.model.named_parameters()]


def gathered_parameters(engine: FSDPEngine) -> Iterator[tuple[str, torch.Tensor]]:
    """Each parameter whole, one at a time (so that no rank ever holds all of them); every rank must iterate."""
    dtype = getattr(torch, engine.config.dtype)
    for name, parameter in engine.model.named_parameters():
        value = parameter.detach()
        value = value.full_tensor() if isinstance(value, DTensor) else value
        yield name, value.to(dtype)


def save_hf(engine: FSDPEngine, path: str, durable: bool = True) -> None:
    """Write a folder that `from_pretrained` reads: weights, config, tokenizer. `durable` waits for the disk."""
    final, aside = Path(path), Path(f"{path}.partial")
    # After a failure the loop goes on without writing: other ranks are gathering with this one.
    attempt = _Attempts(active=distributed.rank() == 0)
    attempt(_open_folder, engine, aside)
    file = attempt(open, aside / "model.safetensors", "wb")
    attempt(_write, file, _safetensors_header(engine))
    for _, tensor in gathered_parameters(engine):
        attempt(_write, file, tensor)
    attempt(_close, file, durable)
    attempt(_swap, aside, final)
    _agree(attempt.failure, aside, final)


def load_hf(engine: FSDPEngine, path: str) -> None:
    """Fill the model from a Hugging Face folder; refuses one of another shape before changing anything."""
    files = sorted(Path(path).glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{path} has no .safetensors file: it is not a checkpoint of weights")
    found: dict[str, Path] = {}
    for file in files:
        with _open_safetensors(file) as handle:
            found.update(dict.fromkeys(handle.keys(), file))
            shapes = {k: handle.get_slice(k).get_shape() for k in handle.keys()}  # noqa: SIM118
        for name, parameter in engine.model.named_parameters():
            if name in shapes and list(parameter.shape) != shapes[name]:
                raise CheckpointError(
                    f"{path} is of another model: {name} is {shapes[name]}, expected {list(parameter.shape)}"
                )
    missing = [n for n, _ in engine.model.named_parameters() if n not in found]
    if missing:
        raise CheckpointError(f"{path} is of another model: it lacks {missing[:3]} …")
    weights = {}
    if distributed.rank() == 0:
        for name, file in found.items():
            with _open_safetensors(file) as handle:
                weights[name] = handle.get_tensor(name)
    fill_parameters(engine.model, weights)


def _open_safetensors(file: Path):
    try:
        return safe_open(file, framework="pt")
    except (
        Exception
    ) as error:  # safetensors raises its own class, which is not part of its interface
        raise CheckpointError(
            f"{file} cannot be read ({error}): it is torn or not safetensors"
        ) from error


def _open_folder(engine: FSDPEngine, aside: Path) -> None:
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    engine.model.config.save_pretrained(aside)
    for pattern in _COMPANIONS:
        for source in engine.folder.glob(pattern):
            shutil.copyfile(source, aside / source.name)
    _fix_config(aside / "config.json", engine.config.dtype)


def _fix_config(file: Path, dtype: str) -> None:
    """Name the type of the written weights, and leave out our attention, which others do not have."""
    config = json.loads(file.read_text())
    config["dtype"] = dtype
    config.pop("_attn_implementation", None)
    file.write_text(json.dumps(config, indent=2))


def _safetensors_header(engine: FSDPEngine) -> bytes:
    header: dict = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape, dtype in tensor_specs(engine):
        size = shape.numel() * dtype.itemsize
        header[name] = {"dtype": _TYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [offset, offset + size]}  # fmt: skip
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write(file: BinaryIO, data: bytes | torch.Tensor) -> None:
    if isinstance(data, torch.Tensor):
        data = memoryview(data.contiguous().cpu().view(-1).view(torch.uint8).numpy())
    file.write(data)


def _close(file: BinaryIO, durable: bool) -> None:
    with file:
        file.flush()
        if durable:
            os.fsync(file.fileno())


# ------------------------------------------------------------------------------------ sharded checkpoints


def save_dcp(engine: FSDPEngine, path: str, with_optim: bool) -> None:
    """Weights, and with `with_optim` also optimizer, schedule position, counters and random states."""
    final, aside = Path(path), Path(f"{path}.partial")
    if distributed.rank() == 0:
        shutil.rmtree(aside, ignore_errors=True)
    distributed.barrier()
    state = _model_state(engine) | (_training_state(engine) if with_optim else {})
    attempt = _Attempts(active=distributed.rank() == 0)
    try:
        dcp.save(state, checkpoint_id=aside, no_dist=not dist.is_initialized())
    except (OSError, CheckpointException) as error:
        attempt.failure = _root_cause(error)
    attempt(_swap, aside, final)
    _agree(attempt.failure, aside, final)


def load_dcp(engine: FSDPEngine, path: str, with_optim: bool) -> None:
    """Load on any number of ranks. Refuses a torn checkpoint and one of another model before changing anything."""
    metadata = _read_metadata(path)
    state = _model_state(engine)
    if with_optim:
        _make_optimizer_state(engine.optimizer)
        state |= _training_state(engine)
    state = {k: v for k, v in state.items() if not k.startswith("rng/") or k in metadata}
    for name, tensor in state.items():
        saved = metadata.get(name)
        if saved is None or tuple(saved.size) != tuple(tensor.shape):
            raise CheckpointError(
                f"{path} does not fit this engine: {name} is "
                f"{'missing' if saved is None else tuple(saved.size)}, expected {tuple(tensor.shape)}. It is of another "
                "model, or was saved without the optimizer"
            )
    try:
        dcp.load(state, checkpoint_id=path, no_dist=not dist.is_initialized())
    except (OSError, CheckpointException, RuntimeError, ValueError, EOFError) as error:
        raise CheckpointError(
            f"{path} cannot be read ({_root_cause(error)}): it is torn"
        ) from error
    if with_optim:
        _restore_training_state(engine, state)


def _read_metadata(path: str) -> dict:
    """What a checkpoint holds, after checking that its files are as long as they should be."""
    try:
        metadata = dcp.FileSystemReader(path).read_metadata()
        for stored in (metadata.storage_data or {}).values():
            size = (Path(path) / stored.relative_path).stat().st_size
            if size < stored.offset + stored.length:
                raise ValueError(f"{stored.relative_path} is cut off at {size} bytes")
    except (OSError, EOFError, ValueError) as error:
        raise CheckpointError(
            f"{path} is not a complete sharded checkpoint ({error}): give a folder that `save` finished"
        ) from error
    return metadata.state_dict_metadata


def _model_state(engine: FSDPEngine) -> dict[str, torch.Tensor]:
    return {f"model/{n}": p.detach() for n, p in engine.model.named_parameters()}


def _training_state(engine: FSDPEngine) -> dict[str, torch.Tensor]:
    """Tensors only, so that nothing has to be pickled. Optimizer and counters are views or copies to be read back."""
    state = {}
    for name, parameter in engine.model.named_parameters():
        for key, value in engine.optimizer.state.get(parameter, {}).items():
            state[f"optim/{name}/{key}"] = value
    counters = [engine.lr_step, engine.bad_steps, engine._version]
    state["counters"] = torch.tensor(counters)
    state |= {f"extra/{key}": value for key, value in engine.extra_state().items()}
    state[f"rng/{distributed.rank()}/torch"] = torch.get_rng_state()
    state[f"rng/{distributed.rank()}/python"] = _python_rng()
    state[f"rng/{distributed.rank()}/numpy"] = torch.from_numpy(numpy.random.get_state()[1].copy()).view(torch.int32)  # fmt: skip
    if torch.cuda.is_available():
        state[f"rng/{distributed.rank()}/cuda"] = torch.cuda.get_rng_state()
    return state


def _restore_training_state(engine: FSDPEngine, state: dict[str, torch.Tensor]) -> None:
    engine.lr_step, engine.bad_steps, engine._version = state["counters"].tolist()
    engine._set_lr()
    extra = {k.removeprefix("extra/"): v for k, v in state.items() if k.startswith("extra/")}
    engine.load_extra_state(extra)
    prefix = f"rng/{distributed.rank()}/"
    if prefix + "torch" not in state:
        return  # more ranks than before: the new ones keep the state they were seeded with
    torch.set_rng_state(state[prefix + "torch"])
    words = state[prefix + "python"].tolist()
    random.setstate((3, tuple(words), None))
    numpy.random.set_state(("MT19937", state[prefix + "numpy"].view(torch.uint32).numpy(), 624))
    if prefix + "cuda" in state:
        torch.cuda.set_rng_state(state[prefix + "cuda"])


def _python_rng() -> torch.Tensor:
    return torch.tensor(random.getstate()[1], dtype=torch.int64)


def _make_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """A fresh optimizer has no state to load into: a step on zero gradients at rate zero makes it."""
    if optimizer.state:
        return
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, lr in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = lr


# ------------------------------------------------------------------------------------------ shared by both


class _Attempts:
    """Runs the steps of writing on the rank that writes; after the first `OSError` the rest is left out."""

    def __init__(self, active: bool):
        self.active = active
        self.failure: str | None = None

    def __call__(self, step: Callable[..., Any], *args: Any) -> Any:
        if not self.active or self.failure is not None:
            return None
        try:
            return step(*args)
        except OSError as error:
            self.failure = str(error)
            return None


def _swap(aside: Path, final: Path) -> None:
    """Put the finished folder in its place; one that was there goes only after the new one is complete."""
    old = Path(f"{final}.old")
    shutil.rmtree(old, ignore_errors=True)
    if final.exists():
        final.rename(old)
    aside.rename(final)
    shutil.rmtree(old, ignore_errors=True)


def _agree(failure: str | None, aside: Path, final: Path) -> None:
    """Fail on every rank if rank 0 failed, and clean up what was half written."""
    failure = distributed.broadcast_json(failure)
    if failure is None:
        return
    if distributed.rank() == 0:
        shutil.rmtree(aside, ignore_errors=True)
    free = shutil.disk_usage(_existing_parent(final)).free
    raise CheckpointError(
        f"could not write {final}: {failure}. {free / 1e9:.2f} GB are free there; make room or save elsewhere. Earlier "
        "checkpoints are untouched"
    )


def _existing_parent(path: Path) -> Path:
    return next(parent for parent in path.absolute().parents if parent.exists())


def _root_cause(error: BaseException) -> str:
    failures = getattr(error, "failures", None)
    return str(next(iter(failures.values()))[0]) if failures else str(error)
