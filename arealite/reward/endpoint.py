"""`Endpoint`: JSON requests to a service outside of the run, with limits and retries.

Judges and served reward models use it. The key is read from the environment at each request: it is not in the object,
not in a pickle of it, and removed from error messages. The key of the run's own servers is never sent. Connections
are closed with the event loop.
"""

import asyncio
import contextlib
import os
import random
import time
from collections.abc import AsyncGenerator
from typing import Any

import aiohttp
import orjson

from arealite.api.errors import ConfigError, RewardError
from arealite.utils.text import clean

_RETRIED = (408, 409, 425, 429, 500, 502, 503, 504, 529)
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.5, 30.0
_MAX_ANSWER_BYTES = 16 << 20
_MAX_TEXT = 500


class Endpoint:
    """Posts JSON to one address. Failures raise `RewardError`, after retries of what may pass.

    At most `max_concurrent` requests at once and `max_per_minute` in a minute (0: any number); others wait in a queue.
    `timeout_s` is for one try, `deadline_s` for all tries of a request and the waits between them. The time in the
    queue does not count, unless no request at all is answered for `deadline_s`.
    """

    def __init__(
        self,
        url: str,
        api_key_env: str = "",
        max_concurrent: int = 32,
        max_per_minute: float = 0.0,
        timeout_s: float = 60.0,
        deadline_s: float = 300.0,
    ):
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"the address of a service must begin with http:// or https://, got {url!r}")
        self.url, self.api_key_env = url, api_key_env
        self.max_concurrent, self.max_per_minute = max_concurrent, max_per_minute
        self.timeout_s, self.deadline_s = timeout_s, deadline_s
        self._next_start = 0.0
        # Belong to one event loop.
        self._loop: asyncio.AbstractEventLoop | None = None
        self._session: aiohttp.ClientSession | None = None
        self._sessions: AsyncGenerator[aiohttp.ClientSession, None] | None = None
        self._slots, self._turn = asyncio.Semaphore(max_concurrent), asyncio.Lock()
        self._answered_at = 0.0

    def __reduce__(self) -> tuple[Any, ...]:
        limits = (self.max_concurrent, self.max_per_minute, self.timeout_s, self.deadline_s)
        return (Endpoint, (self.url, self.api_key_env, *limits))

    async def post(self, body: Any) -> Any:
        """Return the answer to a request, tried again with growing waits while the service is busy or away."""
        data = orjson.dumps(body)
        tries: list[str] = []
        await self._open()
        slots = self._slots
        await self._wait_for_slot(slots)
        try:
            await self._wait_for_turn()
            async with asyncio.timeout(self.deadline_s):
                answer = await self._post_with_retries(data, tries)
        except TimeoutError:
            reason = f" in {len(tries)} tries; the last one: {tries[-1]}" if tries else ""
            raise RewardError(f"{self.url} gave no answer within {self.deadline_s:g} s{reason}") from None
        finally:
            slots.release()
        self._answered_at = time.monotonic()
        return answer

    async def _wait_for_slot(self, slots: asyncio.Semaphore) -> None:
        """Wait until fewer than `max_concurrent` requests run; without a limit while some are answered."""
        began = time.monotonic()
        while (left_s := max(began, self._answered_at) + self.deadline_s - time.monotonic()) > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await slots.acquire()
                return
        raise RewardError(
            f"{self.url} was not asked: none of the {self.max_concurrent} requests in flight (max_concurrent) was "
            f"answered within {self.deadline_s:g} s (deadline_s)"
        )

    async def _post_with_retries(self, data: bytes, tries: list[str]) -> Any:
        """Try until there is an answer; appends to `tries` why each of them failed."""
        wait_s = _FIRST_WAIT_S
        while True:
            status, answer, retry_after_s = await self._try(data)
            if status == 200:
                return answer
            if status not in _RETRIED and status != 0:
                raise RewardError(f"{self.url} answered {status}: {answer}")
            tries.append(f"status {status}: {answer}" if status else answer)
            # At random, so that many requests that failed together do not return together.
            await asyncio.sleep(retry_after_s or random.uniform(0.5, 1.0) * wait_s)
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
            await self._wait_for_turn()

    async def _wait_for_turn(self) -> None:
        """Wait until `max_per_minute` allows a request; one that is cancelled meanwhile takes no turn."""
        if self.max_per_minute:
            async with self._turn:
                now = time.monotonic()
                start = max(now, self._next_start)
                await asyncio.sleep(start - now)
                self._next_start = start + 60 / self.max_per_minute

    async def _try(self, data: bytes) -> tuple[int, Any, float]:
        """Return the status (0: no answer), the answer or the text of the error, and how long to wait."""
        session = await self._open()
        try:
            async with session.post(self.url, data=data, headers=self._headers()) as response:
                raw = await _read_body(response)
                if response.status == 200:
                    return 200, orjson.loads(raw), 0.0
                return response.status, self._error_text(raw), _seconds(response.headers.get("Retry-After"))
        except orjson.JSONDecodeError:
            return 0, self._error_text(b"an answer that is not JSON: " + raw[: 10 * _MAX_TEXT]), 0.0
        # Of aiohttp too: its timeouts are also errors of the connection.
        except TimeoutError:
            return 0, f"no answer within {self.timeout_s:g} s (timeout_s)", 0.0
        except (aiohttp.ClientError, OSError) as error:
            return 0, self._error_text(f"{type(error).__name__}: {error}".encode()), 0.0

    async def _open(self) -> aiohttp.ClientSession:
        loop = asyncio.get_running_loop()
        if self._session is None or self._loop is not loop:
            self._loop, self._slots, self._turn = loop, asyncio.Semaphore(self.max_concurrent), asyncio.Lock()
            self._sessions = self._make_session()
            # Does not suspend: the generator yields at once.
            self._session = await anext(self._sessions)
        return self._session

    async def _make_session(self) -> AsyncGenerator[aiohttp.ClientSession, None]:
        """Yield a session and close it when the loop ends: whoever ends a loop also ends its generators."""
        timeout = aiohttp.ClientTimeout(total=self.timeout_s)
        async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
            yield session

    def _key(self) -> str:
        return os.environ.get(self.api_key_env, "") if self.api_key_env else ""

    def _headers(self) -> dict[str, str]:
        key = self._key()
        return {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})

    def _error_text(self, raw: bytes) -> str:
        text = raw[: 10 * _MAX_TEXT].decode(errors="replace")
        key = self._key()
        return clean(text.replace(key, "***") if key else text)[:_MAX_TEXT]


async def _read_body(response: aiohttp.ClientResponse) -> bytes:
    """Read a body that may arrive in many pieces; of one that is too long only the beginning."""
    body = bytearray()
    async for piece in response.content.iter_any():
        body += piece
        if len(body) > _MAX_ANSWER_BYTES:
            break
    return bytes(body[:_MAX_ANSWER_BYTES])


def _seconds(header: str | None) -> float:
    """Return the seconds of a `Retry-After`, at most a minute; 0.0 if it says something else."""
    try:
        return min(max(float(header or 0), 0.0), 60.0)
    except ValueError:
        return 0.0
