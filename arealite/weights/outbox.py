"""The outbox: the weights that a trainer last published for a broadcast, once, on the host of rank 0.

One thread fills it while another one may already send what is there. A server that joins late is served from it too.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

import torch


class Outbox(dict[str, torch.Tensor]):
    """Published tensors by name."""

    def __init__(self) -> None:
        self._change = threading.Condition()
        self._awaited: set[str] = set()
        self._failure: BaseException | None = None

    def expect(self) -> None:
        """Make `take` wait for new tensors from now on."""
        self._awaited, self._failure = set(self), None

    def fill(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy new tensors into the outbox, in place where dtype and shape are the same."""
        self.expect()
        try:
            for name, tensor in tensors:
                held = self.get(name)
                if held is None or held.shape != tensor.shape or held.dtype != tensor.dtype:
                    self[name] = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
                self[name].copy_(tensor.detach())
                with self._change:
                    self._awaited.discard(name)
                    self._change.notify_all()
        except BaseException as error:
            self._failure = error
            raise
        finally:
            with self._change:
                self._change.notify_all()

    def take(self, names: Iterable[str], timeout_s: float) -> list[torch.Tensor]:
        """Return these tensors as soon as the new ones are there."""
        names = list(names)

        def is_over() -> bool:
            return self._failure is not None or not self._awaited.intersection(names)

        with self._change:
            if not self._change.wait_for(is_over, timeout_s):
                raise RuntimeError(f"{names[0]} was not gathered within {timeout_s:g} s")
        if self._failure is not None:
            raise RuntimeError("the trainer could not gather its weights") from self._failure
        return [self[name] for name in names]


_outboxes: dict[str, Outbox] = {}


def fill_outbox(name: str, tensors: Iterable[tuple[str, torch.Tensor]], keep: bool = True) -> None:
    """Publish tensors in the outbox `name`.

    Ranks that only take part in gathering them pass `keep=False`.
    """
    if keep:
        _outboxes.setdefault(name, Outbox()).fill(tensors)
    else:
        for _ in tensors:
            pass


def get_outbox(name: str) -> Outbox:
    """Return the outbox `name` of this process; an empty one if nothing was published there."""
    return _outboxes.get(name, Outbox())
