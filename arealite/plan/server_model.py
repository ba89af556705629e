"""`DecodingServer`: one inference server on virtual time: continuous batching, a limited KV cache.

All running sequences get one token per step, so one number, the steps made so far, says how far each of them is. An
event is needed only when a sequence ends, requests come, or the cache is full; between two events the growth of the
context is integrated exactly. Prompts are computed before decoding goes on; the samples of a group share theirs.
"""

import asyncio
import heapq
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from arealite.core.foresee.lengths import Lengths
from arealite.core.foresee.prompt_passes import PromptPasses
from arealite.plan.costs import ServerCost
from arealite.plan.virtual_time import SHORTEST_S

# In steps: differences below it are rounding errors.
_EPSILON = 1e-6


@dataclass(slots=True, eq=False)
class Sample:
    """One answer of a request: `left` tokens are to be made after `context` tokens."""

    left: float
    context: float
    group: "Group"
    # Tokens by the version of the weights that made them.
    made: list[tuple[int, float]] = field(default_factory=list)
    # Steps of the server at its start; None while it waits.
    began: float | None = None


@dataclass(slots=True, eq=False)
class Group:
    """A request for several answers; `future` gets its samples when all have ended or were interrupted."""

    future: asyncio.Future[list[Sample]]
    # Prompt tokens that must be computed before the first sample starts.
    prompt_tokens: float
    samples: list[Sample] = field(default_factory=list)
    num_open: int = 0
    is_interrupted: bool = False


class DecodingServer:
    """Generates by the token clock. `speed` is below 1 while others use the same cores."""

    def __init__(self, loop: asyncio.AbstractEventLoop, cost: ServerCost):
        self.loop, self.cost = loop, cost
        self.version = 0
        self.speed = 1.0
        # Called when the load of the server changes.
        self.on_activity: Callable[[], None] = lambda: None
        self.num_tokens = 0.0
        self.busy_s = 0.0
        # Integral of the running sequences over time.
        self.sequence_s = 0.0
        self.num_preemptions = 0
        self._steps = 0.0
        self._at = loop.time()
        # Seconds of prompts, requests and pauses before decoding goes on.
        self._debt_s = 0.0
        self._passes = PromptPasses(cost.pass_s)
        # Tokens in the cache, and the lengths of what runs.
        self._context = 0.0
        self._lengths = Lengths()
        self._ends: list[tuple[float, int, Sample]] = []
        # With the number of its entry in `_ends`: a preempted sample that runs again leaves an old one there.
        self._running: dict[Sample, int] = {}
        self._waiting: deque[Sample] = deque()
        self._versions: list[tuple[float, int]] = [(0.0, 0)]
        self._is_paused = False
        self._is_awake = False
        self._serial = 0
        self._timer: asyncio.TimerHandle | None = None

    # ------------------------------------------------------------------------------------------- requests

    def submit(self, lengths: list[float], contexts: list[float], prompt_tokens: float) -> asyncio.Future[list[Sample]]:
        """Ask for answers of these lengths after these contexts."""
        group = Group(self.loop.create_future(), prompt_tokens, num_open=len(lengths))
        group.samples = [Sample(n, c, group) for n, c in zip(lengths, contexts, strict=True)]
        self._waiting.extend(group.samples)
        self._wake_soon()
        return group.future

    @property
    def is_active(self) -> bool:
        return bool(self._running) and not self._is_paused

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def pause(self, interrupt: bool) -> None:
        """Stop decoding; `interrupt` returns all requests with what they have, else they stay."""
        self._advance()
        self._is_paused = True
        if interrupt:
            self._end_all(lambda group: group.future.set_result(group.samples))
        self._schedule()
        self.on_activity()

    def resume(self) -> None:
        """Decode again after `pause`."""
        self._advance()
        self._is_paused = False
        self._wake_soon()

    def set_version(self, version: int, pause_s: float = 0.0) -> None:
        """Swap the weights between two steps; generation stops for `pause_s`."""
        self._advance()
        self.version = version
        self._debt_s += pause_s if self._running else 0.0
        if not self._running:
            self._versions.clear()
        self._versions.append((self._steps, version))
        self._wake_soon()

    def fail(self, error: Exception) -> None:
        """Lose all requests: the process has died."""
        self._advance()
        self._end_all(lambda group: group.future.set_exception(error))
        self._schedule()
        self.on_activity()

    def set_speed(self, speed: float) -> None:
        if speed != self.speed:
            self._advance()
            self.speed = speed
            self._schedule()

    def _end_all(self, end: Callable[[Group], None]) -> None:
        samples = [*self._running, *self._waiting]
        for sample in self._running:
            self._record(sample)
        self._running.clear()
        self._waiting.clear()
        self._ends.clear()
        self._context = self._debt_s = 0.0
        for group in dict.fromkeys(sample.group for sample in samples):
            group.is_interrupted = True
            # Its owner may have been cancelled.
            if not group.future.done():
                end(group)

    # ------------------------------------------------------------------------------------------- decoding

    def _wake_soon(self) -> None:
        """Look at what has come, once for all that comes at this time."""
        if not self._is_awake:
            self._is_awake = True
            self.loop.call_soon(self._wake)

    def _wake(self) -> None:
        self._is_awake = False
        was_active = self.is_active
        self._advance()
        self._finish()
        if not self._is_paused:
            self._make_room()
            self._start_waiting()
        self._schedule()
        if self.is_active or was_active:
            self.on_activity()

    def _advance(self) -> None:
        """Bring the state to the present time."""
        now = self.loop.time()
        seconds, self._at = now - self._at, now
        if not self.is_active:
            return
        self.busy_s += seconds
        self.sequence_s += seconds * len(self._running)
        seconds *= self.speed
        paid = min(seconds, self._debt_s)
        self._debt_s -= paid
        if seconds > paid:
            steps, count = self._steps_in(seconds - paid), len(self._running)
            self._steps += steps
            self._context += steps * count
            self.num_tokens += steps * count

    def _step_costs(self) -> tuple[float, float]:
        """Return the seconds of the next step, and by how much each further one takes longer."""
        cost, count = self.cost, len(self._running)
        seconds = cost.base_s(count) + cost.context_s * self._context
        if cost.spread_s > 0:
            seconds += cost.spread_s * self._lengths.context(self._steps).spread
        return seconds, cost.context_s * count

    def tokens_per_s(self) -> float:
        """Return how many tokens it generates at full speed now."""
        return len(self._running) / self._step_costs()[0] if self._running else 0.0

    def _steps_in(self, seconds: float) -> float:
        first, more = self._step_costs()
        if more <= 0:
            return seconds / first
        return 2 * seconds / (first + math.sqrt(first * first + 2 * more * seconds))

    def _seconds_of(self, steps: float) -> float:
        first, more = self._step_costs()
        return first * steps + more * steps * steps / 2

    def _finish(self) -> None:
        """End the samples that have all of their tokens."""
        while self._ends and self._ends[0][0] <= self._steps + _EPSILON:
            _, serial, sample = heapq.heappop(self._ends)
            if self._running.get(sample) != serial:
                continue
            self._record(sample, is_last=True)
            del self._running[sample]
            self._context -= sample.context
            group = sample.group
            group.num_open -= 1
            if group.num_open == 0 and not group.future.done():
                group.future.set_result(group.samples)
        if not self._running:
            self._context = 0.0

    def _record(self, sample: Sample, is_last: bool = False) -> None:
        """Add the tokens of a running sample to `made`, by version."""
        assert sample.began is not None
        self._lengths.remove(sample.began - sample.context)
        end = sample.began + sample.left if is_last else min(self._steps, sample.began + sample.left)
        marks = self._versions
        at = len(marks) - 1
        while at > 0 and marks[at][0] > sample.began:
            at -= 1
        for index in range(at, len(marks)):
            begin = max(sample.began, marks[index][0])
            until = min(end, marks[index + 1][0]) if index + 1 < len(marks) else end
            if until > begin:
                sample.made.append((marks[index][1], until - begin))
        sample.context += end - sample.began
        left = sample.left - (end - sample.began)
        sample.left = 0.0 if is_last or left < _EPSILON else left
        sample.began = None

    def _make_room(self) -> None:
        """Preempt the youngest samples while the cache is too full; their context is computed again."""
        while self._context > self.cost.cache_tokens + _EPSILON and len(self._running) > 1:
            sample, _ = self._running.popitem()
            self._record(sample)
            self._context -= sample.context
            self.num_preemptions += 1
            sample.group.prompt_tokens += sample.context
            self._waiting.appendleft(sample)

    def _start_waiting(self) -> None:
        cost = self.cost
        while self._waiting and len(self._running) < cost.max_running:
            sample = self._waiting[0]
            if self._running and self._context + sample.context + len(self._running) > cost.cache_tokens:
                return
            self._waiting.popleft()
            group = sample.group
            if group.prompt_tokens:
                self._debt_s += cost.request_s + cost.prompt_s * group.prompt_tokens + self._passes.start(self._steps)
                group.prompt_tokens = 0.0
            if not self._running and len(self._versions) > 1:
                del self._versions[:-1]
            sample.began = self._steps
            self._lengths.add(sample.began - sample.context)
            self._context += sample.context
            self._serial += 1
            self._running[sample] = self._serial
            heapq.heappush(self._ends, (self._steps + sample.left, self._serial, sample))

    def _schedule(self) -> None:
        """Set the timer to the next event."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._ends and self._running.get(self._ends[0][2]) != self._ends[0][1]:
            heapq.heappop(self._ends)
        if not self.is_active:
            return
        steps = self._ends[0][0] - self._steps
        if len(self._running) > 1:
            room = max(self.cost.cache_tokens - self._context, 0.0)
            # One step more: a full cache must overflow before it is made smaller.
            steps = min(steps, room / len(self._running) + 1.0)
        seconds = (self._debt_s + self._seconds_of(max(steps, 0.0))) / self.speed
        self._timer = self.loop.call_later(max(seconds, SHORTEST_S), self._wake)

    def info(self) -> dict[str, Any]:
        """Return what `/server_info` of a real server says."""
        self._advance()
        return {
            "running": len(self._running),
            "waiting": len(self._waiting),
            "generated_tokens": round(self.num_tokens),
            "busy_s": self.busy_s,
        }
