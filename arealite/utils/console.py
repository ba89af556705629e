"""What a person sees of a run: one live table with a progress bar, what they must know at once, a summary at the end.

On a terminal, `ProgressTable` draws the table and sends all other output of the process to its log meanwhile, except what is said by `tell`; elsewhere it
prints a plain line for the first step, every few steps, and at least every half minute. Ranks other than 0 show nothing.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from arealite.utils.distributed import rank

_NUM_ROWS = 8  # steps that the table shows
_PLAIN_EVERY, _PLAIN_EVERY_S = 10, 30.0  # between two plain lines: steps, and seconds of slow steps


class Column(NamedTuple):
    """A column: its title, the statistic it shows, and how; an optional one only in runs that have it from the first step on."""

    title: str
    key: str
    format: str = "{:.3g}"
    is_optional: bool = False

    def cell(self, stats: Mapping[str, float | None]) -> str:
        value = stats.get(self.key)
        return "–" if value is None else self.format.format(value)


COLUMNS = (
    Column("reward", "reward", "{:.3f}"),
    Column("loss", "loss", "{:.4f}"),
    Column("staleness", "staleness/max", "{:.0f}"),
    Column("tokens/s", "tokens_per_s", "{:,.0f}"),
    Column("trainer idle", "idle/trainer", "{:.0%}"),
    Column("server idle", "idle/server", "{:.0%}"),
)


class ProgressTable:
    """Shows the latest steps and the time left. Use it in a `with` block; `update` once a step."""

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
        self._printed_at = -_PLAIN_EVERY_S  # the first step is worth a line
        self._log_path = os.environ.get("AREALITE_LOG_FILE") or log_path
        self._screen: _Screen | None = None

    def __enter__(self) -> ProgressTable:
        descriptor = _terminal()
        if self.enabled and descriptor is not None:
            self._screen = _Screen(descriptor, self._log_path)
            self._screen.live.start()
            _shown.append(self._screen)
        return self

    def __exit__(self, *_: object) -> None:
        if self._screen is not None:
            _shown.remove(self._screen)
            self._screen.close()
            self._screen = None

    def update(self, step: int, stats: Mapping[str, float]) -> None:
        """Show step `step` (from 0) of the run."""
        if not self.enabled:
            return
        parts = [(k.removeprefix("eval/"), v) for k, v in stats.items() if k.startswith("eval/")]
        if parts:
            found = "  ".join(f"{name} {value:.4g}" for name, value in parts)
            show_message(f"evaluation after step {step + 1}:  {found}")
        if not self._rows:
            self.columns = [c for c in self.columns if c.key in stats or not c.is_optional]
        cells = [column.cell(stats) for column in self.columns]
        self._rows.append((step + 1, cells))
        if self._screen is not None:
            self._screen.live.update(self._render(step + 1))
        elif self._is_worth_a_line(step + 1):
            self._printed_at = time.monotonic() - self._started
            pairs = "  ".join(f"{c.title} {v}" for c, v in zip(self.columns, cells, strict=True))
            left = clock(self._left_s(step + 1))
            print(f"step {step + 1}/{self.total_steps}  {pairs}  left {left}", flush=True)

    def _is_worth_a_line(self, done: int) -> bool:
        is_quiet = time.monotonic() - self._started - self._printed_at >= _PLAIN_EVERY_S
        return is_quiet or done % _PLAIN_EVERY == 0 or done == self.total_steps

    def _left_s(self, done: int) -> float:
        per_step_s = (time.monotonic() - self._started) / max(1, done - self._first_step)
        return per_step_s * (self.total_steps - done)

    def _render(self, done: int) -> Group:
        table = Table()
        for title in ("step", *(column.title for column in self.columns)):
            table.add_column(title, justify="right")
        for step, cells in self._rows:
            table.add_row(str(step), *cells)
        elapsed = clock(time.monotonic() - self._started)
        bar = Progress(MofNCompleteColumn(), BarColumn(None), TextColumn("{task.description}"))
        text = f"{elapsed} gone, {clock(self._left_s(done))} left"
        bar.add_task(text, total=self.total_steps, completed=done)
        return Group(table, bar)


class _Screen:
    """A live display on the terminal; standard output and error of the whole process go to the log meanwhile."""

    def __init__(self, descriptor: int, log_path: str | Path | None):
        width = os.get_terminal_size(descriptor).columns or 80
        self._file = os.fdopen(os.dup(descriptor), "w")
        console = Console(file=self._file, force_terminal=True, width=width)
        # The whole process's output is redirected below, by descriptor: rich need not do it again.
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
    """Say something on the console, above the live table if there is one (then it is in the log too)."""
    print(text, flush=True)
    for screen in _shown:
        screen.live.console.print(text, markup=False, highlight=False, soft_wrap=True)


def print_summary(rows: Mapping[str, str], title: str = "summary") -> None:
    """A small two-column table."""
    table = Table(title=title, show_header=False)
    for name, value in rows.items():
        table.add_row(name, value, style=None)
    # Paths and commands are there to be copied: never cut.
    Console(soft_wrap=True, width=None if sys.stdout.isatty() else 160).print(table)


def clock(seconds: float) -> str:
    """1:05 for 65 seconds, 2:03:00 for hours."""
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


def _terminal() -> int | None:
    """The terminal to draw on: the launcher's, if it passed it on, else our own standard output."""
    if "AREALITE_TTY_FD" in os.environ:
        return int(os.environ["AREALITE_TTY_FD"])
    try:
        return sys.stdout.fileno() if sys.stdout.isatty() else None
    except (OSError, ValueError):  # standard output was replaced by something without a descriptor
        return None
