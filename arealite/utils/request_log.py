"""The generation requests of the episode that this task belongs to, for the record of a run.

`EpisodeRunner` begins a log for each episode and engines add to it. Agents that call over HTTP are served by other
tasks; their session keeps the log of its episode.
"""

from contextvars import ContextVar
from typing import NamedTuple

from arealite.api.io_struct import ModelRequest, ModelResponse


class LoggedRequest(NamedTuple):
    """A request and its answers; `is_group`: it asked for all samples of a group at once."""

    request: ModelRequest
    responses: list[ModelResponse]
    is_group: bool


RequestLog = list[LoggedRequest]
_log: ContextVar[RequestLog | None] = ContextVar("request_log", default=None)


def current_log() -> RequestLog | None:
    """Return the log of this task's episode; None if nothing is recorded."""
    return _log.get()


def use_log(log: RequestLog | None) -> None:
    """Let this task, and those that it starts from now on, add to `log`."""
    _log.set(log)


def log_request(request: ModelRequest, responses: list[ModelResponse], is_group: bool) -> None:
    """Add an answered request to the log, if there is one."""
    log = _log.get()
    if log is not None:
        log.append(LoggedRequest(request, responses, is_group))
