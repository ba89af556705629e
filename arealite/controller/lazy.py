"""References to data in Ray's object store that a script uses: batches, columns, lists of statistics.

A `LazyBatch` consists of layers of columns: those that the rollout collected, then those that engines added. It goes to
an engine as references. Reading a column's numbers in the script fetches that column only.
"""

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from arealite.controller.messages import ADDED, Selection, select
from arealite.controller.runtime import Call
from arealite.utils.data import concat_padded


@dataclass(eq=False)
class Layer:
    """Columns of one call.

    `names` maps names in the store to names in the batch. None stands for all columns of the call's result, or, with
    `added`, for all columns that the method added to the batch that it was given.
    """

    call: Call
    names: dict[str, str] | None = None
    added: bool = False

    def columns(self) -> dict[str, str]:
        """Wait for the call and return {name in the batch: name in the store}."""
        if self.names is None:
            self.names = select(self.call.columns(), self.selection())
        return {name: stored for stored, name in self.names.items()}

    def selection(self) -> Selection:
        """Return which columns of the call belong to this layer, without waiting for it."""
        return (ADDED if self.added else "") if self.names is None else self.names


class LazyTensor:
    """A column that an engine has computed or is computing. Any use except passing it on fetches it."""

    def __init__(self, call: Call, column: str):
        self._call, self._column = call, column
        self._tensor: torch.Tensor | None = None

    def tensor(self) -> torch.Tensor:
        """Fetch the rows of all shares, padded to one length.

        For a batch that the script made they have its order and padded length.
        """
        if self._tensor is None:
            name, call = self._column, self._call
            parts = call.fetch(name)
            first = parts[0]
            if call.order is not None and first.dim() > 1 and first.shape[1] == call.shapes()[0][1]:
                parts.append(first.new_empty(0, call.width, *first.shape[2:]))
            joined = concat_padded([{"attention_mask": p, name: p} for p in parts])[name]
            self._tensor = joined if call.order is None else joined[call.order]
        return self._tensor

    def as_layer(self, name: str) -> Layer:
        """Return a layer that has only this column, under `name`."""
        return Layer(self._call, {self._column: name})

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tensor(), name)

    @classmethod
    def __torch_function__(cls, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*_fetch_all(args), **{k: _fetch_all(v) for k, v in (kwargs or {}).items()})


def _fetch_all(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(map(_fetch_all, value))
    return value.tensor() if isinstance(value, LazyTensor) else value


def _operator(name: str) -> Callable[..., Any]:
    return lambda self, *args: getattr(self.tensor(), name)(*_fetch_all(args))


# Python looks operators up on the class, without __getattr__.
_OPERATORS = "add radd sub rsub mul rmul truediv rtruediv pow neg abs invert and or eq ne lt le gt ge"
_OPERATORS += " getitem len iter bool float int repr"
for _name in _OPERATORS.split():
    setattr(LazyTensor, f"__{_name}__", _operator(f"__{_name}__"))


class LazyBatch(MutableMapping[str, Any]):
    """Behaves like the dict of tensors that a script expects, and holds references."""

    def __init__(self, layers: list[Layer]):
        self.layers = layers
        self._predicted: list[Layer] = []
        # Columns that updates added. No engine waits for them: only the ledger keeps them.
        self.recorded: list[Layer] = []

    def add(self, layer: Layer, predicted: bool = False) -> None:
        """Put a layer over the others. `predicted`: it holds the output of a model."""
        self.layers.append(layer)
        if predicted:
            self._predicted.append(layer)

    def observed(self) -> list[Layer]:
        """Return the layers that are no model outputs: forward passes need not wait for each other."""
        return [layer for layer in self.layers if layer not in self._predicted]

    def __getitem__(self, key: str) -> LazyTensor:
        if len(self.layers) == 1 and self.layers[0].names is None:
            # The call may still be running: do not wait for the names of its columns.
            return LazyTensor(self.layers[0].call, key)
        for layer in reversed(self.layers):
            columns = layer.columns()
            if key in columns:
                return LazyTensor(layer.call, columns[key])
        raise KeyError(key)

    def __setitem__(self, key: str, value: LazyTensor | torch.Tensor) -> None:
        if isinstance(value, LazyTensor):
            self.add(value.as_layer(key), predicted=True)
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
    """A list that an engine may still be computing, such as the statistics of its minibatches."""

    def __init__(self, call: Call):
        self._call = call

    def __getitem__(self, index: Any) -> Any:
        return self._call.value()[index]

    def __len__(self) -> int:
        return len(self._call.value())

    def __add__(self, other: Sequence[Any]) -> list[Any]:
        return [*self, *other]
