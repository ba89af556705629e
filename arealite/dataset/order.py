"""In which order an epoch reads rows: shuffled by the seed, mixed by weight, or drawn by pass rate.

Orders depend only on the seed and the number of the epoch, so that `StatefulDataLoader` resumes them exactly. A
`Curriculum` also depends on the answers of the model; it keeps its draws and pass rates in checkpoints.
"""

import random
from array import array
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, islice
from typing import Any

from arealite.api.dataset_args import MIXTURE_COLUMN, SOURCE_COLUMN, CurriculumConfig
from arealite.api.errors import DatasetError
from arealite.dataset.streamed import WINDOW, JoinedRows

Row = dict[str, Any]
# Draws that a checkpoint keeps, at least. Rows in flight are fewer.
_MIN_DRAWS = 16_384


def epoch_order(rows: Sequence[Row], seed: int | str, epoch: int, shuffle: bool) -> Sequence[int]:
    """Return the numbers of the rows of an epoch, in order."""
    if isinstance(rows, Mixture):
        return rows.order(seed, epoch, shuffle)
    if not shuffle:
        return range(len(rows))
    draw = random.Random(f"{seed}/{epoch}")
    sizes: Sequence[int] = getattr(rows, "blocks", ())
    if not sizes:
        order = array("q", range(len(rows)))
        draw.shuffle(order)
        return order
    # Rows of a block are read together: shuffle the blocks, then the rows of a few blocks at a time.
    ends = list(accumulate(sizes))
    blocks = [range(end - size, end) for size, end in zip(sizes, ends, strict=True)]
    draw.shuffle(blocks)
    order, remaining = array("q"), iter(blocks)
    while window := list(islice(remaining, WINDOW)):
        part = array("q", (i for block in window for i in block))
        draw.shuffle(part)
        order.extend(part)
    return order


class Mixture(JoinedRows):
    """Rows of several sets, by name. An epoch has as many rows as all sets together.

    The share of a set is its weight, or its number of rows if there are no weights. A set with fewer rows than its
    share is repeated; of a larger one each epoch continues where the last one ended. Rows name their set in
    `data_source`, or in `_training_set` if they have the first column themselves.
    """

    def __init__(self, sets: Mapping[str, Sequence[Row]], weights: Mapping[str, float] | None = None):
        super().__init__(list(sets.values()))
        self.names = list(sets)
        total = sum(weights.values()) if weights else 0.0
        exact = [len(self) * weights[name] / total for name in sets] if weights else [len(part) for part in self.parts]
        self.counts = [int(share) for share in exact]
        # The rows that rounding left over go to the largest remainders.
        by_rest = sorted(range(len(exact)), key=lambda i: self.counts[i] - exact[i])
        for i in by_rest[: len(self) - sum(self.counts)]:
            self.counts[i] += 1
        unread = [name for name, count in zip(self.names, self.counts, strict=True) if not count]
        if weights and unread:
            raise DatasetError(
                f"with these weights of the mixture, {', '.join(unread)} would have none of the {len(self)} rows of an "
                "epoch: raise its weight, or leave the set out"
            )

    def read(self, index: int) -> Row:
        number, inside = self.locate(index)
        row = self.parts[number][inside]
        return {**row, MIXTURE_COLUMN if SOURCE_COLUMN in row else SOURCE_COLUMN: self.names[number]}

    def order(self, seed: int | str, epoch: int, shuffle: bool) -> Sequence[int]:
        """Return the order of an epoch: which set comes next, and the next row of that set."""
        if shuffle:
            turns = [i for i, count in enumerate(self.counts) for _ in range(count)]
            random.Random(f"{seed}/{epoch}").shuffle(turns)
        else:
            spread = [((j + 0.5) / count, i) for i, count in enumerate(self.counts) for j in range(count)]
            turns = [i for _, i in sorted(spread)]
        nexts = [self._draws(i, seed, epoch, shuffle) for i in range(len(self.parts))]
        return array("q", (next(nexts[i]) for i in turns))

    def _draws(self, i: int, seed: int | str, epoch: int, shuffle: bool) -> Iterator[int]:
        """Yield the rows that set `i` gives to an epoch, as numbers of the mixture."""
        size, first = len(self.parts[i]), epoch * self.counts[i]
        number, start = divmod(first, size)
        while True:
            order = epoch_order(self.parts[i], f"{seed}/{self.names[i]}", number, shuffle)
            yield from (self.starts[i] + order[k] for k in range(start, size))
            number, start = number + 1, 0


class Curriculum:
    """Draws rows whose pass rate is within a band or not known, and a few of the others."""

    def __init__(self, rows: Sequence[Row], config: CurriculumConfig, seed: int, shuffle: bool):
        self.rows, self.config, self.seed, self.shuffle = rows, config, seed, shuffle
        # Share of right answers by row, and how many rows were looked at.
        self.rates: dict[int, float] = {}
        self.num_seen = 0
        # The last draws, and the number of the first of them.
        self._draws = array("q")
        self._first = 0
        self._order: Sequence[int] = ()
        self._order_epoch = -1

    def draw(self, number: int) -> int:
        """Return the row of draw `number`: a new one, or after a resume the one that was drawn before."""
        if number < self._first:
            raise DatasetError(f"the checkpoint does not keep draw {number} of the curriculum: it is too long ago")
        while number >= self._first + len(self._draws):
            self._draws.append(self._next())
        row = self._draws[number - self._first]
        keep = max(_MIN_DRAWS, len(self.rows))
        if len(self._draws) > 2 * keep:
            self._first += len(self._draws) - keep
            self._draws = self._draws[-keep:]
        return row

    def record(self, number: int, pass_rate: float) -> None:
        """Take the share of right answers to the row of draw `number`; it counts as much as all before."""
        if self._first <= number < self._first + len(self._draws):
            row = self._draws[number - self._first]
            before = self.rates.get(row, pass_rate)
            self.rates[row] = (before + pass_rate) / 2

    def stats(self) -> dict[str, float]:
        within = sum(map(self._is_within, self.rates.values()))
        known = len(self.rates)
        return {"curriculum/known": known / len(self.rows), "curriculum/within": within / known if known else 1.0}

    def _next(self) -> int:
        while True:
            epoch, position = divmod(self.num_seen, len(self.rows))
            if epoch != self._order_epoch:
                self._order, self._order_epoch = epoch_order(self.rows, self.seed, epoch, self.shuffle), epoch
            self.num_seen += 1
            row = self._order[position]
            rate = self.rates.get(row)
            if rate is None or self._is_within(rate):
                return row
            if random.Random(f"{self.seed}/{self.num_seen}").random() < self.config.outside:
                return row

    def _is_within(self, rate: float) -> bool:
        return self.config.low <= rate <= self.config.high

    def state_dict(self) -> dict[str, Any]:
        rates = {str(row): rate for row, rate in self.rates.items()}
        return {"num_seen": self.num_seen, "first": self._first, "draws": list(self._draws), "rates": rates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_seen, self._first, self._draws = state["num_seen"], state["first"], array("q", state["draws"])
        self.rates = {int(row): rate for row, rate in state["rates"].items()}
