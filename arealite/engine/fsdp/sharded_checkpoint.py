"""Sharded checkpoints to resume from (`torch.distributed.checkpoint`).

They hold tensors only, no pickled objects. All ranks save and load together; a checkpoint loads on any number of ranks.
`HostCopy` takes the tensors of a checkpoint off the training thread, so that another thread can write them.
"""

import random
import shutil
import warnings
from pathlib import Path

import numpy
import torch
import torch.distributed as dist
from torch.distributed._state_dict_utils import _copy_state_dict, _create_cpu_state_dict
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import _init_optim_state
from torch.distributed.fsdp import FSDPModule

from arealite.api.errors import CheckpointError
from arealite.engine.adapter_files import alpha_mark, check_sharded, check_tensors
from arealite.engine.fsdp.checkpoint import (
    EngineState,
    WriteSteps,
    all_names,
    own_buffers,
    raise_on_all_ranks,
    replace_folder,
)
from arealite.engine.fsdp.optimizer import fit_scales
from arealite.engine.fsdp.parallel import local
from arealite.utils import distributed

State = dict[str, torch.Tensor]
# A run of one process saves and loads without a process group.
warnings.filterwarnings("ignore", message="torch.distributed is disabled")


def save_dcp(engine: EngineState, path: str, with_optim: bool) -> None:
    """Save weights; `with_optim` also optimizer, schedule position, counters and random states."""
    write_dcp(checkpoint_state(engine, with_optim), path)


def checkpoint_state(engine: EngineState, with_optim: bool) -> State:
    """Return the tensors of a checkpoint. Those of the model and the optimizer are the engine's own."""
    return _model_state(engine) | (_training_state(engine) if with_optim else {})


def write_dcp(state: State, path: str, group: dist.ProcessGroup | None = None) -> None:
    """Write a checkpoint. A thread beside training passes a group of its own, with all ranks."""
    final, aside = Path(path), Path(f"{path}.partial")
    if distributed.rank() == 0:
        shutil.rmtree(aside, ignore_errors=True)
    distributed.barrier(group)
    attempt = WriteSteps(active=distributed.rank() == 0)
    try:
        no_dist = not dist.is_initialized()
        state_dict_saver.save(state, checkpoint_id=aside, no_dist=no_dist, process_group=group)
    except (OSError, CheckpointException) as error:
        attempt.failure = _root_cause(error)
    attempt(replace_folder, aside, final)
    raise_on_all_ranks(attempt.failure, aside, final, group)


class HostCopy:
    """A copy of an engine's checkpoint in host memory, which is used again for the next one."""

    def __init__(self) -> None:
        self._buffers: State = {}

    def missing_bytes(self, state: State) -> int:
        """Return how much more memory a copy of this state needs."""
        held, wanted = ({n: local(t).shape for n, t in tensors.items()} for tensors in (self._buffers, state))
        return 0 if held == wanted else sum(local(tensor).nbytes for tensor in state.values())

    def take(self, state: State) -> State:
        """Copy the state; returns the copy, which is valid until the next call."""
        if self.missing_bytes(state):
            self._buffers = {}
            on_gpu = any(local(tensor).is_cuda for tensor in state.values())
            self._buffers = _create_cpu_state_dict(state, pin_memory=on_gpu)
        # Waits for the copies: training changes the tensors next.
        return _copy_state_dict(state, self._buffers, non_blocking=False)


def load_dcp(engine: EngineState, path: str, with_optim: bool, keeps_schedule: bool = False) -> None:
    """Load on any number of ranks; check that it is complete and fits before changing anything."""
    metadata = _read_metadata(path)
    check_sharded(path, engine.config, metadata, with_optim)
    state = _model_state(engine)
    if with_optim:
        assert engine.optimizer is not None
        # Create the state that is loaded into, by a step on zero gradients. It needs an engine without gradients.
        engine.optimizer.zero_grad(set_to_none=True)
        _init_optim_state(engine.optimizer)
        state |= _training_state(engine)
    # Parameters without a step so far (all rewards were equal) have no optimizer state in the checkpoint.
    stepped = {key.split("/")[1] for key in metadata if key.startswith("optim/")}
    state = {k: v for k, v in state.items() if k in metadata or not _may_lack(k, stepped)}
    resized = _other_scales(state, metadata)
    state |= resized
    check_tensors(path, state, metadata, all_names(engine))
    try:
        state_dict_loader.load(state, checkpoint_id=path, no_dist=not dist.is_initialized())
    except (OSError, CheckpointException, RuntimeError, ValueError, EOFError) as error:
        if isinstance(error, RuntimeError) and dist.is_initialized():
            # A collective: another rank has died, and the job starts again. Errors of reading arrive otherwise.
            raise
        raise CheckpointError(f"{path} cannot be read ({_root_cause(error)}): it is incomplete") from error
    if with_optim:
        assert engine.optimizer is not None
        for name, parameter in engine.model.named_parameters():
            if name not in stepped:
                engine.optimizer.state.pop(parameter, None)
            for key in engine.optimizer.state.get(parameter, {}):
                if (scales := resized.get(f"optim/{name}/{key}")) is not None:
                    engine.optimizer.state[parameter][key] = fit_scales(parameter, scales)
        _restore_training_state(engine, state, keeps_schedule)


def _other_scales(state: State, metadata: dict) -> State:
    """Return tensors for scales of 8-bit moments that were saved with other blocks: with another `t`."""
    sizes = {n: metadata[n].size for n in state if n.startswith("optim/") and n.endswith("_scale") and n in metadata}
    sizes = {n: size for n, size in sizes.items() if size[:-1] == state[n].shape[:-1] and size != state[n].shape}
    return {n: torch.empty(size, device=local(state[n]).device) for n, size in sizes.items()}


def _read_metadata(path: str) -> dict:
    """Return the metadata of a checkpoint, after checking that its files are not cut off."""
    try:
        metadata = FileSystemReader(path).read_metadata()
        for stored in (metadata.storage_data or {}).values():
            size = (Path(path) / stored.relative_path).stat().st_size
            if size < stored.offset + stored.length:
                raise ValueError(f"{stored.relative_path} is cut off at {size} bytes")
    except (OSError, EOFError, ValueError) as error:
        raise CheckpointError(
            f"{path} is not a complete sharded checkpoint ({error}): give a folder that was saved completely"
        ) from error
    return metadata.state_dict_metadata


def _model_state(engine: EngineState) -> dict[str, torch.Tensor]:
    if isinstance(engine.module, FSDPModule):
        # After a forward pass without a backward pass the root's weights are still gathered, in tensors that the
        # optimizer does not have.
        engine.module.reshard()
    tensors = {**dict(engine.model.named_parameters()), **own_buffers(engine.model)}
    state = {f"model/{n}": t.detach() for n, t in tensors.items()} | alpha_mark(engine.config)
    if engine.config.frozen_weight_dtype != "auto":
        # Its weights are not in the checkpoint. Adapters belong to this base, not to one of another type.
        state[f"frozen_weight_dtype/{engine.config.frozen_weight_dtype}"] = torch.zeros(1)
    return state


def _training_state(engine: EngineState) -> dict[str, torch.Tensor]:
    """Return optimizer state, counters and random states as tensors, so that nothing is pickled."""
    assert engine.optimizer is not None
    state = {}
    for name, parameter in engine.model.named_parameters():
        for key, value in engine.optimizer.state.get(parameter, {}).items():
            state[f"optim/{name}/{key}"] = value
    state["counters"] = torch.tensor([engine.lr_step, engine.bad_steps, engine.get_version()])
    state |= {f"extra/{key}": value for key, value in engine.extra_state().items()}
    _, keys, *rest = numpy.random.get_state()
    words = torch.from_numpy(numpy.array(keys)).view(torch.int32)
    python = torch.tensor(random.getstate()[1], dtype=torch.int64)
    rng = {"torch": torch.get_rng_state(), "python": python, "numpy": words}
    # Position in the state, and the second of a pair of normal numbers.
    rng["numpy_rest"] = torch.tensor(rest, dtype=torch.float64)
    if torch.cuda.is_available():
        rng["cuda"] = torch.cuda.get_rng_state()
    return state | {f"rng/{distributed.rank()}/{key}": value for key, value in rng.items()}


def _restore_training_state(engine: EngineState, state: dict[str, torch.Tensor], keeps_schedule: bool) -> None:
    lr_step, engine.bad_steps, version = state["counters"].tolist()
    engine.set_lr_step(engine.lr_step if keeps_schedule else lr_step)
    engine.set_version(version)
    engine.load_extra_state(_under("extra/", state))
    rng = _under(f"rng/{distributed.rank()}/", state)
    if not rng:
        # There are more ranks than before: new ones keep the state that they were seeded with.
        return
    torch.set_rng_state(rng["torch"])
    random.setstate((3, tuple(rng["python"].tolist()), None))
    at, has_half, half = rng["numpy_rest"].tolist()
    words = rng["numpy"].view(torch.uint32).numpy()
    numpy.random.set_state(("MT19937", words, int(at), int(has_half), half))
    if "cuda" in rng:
        torch.cuda.set_rng_state(rng["cuda"])


def _under(prefix: str, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}


def _may_lack(key: str, stepped: set[str]) -> bool:
    """Return whether a complete checkpoint may lack `key`: of a new rank, an unstepped parameter, LoRA."""
    kind, name, *_ = f"{key}/".split("/")
    return kind in ("rng", "lora_alpha") or (kind == "optim" and name not in stepped)


def _root_cause(error: BaseException) -> str:
    failures = getattr(error, "failures", None)
    return str(next(iter(failures.values()))[0]) if failures else str(error)
