"""An endless stream of data rows out of a dataloader, epoch after epoch. A row's position in it is the id of its episode.

The executor pulls from it on the trainer's thread. After a restart the stream is wound back to the oldest row that has not ended, and rows that
have are left out: each row is dealt with once. An empty dataset, or one smaller than a batch, is told at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from arealite.api.errors import DatasetError

Row = dict[str, Any]


class RowStream:
    """`position` is the id of the next row. `first_id` is that of the dataloader's first row."""

    def __init__(self, dataloader: Iterable[list[Row]], first_id: int = 0):
        self.dataloader = dataloader
        self.first_id = first_id
        self.position = first_id
        self._epoch = self._rows()
        self._ahead: deque[Row] = deque()
        self._first_batch: int | None = None
        self._done: Collection[int] = ()

    def seek(self, position: int, done: Collection[int]) -> None:
        """Go to `position`, as a checkpoint names it; rows whose ids are in `done` are not given out again."""
        self._done = done
        self._ahead.clear()
        self.position = self.first_id + self._seek_dataloader(position - self.first_id)
        self._epoch = self._rows()
        while self.position < position:
            self._next()

    def batch_size(self) -> int:
        """Rows in the dataloader's first batch."""
        self._peek(1)
        assert self._first_batch is not None
        return self._first_batch

    @property
    def epoch_rows(self) -> int:
        """Rows of one epoch, as far as the dataloader tells."""
        loader: Any = self.dataloader
        return len(loader) * (self._first_batch or 0) if hasattr(loader, "__len__") else 0

    def require(self, count: int) -> None:
        """An epoch must hold at least `count` rows."""
        if self.position > self.first_id:
            return
        self._peek(count)
        if len(self._ahead) < count:
            raise DatasetError(
                f"the dataset has {len(self._ahead)} rows, but a batch needs {count}: add rows, or lower "
                "train_dataset.batch_size"
            )

    def next_row(self) -> tuple[int, Row]:
        """The next row that is still to be dealt with, and its id."""
        while self.position in self._done:
            self._next()
        row = self._next()
        return self.position - 1, row

    def _next(self) -> Row:
        row = self._ahead.popleft() if self._ahead else next(self._epoch, None)
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

    def _rows(self) -> Iterator[Row]:
        for batch in self.dataloader:
            if self._first_batch is None:
                self._first_batch = len(batch)
            yield from batch

    def _seek_dataloader(self, num_rows: int) -> int:
        """Wind a dataloader that can be wound to the batch that holds row `num_rows`; returns that batch's first row."""
        loader: Any = self.dataloader
        state = loader.state_dict() if hasattr(loader, "load_state_dict") else {}
        if not {"epoch", "position"} <= state.keys() or not hasattr(loader, "batch_size"):
            return 0  # it cannot be wound: starts over; the rows before are read and left out
        rows_per_epoch = len(loader) * loader.batch_size
        epoch, rest = divmod(num_rows, rows_per_epoch)
        position = rest // loader.batch_size
        loader.load_state_dict({**state, "epoch": epoch, "position": position})
        return epoch * rows_per_epoch + position * loader.batch_size

    def _describe(self) -> str:
        """The dataloader in words, with sizes where it tells them."""
        dataset = getattr(self.dataloader, "dataset", None)
        size = getattr(self.dataloader, "batch_size", None)
        rows = len(dataset) if dataset is not None and hasattr(dataset, "__len__") else None
        return f"the dataloader ({rows} rows, batch size {size})" if rows is not None else "the dataloader"
