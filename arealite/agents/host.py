"""`GatewayHost`: one gateway for each event loop, started with the first episode.

Workflows own a host. It travels to rollout workers without its gateways: each process starts one of its own.
"""

import asyncio
from typing import Any

from arealite.agents.gateway import Gateway
from arealite.api.engine_api import InferenceEngine

# Event loops hold tasks weakly: a gateway would be collected with its workflow, while it still listens.
_running: set[asyncio.Task[None]] = set()


class GatewayHost:
    """Makes a `Gateway(engine, **settings)` where it is first asked for."""

    def __init__(self, **settings: Any):
        self.settings = settings
        self._gateways: dict[asyncio.AbstractEventLoop, tuple[asyncio.Task[None], asyncio.Future[Gateway]]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {"settings": self.settings, "_gateways": {}}

    async def get(self, engine: InferenceEngine) -> Gateway:
        """Return the gateway of this event loop. All episodes of a loop use the same engine."""
        loop = asyncio.get_running_loop()
        if loop not in self._gateways:
            started: asyncio.Future[Gateway] = loop.create_future()
            task = loop.create_task(self._serve(Gateway(engine, **self.settings), started), name="agent gateway")
            _running.add(task)
            task.add_done_callback(_running.discard)
            self._gateways[loop] = task, started
        return await asyncio.shield(self._gateways[loop][1])

    async def _serve(self, gateway: Gateway, started: asyncio.Future[Gateway]) -> None:
        """Serve until the loop cancels its tasks."""
        loop = asyncio.get_running_loop()
        try:
            await gateway.start()
            started.set_result(gateway)
            await loop.create_future()
        # Whatever it is, the first episode awaits it.
        except Exception as error:
            started.set_exception(error)
        finally:
            self._gateways.pop(loop, None)
            await gateway.close()

    async def close(self) -> None:
        """Close the gateway of this event loop."""
        task, _ = self._gateways.get(asyncio.get_running_loop(), (None, None))
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
