"""Weights over a process group: the trainer's rank 0 broadcasts its outbox, inference servers receive.

The group is formed as torch forms its own (same keys in the store), so the other side may be SGLang. It is independent
of the trainer's groups, so servers may come and go: another set of servers gets another group. gloo on CPU, NCCL on
CUDA.
"""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from arealite.api.errors import ServerError, WeightUpdateError
from arealite.api.io_struct import WeightUpdateMeta
from arealite.utils import distributed
from arealite.utils.json_client import HttpError
from arealite.utils.network import free_port, host_address
from arealite.weights.layout import TensorLayout
from arealite.weights.outbox import Outbox, fill_outbox, get_outbox
from arealite.weights.transport import T, Transport, WeightClient, WeightOwner, Weights

# torch's type stubs do not export the stores and process groups.
_c10d: Any = dist

PORTION_BYTES = 256 << 20
JOIN_TIMEOUT_S = 20.0
# For one tensor. A process that dies closes its connections; these limits are for one that hangs.
SEND_TIMEOUT_S = 60.0
RECEIVE_TIMEOUT_S = 300.0


class WeightGroup:
    """One sender (rank 0) and its receivers.

    The constructor returns when all have joined (NCCL: joining ends with the first transfer). `timeout_s` limits each
    transfer.
    """

    def __init__(
        self,
        address: str,
        port: int,
        rank: int,
        size: int,
        name: str,
        *,
        timeout_s: float,
        join_timeout_s: float = JOIN_TIMEOUT_S,
        device: str | torch.device = "cpu",
    ):
        self._device = torch.device(device)
        self._timeout = timedelta(seconds=timeout_s)
        joining = timedelta(seconds=join_timeout_s)
        # The master's end of the store must live as long as the group.
        self._store = _c10d.TCPStore(address, port, size, is_master=rank == 0, timeout=joining, wait_for_workers=False)
        keys = _c10d.PrefixStore(f"{name}/", _c10d.PrefixStore(name, self._store))
        keys = _c10d.PrefixStore(f"{self._device.type}/", keys)
        if self._device.type == "cuda":
            options = _c10d.ProcessGroupNCCL.Options()
            options._timeout = self._timeout
            self._group = _c10d.ProcessGroupNCCL(keys, rank, size, options)
        else:
            self._group = _c10d.ProcessGroupGloo(keys, rank, size, joining)

    def send(self, outbox: Outbox) -> None:
        """Broadcast the outbox in portions, each as soon as it is filled."""
        for portion in TensorLayout.of(outbox).portions(PORTION_BYTES):
            tensors = outbox.take(portion.specs, self._timeout.total_seconds())
            self._broadcast([tensor.contiguous().to(self._device) for tensor in tensors])

    def receive(self, layout: TensorLayout) -> Weights:
        """Receive the tensors that rank 0 sends next."""
        tensors = layout.allocate(self._device)
        self._broadcast(list(tensors.values()))
        return tensors

    def _broadcast(self, tensors: list[torch.Tensor]) -> None:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = 0, 0, self._timeout
        pending = [self._group.broadcast([tensor], options) for tensor in tensors]
        for work in pending:
            work.wait()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


class ProcessGroupTransport(Transport):
    """Broadcasts the outbox named `path`.

    `connect` forms a group with exactly the servers of this update, or keeps the last one if the servers are the same,
    and starts to send on a thread; `load` then has each server receive. After a failure the group is dropped, and
    servers that are left without weights get a group of their own. At most one group at a time.
    """

    is_in_process = True

    def __init__(self, path: str):
        super().__init__(path)
        self._name = ""
        self._members: tuple[str, ...] = ()
        self._group: WeightGroup | None = None
        self._sending: asyncio.Future[None] | None = None

    def publish(self, owner: WeightOwner, meta: WeightUpdateMeta) -> None:
        fill_outbox(self.path, owner.gather_weights(), keep=distributed.rank() == 0)

    def open(self, meta: WeightUpdateMeta) -> Weights:
        return get_outbox(self.path)

    def close(self) -> None:
        # Nothing may refer to the group any more, so that its connections close.
        self._group, self._members, self._sending = None, (), None

    def begin(self) -> bool:
        outbox = get_outbox(self.path)
        if not outbox:
            # The first update: the names of the tensors are not known yet.
            return False
        outbox.expect()
        return True

    async def connect(self, client: WeightClient[T], servers: Sequence[T]) -> None:
        outbox = get_outbox(self.path)
        if not outbox:
            raise WeightUpdateError("nothing was published for a broadcast: call the actor's update_weights first")
        members = tuple(sorted(server.address for server in servers))
        # Two transfers at once would mix: an abandoned one that still runs keeps its group.
        is_busy = self._sending is not None and not self._sending.done()
        if self._group is None or members != self._members or is_busy:
            self._group = await self._form_group(client, servers)
            self._members = members
        loop = asyncio.get_running_loop()
        self._sending = loop.run_in_executor(None, self._group.send, outbox)
        self._sending.add_done_callback(partial(self._on_sent, self._group))

    def _on_sent(self, group: WeightGroup, done: asyncio.Future[None]) -> None:
        if not done.cancelled() and done.exception() is not None and self._group is group:
            # Closes the connections: servers that still wait for data learn of it at once.
            self.close()

    async def load(self, client: WeightClient[T], server: T, meta: WeightUpdateMeta) -> None:
        try:
            await self._load(client, server, meta)
        except HttpError:
            # Another member may have failed: this server is asked again in a group of its own.
            self.close()
            raise

    async def _load(self, client: WeightClient[T], server: T, meta: WeightUpdateMeta) -> None:
        portions = list(TensorLayout.of(get_outbox(self.path)).portions(PORTION_BYTES))
        await client.receive(server, meta, self._name, portions)

    async def _form_group(self, client: WeightClient[T], servers: Sequence[T]) -> WeightGroup:
        self.close()
        is_local = all(s.address.startswith(("127.", "localhost")) for s in servers)
        address = "127.0.0.1" if is_local else host_address()
        self._name, port = f"weights-{uuid.uuid4().hex[:8]}", free_port(address)
        size = 1 + sum(s.num_ranks for s in servers)
        on_gpu = all(s.receives_on_gpu for s in servers) and torch.cuda.is_available()
        device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if on_gpu else "cpu"
        settings: dict[str, Any] = {"master_address": address, "master_port": port, "world_size": size}
        settings |= {"group_name": self._name, "backend": "nccl" if on_gpu else "gloo"}
        make = partial(WeightGroup, address, port, 0, size, self._name, device=device, timeout_s=SEND_TIMEOUT_S)
        own = asyncio.get_running_loop().run_in_executor(None, make)
        joining, rank = [], 1
        for server in servers:
            joining.append(client.join_group(server, settings | {"rank_offset": rank}))
            rank += server.num_ranks
        try:
            await asyncio.gather(*joining)
        except BaseException:
            # Nobody awaits this process's own end any more: read its error, so that asyncio does not report it.
            own.add_done_callback(lambda done: done.cancelled() or done.exception())
            raise
        try:
            return await own
        except RuntimeError as error:
            raise ServerError(f"the servers did not join the group for weights: {error}") from error
