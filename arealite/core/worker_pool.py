"""`WorkerPool`: runs episodes in worker processes.

Heavy agents and rewards then do not share the trainer's interpreter. Runs on the executor's event loop; `EpisodeRunner`
uses it when `rollout.num_workers` is set, with the same workflow code. A worker that dies, or blocks when an episode
runs out of time, is replaced. Its episodes run again elsewhere with the same seeds, so none is lost and none is counted
twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import itertools
import logging
import pickle
import socket
import traceback
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

from safetensors.torch import load as load_tensors

from arealite.api.cli_args import GenerationHyperparameters
from arealite.api.errors import ConfigError, ServerError
from arealite.api.io_struct import Batch
from arealite.api.workflow_api import RolloutWorkflow
from arealite.core.diagnosis import describe
from arealite.core.episode import to_bytes
from arealite.core.event_loop import keep_running, new_event_loop
from arealite.utils.config import log_to_file
from arealite.utils.pools.process_pool import (
    Channel,
    MessageError,
    ProcessPool,
    WorkerLost,
    WorkerProcess,
    die_with_owner,
)
from arealite.utils.request_log import RequestLog, use_log
from arealite.utils.startup import prepare_process
from arealite.utils.status.writer import status
from arealite.utils.trace import tracing
from arealite.utils.trace.episode_clock import EpisodeClock, use_clock

logger = logging.getLogger("arealite.executor")
# Until a failed start is tried again, while other workers run on.
RETRY_S = 30.0
# Until a worker that does not answer a ping counts as blocked: an event loop that runs answers at once.
MAX_SILENCE_S = 5
MAX_ATTEMPTS = 3
# Workflows that workers keep; others are sent again when they are used.
MAX_WORKFLOWS = 16
# Attributes that are the same if they are equal. Comparing others may be slow, or fail.
_BY_VALUE = (bool, int, float, str, GenerationHyperparameters)


class WorkerError(RuntimeError):
    """An exception that a workflow raised in a worker, with its traceback."""


class _Kept(NamedTuple):
    """A workflow that workers have by this number, with the attributes that it was sent with."""

    number: int
    workflow: RolloutWorkflow
    attributes: list[Any]


class WorkerPool(ProcessPool["RolloutWorker"]):
    """`count` workers, each with an engine of its own, `engine_class(config)`.

    When servers change, `engine.apply_server_state` of each worker gets what `server_state` returns.
    """

    def __init__(self, count: int, engine_class: type, config: Any, server_state: Callable[[], dict[str, Any]]):
        super().__init__()
        self.count = count
        self._engine_args = (engine_class, config)
        self._server_state = server_state
        self._numbers = itertools.count()
        # By their ids, which are not reused while they are here; the last used is last.
        self._kept: OrderedDict[int, _Kept] = OrderedDict()

    async def start(self) -> None:
        """Start all workers; raises `ServerError` if one cannot start."""
        await asyncio.gather(*(self._launch(RolloutWorker(*self._engine_args)) for _ in range(self.count)))

    async def run_episode(
        self,
        workflow: RolloutWorkflow,
        data: dict[str, Any],
        lane: str | None = None,
        log: RequestLog | None = None,
        clock: EpisodeClock | None = None,
    ) -> Batch | None:
        """Run `workflow.arun_episode` in the worker with the fewest episodes. `lane` is that of the trace.

        Generation requests are added to `log`, and `clock` gets the parts of the episode.
        """
        for _ in range(MAX_ATTEMPTS):
            while not self._workers:
                await self._wait_for_worker()
            worker = min(self._workers, key=lambda w: (w.is_silent, len(w.waiting)))
            number, future = next(self._numbers), asyncio.get_running_loop().create_future()
            worker.waiting[number] = future
            try:
                kept = self._keep(workflow)
                worker.send_workflow(kept.number, workflow)
                worker.send("run", number, (kept.number, data, lane, log is not None))
                kind, payload = await future
            except asyncio.CancelledError:
                # The episode ran out of time: find out whether it blocks its worker.
                worker.send("cancel", number)
                self._watch(worker, worker.ping(), MAX_SILENCE_S)
                raise
            finally:
                del worker.waiting[number]
            if kind in ("error", "result"):
                *_, requests, parts = payload
                if log is not None:
                    log += requests
                if clock is not None:
                    clock.replace(parts)
            if kind == "error":
                raise WorkerError("{}\n{}".format(*payload))
            if kind == "result":
                return None if payload[0] is None else load_tensors(payload[0])
        raise ServerError(f"{MAX_ATTEMPTS} workers in a row died or blocked while they ran the same episode")

    def _keep(self, workflow: RolloutWorkflow) -> _Kept:
        """Return the number of a workflow in the workers: a new one if a script has changed it since."""
        attributes, kept = _attributes(workflow), self._kept.get(id(workflow))
        if kept is None or not _are_same(attributes, kept.attributes):
            if kept is not None:
                self._forget(kept)
            copies = [copy.deepcopy(a) if isinstance(a, GenerationHyperparameters) else a for a in attributes]
            kept = self._kept[id(workflow)] = _Kept(next(self._numbers), workflow, copies)
        self._kept.move_to_end(id(workflow))
        if len(self._kept) > MAX_WORKFLOWS:
            self._forget(self._kept.popitem(last=False)[1])
        return kept

    def _forget(self, kept: _Kept) -> None:
        for worker in self._workers:
            worker.forget_workflow(kept.number)

    def send_server_state(self) -> None:
        """Send all workers the state of the servers, after one was opened, closed, added or removed."""
        state = self._server_state()
        for worker in self._workers:
            worker.send("servers", 0, state)

    def _start_error(self, lost: WorkerLost) -> ServerError:
        return ServerError(
            f"a rollout worker did not start: it {lost}. Fix what the log says about it, or set rollout.num_workers=0 "
            "to run episodes in the trainer's own process"
        )

    def _on_ready(self, worker: RolloutWorker) -> None:
        worker.send("servers", 0, self._server_state())
        worker.reader = asyncio.create_task(self._read(worker), name=f"worker {worker.process.pid}")

    async def _read(self, worker: RolloutWorker) -> None:
        """Receive the results of a worker until it ends, then replace it; its episodes go on elsewhere."""
        with contextlib.suppress(EOFError, OSError, MessageError):
            while True:
                kind, number, payload = await worker.channel.receive()
                future = worker.waiting.get(number)
                if kind == "pong":
                    worker.last_pong = number
                elif kind == "spans":
                    tracing.add(payload)
                elif future is not None and not future.done():
                    future.set_result((kind, payload))
        for future in worker.waiting.values():
            if not future.done():
                future.set_result(("lost", None))
        if worker in self._workers:
            self._remove(worker)
            self.num_replaced += 1
            self._launch_missing()

    def _on_start_failed(self, error: BaseException) -> None:
        message = "%d of %d rollout workers are left, the next start is within %g s: %s"
        logger.warning(message, len(self._workers), self.count, RETRY_S, error)
        asyncio.get_running_loop().call_later(RETRY_S, self._launch_missing)

    def _launch_missing(self) -> None:
        if not self.is_closed:
            for _ in range(self.count - len(self._workers) - len(self._starting)):
                self._launch(RolloutWorker(*self._engine_args))

    def _watch(self, worker: RolloutWorker, ping: int, left_s: int) -> None:
        """Replace a worker that does not answer `ping`."""
        # Count seconds of this loop: it may itself have been blocked.
        if worker.last_pong >= ping:
            return
        if left_s > 0:
            asyncio.get_running_loop().call_later(1.0, self._watch, worker, ping, left_s - 1)
        elif worker in self._workers:
            logger.warning("rollout worker %d is blocked and is replaced", worker.process.pid)
            worker.kill()

    async def _wait_for_worker(self) -> None:
        """Return once a worker is ready; raises if all that were starting have failed."""
        self._launch_missing()
        if not self._starting:
            raise ServerError("the rollout workers were closed: no episode can run any more")
        done, others = set(), set(self._starting)
        while others and not self._workers:
            done, others = await asyncio.wait(others, return_when=asyncio.FIRST_COMPLETED)
        if not self._workers:
            for task in done:
                task.result()


def _attributes(workflow: RolloutWorkflow, seen: frozenset[int] = frozenset()) -> list[Any]:
    """Return names and values of a workflow's attributes, also of workflows in it (cycles are allowed)."""
    found: list[Any] = []
    if id(workflow) in seen:
        return found
    seen |= {id(workflow)}
    for name, value in getattr(workflow, "__dict__", {}).items():
        inner = value if isinstance(value, dict) else {name: value}
        workflows = {key: own for key, own in inner.items() if isinstance(own, RolloutWorkflow)}
        found += [name, value]
        for key, own in workflows.items():
            found += [key, own, *_attributes(own, seen)]
    return found


def _are_same(now: list[Any], before: list[Any]) -> bool:
    return len(now) == len(before) and all(
        a is b or (type(a) is type(b) and isinstance(a, _BY_VALUE) and a == b) for a, b in zip(now, before, strict=True)
    )


class RolloutWorker(WorkerProcess):
    """One worker process, which runs any number of episodes at once. `waiting` has a future for each."""

    def __init__(self, engine_class: type, config: Any):
        # Not a daemon: rewards run in processes of their own.
        args = (engine_class, config)
        super().__init__(_serve, args, engine_class.__module__, "arealite-rollout", is_daemon=False)
        self.waiting: dict[int, asyncio.Future[tuple[str, Any]]] = {}
        self.last_ping = self.last_pong = 0
        self.reader: asyncio.Task[None] | None = None
        self._known_workflows: set[int] = set()

    @property
    def is_silent(self) -> bool:
        return self.last_pong < self.last_ping

    def ping(self) -> int:
        """Ask for a sign of life; the worker has answered once `last_pong` reaches the returned number."""
        self.last_ping += 1
        self.send("ping", self.last_ping)
        return self.last_ping

    def send(self, kind: str, number: int, payload: Any = None) -> None:
        self.channel.send((kind, number, payload))

    def send_workflow(self, number: int, workflow: RolloutWorkflow) -> None:
        """Send a workflow unless the worker has it; raises `ConfigError` if it cannot be pickled."""
        if number in self._known_workflows:
            return
        try:
            self.send("workflow", number, workflow)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ConfigError(
                f"{type(workflow).__name__} cannot be sent to a worker process ({error}): define it and what it holds "
                "at the top level of a module, or set rollout.num_workers=0"
            ) from error
        self._known_workflows.add(number)

    def forget_workflow(self, number: int) -> None:
        """Have the worker drop a workflow, with its processes, once none of its episodes runs."""
        if number in self._known_workflows:
            self._known_workflows.remove(number)
            self.send("forget", number)


def _serve(sock: socket.socket, engine_class: Any, config: Any) -> None:
    """Run episodes in a worker process, any number at once on one event loop, until the owner is gone."""
    die_with_owner()
    log_to_file()
    prepare_process()
    status.begin_here("worker")
    tracing.start()
    loop = new_event_loop()
    status.watch_loop("rollout", loop)
    asyncio.set_event_loop(loop)
    task = loop.create_task(_Worker(engine_class(config), Channel(sock)).run())
    task.add_done_callback(lambda _: loop.stop())
    # A workflow may stop the loop.
    while not task.done():
        keep_running(loop)
    # Connections of rewards end with them.
    loop.run_until_complete(loop.shutdown_asyncgens())
    task.result()


class _Worker:
    """The receiving end of `RolloutWorker`."""

    def __init__(self, engine: Any, channel: Channel):
        self.engine = engine
        self.channel = channel
        self.workflows: dict[int, RolloutWorkflow] = {}
        self.tasks: dict[int, asyncio.Task] = {}

    async def run(self) -> None:
        self.channel.send("ready")
        # The socket closes when the owner is gone.
        with contextlib.suppress(EOFError, ConnectionError):
            while True:
                await self._handle(*await self.channel.receive())

    async def _handle(self, kind: str, number: int, payload: Any) -> None:
        if kind == "servers":
            await self.engine.apply_server_state(payload)
        elif kind == "workflow":
            self.workflows[number] = payload
        elif kind == "forget":
            del self.workflows[number]
        elif kind == "ping":
            self.channel.send(("pong", number, None))
        elif kind == "cancel" and number in self.tasks:
            self.tasks[number].cancel()
        elif kind == "run":
            episode = self._run_episode(number, self.workflows[payload[0]], *payload[1:])
            task = asyncio.create_task(episode, name=f"episode-{number}")
            self.tasks[number] = task
            task.add_done_callback(lambda _: self.tasks.pop(number, None))

    async def _run_episode(
        self, number: int, workflow: RolloutWorkflow, data: dict[str, Any], lane: str | None, keeps_requests: bool
    ) -> None:
        tracing.enter_episode(lane)
        log: RequestLog = []
        clock = EpisodeClock()
        use_log(log if keeps_requests else None)
        use_clock(clock)
        try:
            batch = await workflow.arun_episode(self.engine, data)
            if lane is not None and (spans := tracing.take()):
                self.channel.send(("spans", number, spans))
            self.channel.send(("result", number, (None if batch is None else to_bytes(batch), log, clock.stop())))
        # A workflow may raise anything, also CancelledError; the owner records it.
        except BaseException as error:
            self.channel.send(("error", number, (describe(error), traceback.format_exc(limit=-8), log, clock.stop())))
