"""What all inference engines share: generation in pieces, one executor on rank 0, scattered batches.

Every rank makes the engine and calls the same methods. Rank 0 owns the executor; `prepare_batch` and `rollout_batch`
give each rank whole groups (their statistics need all samples of a prompt), balanced by tokens. With one rank a batch
keeps the order of its data.
"""

import abc
import asyncio
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from arealite.api.cli_args import InferenceEngineConfig
from arealite.api.engine_api import InferenceEngine, returns_nothing
from arealite.api.errors import ConfigError, RequestError
from arealite.api.io_struct import Batch, ModelRequest, ModelResponse
from arealite.api.workflow_api import RolloutWorkflow
from arealite.core.diagnosis import describe_block
from arealite.core.episode import DirectCall
from arealite.core.executor_status import executor_status
from arealite.core.ledger.store import Ledger, Level, ServerSample
from arealite.core.record.recorder import Recorder
from arealite.core.samples import Sample, samples_of
from arealite.core.waits import NamedWait
from arealite.core.workflow_executor import WorkflowExecutor
from arealite.engine.remote.progress import Piece, Progress
from arealite.engine.remote.sampling import sample_servers
from arealite.utils import distributed
from arealite.utils.activity import activity
from arealite.utils.console import show_message
from arealite.utils.data import split_groups
from arealite.utils.process import before_engine
from arealite.utils.request_log import log_request, logging_refusal
from arealite.utils.status.waits import waiting
from arealite.utils.status.writer import status
from arealite.utils.trace import tracing
from arealite.utils.trace.episode_clock import current_clock
from arealite.weights.layout import TensorLayout

# Other ranks wait longer than rank 0, whose error says more.
_GRACE_S = 60.0
# An event loop that has not answered for so long is blocked, and not only busy.
_BLOCKED_S = 2.0


class CollectingEngine(InferenceEngine):
    """Subclasses add `ask` and weight updates. The ledger of episodes is at `ledger_path` (rank 0)."""

    def __init__(self, config: InferenceEngineConfig, seed: int = 1, ledger_path: str | Path | None = None):
        before_engine(self)
        self.config = config
        self.seed = seed
        self.ledger_path = ledger_path
        self._executor: WorkflowExecutor | None = None
        self._version = 0
        self._evaluation: DirectCall | None = None
        # Called once on each rank, when the first episodes run.
        self.on_first_wait: Callable[[], None] | None = None

    def start_executor(self, train_batch_size: int | None) -> None:
        ledger = None if self.ledger_path is None else Ledger(self.ledger_path)
        self._executor = WorkflowExecutor(self.config, self, train_batch_size, self.seed, ledger)
        self._executor.start()
        executor = self._executor
        status.watch_loop("rollout", executor.runner.loop, executor=lambda: executor_status(executor))
        if ledger is not None:
            # Ends with the loop.
            asyncio.run_coroutine_threadsafe(sample_servers(self.take_samples, ledger), self._executor.runner.loop)

    async def take_samples(self) -> list[ServerSample]:
        """Return what each server does now."""
        return []

    @returns_nothing
    def record_event(self, kind: str, text: str, step: int | None = None, level: Level = "info") -> None:
        """Record something that happened to the run in its ledger (rank 0)."""
        if self._executor is not None and self._executor.accounts.ledger is not None:
            self._executor.accounts.ledger.event(kind, text, self._version if step is None else step, level)

    @returns_nothing
    def begin_record(self, folder: str, max_bytes: int, first_step: int, environment: dict[str, Any]) -> None:
        """Record the run from this step on, for `arealite replay` (rank 0)."""
        if self._executor is not None:
            recorder = Recorder(Path(folder), max_bytes, self.seed)
            recorder.begin(first_step, environment)
            self._executor.accounts.recorder = recorder
            self._executor.runner.keeps_requests = True

    @returns_nothing
    def record_step(self, step: int, results: dict[str, Any]) -> None:
        """Add the results of a step to the record (rank 0)."""
        if self._executor is not None and self._executor.accounts.recorder is not None:
            self._executor.accounts.recorder.commit(step, results)

    @returns_nothing
    def record_batch(self, batch: Batch) -> None:
        """Record the last batch as it is here, with what trainers in other processes have added."""
        self.executor.accounts.rollouts.replace(batch)

    def take_trace(self) -> list[tracing.Span]:
        """Return the spans of this process, for a trace that another one writes; collects from now on."""
        tracing.start()
        return tracing.take()

    def destroy(self) -> None:
        if self._executor is not None:
            status.remove("executor", "rollout")
            self._executor.stop()
            self._executor = None

    @property
    def executor(self) -> WorkflowExecutor:
        if self._executor is None:
            first = f"{type(self).__name__}.initialize() first"
            what = first if distributed.rank() == 0 else "this on rank 0"
            raise ConfigError(f"there is no executor here: call {what}")
        return self._executor

    @abc.abstractmethod
    async def ask(self, progress: Progress, count: int) -> list[Piece]:
        """Generate `count` continuations of one sample."""

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        with logging_refusal(request, is_group=False):
            response = await self._complete(Progress(request, request.seed))
        log_request(request, [response], is_group=False)
        self.count_tokens([response])
        return response

    async def agenerate_group(self, request: ModelRequest) -> list[ModelResponse]:
        with logging_refusal(request, is_group=True):
            responses = await self._generate_group(request)
        log_request(request, responses, is_group=True)
        self.count_tokens(responses)
        return responses

    def count_tokens(self, responses: list[ModelResponse]) -> None:
        """Tell the clock of this task's episode how long the answers are, for predictions from the run."""
        clock = current_clock()
        if clock is not None:
            clock.add_answers(len(response.output_tokens) for response in responses)

    async def _generate_group(self, request: ModelRequest) -> list[ModelResponse]:
        """Generate all samples in one request; samples that are interrupted continue one by one."""
        seed = request.seed
        seeds = [None if seed is None else seed + i for i in range(request.gconfig.n_samples)]
        samples = [Progress(request, own_seed, i) for i, own_seed in enumerate(seeds)]
        for sample, piece in zip(samples, await self.ask(samples[0], len(samples)), strict=True):
            sample.num_asked = samples[0].num_asked
            sample.add(piece)
        if all(s.stop_reason != "abort" for s in samples):
            return [s.response() for s in samples]
        if len(samples) == 1:
            return [await self._complete(samples[0])]
        return list(await asyncio.gather(*(self._complete(s) for s in samples)))

    async def _complete(self, progress: Progress) -> ModelResponse:
        while progress.stop_reason == "abort":
            num_before = len(progress.tokens)
            try:
                progress.add((await self.ask(progress, 1))[0])
            except RequestError:
                if not num_before:
                    raise
                # Its beginning was accepted, so it is too long now: it filled the model's context exactly.
                progress.stop_reason = "length"
            if len(progress.tokens) == num_before and progress.stop_reason == "abort":
                # Interrupted before its first token: avoid a busy loop.
                await asyncio.sleep(0.01)
        return progress.response()

    def submit(self, data: dict[str, Any], workflow: RolloutWorkflow) -> None:
        self.executor.submit(data, workflow)

    def wait(self, count: int, timeout_s: float | None = None) -> Batch:
        with waiting("batch", f"{count} episodes", ("episodes",), timeout_s or self.config.batch_timeout_s):
            return self.executor.wait(count, timeout_s)

    def rollout_batch(self, data: list[dict[str, Any]], workflow: RolloutWorkflow) -> Batch:
        is_first = distributed.rank() == 0
        return self._share(self.executor.rollout_batch(data, workflow) if is_first else None)

    def prepare_batch(self, dataloader: Iterable[list[dict[str, Any]]], workflow: RolloutWorkflow) -> Batch:
        meanwhile, self.on_first_wait = self.on_first_wait, None
        if distributed.rank() == 0:
            named = waiting("batch", "the next batch", ("episodes",), self.config.batch_timeout_s)
            with activity.doing(self._describe_batch), named:
                batch = self.executor.prepare_batch(dataloader, workflow, meanwhile)
            share = self._share(batch)
            # What is recorded is what this rank trains, with the columns that it adds.
            accounts = self.executor.accounts
            accounts.rollouts.replace(share)
            if accounts.recorder is not None:
                accounts.recorder.set_share(share)
            return share
        if meanwhile is not None:
            meanwhile()
        return self._share(None)

    def _describe_batch(self) -> str:
        """Say how far the batch is that the trainer waits for."""
        if self._executor is None:
            return ""
        now, size = self._executor.stats(), self._executor.staleness.batch_size
        return (
            f"waiting for the batch: {now['buffered']:.0f} of {size} episodes, {now['running']:.0f} running, "
            f"{now['queued']:.0f} queued"
            + "".join(f", {now[kind]:.0f} {kind}" for kind in ("rejected", "failed") if now[kind])
            + self._describe_block(self._executor)
        )

    def _describe_block(self, executor: WorkflowExecutor) -> str:
        """Say which code holds up all episodes, if any does: it looks like slow servers otherwise."""
        if status.loop_lag_s("rollout") < _BLOCKED_S:
            return ""
        block = describe_block(executor.runner.thread.ident)
        return f"; {block}" if block else ""

    @returns_nothing
    def start_evaluation(
        self, rows: list[dict[str, Any]], workflow: RolloutWorkflow, max_running: int | None = None
    ) -> None:
        """Run these episodes beside training, at most `max_running` at once. They have no limit of staleness."""
        if distributed.rank() == 0:
            self._evaluation = self.executor.start_direct(rows, workflow, max_running)

    def take_evaluation(self, wait: bool = False) -> list[list[Sample] | None] | None:
        """Return the samples of each row (rank 0); None while episodes run, unless told to wait for them.

        A row has None if its episode failed. Raises `NoResultError` if all have failed.
        """
        call = self._evaluation
        if call is None or not (wait or call.remaining == 0):
            return None
        self._evaluation = None
        num = len(call.episodes)
        named = waiting("batch", "an evaluation", ("episodes",), self.config.batch_timeout_s)
        with activity.doing(lambda: f"evaluating: {num - call.remaining} of {num} episodes finished"), named:
            self.executor.wait_direct(call, "evaluation")
        call.raise_if_all_failed()
        if call.reasons:
            # Their number alone does not say that all of one validation set failed, or why.
            cause = next(iter(call.reasons.values()))
            show_message(
                f"warning: {len(call.reasons)} of {num} questions of an evaluation failed and are left out of its "
                f"results; first cause: {cause}"
            )
        return samples_of(call)

    def pause(self) -> None:
        if distributed.rank() == 0:
            self.executor.pause()

    def resume(self) -> None:
        if distributed.rank() == 0:
            self.executor.resume()

    def get_version(self) -> int:
        return self._version

    def set_version(self, version: int) -> None:
        self._version = version
        if self._executor is not None:
            # The batch before has been trained.
            self._executor.accounts.record_trained()
            self._executor.set_version(version)

    def stats(self) -> dict[str, float]:
        """Return counts of episodes and statistics of the last batch (rank 0; empty elsewhere)."""
        return self._executor.stats() if self._executor is not None else {}

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the collection for a recover checkpoint (rank 0)."""
        return self.executor.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint; called by all ranks before the first batch."""
        if self._executor is not None:
            self._executor.load_state_dict(state)
        self._version = state["version"]

    def _share(self, batch: Batch | None) -> Batch:
        """Return this rank's share of the batch that rank 0 has collected."""
        if distributed.world_size() == 1:
            assert batch is not None
            return batch
        who, limit_s = f"rank {distributed.rank()}", self.config.batch_timeout_s + _GRACE_S
        wait = NamedWait(who, "the batch that rank 0 collects", limit_s, "rollout.batch_timeout_s")
        try:
            with waiting("share", wait.what, () if distributed.rank() == 0 else ("rank0",), limit_s):
                distributed.wait_for_first(limit_s)
        except TimeoutError as error:
            cause = "rank 0 hangs: it has the same deadline and did not raise"
            raise wait.error("rank 0 has sent nothing", cause) from error
        shares = None if batch is None else split_groups(batch, distributed.data_size())
        return scatter_batches(shares)


def scatter_batches(shares: list[Batch] | None) -> Batch:
    """Return this rank's share, on the host. Rank 0 passes one share per replica (`data_size`)."""
    rank, replica_size = distributed.rank(), distributed.replica_size()
    layouts = None
    if rank == 0:
        assert shares is not None and len(shares) == distributed.data_size()
        layouts = [TensorLayout.of(share) for share in shares]
    described = distributed.broadcast_json(layouts and [layout.to_json() for layout in layouts])
    if layouts is not None and shares is not None:
        packed = [layout.pack(share) for layout, share in zip(layouts, shares, strict=True)]
        for other in range(1, distributed.world_size()):
            dist.send(packed[other // replica_size], other)
        return shares[0]
    layout = TensorLayout.from_json(described[rank // replica_size])
    buffer = torch.empty(layout.size_bytes, dtype=torch.uint8)
    dist.recv(buffer, 0)
    return layout.views(buffer)
