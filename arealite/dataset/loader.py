"""Batches of rows, in an order that is a function of the seed and the epoch alone, and that resumes exactly.

Training loops iterate one epoch (`for batch in loader`) or for ever (`loader.cycle()`); all ranks see the same batches. The state is two
numbers, saved in recover checkpoints.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

from arealite.api.cli_args import DatasetConfig
from arealite.api.errors import DatasetError

Row = dict[str, Any]


class StatefulDataLoader:
    """Cuts rows into batches of `config.batch_size`; a last incomplete batch of an epoch is left out."""

    def __init__(self, rows: Sequence[Row], config: DatasetConfig, seed: int = 1):
        size = config.batch_size
        if not rows:
            raise DatasetError(f"the dataset {config.path} has no rows")
        if len(rows) < size:
            raise DatasetError(
                f"the dataset {config.path} has {len(rows)} rows, fewer than one batch: lower batch_size={size} or add rows"
            )
        self.rows = rows
        self.batch_size = size
        self.shuffle = config.shuffle
        self.seed = seed
        self.epoch = 0
        self.position = 0  # batches of this epoch already given out

    def __len__(self) -> int:
        """Batches per epoch."""
        return len(self.rows) // self.batch_size

    def __iter__(self) -> Iterator[list[Row]]:
        """What is left of the current epoch; afterwards the loader stands at the start of the next."""
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
        """Epoch after epoch, without end."""
        while True:
            yield from self

    def state_dict(self) -> dict[str, int]:
        state = {"epoch": self.epoch, "position": self.position, "seed": self.seed}
        return state | {"num_rows": len(self.rows), "batch_size": self.batch_size}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on after the batches that the saved loader had given out."""
        mine = self.state_dict()
        changed = [k for k in ("seed", "num_rows", "batch_size") if state[k] != mine[k]]
        if changed:
            pairs = ", ".join(f"{k} was {state[k]} and is {mine[k]}" for k in changed)
            raise DatasetError(
                f"the data differs from the checkpoint's, its order cannot be resumed: {pairs}. Set it back, or start a run "
                "of its own: another trial_name, with the trained weights (checkpoints/) as path"
            )
        self.epoch, self.position = state["epoch"], state["position"]
