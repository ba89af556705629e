"""Trivial workflows and a stub engine for tests of the executor."""

import asyncio
from contextlib import closing
from dataclasses import dataclass, field

import pytest
import torch

from arealite.api.cli_args import InferenceEngineConfig
from arealite.api.workflow_api import RolloutWorkflow
from arealite.core.ledger.reading import open_ledger
from arealite.core.workflow_executor import WorkflowExecutor


def read_counts(path) -> dict[str, int]:
    """Return the admitted episodes of a ledger by state."""
    query = "SELECT state, COUNT(*) FROM episodes WHERE source != 'direct' GROUP BY state"
    with closing(open_ledger(path)) as db:
        return dict(db.execute(query).fetchall())


def make_batch(value: int, n: int = 2, length: int = 4, version: int = 0, reward: float = 1.0):
    """Make a result whose tokens are all `value`."""
    versions = torch.full((n, length), version)
    versions[:, 0] = -1
    return {
        "input_ids": torch.full((n, length), value),
        "attention_mask": torch.ones(n, length, dtype=torch.long),
        "loss_mask": (versions >= 0).long(),
        "logprobs": torch.full((n, length), -0.5),
        "versions": versions,
        "rewards": torch.full((n,), reward),
    }


@dataclass
class StubEngine:
    """Holds the version that workflows give their tokens."""

    version: int = 0
    calls: list = field(default_factory=list)


class Echo(RolloutWorkflow):
    """Returns the row's `x`; rows may set a version, a delay, a rejection or an error."""

    def __init__(self):
        self.gates: dict[int, asyncio.Event] = {}
        self.started: list[int] = []

    async def arun_episode(self, engine, data):
        self.started.append(data["x"])
        version = data.get("version", engine.version)
        for _ in range(data.get("yields", 0)):
            await asyncio.sleep(0)
        if "gate" in data:
            await data["gate"].wait()
        if data.get("hang"):
            await asyncio.Event().wait()
        if data.get("reject"):
            return None
        if "raises" in data:
            raise data["raises"]
        if "returns" in data:
            return data["returns"]
        return make_batch(data["x"], length=data.get("length", 4), version=version)


@pytest.fixture
def executors():
    """Make executors that are stopped at the end of the test."""
    made = []

    def make(batch_size=4, ledger=None, **config):
        config.setdefault("batch_timeout_s", 20.0)
        executor = WorkflowExecutor(InferenceEngineConfig(**config), StubEngine(), batch_size, ledger=ledger)
        executor.start()
        made.append(executor)
        return executor

    yield make
    for executor in made:
        executor.stop()
