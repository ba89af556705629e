"""The dashboard: an aiohttp app that shows run directories, during a run and afterwards.

Handlers read files on threads and return plain values, which become JSON there too: the event loop never waits for a
disk. Nothing is ever written to a run directory. Errors are JSON objects with one message.
"""

import asyncio
import logging
import sqlite3
from collections.abc import Awaitable, Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import orjson
from aiohttp import web

from arealite.api.errors import AReaLiteError, RequestError
from arealite.dashboard import ledger
from arealite.dashboard.access import HEADERS, Access
from arealite.dashboard.csv_export import shown_step, to_csv
from arealite.dashboard.evaluations import read_evaluations
from arealite.dashboard.files import (
    LOG_BYTES,
    compare_configs,
    describe_config,
    list_logs,
    read_config,
    read_image,
    read_log,
)
from arealite.dashboard.foresight import foresight, sweeps
from arealite.dashboard.query import Query
from arealite.dashboard.runs import Run, Runs
from arealite.dashboard.trace import DEFAULT_SPANS, MAX_SPANS
from arealite.utils.beside import run_beside
from arealite.utils.http.connections import Connections
from arealite.utils.http.server import answer_request, describe_error, json_response
from arealite.utils.text import clean

logger = logging.getLogger("arealite.dashboard")
RUNS = web.AppKey("runs", Runs)
ACCESS = web.AppKey("access", Access)
CONNECTIONS = web.AppKey("connections", Connections)
_SLOTS = web.AppKey("slots", asyncio.Semaphore)
STATIC = Path(str(files("arealite.dashboard"))) / "static"
LOGIN_PAGE = STATIC.joinpath("login.html").read_bytes()
# Threads that read at once.
_MAX_READERS = 8

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
# Reads something of a run. The second argument has the parameters of the request.
Reader = Callable[[Run, Query], Any]


def make_app(roots: list[Path], host: str = "127.0.0.1", token: str | None = None) -> web.Application:
    """Make the app that shows the runs below `roots`."""
    app = web.Application(middlewares=[answer_all], client_max_size=1024)
    app[RUNS], app[ACCESS] = Runs(roots), Access(host, token)
    app[CONNECTIONS], app[_SLOTS] = Connections(), asyncio.Semaphore(_MAX_READERS)
    app.router.add_get("/", _index)
    app.router.add_get("/api/runs", _list_runs)
    app.router.add_get("/api/compare", _compare)
    for path, reader in _READERS.items():
        app.router.add_get(f"/api/runs/{{run}}/{path}", _of_run(reader))
    for name, reader in _DOWNLOADS.items():
        app.router.add_get(f"/api/runs/{{run}}/{name}", _download(name, reader))
    app.router.add_get("/api/runs/{run}/images/{name}", _image)
    app.router.add_static("/static/", STATIC, follow_symlinks=False)
    return app


@web.middleware
async def answer_all(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Check who asks, answer every error with a status and a JSON body, and add the security headers."""

    def respond(error: Exception) -> web.Response:
        status, message = _describe(request, error)
        if status == 401 and request.path == "/" and "text/html" in request.headers.get("Accept", ""):
            return web.Response(body=LOGIN_PAGE, status=status, content_type="text/html")
        return json_response({"error": message}, status)

    connection = request.app[CONNECTIONS].of(request)
    response = await answer_request(request, handler, connection, request.app[ACCESS].check, respond)
    if not response.prepared:
        response.headers.update(HEADERS)
        response.headers.setdefault("Cache-Control", "no-store" if request.path.startswith("/api/") else "no-cache")
    return response


def _describe(request: web.Request, error: Exception) -> tuple[int, str]:
    """Return the status and the message of an error. An unexpected one is logged with its traceback."""
    if isinstance(error, FileNotFoundError):
        return 404, "the run does not have this file, or it was removed"
    if isinstance(error, OSError):
        return 503, f"cannot read a file of the run: {error.strerror}"
    statuses = {RequestError: 400, sqlite3.Error: 503, AReaLiteError: 503}
    status, message = describe_error(request, error, statuses, logger, "the dashboard, its log")
    return status, clean(message)


async def _run(request: web.Request, read: Callable[[], bytes]) -> bytes:
    """Call `read` on a thread, which counts as a reader until it ends. Its client may go before."""
    slots = request.app[_SLOTS]
    await slots.acquire()
    task = asyncio.create_task(run_beside(read), name="dashboard reader")
    task.add_done_callback(lambda _: slots.release())
    return await asyncio.shield(task)


async def answer(request: web.Request, read: Callable[[], Any]) -> web.Response:
    """Answer with what `read` returns, as JSON. It is called on a thread."""
    body = await _run(request, lambda: orjson.dumps(read(), option=orjson.OPT_SERIALIZE_NUMPY))
    return web.Response(body=body, content_type="application/json")


async def _index(request: web.Request) -> web.StreamResponse:
    accepted = request.app[ACCESS].accept_token(request)
    return accepted or web.FileResponse(STATIC / "index.html")


async def _list_runs(request: web.Request) -> web.Response:
    return await answer(request, lambda: {"runs": [_summary(run) for run in request.app[RUNS].all()]})


def _summary(run: Run) -> dict[str, Any]:
    summary = run.summary()
    num_alarms = max(summary["alarms"], ledger.num_alarms(run))
    return summary | describe_config(run) | {"alarms": num_alarms}


async def _compare(request: web.Request) -> web.Response:
    runs, query = request.app[RUNS], Query(request)
    return await answer(request, lambda: compare_configs(runs.get(query.text("a")), runs.get(query.text("b"))))


def _of_run(reader: Reader) -> Handler:
    """Make the handler that answers with what `reader` returns for a run."""

    async def handle(request: web.Request) -> web.Response:
        runs, query = request.app[RUNS], Query(request)
        return await answer(request, lambda: reader(runs.get(query.text("run")), query))

    return handle


def _download(name: str, reader: Reader) -> Handler:
    """Make the handler that answers with the CSV that `reader` returns for a run."""

    async def handle(request: web.Request) -> web.Response:
        runs, query = request.app[RUNS], Query(request)
        body = await _run(request, lambda: reader(runs.get(query.text("run")), query))
        headers = {"Content-Disposition": f'attachment; filename="{name}"'}
        return web.Response(body=body, content_type="text/csv", charset="utf-8", headers=headers)

    return handle


async def _image(request: web.Request) -> web.Response:
    runs, query = request.app[RUNS], Query(request)
    body = await _run(request, lambda: read_image(runs.get(query.text("run")), query.text("name")))
    # Named by its content, it never changes.
    headers = {"Cache-Control": "private, max-age=86400, immutable"}
    return web.Response(body=body, content_type="image/png", headers=headers)


def _stats_csv(run: Run, _: Query) -> bytes:
    columns = run.stats.rows()["columns"]
    if "step" in columns:
        columns["step"] = [shown_step(step) for step in columns["step"]]
    return to_csv(list(columns), zip(*columns.values(), strict=True))


def _log(run: Run, query: Query) -> dict[str, Any]:
    since, end = (query.integer(name, 0) if query.text(name) else None for name in ("since", "end"))
    return read_log(run, query.text("name"), since, end, query.integer("size", LOG_BYTES))


def _trace(run: Run, query: Query) -> dict[str, Any]:
    limit = query.integer("limit", DEFAULT_SPANS, 1, MAX_SPANS)
    return run.trace.window(query.number("start"), query.number("end"), limit)


_READERS: dict[str, Reader] = {
    "stats": lambda run, query: run.stats.rows(query.integer("since", 0)),
    "evaluations": lambda run, _: read_evaluations(run.stats),
    "trace": _trace,
    "events": ledger.events,
    "flow": ledger.flow,
    "ages": ledger.ages,
    "servers": ledger.servers,
    "foresight": foresight,
    "sweeps": sweeps,
    "rollouts": ledger.rollouts,
    "rollouts/{source}/{episode}/{sample}": ledger.rollout,
    "groups/{source}/{episode}": ledger.group,
    "same-prompt": ledger.same_prompt,
    "config": lambda run, _: read_config(run),
    "logs": lambda run, _: list_logs(run),
    "logs/{name}": _log,
}
_DOWNLOADS: dict[str, Reader] = {"stats.csv": _stats_csv, "rollouts.csv": ledger.rollouts_csv}
