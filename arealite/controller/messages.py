"""Messages between the driver and its ranks: requests, reports, and columns in Ray's object store.

A batch is split into shares, one for each data-parallel rank of the most parallel engine. The columns of a share are
stored together, so that one object reference stands for all columns that a call left for that share.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from arealite.api.io_struct import Batch
from arealite.weights.layout import TensorLayout

# Columns in the object store: their layout, and the bytes of all of them.
Stored = tuple[TensorLayout, np.ndarray]

# Prefix, in the store, of columns that a method added to the batch that it was given.
ADDED = "+"
# Which stored columns go into a batch: a dict {name in the store: name in the batch}, ADDED for all columns with that
# prefix (which is removed), or "" for all columns without it.
Selection = dict[str, str] | str


class Report(NamedTuple):
    """What the driver learns about a call on one rank. Tensors stay in the object store.

    `began` and `ended` are `time.time()`. A call has either a plain `value`, or `columns` with the shape
    (rows, length) of each share.
    """

    began: float
    ended: float
    value: Any = None
    columns: tuple[str, ...] = ()
    shapes: tuple[torch.Size, ...] = ()


class Placeholder(NamedTuple):
    """Stands in a request for the batch (`number` is None) or for an object that was sent before."""

    number: int | None = None


@dataclass
class Request:
    """A method call.

    `layers` selects columns of each stored layer of the batch; later layers replace columns of earlier ones.
    `num_parts` is the number of shares for which the call leaves columns; 0 means that it has a plain result.
    """

    method: str
    args: list[Any] = field(default_factory=list)
    kwargs: dict[str, Any] = field(default_factory=dict)
    layers: list[Selection] = field(default_factory=list)
    num_parts: int = 0


def store(columns: Batch) -> Stored:
    """Convert columns to the form in which they are put into the object store."""
    layout = TensorLayout.of(columns)
    return layout, layout.pack(columns).numpy()


def load(stored: Stored) -> Batch:
    """Return the columns of a stored object. Copies, because Ray's memory is read-only."""
    layout, data = stored
    return layout.views(torch.from_numpy(data.copy()))


def select(stored: Iterable[str], selection: Selection) -> dict[str, str]:
    """Return {name in the store: name in the batch} of the selected columns."""
    if isinstance(selection, dict):
        return {name: selection[name] for name in stored if name in selection}
    chosen = [name for name in stored if name.startswith(ADDED) == bool(selection)]
    return {name: name.removeprefix(ADDED) for name in chosen}


def cut(column: torch.Tensor, shapes: Sequence[torch.Size]) -> list[torch.Tensor]:
    """Split a column of joined shares into one tensor per share, without the padding that joining added."""
    width = max(length for _, length in shapes)
    is_padded = column.dim() > 1 and column.shape[1] == width
    parts = zip(column.split([rows for rows, _ in shapes]), shapes, strict=True)
    return [part[:, :length] if is_padded else part for part, (_, length) in parts]
