"""Asks a dashboard in this process, for tests."""

import asyncio
from pathlib import Path
from typing import Any, NamedTuple

import orjson
from aiohttp.test_utils import TestClient, TestServer

from arealite.dashboard.app import make_app


class Answer(NamedTuple):
    """An answer of the dashboard; `json` is None if it is something else."""

    status: int
    headers: Any
    body: bytes

    @property
    def json(self) -> Any:
        return orjson.loads(self.body)


class Dashboard:
    """A dashboard on a free port of loopback. Use it as a context manager."""

    def __init__(self, *roots: Path, host: str = "127.0.0.1", token: str | None = None):
        self._loop = asyncio.new_event_loop()
        self._app = make_app(list(roots), host, token)

    def __enter__(self) -> "Dashboard":
        self._client = self._loop.run_until_complete(self._start())
        return self

    async def _start(self) -> TestClient:
        client = TestClient(TestServer(self._app))
        await client.start_server()
        return client

    def __exit__(self, *_: object) -> None:
        self._loop.run_until_complete(self._client.close())
        self._loop.close()

    def get(self, path: str, method: str = "GET", **options: Any) -> Answer:
        """Send a request and return the answer, whatever its status."""

        async def ask() -> Answer:
            async with self._client.request(method, path, allow_redirects=False, **options) as response:
                return Answer(response.status, response.headers, await response.read())

        return self._loop.run_until_complete(asyncio.wait_for(ask(), 30))

    def json(self, path: str) -> Any:
        """Return the JSON of an answer that must be a success."""
        answer = self.get(path)
        assert answer.status == 200, (path, answer.status, answer.body[:500])
        return answer.json

    def forget_cookies(self) -> None:
        self._client.session.cookie_jar.clear()

    def run_id(self, name: str) -> str:
        """Return the id of the run with this name."""
        found = {run["name"]: run["id"] for run in self.json("/api/runs")["runs"]}
        return found[name]
