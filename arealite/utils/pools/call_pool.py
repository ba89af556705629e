"""`CallPool`: runs functions of users in worker processes, for tools and environments.

A workflow leases a worker and calls functions in it, each with a deadline. A worker keeps what a function leaves in its
module, such as an environment, until the lease ends. A function that hangs or crashes costs its own worker, which is
killed and replaced. Any object that can be pickled may be returned.
"""

import contextlib
import pickle
import traceback
from collections.abc import AsyncIterator, Callable
from multiprocessing.connection import Connection
from typing import Any

from arealite.utils.pools.job_pool import JobPool
from arealite.utils.pools.process_pool import WorkerLost, WorkerProcess, WorkerTimeout

# Longest error text that is reported, in characters.
_MAX_TEXT = 10_000
# Largest result, so that a wrong function does not fill the memory of the trainer's process.
_MAX_RESULT_BYTES = 1 << 26


class CallError(RuntimeError):
    """A function raised, ended its process, or returned something that cannot be sent."""


class CallTimeout(CallError):
    """A function did not return within its deadline."""


class CallPool(JobPool):
    """Up to `max_workers` processes; who finds all of them leased waits for one."""

    def __init__(self, max_workers: int = 16):
        super().__init__(max_workers, _call, "arealite-call")

    def __reduce__(self) -> tuple[Any, ...]:
        """In another process (the workflow of a rollout worker) it becomes a pool with workers of its own."""
        return (CallPool, (self._limit,))

    async def run(self, fn: Callable[..., Any], *args: Any, timeout_s: float, name: str | None = None) -> Any:
        """Return `fn(*args)` of any worker; raises `CallError`, or `CallTimeout` after the deadline.

        Args:
            name: what messages call the function, if not by its own name.
        """
        async with self.lease(fn.__module__) as worker:
            return await worker.call(fn, *args, timeout_s=timeout_s, name=name)

    @contextlib.asynccontextmanager
    async def lease(self, module: str) -> AsyncIterator["Lease"]:
        """Lease one worker. `module` is imported once, before workers are forked."""
        lease = Lease(await self._acquire(module))
        try:
            yield lease
        finally:
            if lease.is_usable:
                self._on_ready(lease.worker)
            else:
                self._replace(lease.worker)

    def _start_error(self, lost: WorkerLost) -> CallError:
        return CallError(f"a worker process did not start: it {lost}")


class Lease:
    """A worker that nobody else uses meanwhile."""

    def __init__(self, worker: WorkerProcess):
        self.worker = worker
        # False while a call runs: a call that is cancelled or fails to return leaves a worker that nobody may use.
        self.is_usable = True

    async def call(self, fn: Callable[..., Any], *args: Any, timeout_s: float, name: str | None = None) -> Any:
        """Return `fn(*args)` of the worker; raises `CallError`, or `CallTimeout` after the deadline."""
        name = name or getattr(fn, "__qualname__", repr(fn))
        try:
            job = pickle.dumps((fn, args), protocol=pickle.HIGHEST_PROTOCOL)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise CallError(
                f"{name} cannot be sent to a worker process ({error}): define it at the top level of a module or of "
                "your script, or make it a coroutine function"
            ) from error
        if not self.is_usable:
            raise CallError(f"{name} was not called: an earlier call of its worker process failed")
        self.is_usable = False
        self.worker.channel.send(job)
        try:
            answer = await self.worker.receive(timeout_s)
        except WorkerTimeout:
            raise CallTimeout(f"{name} did not return within {timeout_s:g} s and was killed") from None
        except WorkerLost as lost:
            raise CallError(f"{name} failed: its worker process {lost}") from None
        match answer:
            case "done", value:
                self.is_usable = True
                return value
            case "error", str(text):
                self.is_usable = True
                raise CallError(text)
            case _:
                raise CallError(f"{name} failed: its worker process sent a message that is not an answer")


def _call(owner: Connection, job: bytes) -> bytes:
    """Return the answer to one call, in a worker process."""
    try:
        fn, args = pickle.loads(job)
        answer = pickle.dumps(("done", fn(*args)), protocol=pickle.HIGHEST_PROTOCOL)
        if len(answer) > _MAX_RESULT_BYTES:
            raise ValueError(f"the result has {len(answer)} bytes; at most {_MAX_RESULT_BYTES} can be returned")
        return answer
    # Code of users may raise anything; the owner needs the text.
    except BaseException as error:
        text = "".join(traceback.format_exception_only(error)).strip()[:_MAX_TEXT]
        return pickle.dumps(("error", text))
