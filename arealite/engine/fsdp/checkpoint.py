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
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers.core_model_loading import revert_weight_conversion

from arealite.api.errors import CheckpointError
from arealite.engine.fsdp import lora
from arealite.engine.fsdp.model import fill_parameters, load_model
from arealite.engine.fsdp.parallel import whole
from arealite.utils import distributed
from arealite.weights.host_memory import safetensors_header

if TYPE_CHECKING:
    from arealite.engine.fsdp_engine import FSDPEngine

Named = tuple[str, torch.Tensor]
# Beside weights and config, what makes a folder complete for people and servers.
_COMPANIONS = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.jinja",
               "*.model", "preprocessor_config.json", "processor_config.json", "generation_config.json")  # fmt: skip


# ------------------------------------------------------------------------------------ Hugging Face folders


def tensor_specs(engine: FSDPEngine) -> list[tuple[str, torch.Size, torch.dtype]]:
    """Name, whole shape and published type of each parameter; tied ones once, adapters merged into their layers."""
    dtype = getattr(torch, engine.config.dtype)
    parameters = engine.model.named_parameters()
    return [(lora.plain_name(n), p.shape, dtype) for n, p in parameters if not lora.is_adapter(n)]


def gathered_parameters(engine: FSDPEngine, borrow: bool = False) -> Iterator[Named]:
    """Each parameter whole, one at a time (so that no rank ever holds all of them); every rank must iterate.

    A copy; with `borrow` perhaps the parameter itself, for whoever copies it at once.
    """
    dtype = getattr(torch, engine.config.dtype)
    for name, parameter in engine.model.named_parameters():
        if not lora.is_adapter(name):
            value = lora.merged(engine.model, name, _whole(parameter, borrow))
            yield lora.plain_name(name), value.to(dtype)


def _export(engine: FSDPEngine, tensors: Iterable[Named]) -> Iterator[Named]:
    """Tensors as checkpoints of this model name and cut them: transformers fuses experts, files do not."""
    for name, tensor in tensors:
        yield from revert_weight_conversion(engine.model, {name: tensor}).items()


def _file_specs(engine: FSDPEngine, adapters: bool) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Names, shapes and types of the tensors in a checkpoint file of this engine."""
    if adapters:
        return {n: (p.shape, p.dtype) for n, p in lora.adapter_parameters(engine.model)}
    empty = ((n, torch.empty(s, dtype=d, device="meta")) for n, s, d in tensor_specs(engine))
    return {n: (t.shape, t.dtype) for n, t in _export(engine, (*empty, *_saved_buffers(engine)))}


def _saved_buffers(engine: FSDPEngine) -> list[Named]:
    """What belongs to a checkpoint beside parameters, such as the correction bias of a router; the same on all ranks."""
    saved = engine.model.state_dict().keys()
    return [(lora.plain_name(n), b) for n, b in engine.model.named_buffers() if n in saved]


def save_hf(engine: FSDPEngine, path: str, durable: bool = True, merge: bool = False) -> None:
    """Write a folder that `from_pretrained` reads: weights, config, tokenizer. `durable` waits for the disk.

    An engine that trains adapters writes a folder of PEFT's instead, unless it is told to `merge` them; one that servers
    read at once (not `durable`) holds nothing else.
    """
    final, aside = Path(path), Path(f"{path}.partial")
    adapters = engine.config.lora_rank > 0 and not merge
    if adapters:
        tensors = ((n, _whole(p)) for n, p in lora.adapter_parameters(engine.model))
    else:
        tensors = _export(engine, chain(gathered_parameters(engine), _saved_buffers(engine)))
    # After a failure the loop goes on without writing: other ranks are gathering with this one.
    attempt = _Attempts(active=distributed.rank() == 0)
    attempt(_open_folder, engine, aside, adapters, companions=durable or not adapters)
    name = "adapter_model.safetensors" if adapters else "model.safetensors"
    file = attempt(open, aside / name, "wb")
    attempt(_write, file, safetensors_header(_file_specs(engine, adapters))[0])
    for _, tensor in tensors:
        attempt(_write, file, tensor)
    attempt(_close, file, durable)
    attempt(_swap, aside, final)
    _agree(attempt.failure, aside, final)


def load_hf(engine: FSDPEngine, path: str) -> None:
    """Fill the model (or its adapters) from what `save_hf` wrote; refuses another shape before changing anything."""
    adapters = engine.config.lora_rank > 0
    found: dict[str, tuple[Path, list[int]]] = {}
    for file in sorted(Path(path).glob("*.safetensors")):
        with _open_safetensors(file) as handle:
            for key in handle.keys():  # noqa: SIM118 - a safetensors handle cannot be iterated
                found[key] = (file, handle.get_slice(key).get_shape())
    if not found:
        raise CheckpointError(f"{path} has no .safetensors file: it is not a checkpoint of weights")
    for key, (shape, _) in _file_specs(engine, adapters).items():
        given = found[key][1] if key in found else "missing"
        if given != list(shape):
            told = f"{key} is {given}, expected {list(shape)}"
            raise CheckpointError(f"{path} is of another model: {told}")
    weights: dict[str, torch.Tensor] = {}
    if distributed.rank() == 0 and adapters:
        names = {id(p): n for n, p in engine.model.named_parameters()}
        for key, parameter in lora.adapter_parameters(engine.model):
            with _open_safetensors(found[key][0]) as handle:
                weights[names[id(parameter)]] = handle.get_tensor(key)
    elif distributed.rank() == 0:
        config = replace(engine.config, init_from_scratch=False)
        loaded = load_model(Path(path), engine.hf_config, config, engine.scalar_head)
        weights = dict(loaded.named_parameters())
    fill_parameters(engine.model, weights)


def _open_safetensors(file: Path):
    try:
        return safe_open(file, framework="pt")
    except Exception as error:  # safetensors' own class is not part of its interface
        told = f"{file} cannot be read ({error}): it is torn or not safetensors"
        raise CheckpointError(told) from error


def _open_folder(engine: FSDPEngine, aside: Path, adapters: bool, companions: bool) -> None:
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    for pattern in _COMPANIONS if companions else ():
        for source in engine.folder.glob(pattern):
            shutil.copyfile(source, aside / source.name)
    if adapters:
        lora.save_settings(engine.model, aside, str(engine.folder))
        return
    engine.model.config.save_pretrained(aside)
    _fix_config(aside / "config.json", engine.config.dtype)


def _whole(value: torch.Tensor, borrow: bool = False) -> torch.Tensor:
    # FSDP leaves the root's parameters gathered after a forward pass. A copy, because writing one out as bytes would make
    # its storage one that FSDP can no longer free.
    if not isinstance(value, DTensor) and not borrow:
        return value.detach().clone()
    return whole(value)


def _fix_config(file: Path, dtype: str) -> None:
    """Name the type of the written weights, and leave out our attention, which others do not have."""
    config = json.loads(file.read_text())
    config["dtype"] = dtype
    config.pop("_attn_implementation", None)
    file.write_text(json.dumps(config, indent=2))


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
        with _alone():
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
    # What no step had touched yet (all rewards were equal so far) has no optimizer state in the checkpoint.
    stepped = {key.split("/")[1] for key in metadata if key.startswith("optim/")}
    state = {k: v for k, v in state.items() if k in metadata or not _may_lack(k, stepped)}
    for name, tensor in state.items():
        saved = metadata.get(name)
        if saved is None or tuple(saved.size) != tuple(tensor.shape):
            raise CheckpointError(
                f"{path} does not fit this engine: {name} is "
                f"{'missing' if saved is None else tuple(saved.size)}, expected {tuple(tensor.shape)}. It is of another "
                "model, or was saved without the optimizer"
            )
    try:
        with _alone():
            dcp.load(state, checkpoint_id=path, no_dist=not dist.is_initialized())
    except (OSError, CheckpointException, RuntimeError, ValueError, EOFError) as error:
        told = f"{path} cannot be read ({_root_cause(error)}): it is torn"
        raise CheckpointError(told) from error
    if with_optim:
        for name, parameter in engine.model.named_parameters():
            if name not in stepped:
                engine.optimizer.state.pop(parameter, None)
        _restore_training_state(engine, state)


@contextmanager
def _alone() -> Iterator[None]:
    """DCP warns that a single process is a single process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


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
    if isinstance(engine.module, FSDPModule):
        # A forward pass alone leaves the outermost weights gathered: tensors that neither optimizer nor backward pass know.
        engine.module.reshard()
    return {f"model/{n}": p.detach() for n, p in engine.model.named_parameters()}


def _training_state(engine: FSDPEngine) -> dict[str, torch.Tensor]:
    """Tensors only, so that nothing has to be pickled. Optimizer and counters are views or copies to be read back."""
    state = {}
    for name, parameter in engine.model.named_parameters():
        for key, value in engine.optimizer.state.get(parameter, {}).items():
            state[f"optim/{name}/{key}"] = value
    state["counters"] = torch.tensor([engine.lr_step, engine.bad_steps, engine._version])
    state |= {f"extra/{key}": value for key, value in engine.extra_state().items()}
    _, keys, *rest = numpy.random.get_state()
    words = torch.from_numpy(keys.copy()).view(torch.int32)
    python = torch.tensor(random.getstate()[1], dtype=torch.int64)
    rng = {"torch": torch.get_rng_state(), "python": python, "numpy": words}
    rng["numpy_rest"] = torch.tensor(rest, dtype=torch.float64)  # position, and half of a pair
    if torch.cuda.is_available():
        rng["cuda"] = torch.cuda.get_rng_state()
    return state | {f"rng/{distributed.rank()}/{key}": value for key, value in rng.items()}


def _restore_training_state(engine: FSDPEngine, state: dict[str, torch.Tensor]) -> None:
    engine.lr_step, engine.bad_steps, engine._version = state["counters"].tolist()
    engine._set_lr()
    extra = {k.removeprefix("extra/"): v for k, v in state.items() if k.startswith("extra/")}
    engine.load_extra_state(extra)
    prefix = f"rng/{distributed.rank()}/"
    rng = {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
    if not rng:
        return  # more ranks than before: the new ones keep the state they were seeded with
    torch.set_rng_state(rng["torch"])
    random.setstate((3, tuple(rng["python"].tolist()), None))
    at, has_half, half = rng["numpy_rest"].tolist() if "numpy_rest" in rng else (624, 0, 0.0)
    words = rng["numpy"].view(torch.uint32).numpy()
    numpy.random.set_state(("MT19937", words, int(at), int(has_half), half))
    if "cuda" in rng:
        torch.cuda.set_rng_state(rng["cuda"])


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


def _may_lack(key: str, stepped: set[str]) -> bool:
    """Whether a complete checkpoint can be without this: the random state of a rank, the optimizer's of a parameter not stepped."""
    kind, name, *_ = f"{key}/".split("/")
    return kind == "rng" or (kind == "optim" and name not in stepped)


# ------------------------------------------------------------------------------------------ shared by both


class _Attempts:
    """Runs the steps of writing on the rank that writes; after the first `OSError` the rest is left out."""

    def __init__(self, active: bool):
        self.active = active
        self.failure: str | None = None

    def __call__(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not self.active or self.failure is not None:
            return None
        try:
            return step(*args, **kwargs)
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
    folder = next(parent for parent in final.absolute().parents if parent.exists())
    free = shutil.disk_usage(folder).free
    raise CheckpointError(
        f"could not write {final}: {failure}. {free / 1e9:.2f} GB are free there; make room or save elsewhere. Earlier "
        "checkpoints are untouched"
    )


def _root_cause(error: BaseException) -> str:
    failures = getattr(error, "failures", None)
    return str(next(iter(failures.values()))[0]) if failures else str(error)
