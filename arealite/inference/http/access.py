"""Decides which requests the server answers and which weights it loads.

Every request passes `Access.check`: the API key, if the server has one; on a loopback server a `Host` that no web page
can choose; and JSON bodies only, which a web page cannot send to another origin without asking.
"""

import os
from pathlib import Path
from typing import Any

from aiohttp import web

from arealite.api.cli_args import ServerConfig
from arealite.api.errors import RequestError
from arealite.api.generation_args import LOOPBACK_HOSTS
from arealite.utils.http.server import LoopbackHosts, bearer_token, check_sender, is_same_token

OPEN_PATHS = ("/health",)
MAX_VERSION = 2**31 - 1
# A server may miss updates, but not this many.
MAX_VERSION_STEP = 1000
_SHARED_MEMORY = "/dev/shm"
_SEGMENT_PREFIX = "arealite-"


class Access:
    """The rules of one server. `check` is called for every request and raises an HTTP error."""

    def __init__(self, config: ServerConfig):
        self._key = (config.api_key or "").encode(errors="surrogateescape")
        self._hosts = LoopbackHosts() if config.host in LOOPBACK_HOSTS else None
        folders = [*config.weight_folders, *([config.join] if config.join else [])]
        # The model's own weights may always be loaded again.
        self._folders = [Path(os.path.realpath(f)) for f in [*folders, config.model_path]] if folders else []

    def check(self, request: web.Request) -> bool:
        """Return whether the request carries the key; without it only `OPEN_PATHS` are answered."""
        has_key = not self._key or is_same_token(bearer_token(request), self._key)
        if not has_key and request.path not in OPEN_PATHS:
            raise web.HTTPUnauthorized(reason="missing or wrong bearer token")
        if self._hosts is not None:
            self._hosts.check(request.headers.get("Host", ""))
        if request.method == "POST":
            check_sender(request)
        return has_key

    def weight_path(self, path: str) -> str:
        """Return the real path of new weights; raises `RequestError` if this server may not load them.

        With `weight_folders` they lie in one of these, or are a segment in shared memory; else they belong to this
        user. May block: call it on a thread.
        """
        try:
            real = Path(os.path.realpath(path))
            is_segment = str(real.parent) == _SHARED_MEMORY and real.name.startswith(_SEGMENT_PREFIX)
            if self._folders and not is_segment and not any(real.is_relative_to(f) for f in self._folders):
                shown = ", ".join(map(str, self._folders))
                raise RequestError(
                    f"{path!r:.300} is outside the folders from which this server loads weights ({shown}): publish "
                    "there, or start it with weight_folders=[...]"
                )
            if not self._folders and os.path.exists(real) and os.stat(real).st_uid != os.geteuid():
                raise RequestError(f"{path!r:.300} belongs to another user: publish weights as the user of the server")
        except (OSError, ValueError) as error:
            if isinstance(error, RequestError):
                raise
            raise RequestError(f"{path!r:.300} is not a path of weights") from error
        return str(real)


def new_version(body: dict[str, Any], current: int, is_reset: bool) -> int:
    """Read the version of new weights: the one in use again, or a little above; any with `is_reset`."""
    given = body.get("weight_version")
    if given is None:
        return current + 1
    digits = str(given) if type(given) in (int, str) else ""
    if not (digits.isascii() and digits.isdecimal() and len(digits) <= 10 and int(digits) <= MAX_VERSION):
        raise RequestError(f"weight_version must be a whole number from 0 to {MAX_VERSION}, got {given!r:.60}")
    version = int(digits)
    if not is_reset and not current <= version <= current + MAX_VERSION_STEP:
        raise web.HTTPConflict(
            reason=f"weight_version is {version}, but this server holds {current}: expected {current} to "
            f"{current + MAX_VERSION_STEP}. Send reset_version: true to go back or further ahead, as for a run that "
            "recovers or a server that joins late"
        )
    return version
