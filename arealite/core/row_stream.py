"""`RowStream`: an endless stream of data rows from a dataloader.

A row's position in it is the number of its episode. The executor reads it on the trainer's thread. After a restart the
stream goes back to the oldest row that has not ended and skips rows that have, so each row is handled once. An empty
dataset, or one smaller than a batch, raises an error at once.
"""

from collections import deque
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from arealite.api.errors import DatasetError
from arealite.utils.status.waits import waiting

Row = dict[str, Any]


class RowStream:
    """`position` is the number of the next row, `first_position` that of the dataloader's first row."""

    def __init__(self, dataloader: Iterable[list[Row]], first_position: int = 0):
        self.dataloader = dataloader
        self.first_position = first_position
        self.position = first_position
        self._epoch = self._rows()
        self._ahead: deque[Row] = deque()
        self._first_batch: int | None = None
        self._done: Collection[int] = ()
        # Pass rates of ended rows, from the loop's thread, for a dataloader that chooses rows by them.
        self._results: deque[tuple[int, float]] = deque()
        self.wants_results: bool = getattr(dataloader, "record_result", None) is not None

    def seek(self, position: int, done: Collection[int]) -> None:
        """Go to the `position` of a checkpoint and skip rows in `done`."""
        self._done = done
        self._ahead.clear()
        self.position = self.first_position + self._seek_dataloader(position - self.first_position)
        self._epoch = self._rows()
        while self.position < position:
            self._next()

    def batch_size(self) -> int:
        """Return the number of rows in the dataloader's first batch."""
        self._peek(1)
        assert self._first_batch is not None
        return self._first_batch

    @property
    def epoch_rows(self) -> int:
        """Rows of one epoch; 0 if the dataloader has no length."""
        loader: Any = self.dataloader
        return len(loader) * (self._first_batch or 0) if hasattr(loader, "__len__") else 0

    def require(self, count: int) -> None:
        """Raise if an epoch has fewer than `count` rows."""
        if self.position > self.first_position:
            return
        self._peek(count)
        if len(self._ahead) < count:
            raise DatasetError(
                f"the dataset has {len(self._ahead)} rows, but a batch needs {count}: add rows, or lower "
                "train_dataset.batch_size"
            )

    def report(self, position: int, pass_rate: float) -> None:
        """Take the share of right answers to a row. Any thread may call it."""
        self._results.append((position - self.first_position, pass_rate))

    def next_row(self) -> tuple[int, Row]:
        """Return the next row that has not ended, and its position."""
        loader: Any = self.dataloader
        while self._results:
            loader.record_result(*self._results.popleft())
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
                raise DatasetError(
                    "the dataloader gives no rows in a second epoch: pass one that can be iterated again"
                )
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
        batches = iter(self.dataloader)
        while True:
            with waiting("data", "the next rows of the dataloader"):
                batch = next(batches, None)
            if batch is None:
                return
            if self._first_batch is None:
                self._first_batch = len(batch)
            yield from batch

    def _seek_dataloader(self, num_rows: int) -> int:
        """Move a stateful dataloader to the batch that holds row `num_rows`; returns that batch's first row."""
        loader: Any = self.dataloader
        state = loader.state_dict() if hasattr(loader, "load_state_dict") else {}
        if not {"epoch", "position"} <= state.keys() or not hasattr(loader, "batch_size"):
            # It has no state to set: start over and skip the rows before.
            return 0
        rows_per_epoch = len(loader) * loader.batch_size
        epoch, rest = divmod(num_rows, rows_per_epoch)
        position = rest // loader.batch_size
        loader.load_state_dict({**state, "epoch": epoch, "position": position})
        return epoch * rows_per_epoch + position * loader.batch_size

    def _describe(self) -> str:
        """Describe the dataloader, with its sizes if it has them."""
        dataset = getattr(self.dataloader, "dataset", None)
        size = getattr(self.dataloader, "batch_size", None)
        rows = len(dataset) if dataset is not None and hasattr(dataset, "__len__") else None
        return f"the dataloader ({rows} rows, batch size {size})" if rows is not None else "the dataloader"
