"""What this process does now and what it waits for, for a person who watches.

Code that may take long names itself with `with activity.doing("loading the model"):`. The live table shows it; without
one, rank 0 prints a line whenever nothing was printed for a while: every ten seconds until the first step, later every
minute. Ranks do it from a thread (`watch`), launchers in the loops in which they wait (`tick`): they start processes,
which a process without threads does best.
"""

import atexit
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# Until the first step, and after it.
STARTING_S, RUNNING_S = 10.0, 60.0
# How late a line may be, after the interval was changed.
_LONGEST_WAIT_S = 5.0


class Activity:
    """The activities of one process, the innermost last. `interval_s` None prints nothing."""

    def __init__(self, interval_s: float | None = STARTING_S, show: Callable[[str], object] | None = None):
        self.interval_s = interval_s
        self._show = show or (lambda text: print(text, flush=True))
        # No lock: a signal handler that prints may interrupt any of this.
        self._stack: list[tuple[str | Callable[[], str], float]] = []
        self._shown_at = time.monotonic()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @contextmanager
    def doing(self, text: str | Callable[[], str]) -> Iterator[None]:
        """Name what is done in this block; an empty text says nothing.

        A function is called from another thread, whenever a line is due.
        """
        named = text, time.monotonic()
        self._stack.append(named)
        try:
            yield
        finally:
            self._stack.remove(named)

    def now(self) -> str:
        """Return what is done and for how many seconds; empty if nothing is named."""
        for text, began in reversed(list(self._stack)):
            shown = text if isinstance(text, str) else text()
            if shown:
                return f"{shown} ({time.monotonic() - began:.0f} s)"
        return ""

    def stack(self) -> list[tuple[str, float]]:
        """Return all that is named now, the innermost last, and for how many seconds."""
        now = time.monotonic()
        named = [(text if isinstance(text, str) else text(), began) for text, began in list(self._stack)]
        return [(text, round(now - began, 3)) for text, began in named if text]

    def note_output(self) -> None:
        """Something was printed: the next line is due after the interval."""
        self._shown_at = time.monotonic()

    def tick(self) -> None:
        """Print a line if one is due."""
        if self.interval_s is None or self._left_s() > 0:
            return
        self.note_output()
        text = self.now()
        if text:
            self._show(f"… {text}")

    def watch(self) -> None:
        """Print lines from a thread from now on, on rank 0."""
        if self._thread is None and os.environ.get("RANK", "0") == "0":
            self._stop.clear()
            self._thread = threading.Thread(target=self._run, name="activity", daemon=True)
            self._thread.start()
            # A thread that prints while the interpreter ends would crash it.
            atexit.register(self.close)

    def close(self) -> None:
        """End the thread."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while not self._stop.wait(min(self._left_s(), _LONGEST_WAIT_S)):
            self.tick()

    def _left_s(self) -> float:
        """Return the time until a line is due."""
        if self.interval_s is None:
            return _LONGEST_WAIT_S
        return max(0.0, self._shown_at + self.interval_s - time.monotonic())


activity = Activity()
