"""The driver's calls on Ray actors: pending ones, results, times, failures.

`Runtime` is shared by all controllers of the driver. A call is sent at once; its failure is raised at the driver's next
wait, whichever call that waits for.
"""

from __future__ import annotations

import pickle
import time
from pathlib import Path
from typing import Any, NoReturn

import torch

from arealite.api.errors import AReaLiteError, TrainingError
from arealite.api.io_struct import Batch
from arealite.controller.messages import Report, cut, load, store
from arealite.utils.status.waits import waiting

# One call on one rank, for the trace: its name, when it began (`time.time()`), its seconds, its track.
Span = tuple[str, float, float, str]
# How long Ray may take to report that an actor died, after another rank failed because of it.
_DEATH_REPORT_S = 10.0


class Runtime:
    """Ray, pending calls, and what all controllers share."""

    def __init__(self, ray: Any, log_folder: Path, stop_timeout_s: float = 10.0):
        self.ray, self.log_folder, self.stop_timeout_s = ray, log_folder, stop_timeout_s
        # Into how many shares a batch is split: the data-parallel size of the most parallel engine.
        self.num_shares = 1
        # References to weights that trainers published for a broadcast, by the path of their `WeightUpdateMeta`.
        self.outboxes: dict[str, Any] = {}
        # Bytes of tensors that passed through this process.
        self.tensor_bytes = 0
        self._pending: dict[Any, tuple[Call, int]] = {}
        self._seconds: dict[str, float] = {}
        self._spans: list[Span] = []

    def add(self, call: Call) -> None:
        """Track a call that was sent."""
        self._pending |= {ref: (call, rank) for rank, ref in enumerate(call.reports)}

    def wait(self, reports: list[Any]) -> None:
        """Wait until these calls have ended; raise the error of any call that failed meanwhile.

        Has no deadline of its own: Ray reports actors that died, and the methods that run in them have deadlines.
        """
        while waited := [self._pending[ref] for ref in reports if ref in self._pending]:
            call, whom = waited[0][0], [f"{call.engine}.rank{rank}" for call, rank in waited]
            with waiting("call", f"{call.engine}.{call.method}", whom):
                ended, _ = self.ray.wait(list(self._pending), num_returns=1)
            for ref in ended:
                self._finish(ref, *self._pending.pop(ref))

    def forget(self, reports: list[Any]) -> None:
        """Stop tracking calls."""
        for ref in reports:
            self._pending.pop(ref, None)

    def get(self, ref: Any, call: Call, rank: int) -> Any:
        """Return what a method of a rank returned, or raise its error or that of a rank that died."""
        try:
            return self.ray.get(ref)
        except self.ray.exceptions.RayError as error:
            cause = self._find_cause(error, call, rank)
            # One error per call, not one from every rank.
            self.forget(call.reports)
            self._raise(*cause)

    def _finish(self, ref: Any, call: Call, rank: int) -> None:
        report = self.get(ref, call, rank)
        if not isinstance(report, Report):
            return
        call.ended[rank] = report
        name, took_s = f"{call.engine}.{call.method}", report.ended - report.began
        self._spans.append((name, report.began, took_s, f"{call.engine} rank {rank}"))
        if rank == 0 and call.has_batch:
            self._seconds[f"time/{name}"] = self._seconds.get(f"time/{name}", 0.0) + took_s

    def _find_cause(self, error: Any, call: Call, rank: int) -> tuple[Any, Call, int]:
        """Return the death of a rank, with its call and rank, instead of a failure that follows from it.

        If a rank dies, the others fail in the collective that they share with it, or because a column of it is lost.
        Their errors may arrive first. An error of this package says itself what is wrong.
        """
        if self._is_death(error) or isinstance(getattr(error, "cause", None), AReaLiteError):
            return error, call, rank
        pending, deadline = dict(self._pending), time.monotonic() + _DEATH_REPORT_S
        while any(ref in pending for ref in call.reports) and (left_s := deadline - time.monotonic()) > 0:
            ended, _ = self.ray.wait(list(pending), num_returns=1, timeout=left_s)
            for ref in ended:
                other_call, other_rank = pending.pop(ref)
                try:
                    self.ray.get(ref)
                except self.ray.exceptions.RayError as other:
                    if self._is_death(other):
                        return other, other_call, other_rank
        return error, call, rank

    def _is_death(self, error: Any) -> bool:
        """Whether the error says that the actor itself died, and not one whose result its method needed."""
        exceptions = self.ray.exceptions
        return isinstance(error, exceptions.RayActorError) and not isinstance(error, exceptions.RayTaskError)

    def _raise(self, error: Any, call: Call, rank: int) -> NoReturn:
        cause = getattr(error, "cause", error)
        if not isinstance(cause, self.ray.exceptions.RayError):
            # The method's own exception, as if it had been raised here.
            raise cause from error
        reason = str(cause).split("Some common causes")[0].strip().splitlines()[-1].strip()
        what = "died" if self._is_death(error) else "could not get its data"
        raise TrainingError(
            f"rank {rank} of {call.engine} {what} during {call.method}: {reason}\n"
            f"Its log is {self.log_path(call.engine, rank)}. With recover.mode=auto and recover.retries the launcher "
            "starts again from the recover checkpoint"
        ) from error

    def log_path(self, engine: str, rank: int) -> Path:
        """Return the log file of a rank."""
        return self.log_folder / f"{engine}.rank{rank}.log"

    def take_stats(self) -> dict[str, float]:
        """Return the seconds that each engine's methods worked on batches since the last call.

        `driver/tensor_bytes` counts the bytes of tensors that passed through the driver so far.
        """
        stats, self._seconds = self._seconds, {}
        return {**stats, "driver/tensor_bytes": float(self.tensor_bytes)}

    def take_spans(self) -> list[Span]:
        """Return the calls that ended since the last call."""
        spans, self._spans = self._spans, []
        return spans

    def dumps(self, value: Any) -> bytes:
        """Pickle by reference, as `multiprocessing` does; lambdas and closures by value."""
        try:
            return pickle.dumps(value)
        except (pickle.PicklingError, AttributeError, TypeError):
            from ray.cloudpickle import cloudpickle

            return cloudpickle.dumps(value)

    def put(self, shares: list[Batch], shapes: list[torch.Size]) -> Call:
        """Put columns that the driver has into the object store, as those of a call that has ended."""
        call = Call(self, "the driver", "put", [])
        call.ended[0] = Report(0.0, 0.0, None, tuple(shares[0]), tuple(shapes))
        call.refs = [self.ray.put(store(share)) for share in shares]
        self.tensor_bytes += sum(column.nbytes for share in shares for column in share.values())
        return call


class Call:
    """A method call on all ranks of an engine.

    Without `reports` it stands for columns that the driver itself stored. `reports` has one object reference per rank.
    `replica` is the number of ranks that hold one copy of the model: they get the same shares.
    """

    def __init__(self, runtime: Runtime, engine: str, method: str, reports: list[Any], replica: int = 1):
        self.runtime, self.engine, self.method = runtime, engine, method
        self.reports, self.replica = reports, replica
        self.has_batch = False
        self.ended: dict[int, Report] = {}
        # For each share: the actor that holds its columns, and the reference to them.
        self.owners: list[Any] = []
        self.refs: list[Any] = []
        # For a batch that the script made: the position of its rows among those of the shares, and its padded length.
        self.order: torch.Tensor | None = None
        self.width = 0

    def report(self, rank: int = 0) -> Report:
        """Wait for the call on one rank."""
        self.runtime.wait([self.reports[rank]] if self.reports else [])
        return self.ended[rank]

    def value(self) -> Any:
        """Wait for the call and return the plain result of rank 0."""
        return self.report().value

    def columns(self) -> tuple[str, ...]:
        """Wait for the call and return the names of the columns that it left."""
        return self.report().columns

    def shapes(self) -> list[torch.Size]:
        """Wait for the call and return the shape (rows, length) of each share."""
        first_ranks = range(0, len(self.reports) or 1, self.replica)
        return [shape for rank in first_ranks for shape in self.report(rank).shapes]

    def fetch(self, column: str) -> list[torch.Tensor]:
        """Bring one column of each share to the driver."""
        # Raises the call's own error, where Ray would report a lost object.
        self.columns()
        ray = self.runtime.ray
        if not self.reports:
            parts = [load(stored)[column] for stored in ray.get(self.refs)]
        else:
            each = len(self.refs) * self.replica // len(self.reports)
            picked = [owner.pick.remote(column, ref) for owner, ref in zip(self.owners, self.refs, strict=True)]
            reading = Call(self.runtime, self.engine, f"the reading of {column!r}", [])
            parts = [self.runtime.get(ref, reading, i // each * self.replica) for i, ref in enumerate(picked)]
        self.runtime.tensor_bytes += sum(part.nbytes for part in parts)
        return parts

    def put(self, column: torch.Tensor) -> Call:
        """Store a column that the driver has, under the name "", split into the shares of this call."""
        shapes = self.shapes()
        if self.order is not None:
            column = column[self.order.argsort()]
            if column.dim() > 1 and column.shape[1] == self.width:
                column = column[:, : max(length for _, length in shapes)]
        stored = self.runtime.put([{"": part} for part in cut(column, shapes)], shapes)
        stored.order, stored.width = self.order, self.width
        return stored
