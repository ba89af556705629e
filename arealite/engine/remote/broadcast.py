"""Sending published weights to servers over a process group: the trainer's side, on rank 0's event loop.

`open` makes a group with exactly the servers of this update (or takes the last one, if they are the same) and starts sending on a thread; each server is then
told to receive, portion after portion. If anything fails the group is given up, and whoever is left without weights is served by a group of its own.
"""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Any

import torch

from arealite.api.errors import ServerError, WeightUpdateError
from arealite.api.io_struct import WeightUpdateMeta
from arealite.engine.remote.router import Server
from arealite.utils.network import free_port, host_address
from arealite.weights.process_group import Spec, WeightGroup, buckets, get_outbox, specs_of

JOIN_TIMEOUT_S = 20.0
# For one tensor. A server that dies closes its connection; this is for one that was told to receive and does not.
TRANSFER_TIMEOUT_S = 60.0
# Has a server join the group with these settings: address and port of the master, rank of its first process, …
Join = Callable[[Server, dict[str, Any]], Awaitable[None]]


class WeightSender:
    """At most one group at a time. Used under the fleet's lock."""

    def __init__(self) -> None:
        self.name = ""
        self._members: tuple[str, ...] = ()
        self._group: WeightGroup | None = None
        self._sending: asyncio.Future[None] | None = None

    async def open(self, servers: list[Server], meta: WeightUpdateMeta, join: Join) -> None:
        """Have a group with these servers and send them what `meta` published."""
        if not get_outbox(meta.path):
            raise WeightUpdateError("nothing was published for a broadcast: call the actor's update_weights first")
        members = tuple(sorted(s.address for s in servers))
        # two transfers at once would mix: one that nobody waits for any more keeps its group for itself
        is_busy = self._sending is not None and not self._sending.done()
        if self._group is None or members != self._members or is_busy:
            await self._meet(servers, join)
            self._members = members
        assert self._group is not None
        loop = asyncio.get_running_loop()
        self._sending = loop.run_in_executor(None, self._group.send, get_outbox(meta.path))
        self._sending.add_done_callback(partial(self._sent, self._group))

    def _sent(self, group: WeightGroup, done: asyncio.Future[None]) -> None:
        if not done.cancelled() and done.exception() is not None and self._group is group:
            self.give_up()  # closes the connections: who still waits for data learns of it at once

    def portions(self, meta: WeightUpdateMeta) -> Iterator[list[Spec]]:
        """What a server must be told to receive, in this order."""
        return buckets(specs_of(get_outbox(meta.path)))

    def give_up(self) -> None:
        """A member failed: the group is of no use any more. Nothing may hold it, so that its connections close."""
        self._group, self._members, self._sending = None, (), None

    async def _meet(self, servers: list[Server], join: Join) -> None:
        self.give_up()
        is_local = all(s.address.startswith(("127.", "localhost")) for s in servers)
        address = "127.0.0.1" if is_local else host_address()
        self.name, port = f"weights-{uuid.uuid4().hex[:8]}", free_port(address)
        size = 1 + sum(s.num_ranks for s in servers)
        # The embedded engine swaps from host memory; others load what arrives on their device.
        on_cuda = all(s.device == "cuda" and not s.is_arealite for s in servers)
        device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if on_cuda and torch.cuda.is_available() else "cpu"
        settings = {"master_address": address, "master_port": port, "world_size": size}
        settings |= {"group_name": self.name, "backend": "gloo" if device == "cpu" else "nccl"}
        limits = {"join_timeout_s": JOIN_TIMEOUT_S, "timeout_s": TRANSFER_TIMEOUT_S}
        make = partial(WeightGroup, address, port, 0, size, self.name, device=device, **limits)
        mine = asyncio.get_running_loop().run_in_executor(None, make)
        joining, rank = [], 1
        for server in servers:
            joining.append(join(server, settings | {"rank_offset": rank}))
            rank += server.num_ranks
        try:
            await asyncio.gather(*joining)
        except BaseException:
            mine.add_done_callback(lambda done: done.cancelled() or done.exception())
            raise
        try:
            self._group = await mine
        except RuntimeError as error:
            raise ServerError(f"the servers did not join the group for weights: {error}") from error
