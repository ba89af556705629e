"""`ReplayEngine`: stands for the client of the inference servers while a run is replayed.

Batches come from the record, or from workflows that run again. Workflows get recorded answers, or those of real servers
where their sampling is reproducible (`Generation`). Rank 0 reads the record; other ranks get their share as in a run.
"""

import asyncio
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from arealite.api.cli_args import InferenceEngineConfig
from arealite.api.errors import ConfigError, RecordError
from arealite.api.io_struct import Batch, ModelRequest, ModelResponse, WeightUpdateMeta
from arealite.api.workflow_api import RolloutWorkflow
from arealite.core.diagnosis import describe
from arealite.core.episode import check_trajectories
from arealite.core.record.episodes import RecordedRequest, decode_requests, decode_row
from arealite.core.record.step_file import StepRecord, read_step
from arealite.core.waits import NamedWait
from arealite.engine.remote.collecting import CollectingEngine
from arealite.engine.remote.progress import Piece, Progress
from arealite.engine.replay.compare import Difference, compare_batches
from arealite.engine.replay.plan import ReplayPlan, unknown_versions
from arealite.engine.replay.playback import Generation, Playback, ReplayMismatch
from arealite.utils import distributed
from arealite.utils.data import concat_padded, select_rows, with_sample_columns

# What a workflow made, or in words why it made nothing.
Outcome = Batch | str


class ReplayEngine(CollectingEngine):
    """Gives a training loop the batches of a recorded run. With `servers` answers are generated again."""

    def __init__(self, plan: ReplayPlan, config: InferenceEngineConfig, servers: CollectingEngine | None = None):
        super().__init__(config)
        self.plan, self.servers = plan, servers
        self.takes_weights = servers is not None
        self.folder = Path(plan.record)
        # What this rank has got since the step began.
        self.shares: list[Batch] = []
        # The first difference of the rollouts (rank 0).
        self.difference: Difference | None = None
        # Episodes that had failed in the run: id, reason, and how they end now.
        self.failures: list[tuple[str, str, str]] = []
        # Episodes that ran again, and those that could not.
        self.num_checked = self.num_taken = 0
        self._step = plan.first
        self._playback = Playback()
        self._generation: Generation | None = None
        if servers is not None:
            self._generation = Generation(servers, plan.first, unknown_versions(self.folder, plan.first, plan.last))
        self._mismatches: list[ReplayMismatch] = []
        self._running: dict[str, Future[Outcome]] = {}
        # Gets the workflow of a loop whose rollouts alone are replayed, and ends the loop.
        self.on_workflow: Callable[[RolloutWorkflow], None] | None = None

    def initialize(self, addrs: list[str] | None = None, train_batch_size: int | None = None) -> None:
        if self.servers is not None:
            self.servers.initialize(addrs, train_batch_size)
            # Workflows run on the event loop of the servers' client.
            self._executor = self.servers._executor
        elif distributed.rank() == 0 and self.plan.mode != "trainer-only":
            self.start_executor(train_batch_size)

    def destroy(self) -> None:
        if self.servers is None:
            return super().destroy()
        self._executor = None
        self.servers.destroy()

    # ------------------------------------------------------------------------------------------------ batches

    def begin_step(self, step: int) -> None:
        """Go to a step; called by all ranks."""
        self._step, self.shares = step, []

    def prepare_batch(self, dataloader: Iterable[list[dict[str, Any]]], workflow: RolloutWorkflow) -> Batch:
        if self.on_workflow is not None:
            self.on_workflow(workflow)
        return self._next_batch(workflow)

    def wait(self, count: int, timeout_s: float | None = None) -> Batch:
        return self._next_batch(None)

    def submit(self, data: dict[str, Any], workflow: RolloutWorkflow) -> None:
        """Do nothing: the record has the row."""

    def rollout_batch(self, data: list[dict[str, Any]], workflow: RolloutWorkflow) -> Batch:
        raise ConfigError("a loop that trains on rollout_batch cannot be replayed: use prepare_batch")

    def _next_batch(self, workflow: RolloutWorkflow | None) -> Batch:
        batch = None
        if distributed.rank() == 0:
            record, number = read_step(self.folder, self._step), len(self.shares)
            if number >= len(record.batches):
                raise RecordError(
                    f"step {self._step + 1} got {len(record.batches)} batches in the run, and now asks for another"
                )
            batch = record.batches[number]
            if workflow is not None and self.plan.mode == "whole":
                batch = self.run_again(self._step, record, number, workflow)
        self.shares.append(self._share(batch))
        return self.shares[-1]

    def run_again(self, step: int, record: StepRecord, number: int, workflow: RolloutWorkflow) -> Batch:
        """Run the episodes of a batch again, compare them with the record, and return their batch.

        Episodes whose row could not be recorded, and those that fail, keep their recorded trajectories.
        """
        recorded, episodes = record.batches[number], record.info["episodes"][number]
        self._start(episodes, recorded, workflow)
        self._start_ahead(step, workflow)
        parts, owners, row = [], [], 0
        for known in episodes:
            outcome = self._outcome(known)
            rows = list(range(row, row + known["rows"]))
            row += known["rows"]
            owners += [f"episode {known['id']}, sample {i}" for i in range(known["rows"])]
            if isinstance(outcome, str):
                self._note(self._failure(step, known, outcome))
            parts.append(outcome if isinstance(outcome, dict) else _without_group(select_rows(recorded, rows)))
        joined = concat_padded(with_sample_columns(parts))
        joined = {name: joined[name] for name in recorded if name in joined} | joined
        joined["group_ids"] = recorded["group_ids"]
        self._note(compare_batches(step, recorded, joined, owners))
        return joined

    def run_others(self, step: int, record: StepRecord, workflow: RolloutWorkflow) -> None:
        """Run the rejected and failed episodes of a step again, and compare how they end."""
        others = [known for known in record.info["others"] if known["state"] in ("rejected", "failed")]
        self._start(others, None, workflow)
        for known in others:
            outcome = self._outcome(known)
            if outcome is None:
                continue
            now = "trained" if isinstance(outcome, dict) else outcome
            if known["state"] == "failed":
                # No difference: deadlines, and servers that were lost, do not repeat themselves.
                self.failures.append((known["id"], known["reason"], now))
            elif now != "rejected":
                self._note(Difference(step, f"outcome of episode {known['id']}", "rejected", now))

    def _failure(self, step: int, known: dict[str, Any], reason: str) -> Difference:
        """Return why an episode was trained in the run and not now; a request that does not match says most."""
        for found in self._mismatches:
            if found.episode in (known["id"], ""):
                return Difference(step, found.what, found.recorded, found.replayed)
        return Difference(step, f"outcome of episode {known['id']}", "trained", reason)

    def _note(self, difference: Difference | None) -> None:
        """Keep the first difference."""
        self.difference = self.difference or difference

    # ----------------------------------------------------------------------------------------------- episodes

    def _start(self, episodes: list[dict[str, Any]], recorded: Batch | None, workflow: RolloutWorkflow) -> None:
        """Start episodes that have not been started."""
        for known in episodes:
            if known["id"] in self._running:
                continue
            if known["data"] is None:
                self.num_taken += 1
                continue
            self.num_checked += 1
            requests = decode_requests(known, recorded)
            row = {**decode_row(known["data"]), "seed": known["seed"]}
            play = self._play(known["id"], row, requests, workflow)
            self._running[known["id"]] = asyncio.run_coroutine_threadsafe(play, self.executor.runner.loop)

    def _start_ahead(self, step: int, workflow: RolloutWorkflow) -> None:
        """Start episodes of later batches that have tokens of the weights that servers hold now."""
        if self._generation is None:
            return
        for later in range(step + 1, min(self.plan.last, step + self.config.max_head_offpolicyness) + 1):
            record = read_step(self.folder, later)
            for episodes, batch in zip(record.info["episodes"], record.batches, strict=True):
                self._start([e for e in episodes if e["start"] <= self._version], batch, workflow)

    async def _play(
        self, name: str, row: dict[str, Any], requests: list[RecordedRequest], workflow: RolloutWorkflow
    ) -> Outcome:
        self._playback.add(requests)
        if self._generation is not None:
            self._generation.expect(name, requests)
        try:
            async with asyncio.timeout(self.config.episode_timeout_s):
                made = await workflow.arun_episode(self, row)
            return "rejected" if made is None or made.keys() == {"rewards"} else check_trajectories(made).batch
        # A workflow may raise anything: the episode has failed.
        except Exception as error:
            return describe(error)
        finally:
            if self._generation is not None:
                await self._generation.finish(name)

    def _outcome(self, known: dict[str, Any]) -> Outcome | None:
        """Wait for an episode; None if it could not be started."""
        future = self._running.pop(known["id"], None)
        if future is None:
            return None
        wait = NamedWait("replay", f"episode {known['id']}", self.config.batch_timeout_s, "rollout.batch_timeout_s")
        try:
            return future.result(wait.left_s)
        except TimeoutError:
            raise wait.error("it has not ended", "the workflow hangs") from None

    async def ask(self, progress: Progress, count: int) -> list[Piece]:
        raise AssertionError("unreachable: requests are answered as a whole")

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        return (await self._answer(request, is_group=False))[0]

    async def agenerate_group(self, request: ModelRequest) -> list[ModelResponse]:
        return await self._answer(request, is_group=True)

    async def _answer(self, request: ModelRequest, is_group: bool) -> list[ModelResponse]:
        try:
            recorded = self._playback.find(request, is_group)
            if self._generation is None:
                return recorded.responses
            return await self._generation.repeat(request, recorded)
        except ReplayMismatch as mismatch:
            self._mismatches.append(mismatch)
            raise

    # ------------------------------------------------------------------------------------------------ weights

    def begin_update(self, meta: WeightUpdateMeta) -> None:
        """Wait until everything that the run generated with the weights before has been generated."""
        if self.servers is None:
            return
        if self._generation is not None and distributed.rank() == 0:
            wait = NamedWait(
                "replay", "answers of this version", self.config.batch_timeout_s, "rollout.batch_timeout_s"
            )
            self.executor.run_coroutine(self._generation.wait_until_done(meta.version), wait)
        self.servers.begin_update(meta)

    def update_weights(self, meta: WeightUpdateMeta) -> None:
        if self.servers is not None:
            self.servers.update_weights(meta)

    def set_version(self, version: int) -> None:
        self._version = version
        if self.servers is not None:
            self.servers.set_version(version)
        if self._generation is not None and self._executor is not None:
            wait = NamedWait("replay", "the version to be set", 60.0)
            self.executor.run_coroutine(self._generation.set_version(version), wait)

    def server_info(self) -> list[dict[str, Any]]:
        return [] if self.servers is None else self.servers.server_info()

    def read_probe(self, path: str) -> list[str]:
        return [] if self.servers is None else self.servers.read_probe(path)

    def stats(self) -> dict[str, float]:
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {"version": self._version}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._version = state["version"]


def _without_group(batch: Batch) -> Batch:
    return {name: column for name, column in batch.items() if name != "group_ids"}
