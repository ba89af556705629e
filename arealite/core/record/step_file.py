"""One step of a recorded run as a file: `record/step000012.rec`, numbered from 0.

A file is compressed safetensors: the batches of the step without padding, and JSON about everything else. Its checksum
is that of zlib. `Recorder` writes it and `arealite.engine.replay` reads it; the format is known here only.
"""

import json
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from arealite.api.errors import RecordError
from arealite.api.io_struct import Batch
from arealite.utils.data import is_per_token, padding, seq_lengths
from arealite.utils.rundir import write_file

_FORMAT = 1
# Fast: levels above 1 save a few percent for several times the work.
_LEVEL = 1
_MASK = "attention_mask"


class StepRecord(NamedTuple):
    """What is known of a step: JSON, and the batches that its loop received."""

    info: dict[str, Any]
    batches: list[Batch]


def step_path(folder: Path, step: int) -> Path:
    return folder / f"step{step:06d}.rec"


def recorded_steps(folder: Path) -> list[int]:
    """Return the steps of a record, in order."""
    found = (path.stem.removeprefix("step") for path in folder.glob("step*.rec"))
    return sorted(int(number) for number in found if number.isdecimal())


def write_step(folder: Path, step: int, record: StepRecord) -> int:
    """Write a step and return the size of its file in bytes."""
    tensors, layouts = {}, []
    for number, batch in enumerate(record.batches):
        columns, mask = {}, batch[_MASK].flatten().cpu().bool()
        places = [each.nonzero().squeeze(1) for each in (mask, ~mask)]
        for name, column in batch.items():
            tensors[f"{number}/{name}"], columns[name] = _pack(batch, name, column, *places)
        layouts.append({"columns": columns, "width": batch[_MASK].shape[1], "lengths": seq_lengths(batch).tolist()})
    # Statistics may be scalars of torch or NumPy.
    head = json.dumps({"format": _FORMAT, "layouts": layouts, "info": record.info}, default=float).encode()
    body = save(tensors) if tensors else b""
    blob = zlib.compress(len(head).to_bytes(8, "little") + head + body, _LEVEL)
    write_file(step_path(folder, step), blob, private=False)
    return len(blob)


def read_info(folder: Path, step: int) -> dict[str, Any]:
    """Read what `read_step` does, without the batches."""
    return read_step(folder, step, with_batches=False).info


def read_step(folder: Path, step: int, with_batches: bool = True) -> StepRecord:
    """Read a step; raises `RecordError` if its file is damaged or not there."""
    path = step_path(folder, step)
    try:
        data = zlib.decompress(path.read_bytes())
        size = int.from_bytes(data[:8], "little")
        head = json.loads(data[8 : 8 + size])
        if head["format"] != _FORMAT:
            raise RecordError(f"{path} is of format {head['format']}; this version of arealite reads {_FORMAT}")
        if not with_batches:
            return StepRecord(head["info"], [])
        tensors = load(data[8 + size :]) if len(data) > 8 + size else {}
        return StepRecord(head["info"], [_unpack(i, each, tensors) for i, each in enumerate(head["layouts"])])
    except FileNotFoundError:
        raise RecordError(f"step {step + 1} is not in the record {folder}: {describe_steps(folder)}") from None
    except (OSError, zlib.error, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise RecordError(
            f"{path} is damaged ({type(error).__name__}: {error}): step {step + 1} cannot be replayed; others can, "
            "from a checkpoint after it"
        ) from error


def describe_steps(folder: Path) -> str:
    """Say which steps a record has, as people count them, from 1."""
    steps = recorded_steps(folder)
    return f"it has steps {steps[0] + 1} to {steps[-1] + 1}" if steps else "it has no step"


def _pack(
    batch: Batch, name: str, column: torch.Tensor, tokens: torch.Tensor, padded: torch.Tensor
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Return a column without padding, in a small dtype, and how to get it back.

    `tokens` and `padded` are places in the flat batch: torch is several times as fast with them as with a mask.
    """
    column = column.detach().cpu()
    layout: dict[str, Any] = {"dtype": str(column.dtype).removeprefix("torch.")}
    fill = padding(name, column)
    if is_per_token(batch, name) and bool(((flat := column.flatten(0, 1)).index_select(0, padded) == fill).all()):
        layout["fill"] = fill
        column = flat.index_select(0, tokens)
    if column.dtype == torch.int64 and column.numel():
        low, high = int(column.min()), int(column.max())
        small = torch.int8 if low >= -128 and high < 128 else torch.int32
        column = column.to(small) if low >= -(1 << 31) and high < 1 << 31 else column
    return column.clone(memory_format=torch.contiguous_format), layout


def _unpack(number: int, layout: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Batch:
    # Rows are padded on the right.
    mask = torch.arange(layout["width"]) < torch.tensor(layout["lengths"])[:, None]
    batch = {}
    for name, how in layout["columns"].items():
        value = tensors[f"{number}/{name}"].to(getattr(torch, how["dtype"]))
        if "fill" in how:
            padded = value.new_full((*mask.shape, *value.shape[1:]), how["fill"])
            padded[mask] = value
            value = padded
        batch[name] = value
    return batch
