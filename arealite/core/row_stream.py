"""An endless stream of data rows out of a dataloader, epoch after epoch, with a position that survives a restart.

The executor pulls from it on the trainer's thread. An empty dataset, or one smaller than a batch, is told at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from arealite.api.errors import DatasetError


class RowStream:
    """`position` counts the rows given out; the row at a position is the same after a restart if the dataloader is seeded."""

    def __init__(self, dataloader: Iterable[list[dict[str, Any]]], skip: int = 0):
        self.dataloader = dataloader
        self.position = 0
        self._epoch = self._rows()
        self._ahead: list[dict[str, Any]] = []
        self._first_batch: int | None = None
        self._skip = skip

    def batch_size(self) -> int:
        """Rows in the dataloader's first batch."""
        self._peek(1)
        assert self._first_batch is not None
        return self._first_batch

    def require(self, count: int) -> None:
        """An epoch must hold at least `count` rows."""
        if self.position > 0:
            return
        self._peek(count)
        if len(self._ahead) < count:
            raise DatasetError(
                f"the dataset has {len(self._ahead)} rows, but a batch needs {count}: add rows, or lower "
                "train_dataset.batch_size"
            )

    def next_row(self) -> dict[str, Any]:
        while self.position < self._skip:  # rows that an earlier process has dealt with
            self._next()
        return self._next()

    def _next(self) -> dict[str, Any]:
        row = self._ahead.pop(0) if self._ahead else next(self._epoch, None)
        if row is None:
            self._epoch = self._rows()
            row = next(self._epoch, None)
            if row is None:
                raise DatasetError("the dataloader gives no rows in a further epoch")
        self.position += 1
        return row

    def _peek(self, count: int) -> None:
        while len(self._ahead) < count:
            row = next(self._epoch, None)
            if row is None:
                break
            self._ahead.append(row)
        if not self._ahead:
            raise DatasetError(
                f"{self._describe()} gives no rows: it is empty, or has fewer rows than one batch and drops the last"
            )

    def _rows(self) -> Iterator[dict[str, Any]]:
        for batch in self.dataloader:
            if self._first_batch is None:
                self._first_batch = len(batch)
            yield from batch

    def _describe(self) -> str:
        """The dataloader in words, with sizes where it tells them."""
        dataset = getattr(self.dataloader, "dataset", None)
        size = getattr(self.dataloader, "batch_size", None)
        rows = len(dataset) if dataset is not None and hasattr(dataset, "__len__") else None
        return (
            f"the dataloader ({rows} rows, batch size {size})"
            if rows is not None
            else "the dataloader"
        )
