"""The driver reports the rank that died, and not what its death did to other ranks."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from arealite.api.errors import ConfigError, TrainingError
from arealite.controller.runtime import Call, Runtime


class RayError(Exception):
    """Base of Ray's errors."""


class RayActorError(RayError):
    """The actor died."""


class RayTaskError(RayError):
    """The method raised `cause`."""

    def __init__(self, cause: Exception):
        super().__init__(str(cause))
        self.cause = cause


class EndedCalls:
    """The part of Ray that waits for calls. A reference is (when it ended, what `get` raises or returns)."""

    exceptions = SimpleNamespace(RayError=RayError, RayActorError=RayActorError, RayTaskError=RayTaskError)

    def wait(self, refs: list[Any], num_returns: int, timeout: float | None = None) -> tuple[list[Any], list[Any]]:
        first = min(refs)
        return [first], [ref for ref in refs if ref != first]

    def get(self, ref: tuple[int, Any]) -> Any:
        if isinstance(ref[1], Exception):
            raise ref[1]
        return ref[1]


ABORTED = RayTaskError(RuntimeError("connection closed by peer"))
DIED = RayActorError("The actor died.\nworker was killed")


def wait(*outcomes: Any) -> None:
    """Wait for a call whose ranks end in this way, the last rank first."""
    runtime = Runtime(EndedCalls(), Path("logs"))
    reports = [(len(outcomes) - rank, outcome) for rank, outcome in enumerate(outcomes)]
    call = Call(runtime, "actor", "ppo_update", reports)
    runtime.add(call)
    runtime.wait(reports)


@pytest.mark.parametrize("consequence", [ABORTED, RayTaskError(RayActorError("an argument is lost"))])
def test_death_is_reported_although_another_rank_fails_first(consequence):
    with pytest.raises(TrainingError, match=r"rank 0 of actor died during ppo_update: worker was killed") as caught:
        wait(DIED, consequence)
    assert "logs/actor.rank0.log" in str(caught.value)


def test_error_of_a_method_is_raised_as_it_is():
    with pytest.raises(RuntimeError, match="connection closed by peer"):
        wait("ended", ABORTED)
    with pytest.raises(ConfigError, match="batch_size"):
        wait(DIED, RayTaskError(ConfigError("raise batch_size")))


def test_lost_data_without_a_death():
    with pytest.raises(TrainingError, match="rank 1 of actor could not get its data during ppo_update: it is lost"):
        wait("ended", RayTaskError(RayError("it is lost")))


def test_death_while_a_column_is_read():
    runtime = Runtime(EndedCalls(), Path("logs"))
    call = Call(runtime, "actor", "compute_logp", ["rank 0", "rank 1"])
    call.ended[0] = SimpleNamespace(columns=("logp",))
    call.refs = ["share 0", "share 1"]
    call.owners = [
        SimpleNamespace(pick=SimpleNamespace(remote=lambda column, ref, outcome=outcome: (0, outcome)))
        for outcome in ("a tensor", DIED)
    ]
    with pytest.raises(TrainingError, match="rank 1 of actor died during the reading of 'logp': worker was killed"):
        call.fetch("logp")
