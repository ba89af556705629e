"""Batches of rows in an order that depends only on the seed and the epoch, and that resumes exactly.

Training loops iterate over one epoch (`for batch in loader`) or without end (`loader.cycle()`). All ranks see the same
batches. Recover checkpoints save the state: the epoch and the position in it, and with a curriculum its draws.
"""

import json
import zlib
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from arealite.api.cli_args import BaseExperimentConfig, DatasetConfig, DPOConfig
from arealite.api.dataset_args import DataSourceConfig
from arealite.api.errors import DatasetError
from arealite.dataset.order import Curriculum, epoch_order
from arealite.utils.console import show_message
from arealite.utils.distributed import rank

Row = dict[str, Any]
# Makes the rows of a dataset; the folder is that of its cache.
RowLoader = Callable[[DataSourceConfig, PreTrainedTokenizerBase, Path | None], Sequence[Row]]
# Rows of the last batch that a checkpoint has a checksum of.
_NUM_CHECKED = 4


def check_num_rows(num_rows: int, config: DatasetConfig) -> None:
    """Raise `DatasetError` if the rows of the training data are fewer than one batch."""
    size, name = config.batch_size, config.path or "of train_datasets"
    if not num_rows:
        raise DatasetError(f"the dataset {name} has no rows")
    if num_rows < size:
        raise DatasetError(
            f"the dataset {name} has {num_rows} rows, fewer than one batch: lower batch_size={size} or add rows"
        )


def check_training_rows(config: BaseExperimentConfig, num_rows: int) -> None:
    """Raise `DatasetError` if the training data has too few rows for a batch, or for the loss."""
    if num_rows < 2 * config.num_shares and _compares_rows(config):
        raise DatasetError(
            f"the dataset {config.train_dataset.path or 'of train_datasets'} has {num_rows} rows, and model.loss=kto, "
            f"which compares the answers of different rows, needs {2 * config.num_shares} or more (2 for each "
            "data-parallel rank): add rows"
        )
    check_num_rows(num_rows, config.train_dataset)


def _compares_rows(config: BaseExperimentConfig) -> bool:
    return isinstance(config, DPOConfig) and config.model.loss == "kto"


def check_valid_rows(config: BaseExperimentConfig, name: str, num_rows: int) -> None:
    """Raise `DatasetError` if a validation set of supervised training has too few rows for all ranks."""
    if num_rows < config.num_shares:
        raise DatasetError(
            f"the validation set {name} has {num_rows} rows, and each of {config.num_shares} data-parallel ranks "
            "needs one: add rows"
        )
    if num_rows == config.num_shares and _compares_rows(config):
        raise DatasetError(
            f"the validation set {name} has {num_rows} rows, one for each data-parallel rank, and model.loss=kto "
            "compares the answers of different rows: add rows"
        )


class StatefulDataLoader:
    """Yields batches of `config.batch_size` rows and drops an incomplete last batch of an epoch."""

    def __init__(self, rows: Sequence[Row], config: DatasetConfig, seed: int = 1):
        check_num_rows(len(rows), config)
        self.rows = rows
        self.batch_size = config.batch_size
        self.shuffle = config.shuffle
        self.seed = seed
        self.epoch = 0
        # Batches of this epoch that were yielded.
        self.position = 0
        self.curriculum = Curriculum(rows, config.curriculum, seed, config.shuffle) if config.curriculum else None
        # Takes the number of a row, counted over all epochs, and the share of right answers; None if nobody asks.
        self.record_result: Callable[[int, float], None] | None = self.curriculum.record if self.curriculum else None
        # The last order that was made, and its epoch.
        self._order: tuple[int, Sequence[int]] | None = None

    def __len__(self) -> int:
        """Batches per epoch."""
        return len(self.rows) // self.batch_size

    def __iter__(self) -> Iterator[list[Row]]:
        """Yield the remaining batches of the current epoch, then move to the start of the next."""
        order = () if self.curriculum else self._order_of(self.epoch)
        while self.position < len(self):
            start = self.position * self.batch_size
            self.position += 1
            numbers = range(start, start + self.batch_size)
            if self.curriculum:
                first = self.epoch * len(self) * self.batch_size
                yield [self.rows[self.curriculum.draw(first + i)] for i in numbers]
            else:
                yield [self.rows[order[i]] for i in numbers]
        self.epoch += 1
        self.position = 0

    def cycle(self) -> Iterator[list[Row]]:
        """Yield batches of one epoch after another, without end."""
        while True:
            yield from self

    def _order_of(self, epoch: int) -> Sequence[int]:
        if self._order is None or self._order[0] != epoch:
            self._order = epoch, epoch_order(self.rows, self.seed, epoch, self.shuffle)
        return self._order[1]

    def _checksums(self, epoch: int, position: int) -> dict[str, Any]:
        """Return checksums of the order of an epoch, and of rows in the batch before a position in it."""
        order, end = self._order_of(epoch), position * self.batch_size
        rows = [self.rows[order[i]] for i in range(max(0, end - self.batch_size), end)[:_NUM_CHECKED]]
        # The order of the file needs no pass over all numbers.
        order_sum = 0 if isinstance(order, range) else zlib.crc32(array("q", order))
        rows_sum = zlib.crc32(json.dumps(_plain(rows)).encode())
        return {"epoch": epoch, "position": position, "order": order_sum, "rows": rows_sum}

    def stats(self) -> dict[str, float]:
        """Return statistics of the curriculum; empty without one."""
        return self.curriculum.stats() if self.curriculum else {}

    def state_dict(self) -> dict[str, Any]:
        state = {"epoch": self.epoch, "position": self.position, "seed": self.seed}
        state |= {"num_rows": len(self.rows), "batch_size": self.batch_size}
        if self.curriculum:
            return state | {"curriculum": self.curriculum.state_dict()}
        return state | {"sums": self._checksums(self.epoch, self.position)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the batches that the saved loader had yielded."""
        changed = self.differences(state)
        if changed:
            raise DatasetError(
                f"the data differs from the checkpoint's, so its order cannot be resumed: {', '.join(changed)}. "
                "Restore the old values, or start another run (another trial_name) from the trained weights in "
                "checkpoints/"
            )
        if self._has_other_rows(state) and rank() == 0:
            show_message(
                "warning: the training data has as many rows as that of the checkpoint, but other ones (another file, "
                "or other settings that make the rows): the run continues at the same position of the new rows. If "
                "that is not intended, stop it and restore the data, or set another trial_name"
            )
        self.load_position(state)
        if self.curriculum:
            self.curriculum.load_state_dict(state["curriculum"])

    def load_position(self, state: dict[str, Any]) -> None:
        """Continue at the saved position of data that may differ."""
        self.epoch, self.position = state["epoch"], state["position"]

    def differences(self, state: dict[str, Any]) -> list[str]:
        """Return what makes another order than that of the saved loader."""
        mine = {"seed": self.seed, "num_rows": len(self.rows), "batch_size": self.batch_size}
        changed = [f"{k} was {state[k]} and is {mine[k]}" for k in mine if state[k] != mine[k]]
        if (self.curriculum is not None) != ("curriculum" in state):
            changed.append(f"curriculum was {'on' if 'curriculum' in state else 'off'}")
        if not changed and self._sums_like(state).get("order") != state.get("sums", {}).get("order"):
            changed.append("rows are read in another order (shuffle, streaming, or the sets and weights of a mixture)")
        return changed

    def _has_other_rows(self, state: Mapping[str, Any]) -> bool:
        return self._sums_like(state).get("rows") != state.get("sums", {}).get("rows")

    def _sums_like(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return own checksums of what a state has checksums of; empty if it has none."""
        sums = state.get("sums")
        return self._checksums(sums["epoch"], sums["position"]) if sums and not self.curriculum else {}


def _plain(value: Any) -> Any:
    """Return a value as JSON holds it, the same in each process; of what JSON cannot hold, the type."""
    if isinstance(value, Mapping):
        return [[str(key), _plain(one)] for key, one in value.items()]
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, str | int | float | None):
        return value
    return _plain(value.tolist()) if hasattr(value, "tolist") else type(value).__name__
