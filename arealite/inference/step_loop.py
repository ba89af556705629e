"""The engine's thread: steps while there is work and, between two steps, runs calls from other threads.

Base class of `Engine`. An idle loop sleeps on a condition. If a step fails, all pending futures get the error, later
calls raise it, and `failure` stays set: nothing hangs.
"""

from __future__ import annotations

import abc
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from typing import Any, Self

from arealite.api.errors import ServerError, WeightUpdateError


class StepLoop(abc.ABC):
    """`start` it, `close` it. In subclasses, methods with an underscore run on its thread."""

    def __init__(self) -> None:
        self.failure: BaseException | None = None
        self.on_failure: Callable[[], object] = lambda: None  # called when `failure` is set
        self.busy_s = 0.0
        self._inbox: deque[tuple[Callable[[], None], Future]] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._loop, name="inference-engine", daemon=True)

    @property
    @abc.abstractmethod
    def _can_step(self) -> bool: ...

    @abc.abstractmethod
    def _step(self) -> None: ...

    @abc.abstractmethod
    def _take_waiting(self) -> list[Future]:
        """Remove and return the futures of all unfinished requests."""

    def _cause(self, error: BaseException) -> BaseException | None:
        """The reason behind an error of the loop; None if it is the error itself."""

    def start(self) -> Self:
        """Start the thread."""
        self._thread.start()
        return self

    def close(self) -> None:
        """Stop the loop; unfinished requests fail. Idempotent."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread.is_alive():
            # After a failure the thread may wait for a dead rank forever.
            self._thread.join(None if self.failure is None else 5.0)
        self._answer_all(ServerError("it was closed"))

    def fail(self, error: BaseException) -> None:
        """Fail all pending futures and refuse later calls. Any thread may call it."""
        self.failure = error
        self._answer_all(error)
        self.on_failure()

    def _loop(self) -> None:
        try:
            while self._wait_for_work():
                begin = time.perf_counter()
                if self._can_step:
                    self._step()
                self.busy_s += time.perf_counter() - begin
        except BaseException as error:
            cause = self._cause(error)
            self.fail(cause or error)
            if cause is None:
                raise

    def _wait_for_work(self) -> bool:
        """Sleep until there is work, then run the queued calls. False: the loop is closing."""
        with self._wake:
            while not (self._inbox or self._closing or self._can_step):
                self._wake.wait()
        while self._inbox:
            self._inbox[0][0]()
            self._inbox.popleft()
        return not self._closing

    def _send(self, action: Callable[[], None], future: Future) -> None:
        """Run `action`, which resolves `future`, between two steps."""
        with self._wake:
            if self.failure is not None:
                raise ServerError(f"the inference engine has failed: {self.failure!r}")
            if self._closing:
                raise ServerError("the inference engine is closed")
            self._inbox.append((action, future))
            self._wake.notify()

    def _call(self, function: Callable[[], Any]) -> Future[Any]:
        """Run `function` between two steps.

        A `WeightUpdateError` is the caller's; other errors fail the loop.
        """
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()  # it runs also if the caller gives up

        def act() -> None:
            try:
                resolve(future, function())
            except WeightUpdateError as refusal:
                resolve(future, refusal)

        self._send(act, future)
        return future

    def _answer_all(self, error: BaseException) -> None:
        cause = ServerError(f"the inference engine has failed: {error!r}")
        with self._wake:
            waiting = [future for _, future in self._inbox]
            self._inbox.clear()
        for future in [*waiting, *self._take_waiting()]:
            resolve(future, cause)


def resolve(future: Future, value: Any) -> None:
    """Set the result or exception of a future that may have been cancelled."""
    try:
        if isinstance(value, BaseException):
            future.set_exception(value)
        else:
            future.set_result(value)
    except InvalidStateError:
        pass
