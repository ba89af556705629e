"""The generation requests of the episode that this task belongs to, for the record of a run.

`EpisodeRunner` begins a log for each episode and engines add to it. Agents that call over HTTP are served by other
tasks; their session keeps the log of its episode.
"""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple

from arealite.api.errors import RequestError
from arealite.api.io_struct import ModelRequest, ModelResponse


class LoggedRequest(NamedTuple):
    """A request and its answers, or why it was refused; `is_group`: it asked for all samples of a group."""

    prompt: list[int]
    seed: int | None
    responses: list[ModelResponse]
    is_group: bool
    error: str = ""
    gconfig: dict[str, Any] | None = None


RequestLog = list[LoggedRequest]
_log: ContextVar[RequestLog | None] = ContextVar("request_log", default=None)


def current_log() -> RequestLog | None:
    """Return the log of this task's episode; None if nothing is recorded."""
    return _log.get()


def use_log(log: RequestLog | None) -> None:
    """Let this task, and those that it starts from now on, add to `log`."""
    _log.set(log)


def log_request(request: ModelRequest, responses: list[ModelResponse], is_group: bool, error: str = "") -> None:
    """Add a request that was answered or refused to the log, if there is one.

    Workflows may go on to change the lists, so these are copied. Images, metadata and experts are left out: the record
    does not need them here, and a log is sent between processes.
    """
    log = _log.get()
    if log is not None:
        prompt = list(request.input_ids)
        copies, gconfig = [_copy(prompt, r) for r in responses], dict(vars(request.gconfig))
        log.append(LoggedRequest(prompt, request.seed, copies, is_group, error, gconfig))


def _copy(prompt: list[int], response: ModelResponse) -> ModelResponse:
    return ModelResponse(
        prompt,
        list(response.output_tokens),
        list(response.output_logprobs),
        list(response.output_versions),
        response.stop_reason,
        response.num_interruptions,
    )


@contextlib.contextmanager
def logging_refusal(request: ModelRequest, is_group: bool) -> Iterator[None]:
    """Add the request to the log if it is refused: workflows may go on without its answer."""
    try:
        yield
    except RequestError as error:
        log_request(request, [], is_group, str(error))
        raise
