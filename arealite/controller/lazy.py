"""What the driver holds of data that lives in Ray's object store: a batch, a column, a list of statistics. Nothing is fetched before it is read.

A `LazyBatch` is layers of columns, one over the other: what the rollout collected, then what engines said of it. It goes to an engine as
references. Reading a column's numbers in the driver brings that column here, and it alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from arealite.utils.data import concat_padded

if TYPE_CHECKING:
    from arealite.controller.engines import Call

ADDED = "+"
# Which stored columns go into a batch and under which names: listed, or all that begin with ADDED (without it), or ("") all others.
Selection = dict[str, str] | str


def select(stored: Iterable[str], selection: Selection) -> dict[str, str]:
    """Name in the store → name in the batch."""
    if isinstance(selection, dict):
        return {name: selection[name] for name in stored if name in selection}
    chosen = [name for name in stored if name.startswith(ADDED) == bool(selection)]
    return {name: name.removeprefix(ADDED) for name in chosen}


def cut(column: torch.Tensor, shapes: Sequence[torch.Size]) -> list[torch.Tensor]:
    """A column of joined shares as that of each (of these shapes), without the padding that joining added."""
    width = max(length for _, length in shapes)
    is_padded = column.dim() > 1 and column.shape[1] == width
    parts = zip(column.split([rows for rows, _ in shapes]), shapes, strict=True)
    return [part[:, :length] if is_padded else part for part, (_, length) in parts]


@dataclass(eq=False)
class Layer:
    """Columns of one call. `names`: those that are taken over, and what they are called in the batch; None: all of its result, or with
    `added` all that it put into the batch that it was given (`ADDED` stands before their names in the store)."""

    call: Call
    names: dict[str, str] | None = None
    added: bool = False

    def columns(self) -> dict[str, str]:
        """Name in the batch → name in the store; waits for the call's end."""
        if self.names is None:
            self.names = select(self.call.columns(), self.selection())
        return {name: stored for stored, name in self.names.items()}

    def selection(self) -> Selection:
        return (ADDED if self.added else "") if self.names is None else self.names


class LazyTensor:
    """A column that some engine computed, or will have. Any use but handing it on fetches it."""

    def __init__(self, call: Call, column: str):
        self._call, self._column = call, column
        self._tensor: torch.Tensor | None = None

    def tensor(self) -> torch.Tensor:
        """Its numbers: the rows of all shares, padded alike; of a batch that the script made, in its order and width."""
        if self._tensor is None:
            name, call = self._column, self._call
            parts = call.fetch(name)
            first = parts[0]
            if call.order is not None and first.dim() > 1 and first.shape[1] == call.shapes()[0][1]:
                parts.append(first.new_empty(0, call.width, *first.shape[2:]))
            joined = concat_padded([{"attention_mask": p, name: p} for p in parts])[name]
            self._tensor = joined if call.order is None else joined[call.order]
        return self._tensor

    def under(self, name: str) -> Layer:
        """As a layer of a batch that has this column alone, by that name."""
        return Layer(self._call, {self._column: name})

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tensor(), name)

    @classmethod
    def __torch_function__(cls, function: Callable, types: Any, args: Any = (), kwargs: Any = None):
        return function(*_read(args), **{k: _read(v) for k, v in (kwargs or {}).items()})


def _read(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(map(_read, value))
    return value.tensor() if isinstance(value, LazyTensor) else value


def _operator(name: str) -> Callable[..., Any]:
    return lambda self, *args: getattr(self.tensor(), name)(*_read(args))


# Operators are looked up on the class, past __getattr__.
_ARITHMETIC = ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "pow", "neg", "abs", "invert", "and", "or")  # fmt: skip
_COMPARISON = ("eq", "ne", "lt", "le", "gt", "ge")
_OTHER = ("getitem", "len", "iter", "bool", "float", "int", "repr")
for _name in (*_ARITHMETIC, *_COMPARISON, *_OTHER):
    setattr(LazyTensor, f"__{_name}__", _operator(f"__{_name}__"))


class LazyBatch(MutableMapping[str, Any]):
    """Behaves as the dict of tensors that a script expects, made of references."""

    def __init__(self, layers: list[Layer]):
        self.layers = layers
        self._predicted: list[Layer] = []

    def add(self, layer: Layer, predicted: bool = False) -> None:
        self.layers.append(layer)
        if predicted:
            self._predicted.append(layer)

    def observed(self) -> list[Layer]:
        """Layers that are not predictions of engines. A prediction looks at these alone, so it need not wait for another."""
        return [layer for layer in self.layers if layer not in self._predicted]

    def __getitem__(self, key: str) -> LazyTensor:
        if len(self.layers) == 1 and self.layers[0].names is None:
            return LazyTensor(self.layers[0].call, key)  # of a call that has perhaps not ended
        for layer in reversed(self.layers):
            columns = layer.columns()
            if key in columns:
                return LazyTensor(layer.call, columns[key])
        raise KeyError(key)

    def __setitem__(self, key: str, value: LazyTensor | torch.Tensor) -> None:
        if isinstance(value, LazyTensor):
            self.add(value.under(key), predicted=True)
        else:
            self.add(Layer(self.layers[0].call.put(value), {"": key}))

    def __delitem__(self, key: str) -> None:
        if key not in list(self):
            raise KeyError(key)
        for layer in self.layers:
            layer.names = {stored: name for name, stored in layer.columns().items() if name != key}

    def __contains__(self, key: object) -> bool:
        return any(key in layer.columns() for layer in self.layers)

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys(name for layer in self.layers for name in layer.columns()))

    def __len__(self) -> int:
        return sum(1 for _ in self)


class LazyList(Sequence[Any]):
    """A list that an engine is still computing, such as the statistics of its minibatches."""

    def __init__(self, call: Call):
        self._call = call

    def __getitem__(self, index: Any) -> Any:
        return self._call.value()[index]

    def __len__(self) -> int:
        return len(self._call.value())

    def __add__(self, other: Sequence[Any]) -> list[Any]:
        return [*self, *other]
