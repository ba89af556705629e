"""Batches of rows in an order that depends only on the seed and the epoch, and that resumes exactly.

Training loops iterate over one epoch (`for batch in loader`) or without end (`loader.cycle()`). All ranks see the same
batches. Recover checkpoints save the state: the epoch and the position in it.
"""

import random
from collections.abc import Iterator, Sequence
from typing import Any

from arealite.api.cli_args import DatasetConfig
from arealite.api.errors import DatasetError

Row = dict[str, Any]


class StatefulDataLoader:
    """Yields batches of `config.batch_size` rows and drops an incomplete last batch of an epoch."""

    def __init__(self, rows: Sequence[Row], config: DatasetConfig, seed: int = 1):
        size = config.batch_size
        if not rows:
            raise DatasetError(f"the dataset {config.path} has no rows")
        if len(rows) < size:
            raise DatasetError(
                f"the dataset {config.path} has {len(rows)} rows, fewer than one batch: lower batch_size={size} or add "
                "rows"
            )
        self.rows = rows
        self.batch_size = size
        self.shuffle = config.shuffle
        self.seed = seed
        self.epoch = 0
        # Batches of this epoch that were yielded.
        self.position = 0

    def __len__(self) -> int:
        """Batches per epoch."""
        return len(self.rows) // self.batch_size

    def __iter__(self) -> Iterator[list[Row]]:
        """Yield the remaining batches of the current epoch, then move to the start of the next."""
        order = list(range(len(self.rows)))
        if self.shuffle:
            random.Random(f"{self.seed}/{self.epoch}").shuffle(order)
        while self.position < len(self):
            start = self.position * self.batch_size
            self.position += 1
            yield [self.rows[i] for i in order[start : start + self.batch_size]]
        self.epoch += 1
        self.position = 0

    def cycle(self) -> Iterator[list[Row]]:
        """Yield batches of one epoch after another, without end."""
        while True:
            yield from self

    def state_dict(self) -> dict[str, int]:
        state = {"epoch": self.epoch, "position": self.position, "seed": self.seed}
        return state | {"num_rows": len(self.rows), "batch_size": self.batch_size}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue after the batches that the saved loader had yielded."""
        mine = self.state_dict()
        changed = [k for k in ("seed", "num_rows", "batch_size") if state[k] != mine[k]]
        if changed:
            pairs = ", ".join(f"{k} was {state[k]} and is {mine[k]}" for k in changed)
            raise DatasetError(
                f"the data differs from the checkpoint's, so its order cannot be resumed: {pairs}. Restore the old "
                "values, or start another run (another trial_name) from the trained weights in checkpoints/"
            )
        self.epoch, self.position = state["epoch"], state["position"]
