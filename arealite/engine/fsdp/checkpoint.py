"""Hugging Face folders of an engine's weights, and what all checkpoints share.

A folder is written under a temporary name and renamed when it is complete, so a crash or a full disk leaves the
previous one as it was. All ranks call these functions together, and they fail on all ranks together. Sharded
checkpoints to resume from are in `sharded_checkpoint`.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from arealite.api.cli_args import TrainEngineConfig
from arealite.api.errors import CheckpointError
from arealite.engine.adapter_files import check_adapter_folder, check_depth
from arealite.engine.fsdp import lora
from arealite.engine.fsdp.low_bit import LowBitLinear, low_bit_buffers, low_bit_weights
from arealite.engine.fsdp.model import PackedModel, load_model
from arealite.engine.fsdp.parallel import local, offset_of, whole
from arealite.engine.fsdp.sharding import all_tensors, copy_from_first
from arealite.engine.pipeline.model import PipelinedModel
from arealite.utils import distributed
from arealite.weights.layout import TensorLayout
from arealite.weights.transport import Shard

Named = tuple[str, torch.Tensor]


class EngineState(Protocol):
    """What checkpoints read from a training engine and restore in it."""

    config: TrainEngineConfig
    hf_config: PreTrainedConfig
    folder: Path
    scalar_head: bool
    module: PackedModel | PipelinedModel | None
    pipeline: PipelinedModel | None
    device: str
    optimizer: torch.optim.Optimizer | None
    lr_step: int
    bad_steps: int

    @property
    def model(self) -> PreTrainedModel: ...

    def set_lr_step(self, step: int) -> None: ...
    def get_version(self) -> int: ...
    def set_version(self, version: int) -> None: ...
    def extra_state(self) -> dict[str, torch.Tensor]: ...
    def load_extra_state(self, state: dict[str, torch.Tensor]) -> None: ...


# Files copied from the original folder, so that the new one is complete.
_COMPANIONS = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.jinja",
               "*.model", "preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json",
               "chat_template.json", "generation_config.json")  # fmt: skip


def _parameters(engine: EngineState) -> dict[str, torch.Tensor]:
    """Return all parameters of the model, in its order; those of other pipeline stages are on `meta`."""
    own: dict[str, torch.Tensor] = dict(engine.model.named_parameters())
    if engine.pipeline is None:
        return own
    return {n: own.get(n, like) for n, like in engine.pipeline.all_parameters.items()}


def _weights(engine: EngineState) -> dict[str, torch.Tensor | LowBitLinear]:
    """Return all parameters, and the layers whose weights are in low bits."""
    return {**_parameters(engine), **low_bit_weights(engine.model)}


def _saved_buffers(engine: EngineState) -> dict[str, torch.Tensor]:
    """Return buffers that belong to a checkpoint, such as a router's correction bias."""
    own = own_buffers(engine.model)
    if engine.pipeline is None:
        return own
    return {n: own.get(n, like) for n, like in engine.pipeline.saved_buffers.items()}


def all_names(engine: EngineState) -> set[str]:
    """Return the names of what a checkpoint holds of the whole model, on every pipeline stage."""
    return {*_parameters(engine), *_saved_buffers(engine)}


def own_buffers(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the buffers of this rank that belong to a checkpoint."""
    saved = model.state_dict().keys()
    return {n: b for n, b in model.named_buffers() if n in saved}


def _moved_buffers(engine: EngineState) -> dict[str, torch.Tensor]:
    """Return the buffers that training changes: servers need them with the parameters."""
    return _saved_buffers(engine) if engine.config.router_bias_update_rate else {}


def _adapters(engine: EngineState) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Yield name, name in PEFT's files and value of each parameter that such a file holds."""
    for name, parameter in _parameters(engine).items():
        in_file = lora.file_name(name)
        if in_file is not None:
            yield name, in_file, parameter


def _fetch(engine: EngineState, name: str, dtype: torch.dtype, make: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Return what `make` returns on the pipeline stage that has the tensor `name`. Collective."""
    return make() if engine.pipeline is None else engine.pipeline.fetch(name, dtype, make)


def empty_parameters(engine: EngineState) -> dict[str, torch.Tensor]:
    """Return what `gathered_parameters` yields, on the `meta` device."""
    dtype = getattr(torch, engine.config.dtype)
    types = {n: (p.shape, dtype) for n, p in _weights(engine).items() if not lora.is_adapter(n)}
    types |= {n: (b.shape, b.dtype) for n, b in _moved_buffers(engine).items()}
    return {lora.plain_name(n): torch.empty(shape, dtype=t, device="meta") for n, (shape, t) in types.items()}


def gathered_parameters(engine: EngineState) -> Iterator[Named]:
    """Yield the full parameters one at a time, with adapters merged; every rank must iterate.

    Layers in low bits are dequantized. Tensors may be the engine's own: copy them before the next one. Parameters of
    other pipeline stages have values on rank 0 only. Correction biases of routers follow if training moves them.
    """
    dtype = getattr(torch, engine.config.dtype)
    for name, parameter in _weights(engine).items():
        if not lora.is_adapter(name):
            yield lora.plain_name(name), _fetch(engine, name, dtype, partial(_merged, engine, name, parameter))
    yield from _gathered_buffers(engine, _moved_buffers(engine))


def local_parameters(engine: EngineState) -> Iterator[Shard]:
    """Yield this rank's shard of each parameter, in the compute dtype. Nothing is exchanged."""
    if isinstance(engine.module, FSDPModule):
        # After a forward pass the root's weights are still gathered.
        engine.module.reshard()
    dtype = getattr(torch, engine.config.dtype)
    own: dict[str, torch.Tensor] = dict(engine.model.named_parameters())
    moved = _moved_buffers(engine).keys()
    own |= {name: buffer for name, buffer in own_buffers(engine.model).items() if name in moved}
    for name, tensor in own.items():
        shard = local(tensor).detach()
        yield name, tuple(tensor.shape), offset_of(tensor), shard if name in moved else shard.to(dtype)


def _gathered_buffers(engine: EngineState, buffers: dict[str, torch.Tensor]) -> Iterator[Named]:
    for name, buffer in buffers.items():
        yield lora.plain_name(name), _fetch(engine, name, buffer.dtype, partial(whole, buffer))


def _merged(engine: EngineState, name: str, parameter: torch.Tensor | LowBitLinear) -> torch.Tensor:
    dtype = getattr(torch, engine.config.dtype)
    value = parameter.dequantized(dtype) if isinstance(parameter, LowBitLinear) else whole(parameter)
    return lora.merged(engine.model, name, value).to(dtype)


def _export(engine: EngineState, tensors: Iterable[Named]) -> Iterator[Named]:
    """Yield tensors as checkpoint files hold them; transformers fuses experts, files do not."""
    for name, tensor in tensors:
        yield from revert_weight_conversion(engine.model, {name: tensor}).items()


def _other_buffers(engine: EngineState) -> dict[str, torch.Tensor]:
    """Return the buffers of a file that `gathered_parameters` does not yield."""
    return {} if _moved_buffers(engine) else _saved_buffers(engine)


def _file_layout(engine: EngineState, adapters: bool) -> TensorLayout:
    """Return the layout of the tensors in a checkpoint file of this engine."""
    if adapters:
        return TensorLayout.of({in_file: p for _, in_file, p in _adapters(engine)}, align=1)
    buffers = ((lora.plain_name(n), b) for n, b in _other_buffers(engine).items())
    return TensorLayout.of(dict(_export(engine, chain(empty_parameters(engine).items(), buffers))), align=1)


def _file_tensors(engine: EngineState, adapters: bool) -> Iterator[Named]:
    """Yield the tensors of `_file_layout`, with values on rank 0; every rank must iterate."""
    if adapters:
        for name, in_file, p in _adapters(engine):
            yield in_file, _fetch(engine, name, p.dtype, partial(whole, p))
        return
    yield from _export(engine, gathered_parameters(engine))
    yield from _export(engine, _gathered_buffers(engine, _other_buffers(engine)))


def save_hf(engine: EngineState, path: str, durable: bool = True, merge: bool = False) -> None:
    """Write a folder that `from_pretrained` reads: weights, config, tokenizer.

    `durable` flushes it to disk. An engine with adapters writes a PEFT folder, unless `merge` is set. A PEFT folder
    that is not `durable` is read by servers at once and holds no tokenizer.
    """
    final, aside = Path(path), Path(f"{path}.partial")
    adapters = engine.config.lora_rank > 0 and not merge
    # After a failure the loop goes on without writing, because the other ranks gather tensors with this one.
    attempt = WriteSteps(active=distributed.rank() == 0)
    attempt(_open_folder, engine, aside, adapters, companions=durable or not adapters)
    name = "adapter_model.safetensors" if adapters else "model.safetensors"
    file = attempt(open, aside / name, "wb")
    attempt(_write, file, _file_layout(engine, adapters).to_safetensors())
    for _, tensor in _file_tensors(engine, adapters):
        attempt(_write, file, tensor)
    attempt(_close, file, durable)
    attempt(replace_folder, aside, final)
    raise_on_all_ranks(attempt.failure, aside, final)


def load_hf(engine: EngineState, path: str) -> None:
    """Load a folder of `save_hf`; check all shapes before changing anything."""
    adapters = engine.config.lora_rank > 0
    found: dict[str, tuple[Path, list[int]]] = {}
    for file in sorted(Path(path).glob("*.safetensors")):
        with _open_safetensors(file) as handle:
            for key in handle.keys():  # noqa: SIM118 - a safetensors handle cannot be iterated
                found[key] = (file, handle.get_slice(key).get_shape())
    if not found:
        raise CheckpointError(f"{path} has no .safetensors file: it is not a checkpoint of weights")
    specs = _file_layout(engine, adapters).specs
    check_adapter_folder(path, engine.config, found, specs)
    for key, spec in specs.items():
        given = found[key][1] if key in found else "missing"
        if given != list(spec.shape):
            raise CheckpointError(f"{path} is of another model: {key} is {given}, expected {list(spec.shape)}")
    check_depth(path, engine.hf_config)
    weights, own = {}, {name: p for name, _, p in _adapters(engine)}
    like = own if adapters else _parameters(engine) | _saved_buffers(engine) | low_bit_buffers(engine.model)
    if distributed.rank() == 0 and adapters:
        for name, in_file, _ in _adapters(engine):
            with _open_safetensors(found[in_file][0]) as handle:
                weights[name] = handle.get_tensor(in_file)
    elif distributed.rank() == 0:
        config = replace(engine.config, init_from_scratch=False)
        loaded = load_model(Path(path), engine.hf_config, config, engine.scalar_head)
        weights = all_tensors(loaded)
    if isinstance(engine.module, FSDPModule):
        # After a forward pass the root's weights are still gathered.
        engine.module.reshard()
    copy_from_first(engine.model, weights, engine.device, like)


def _open_safetensors(file: Path):
    try:
        return safe_open(file, framework="pt")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file} cannot be read ({error}): it is incomplete or not safetensors") from error


def _open_folder(engine: EngineState, aside: Path, adapters: bool, companions: bool) -> None:
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


def _fix_config(file: Path, dtype: str) -> None:
    """Set the dtype of the written weights, and remove our attention, which other programs do not have."""
    config = json.loads(file.read_text())
    config["dtype"] = dtype
    config.pop("_attn_implementation", None)
    file.write_text(json.dumps(config, indent=2))


def _write(file: BinaryIO, data: bytes | memoryview | torch.Tensor) -> None:
    if isinstance(data, torch.Tensor):
        # A copy: FSDP leaves the root's parameters gathered after a forward pass, and once their memory is exposed as
        # bytes it can no longer free them.
        data = data.contiguous().to("cpu", copy=True).view(-1).view(torch.uint8).numpy().data
    file.write(data)


def _close(file: BinaryIO, durable: bool) -> None:
    with file:
        file.flush()
        if durable:
            os.fsync(file.fileno())


class WriteSteps:
    """Runs the steps of writing on the rank that writes; after the first `OSError` it skips the rest."""

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


def replace_folder(aside: Path, final: Path) -> None:
    """Rename the finished folder to its final name; remove the previous one only after that."""
    old = Path(f"{final}.old")
    shutil.rmtree(old, ignore_errors=True)
    if final.exists():
        final.rename(old)
    aside.rename(final)
    shutil.rmtree(old, ignore_errors=True)


def raise_on_all_ranks(failure: str | None, aside: Path, final: Path, group: dist.ProcessGroup | None = None) -> None:
    """Raise `CheckpointError` on every rank if rank 0 failed, and remove the incomplete folder."""
    failure = distributed.broadcast_json(failure, group=group)
    if failure is None:
        return
    if distributed.rank() == 0:
        shutil.rmtree(aside, ignore_errors=True)
    folder = next(parent for parent in final.absolute().parents if parent.exists())
    free = shutil.disk_usage(folder).free
    raise CheckpointError(
        f"could not write {final}: {failure}. {free / 1e9:.2f} GB are free there: free some space or save elsewhere. "
        "Earlier checkpoints are unchanged"
    )
