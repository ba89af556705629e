"""Sending published weights to servers over a process group: the trainer's side, on rank 0's event loop.

`open` makes a group with exactly the servers of this update (or takes the last one, if they are the same) and starts sending on a thread; each server is then
told to receive. If anything fails the group is given up, and whoever is left without weights is served by a group of its own.
"""

from __future__ import annotations

import asyncio
import uuid

from arealite.api.errors import WeightUpdateError
from arealite.api.io_struct import WeightUpdateMeta
from arealite.core.router import Server
from arealite.utils.http import HttpClient
from arealite.utils.network import free_port, host_address
from arealite.utils.weight_group import WeightGroup, get_outbox, specs_of

JOIN_TIMEOUT_S = 20.0


class WeightSender:
    """At most one group at a time. Used under the fleet's lock."""

    def __init__(self) -> None:
        self._name = ""
        self._members: tuple[str, ...] = ()
        self._group: WeightGroup | None = None
        self._sending: asyncio.Future[None] | None = None

    async def open(self, http: HttpClient, servers: list[Server], meta: WeightUpdateMeta) -> None:
        """Have a group with these servers and send them what `meta` published."""
        if not get_outbox(meta.path):
            raise WeightUpdateError(
                "nothing was published for a broadcast: call the actor's update_weights first"
            )
        members = tuple(sorted(s.address for s in servers))
        if self._group is None or members != self._members:
            await self._join(http, servers, members)
        loop = asyncio.get_running_loop()
        assert self._group is not None
        self._sending = loop.run_in_executor(None, self._group.send, get_outbox(meta.path))
        self._sending.add_done_callback(self._sent)

    def _sent(self, done: asyncio.Future[None]) -> None:
        if not done.cancelled() and done.exception() is not None:
            self.give_up()  # closes the connections: who still waits for data learns of it at once

    def body(self, meta: WeightUpdateMeta) -> dict[str, object]:
        """What a server must know to receive."""
        return {"group_name": self._name, "specs": specs_of(get_outbox(meta.path))}

    def give_up(self) -> None:
        """A member failed: the group is of no use any more."""
        self._group, self._sending, self._members = None, None, ()

    async def _join(
        self, http: HttpClient, servers: list[Server], members: tuple[str, ...]
    ) -> None:
        self.give_up()
        is_local = all(s.address.startswith(("127.", "localhost")) for s in servers)
        address = "127.0.0.1" if is_local else host_address()
        name, port, size = f"weights-{uuid.uuid4().hex[:8]}", free_port(address), len(servers) + 1
        common = {"master_address": address, "master_port": port, "world_size": size}
        common |= {"group_name": name, "backend": "gloo"}
        loop = asyncio.get_running_loop()
        mine = loop.run_in_executor(None, WeightGroup, address, port, 0, size, name, JOIN_TIMEOUT_S)
        theirs = [
            http.post(
                f"{s.url}/init_weights_update_group",
                {**common, "rank_offset": i + 1},
                JOIN_TIMEOUT_S,
            )
            for i, s in enumerate(servers)
        ]
        await asyncio.gather(*theirs)
        self._group, self._members, self._name = await mine, members, name
