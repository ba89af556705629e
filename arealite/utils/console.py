"""Console output of a run: a live table with what is done now, and messages.

On a terminal `ProgressTable` draws the latest steps, the curve of the first statistic, where the time of the last step
went, and what is waited for; all other output of the process goes to its log, apart from `show_message`. In a notebook
the table is updated in its cell. Elsewhere (a pipe, CI, TERM=dumb) it prints a plain line for the first step, every few
steps, and at least every half minute. Only rank 0 prints.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich import box
from rich.console import Console, ConsoleDimensions, ConsoleOptions, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from arealite.utils.activity import RUNNING_S, activity
from arealite.utils.notebook import NotebookDisplay, open_display
from arealite.utils.process import rank
from arealite.utils.status.writer import status
from arealite.utils.text import clean

# Steps that the table shows, fewer in a low window, and the lines around them.
_NUM_ROWS, _OTHER_LINES = 10, 9
# Statistics of workflows that a step reports get columns, up to this number.
_OWN_STATS, _MAX_OWN_COLUMNS = "rollout/", 4
# Between two plain lines: steps, and seconds if steps are slow.
_PLAIN_EVERY, _PLAIN_EVERY_S = 10, 30.0
_PHASE_COLORS = ("cyan", "magenta", "green", "yellow", "blue", "red", "white")
_BLOCKS = "▁▂▃▄▅▆▇█"
_GAP = 2

Stats = Mapping[str, float | None]


class Column(NamedTuple):
    """One column of the table: its title and the statistic that it shows.

    An optional column is left out of runs that never report the statistic. With `total_key` the cell reads
    "value/total".
    """

    title: str
    key: str
    format: str = "{:.3g}"
    is_optional: bool = False
    total_key: str | None = None

    def cell(self, stats: Stats) -> str:
        keys = [self.key] if self.total_key is None else [self.key, self.total_key]
        values = [stats.get(key) for key in keys]
        return "/".join("–" if value is None else self.format.format(value) for value in values)


# The most important first: a narrow terminal has no room for the last ones.
COLUMNS = (
    Column("reward", "reward", "{:.3f}"),
    Column("loss", "loss", "{:.4f}"),
    Column("ref KL", "ref_kl", "{:.4f}", is_optional=True),
    Column("KL", "prox_kl", "{:.4f}", is_optional=True),
    Column("entropy", "entropy", "{:.3f}", is_optional=True),
    Column("length", "answer_len", "{:.0f}", is_optional=True),
    Column("staleness", "staleness/max", "{:.0f}"),
    Column("tokens/s", "tokens_per_s", "{:,.0f}"),
    Column("s/step", "time/step", "{:.1f}", is_optional=True),
    Column("trainer idle", "idle/trainer", "{:.0%}"),
    Column("server idle", "idle/server", "{:.0%}"),
    Column("groups with signal", "groups_with_signal", "{:.0f}", is_optional=True, total_key="groups"),
)


def step_table(columns: Sequence[Column], steps: Iterable[tuple[int, Stats]], width: int, title: str = "") -> Table:
    """Return a table of steps with as many of the columns as have room in `width` characters."""
    steps = list(steps)
    # Between two columns the box has a space, too.
    looks: dict[str, Any] = {"box": box.SIMPLE_HEAD, "show_edge": False, "pad_edge": False}
    table = Table(title=title or None, padding=(0, _GAP - 1, 0, 0), **looks)
    table.add_column("step", justify="right")
    cells = [[str(number) for number, _ in steps]]
    left = width - max(len(text) for text in ("step", *cells[0])) - _GAP
    for column in columns:
        own = [column.cell(stats) for _, stats in steps]
        left -= max(len(text) for text in (column.title, *own)) + _GAP
        if left < 0:
            break
        table.add_column(column.title, justify="right", no_wrap=True)
        cells.append(own)
    for row in zip(*cells, strict=True):
        table.add_row(*row)
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
        self._steps: deque[tuple[int, Stats]] = deque(maxlen=_NUM_ROWS)
        self._seen: set[str] = set()
        self._curve: list[float] = []
        self._started = time.monotonic()
        self._first_step = self._done = first_step
        # The first step gets a line.
        self._printed_at = -_PLAIN_EVERY_S
        self._log_path = os.environ.get("AREALITE_LOG_FILE") or log_path
        self._screen: _Screen | None = None
        self._notebook: NotebookDisplay | None = None

    def __enter__(self) -> ProgressTable:
        descriptor = _terminal()
        if self.enabled and descriptor is not None:
            self._screen = _Screen(descriptor, self._log_path, self)
            _shown.append(self._screen)
            # The table says what is done.
            activity.interval_s = None
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
        self._add(step + 1, stats)
        if self._screen is not None:
            return self._screen.live.refresh()
        activity.interval_s = RUNNING_S
        if self._notebook is not None:
            self._notebook.update(self)
        elif self._is_line_due(step + 1):
            self._printed_at = time.monotonic() - self._started
            pairs = "  ".join(f"{column.title} {column.cell(stats)}" for column in self._present())
            left = clock(self._left_s(step + 1))
            print(f"step {step + 1}/{self.total_steps}  {pairs}  left {left}", flush=True)
            activity.note_output()

    def _add(self, done: int, stats: Mapping[str, float]) -> None:
        if not self._steps:
            own = [key for key in stats if key.startswith(_OWN_STATS)][:_MAX_OWN_COLUMNS]
            self.columns = [*self.columns, *(Column(clean(key.removeprefix(_OWN_STATS)), key) for key in own)]
        self._seen |= stats.keys()
        self._steps.append((done, stats))
        self._done = done
        value = stats.get(self.columns[0].key)
        if value is not None and math.isfinite(value):
            self._curve.append(value)

    def _present(self) -> list[Column]:
        return [column for column in self.columns if column.key in self._seen or not column.is_optional]

    def _is_line_due(self, done: int) -> bool:
        is_overdue = time.monotonic() - self._started - self._printed_at >= _PLAIN_EVERY_S
        return is_overdue or done % _PLAIN_EVERY == 0 or done == self.total_steps

    def _left_s(self, done: int) -> float:
        per_step_s = (time.monotonic() - self._started) / max(1, done - self._first_step)
        return per_step_s * (self.total_steps - done)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width, gone = options.max_width, clock(time.monotonic() - self._started)
        text = f" {self._done}/{self.total_steps} steps, {gone} gone"
        if self._steps:
            text += f", {clock(self._left_s(self._done))} left"
            num_rows = max(1, min(_NUM_ROWS, (options.height or console.height) - _OTHER_LINES))
            yield step_table(self._present(), list(self._steps)[-num_rows:], width)
            yield ""
            yield from _curve(self.columns[0].title, self._curve, width)
            yield from _time_split(self._steps[-1][1], width)
        bar = Table.grid(expand=True)
        bar.add_column(ratio=1)
        bar.add_column(no_wrap=True)
        # Without steps there is no rate yet.
        bar.add_row(ProgressBar(self.total_steps, self._done, pulse=not self._steps), text)
        yield bar
        now = activity.now()
        yield Text(f"now: {now}" if now else "", style="dim", no_wrap=True, overflow="ellipsis")


def _curve(title: str, values: Sequence[float], width: int) -> Iterator[Text]:
    """Draw a statistic over all steps so far in one line, between its first and its last value."""
    if len(values) < 2:
        return
    ends = f"{values[0]:.3g} ", f" {values[-1]:.3g}"
    room = max(1, min(len(values), width - len(title) - len("".join(ends)) - 1))
    parts = [values[len(values) * i // room : len(values) * (i + 1) // room] for i in range(room)]
    means = [sum(part) / len(part) for part in parts]
    low, span = min(means), (max(means) - min(means)) or 1.0
    line = "".join(_BLOCKS[int((mean - low) / span * (len(_BLOCKS) - 1))] for mean in means)
    yield Text.assemble(f"{title} {ends[0]}", (line, "green"), ends[1], no_wrap=True)


def _time_split(stats: Stats, width: int) -> Iterator[Text]:
    """Draw where the time of a step went: a bar, and a legend in the same colours."""
    total = stats.get("time/step")
    names = [key.removeprefix("time/") for key in stats if key.startswith("time/") and key.count("/") == 1]
    parts = {name: stats[f"time/{name}"] or 0.0 for name in names if name != "step"}
    if not total or not parts:
        return
    parts["other"] = max(0.0, total - sum(parts.values()))
    bar, legend = Text(no_wrap=True), Text("time: ", no_wrap=True, overflow="ellipsis")
    for (name, seconds), color in zip(parts.items(), _PHASE_COLORS * len(parts), strict=False):
        share = min(1.0, seconds / total)
        bar.append("━" * round(share * width), color)
        if share >= 0.01:
            legend.append(f"{name} {seconds:.3g} s {share:.0%}  ", color)
    bar.truncate(width)
    yield bar
    yield legend


class _Screen:
    """A live display on the terminal; other output of the process goes to the log."""

    def __init__(self, descriptor: int, log_path: str | Path | None, content: ProgressTable):
        self._file = os.fdopen(os.dup(descriptor), "w")
        self._console = Console(file=self._file, force_terminal=True)
        self._content = content
        # The output of the whole process is redirected below, by descriptor.
        self.live = Live(
            console=self._console, refresh_per_second=2, redirect_stdout=False, redirect_stderr=False,
            get_renderable=self._fit,
        )  # fmt: skip
        sys.stdout.flush()
        sys.stderr.flush()
        self._saved = [os.dup(1), os.dup(2)]
        target = os.open(log_path or os.devnull, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(target, 1)
        os.dup2(target, 2)
        os.close(target)
        self.live.start()

    def _fit(self) -> ProgressTable:
        """Return the table after taking the size of the window, which may have changed."""
        columns, lines = os.get_terminal_size(self._file.fileno())
        self._console.size = ConsoleDimensions(columns or 80, lines or 25)
        return self._content

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
    # In one piece: unbuffered output would let a message of another thread come before the end of the line.
    print(f"{text}\n", end="", flush=True)
    activity.note_output()
    status.event(text)
    for screen in _shown:
        screen.live.console.print(text, markup=False, highlight=False, soft_wrap=True)


def clock(seconds: float) -> str:
    """Format a duration: 1:05 for 65 seconds, 2:03:00 for hours."""
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


def _terminal() -> int | None:
    """Return the terminal to draw on: the launcher's, else standard output; None without one, and in CI."""
    if os.environ.get("TERM") == "dumb" or os.environ.get("CI", "") not in ("", "0", "false"):
        return None
    if "AREALITE_TTY_FD" in os.environ:
        return int(os.environ["AREALITE_TTY_FD"])
    try:
        return sys.stdout.fileno() if sys.stdout.isatty() else None
    # Standard output may have been replaced by an object without a descriptor.
    except (OSError, ValueError):
        return None
