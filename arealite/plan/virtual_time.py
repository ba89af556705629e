"""`VirtualLoop`: an asyncio event loop whose clock jumps to the next timer.

The trainer of a simulation is plain code on one thread. When it waits, for a condition, a coroutine or some time, the
loop runs until that has happened, without real time passing. The result depends on nothing but the program: no threads,
no sockets. When everybody waits and no timer is set, the loop names who waits and where, instead of hanging.
"""

import asyncio
import selectors
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from arealite.api.errors import AReaLiteError
from arealite.utils import clock

T = TypeVar("T")
# asyncio runs timers that are due within a nanosecond at once: shorter waits would let no time pass, and never end.
SHORTEST_S = 1e-8
_MAX_NAMED = 8


class SimulationError(AReaLiteError):
    """A simulation cannot go on."""


class _JumpingSelector(selectors.SelectSelector):
    """Lets time pass where a real selector waits for it; first asks whether the loop has run long enough."""

    def __init__(self, is_done: Callable[[], bool]) -> None:
        super().__init__()
        self.now = 0.0
        self._is_done = is_done

    def select(self, timeout: float | None = None) -> list[Any]:
        if self._is_done():
            return []
        if timeout is None:
            raise SimulationError(f"the simulation has come to a stop after {self.now:g} s: {_describe_tasks()}")
        self.now += max(0.0, timeout)
        return []


def _describe_tasks() -> str:
    """Name the tasks that wait, and their innermost lines outside of asyncio."""
    tasks = sorted(asyncio.all_tasks(), key=lambda task: task.get_name())
    if not tasks:
        return "nothing runs and no timer is set"
    lines = [f"{task.get_name()} waits in {_place(task)}" for task in tasks[:_MAX_NAMED]]
    more = f"; and {len(tasks) - _MAX_NAMED} more" if len(tasks) > _MAX_NAMED else ""
    return f"no timer is set, and {'; '.join(lines)}{more}"


def _place(task: asyncio.Task) -> str:
    place, awaited = "an unknown place", task.get_coro()
    while (frame := getattr(awaited, "cr_frame", None)) is not None:
        if "/asyncio/" not in frame.f_code.co_filename:
            place = f"{frame.f_code.co_qualname} (line {frame.f_lineno})"
        awaited = getattr(awaited, "cr_await", None)
    return place


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop for one thread. `time()` is in virtual seconds and starts at 0."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector(self._stop_if_done)
        super().__init__(self._jumping)
        self._is_done: Callable[[], bool] = lambda: False
        self._error: BaseException | None = None
        self.set_exception_handler(self._keep_error)

    def time(self) -> float:
        return self._jumping.now

    def call_soon_threadsafe(self, callback: Callable[..., Any], *args: Any, context: Any = None) -> asyncio.Handle:
        """Call soon: there is one thread, and nothing has to be woken up."""
        return self.call_soon(callback, *args, context=context)

    def _keep_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Stop the loop at the first error of a callback, which asyncio would only log."""
        error = context.get("exception")
        # A task that nobody awaits is no callback: whoever owns it looks at its result.
        if isinstance(error, BaseException) and "handle" in context and self._error is None:
            self._error = error
            self.stop()

    def run_until(self, is_done: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Run until `is_done`, which is asked before time passes; False if `timeout_s` pass before that."""
        # A flag and not the time: a jump to the deadline may miss it by a rounding error.
        expired: list[bool] = []
        deadline = None if timeout_s is None else self.call_later(timeout_s, expired.append, True)
        before, self._is_done = self._is_done, lambda: bool(expired) or is_done()
        try:
            self.run_forever()
        finally:
            self._is_done = before
            if deadline is not None:
                deadline.cancel()
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        return is_done()

    def _stop_if_done(self) -> bool:
        if self._is_done():
            self.stop()
            return True
        return False

    def run_for(self, seconds: float) -> None:
        """Let `seconds` pass: the trainer works."""
        self.run_until(lambda: False, max(0.0, seconds))

    def run_coroutine(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run until the coroutine has ended, and return its result."""
        task = self.create_task(coroutine, name="trainer")
        self.run_until(task.done)
        return task.result()

    @contextmanager
    def clock(self) -> Iterator[None]:
        """Let all code that reads `utils.clock` read this loop's time."""
        with clock.use(self.time):
            yield

    def shut_down(self) -> None:
        """Cancel all tasks and close the loop."""
        tasks = asyncio.all_tasks(self)
        for task in tasks:
            task.cancel()
        if tasks:
            self.run_until(lambda: all(task.done() for task in tasks))
        self.close()


class VirtualCondition:
    """Takes the place of `threading.Condition`: `wait` runs the loop until `notify_all`. Locks nothing."""

    def __init__(self, loop: VirtualLoop):
        self._loop = loop
        self._num_notified = 0

    def __enter__(self) -> "VirtualCondition":
        return self

    def __exit__(self, *error: object) -> None:
        return None

    def notify_all(self) -> None:
        self._num_notified += 1

    def wait(self, timeout: float | None = None) -> bool:
        before = self._num_notified
        timeout = None if timeout is None else max(timeout, SHORTEST_S)
        return self._loop.run_until(lambda: self._num_notified > before, timeout)

    def wait_for(self, is_done: Callable[[], bool], timeout: float | None = None) -> bool:
        return self._loop.run_until(is_done, timeout)
