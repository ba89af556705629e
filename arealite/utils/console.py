"""Console output of a run: a live table with a progress bar, messages, and a summary at the end.

On a terminal `ProgressTable` draws the table and redirects all other output of the process to its log, apart from
`show_message`. In a notebook the table is updated in its cell. Elsewhere it prints a plain line for the first step,
every few steps, and at least every half minute. Only rank 0 prints.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from arealite.utils.notebook import NotebookDisplay, open_display
from arealite.utils.process import rank
from arealite.utils.text import clean

# Steps that the table shows.
_NUM_ROWS = 8
# Statistics of workflows that the first step reports get columns, up to this number.
_OWN_STATS, _MAX_OWN_COLUMNS = "rollout/", 4
# Between two plain lines: steps, and seconds if steps are slow.
_PLAIN_EVERY, _PLAIN_EVERY_S = 10, 30.0


class Column(NamedTuple):
    """One column of the table: its title and the statistic that it shows.

    An optional column is left out of runs whose first step lacks the statistic. With `total_key` the cell reads
    "value/total".
    """

    title: str
    key: str
    format: str = "{:.3g}"
    is_optional: bool = False
    total_key: str | None = None

    def cell(self, stats: Mapping[str, float | None]) -> str:
        keys = [self.key] if self.total_key is None else [self.key, self.total_key]
        values = [stats.get(key) for key in keys]
        return "/".join("–" if value is None else self.format.format(value) for value in values)


COLUMNS = (
    Column("reward", "reward", "{:.3f}"),
    Column("loss", "loss", "{:.4f}"),
    Column("groups with signal", "groups_with_signal", "{:.0f}", is_optional=True, total_key="groups"),
    Column("staleness", "staleness/max", "{:.0f}"),
    Column("tokens/s", "tokens_per_s", "{:,.0f}"),
    Column("trainer idle", "idle/trainer", "{:.0%}"),
    Column("server idle", "idle/server", "{:.0%}"),
)


def step_table(columns: Sequence[Column], rows: Iterable[tuple[int, Sequence[str]]], title: str = "") -> Table:
    """Return a table of steps: the number of each and its cells."""
    table = Table(title=title or None)
    for heading in ("step", *(column.title for column in columns)):
        table.add_column(heading, justify="right")
    for step, cells in rows:
        table.add_row(str(step), *cells)
    return table


class ProgressTable:
    """Shows the latest steps and the time left. Use it in a `with` block and call `update` once a step."""

    def __init__(
        self,
        total_steps: int,
        columns: Sequence[Column] = COLUMNS,
        log_path: Path | None = None,
        enabled: bool = True,
        first_step: int = 0,
    ):
        self.total_steps = total_steps
        self.columns = columns
        self.enabled = enabled and rank() == 0
        self._rows: deque[tuple[int, list[str]]] = deque(maxlen=_NUM_ROWS)
        self._started = time.monotonic()
        self._first_step = first_step
        # The first step gets a line.
        self._printed_at = -_PLAIN_EVERY_S
        self._log_path = os.environ.get("AREALITE_LOG_FILE") or log_path
        self._screen: _Screen | None = None
        self._notebook: NotebookDisplay | None = None

    def __enter__(self) -> ProgressTable:
        descriptor = _terminal()
        if self.enabled and descriptor is not None:
            self._screen = _Screen(descriptor, self._log_path)
            self._screen.live.start()
            _shown.append(self._screen)
        elif self.enabled:
            self._notebook = open_display()
        return self

    def __exit__(self, *_: object) -> None:
        if self._screen is not None:
            _shown.remove(self._screen)
            self._screen.close()
            self._screen = None

    def update(self, step: int, stats: Mapping[str, float]) -> None:
        """Show a step, counted from 0."""
        if not self.enabled:
            return
        if not self._rows:
            own = [key for key in stats if key.startswith(_OWN_STATS)][:_MAX_OWN_COLUMNS]
            self.columns = [c for c in self.columns if c.key in stats or not c.is_optional]
            self.columns += [Column(clean(key.removeprefix(_OWN_STATS)), key) for key in own]
        cells = [column.cell(stats) for column in self.columns]
        self._rows.append((step + 1, cells))
        if self._screen is not None:
            self._screen.live.update(self._render(step + 1))
        elif self._notebook is not None:
            self._notebook.update(self._render(step + 1))
        elif self._is_line_due(step + 1):
            self._printed_at = time.monotonic() - self._started
            pairs = "  ".join(f"{c.title} {v}" for c, v in zip(self.columns, cells, strict=True))
            left = clock(self._left_s(step + 1))
            print(f"step {step + 1}/{self.total_steps}  {pairs}  left {left}", flush=True)

    def _is_line_due(self, done: int) -> bool:
        is_overdue = time.monotonic() - self._started - self._printed_at >= _PLAIN_EVERY_S
        return is_overdue or done % _PLAIN_EVERY == 0 or done == self.total_steps

    def _left_s(self, done: int) -> float:
        per_step_s = (time.monotonic() - self._started) / max(1, done - self._first_step)
        return per_step_s * (self.total_steps - done)

    def _render(self, done: int) -> Group:
        elapsed = clock(time.monotonic() - self._started)
        bar = Progress(MofNCompleteColumn(), BarColumn(None), TextColumn("{task.description}"))
        text = f"{elapsed} gone, {clock(self._left_s(done))} left"
        bar.add_task(text, total=self.total_steps, completed=done)
        return Group(step_table(self.columns, self._rows), bar)


class _Screen:
    """A live display on the terminal; other output of the process goes to the log."""

    def __init__(self, descriptor: int, log_path: str | Path | None):
        width = os.get_terminal_size(descriptor).columns or 80
        self._file = os.fdopen(os.dup(descriptor), "w")
        console = Console(file=self._file, force_terminal=True, width=width)
        # The output of the whole process is redirected below, by descriptor.
        self.live = Live(console=console, refresh_per_second=4, redirect_stdout=False, redirect_stderr=False)
        sys.stdout.flush()
        sys.stderr.flush()
        self._saved = [os.dup(1), os.dup(2)]
        target = os.open(log_path or os.devnull, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(target, 1)
        os.dup2(target, 2)
        os.close(target)

    def close(self) -> None:
        self.live.stop()
        sys.stdout.flush()
        sys.stderr.flush()
        for saved, standard in zip(self._saved, (1, 2), strict=True):
            os.dup2(saved, standard)
            os.close(saved)
        self._file.close()


_shown: list[_Screen] = []


def show_message(text: str) -> None:
    """Print a message, above the live table if there is one; then it is in the log too."""
    text = clean(text)
    print(text, flush=True)
    for screen in _shown:
        screen.live.console.print(text, markup=False, highlight=False, soft_wrap=True)


def print_summary(rows: Mapping[str, str], title: str = "summary") -> None:
    """Print a small table with two columns."""
    table = Table(title=title, show_header=False)
    for name, value in rows.items():
        table.add_row(name, value, style=None)
    # Paths and commands are copied from here: never cut them.
    Console(soft_wrap=True, width=None if sys.stdout.isatty() else 160).print(table)


def clock(seconds: float) -> str:
    """Format a duration: 1:05 for 65 seconds, 2:03:00 for hours."""
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


def _terminal() -> int | None:
    """Return the terminal to draw on: the launcher's, else standard output; None without one."""
    if "AREALITE_TTY_FD" in os.environ:
        return int(os.environ["AREALITE_TTY_FD"])
    try:
        return sys.stdout.fileno() if sys.stdout.isatty() else None
    # Standard output may have been replaced by an object without a descriptor.
    except (OSError, ValueError):
        return None
