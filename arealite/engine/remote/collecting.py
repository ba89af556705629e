"""Collects batches for all inference engines: one executor on rank 0, batches scattered to ranks.

Every rank makes the engine and calls the same methods. Rank 0 owns the executor; `prepare_batch` and `rollout_batch`
give each rank whole groups (their statistics need all samples of a prompt), balanced by tokens. With one rank a batch
keeps the order of its data.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from arealite.api.cli_args import InferenceEngineConfig
from arealite.api.engine_api import InferenceEngine
from arealite.api.errors import ConfigError
from arealite.api.io_struct import Batch
from arealite.api.workflow_api import RolloutWorkflow
from arealite.core.ledger import Ledger
from arealite.core.waits import NamedWait
from arealite.core.workflow_executor import WorkflowExecutor
from arealite.utils import distributed
from arealite.utils.data import split_groups
from arealite.utils.process import check_not_driver
from arealite.weights.scatter import scatter_batches

# Other ranks wait longer than rank 0, whose error says more.
_GRACE_S = 60.0


class CollectingEngine(InferenceEngine):
    """Subclasses add generation and weight updates. The ledger of episodes is at `ledger_path` (rank 0)."""

    def __init__(self, config: InferenceEngineConfig, seed: int = 1, ledger_path: str | Path | None = None):
        check_not_driver(self)
        self.config = config
        self.seed = seed
        self.ledger_path = ledger_path
        self._executor: WorkflowExecutor | None = None
        self._version = 0

    def start_executor(self, train_batch_size: int | None) -> None:
        ledger = None if self.ledger_path is None else Ledger(self.ledger_path)
        self._executor = WorkflowExecutor(self.config, self, train_batch_size, self.seed, ledger)
        self._executor.start()

    def destroy(self) -> None:
        if self._executor is not None:
            self._executor.stop()
            self._executor = None

    @property
    def executor(self) -> WorkflowExecutor:
        if self._executor is None:
            first = f"{type(self).__name__}.initialize() first"
            what = first if distributed.rank() == 0 else "this on rank 0"
            raise ConfigError(f"there is no executor here: call {what}")
        return self._executor

    def submit(self, data: dict[str, Any], workflow: RolloutWorkflow) -> None:
        self.executor.submit(data, workflow)

    def wait(self, count: int, timeout_s: float | None = None) -> Batch:
        return self.executor.wait(count, timeout_s)

    def rollout_batch(self, data: list[dict[str, Any]], workflow: RolloutWorkflow) -> Batch:
        is_first = distributed.rank() == 0
        return self._share(self.executor.rollout_batch(data, workflow) if is_first else None)

    def prepare_batch(self, dataloader: Iterable[list[dict[str, Any]]], workflow: RolloutWorkflow) -> Batch:
        is_first = distributed.rank() == 0
        return self._share(self.executor.prepare_batch(dataloader, workflow) if is_first else None)

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
            distributed.wait_for_first(limit_s)
        except TimeoutError as error:
            cause = "rank 0 hangs: it has the same deadline and did not raise"
            raise wait.error("rank 0 has sent nothing", cause) from error
        shares = None if batch is None else split_groups(batch, distributed.data_size())
        return scatter_batches(shares)
