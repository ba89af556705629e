"""The contract of a client of one kind of inference server: `SGLangClient`, `VLLMClient`.

A client knows the wire format only. `Fleet` decides which servers get requests, `RemoteEngine` which request goes
where, and `Transport` (`arealite.weights`) which of the loading methods an update uses.
"""

import abc
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from arealite.api.backends import API_KEY_ENV
from arealite.api.cli_args import InferenceEngineConfig
from arealite.api.errors import ConfigError, HttpError, WeightUpdateError
from arealite.api.io_struct import WeightUpdateMeta
from arealite.engine.remote.progress import Piece, Progress
from arealite.engine.remote.server import Server, ServerInfo
from arealite.utils.json_client import JsonClient
from arealite.weights.fingerprint import Fingerprints
from arealite.weights.transport import WeightClient

logger = logging.getLogger("arealite.remote")

CONTROL_TIMEOUT_S = 60.0
PROBE_TIMEOUT_S = 5.0
MAX_VERSION = 2**31 - 1


def read_version(version: Any, unknown: int) -> int:
    """Parse a weight version as SGLang and vLLM report it.

    Versions of this package are numbers; `default`, the weights that a server started with, is 0; else it is `unknown`.
    A number that no run reaches is a `ValueError`.
    """
    if version == "default":
        return 0
    number = int(version) if isinstance(version, int | str) and str(version).isdigit() else unknown
    if number > MAX_VERSION:
        raise ValueError(f"weight version {number!s:.20} is above {MAX_VERSION}")
    return number


class ServerClient(WeightClient[Server], abc.ABC):
    """Speaks to all servers of one kind. Methods raise `ServerError` when a server cannot be reached."""

    def __init__(self, config: InferenceEngineConfig):
        self.config = config
        self._http: JsonClient | None = None

    @property
    def http(self) -> JsonClient:
        if self._http is None:
            raise ConfigError("the engine is not connected: call initialize() first")
        return self._http

    def connect(self) -> None:
        """Create the HTTP session; called on the event loop. Does nothing if there is one."""
        key = os.environ.get(API_KEY_ENV)
        self._http = self._http or JsonClient(key, num_processes=max(1, self.config.num_workers))

    async def close(self) -> None:
        http, self._http = self._http, None
        if http is not None:
            await http.close()

    async def control(
        self,
        server: Server,
        endpoint: str,
        body: dict[str, Any] | None = None,
        timeout_s: float = CONTROL_TIMEOUT_S,
        *,
        is_json: bool = True,
    ) -> Any:
        """Post to a control endpoint of the server."""
        return await self.http.post(f"{server.url}/{endpoint}", body or {}, timeout_s, is_json=is_json)

    @abc.abstractmethod
    async def probe(self, server: Server) -> ServerInfo:
        """Return what the server says about itself, once it can generate."""

    async def check_health(self, server: Server, timeout_s: float) -> None:
        await self.http.get(f"{server.url}/health", timeout_s)

    @abc.abstractmethod
    async def fingerprints(self, server: Server) -> Fingerprints | None:
        """Return the fingerprints of the server's tensors; None if it reports none."""

    @abc.abstractmethod
    async def generate(self, server: Server, progress: Progress, num_samples: int) -> list[Piece]:
        """Ask for `num_samples` continuations of the prompt and the tokens so far."""

    @abc.abstractmethod
    async def pause(self, server: Server, mode: str) -> None:
        """Stop decoding: `abort` returns what is in flight, `in_place` keeps it."""

    @abc.abstractmethod
    async def resume(self, server: Server) -> None:
        """Continue decoding after `pause`."""

    @abc.abstractmethod
    async def release_memory(self, server: Server) -> None:
        """Have a paused server free the memory of its KV cache."""

    @abc.abstractmethod
    async def resume_memory(self, server: Server) -> None:
        """Have the server allocate its KV cache again."""

    @staticmethod
    @contextmanager
    def tolerate_refused_unload(server: Server, name: str) -> Iterator[None]:
        """Let the run go on if a server refuses to unload an adapter, which no request names."""
        try:
            yield
        except (HttpError, WeightUpdateError) as error:
            logger.warning("%s keeps the adapter %s in its memory: %s", server.address, name, error)

    async def reclaim_memory(self, server: Server) -> None:
        """Have the server allocate its KV cache again if it has freed it, also for a trainer that is gone."""
        if server.is_released:
            await self.resume_memory(server)

    async def load_stream(self, server: Server, meta: WeightUpdateMeta, order: dict[str, Any]) -> None:
        """Implement `WeightClient.load_stream`: only embedded servers can pull weights."""
        raise ConfigError(
            f"{server.address} cannot pull weights, only embedded servers can: set rollout.weight_update=broadcast"
        )

    def can_swap(self, server: Server) -> bool:
        """Whether the server can load weights while it generates."""
        return False
