"""Weights over a process group: the trainer's rank 0 broadcasts its outbox, servers receive.

The group is formed as torch forms its own (same keys in the store), so the other side may be SGLang. It is independent
of the trainer's groups, so servers may come and go: another set of servers gets another group. gloo on CPU, NCCL on
CUDA.
"""

import asyncio
import os
import socket
import threading
import uuid
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from arealite.api.errors import ServerError, WeightUpdateError
from arealite.api.io_struct import WeightUpdateMeta
from arealite.utils import distributed
from arealite.utils.beside import run_beside
from arealite.utils.network import free_port, host_address
from arealite.weights.layout import TensorLayout
from arealite.weights.transport import T, Transport, WeightClient, WeightOwner, Weights

# torch's type stubs do not export the stores and process groups.
_c10d: Any = dist

PORTION_BYTES = 256 << 20
JOIN_TIMEOUT_S = 20.0
# For one tensor. A process that dies closes its connections; these limits are for one that hangs.
SEND_TIMEOUT_S = 60.0
RECEIVE_TIMEOUT_S = 300.0
# A machine that is cut off takes nothing: a tensor must be sent within this time, and more for its size.
STALL_TIMEOUT_S = 15.0
MIN_BYTES_PER_S = 10e6


class Outbox(dict[str, torch.Tensor]):
    """The weights that a trainer last published for a broadcast, by name, once, on the host of rank 0.

    One thread fills it while another one may already send what is there. A server that joins late is served from it
    too.
    """

    def __init__(self) -> None:
        self._change = threading.Condition()
        self._awaited: set[str] = set()
        self._failure: BaseException | None = None

    def expect(self) -> None:
        """Make `take` wait for new tensors from now on."""
        self._awaited, self._failure = set(self), None

    def fill(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy new tensors into the outbox, in place where dtype and shape are the same."""
        self.expect()
        try:
            for name, tensor in tensors:
                held = self.get(name)
                if held is None or held.shape != tensor.shape or held.dtype != tensor.dtype:
                    self[name] = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
                self[name].copy_(tensor.detach())
                with self._change:
                    self._awaited.discard(name)
                    self._change.notify_all()
        except BaseException as error:
            self._failure = error
            raise
        finally:
            with self._change:
                self._change.notify_all()

    def take(self, names: Iterable[str], timeout_s: float) -> list[torch.Tensor]:
        """Return these tensors as soon as the new ones are there."""
        names = list(names)

        def is_over() -> bool:
            return self._failure is not None or not self._awaited.intersection(names)

        with self._change:
            if not self._change.wait_for(is_over, timeout_s):
                raise RuntimeError(f"{names[0]} was not gathered within {timeout_s:g} s")
        if self._failure is not None:
            raise RuntimeError("the trainer could not gather its weights") from self._failure
        return [self[name] for name in names]


_outboxes: dict[str, Outbox] = {}


def fill_outbox(name: str, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Publish tensors in the outbox `name`."""
    _outboxes.setdefault(name, Outbox()).fill(tensors)


def get_outbox(name: str) -> Outbox:
    """Return the outbox `name` of this process; an empty one if nothing was published there."""
    return _outboxes.get(name, Outbox())


@dataclass(frozen=True)
class GroupSettings:
    """A group, as HTTP endpoints describe it to a server. `rank_offset` is the first rank of that server."""

    master_address: str
    master_port: int
    world_size: int
    rank_offset: int
    group_name: str
    backend: str = "gloo"


class WeightGroup:
    """One sender (rank 0) and its receivers.

    The constructor returns when all have joined (NCCL: joining ends with the first transfer). `timeout_s` limits each
    transfer.
    """

    def __init__(self, settings: GroupSettings, rank: int, timeout_s: float, device: str | torch.device = "cpu"):
        self._device = torch.device(device)
        self._timeout, joining = timedelta(seconds=timeout_s), timedelta(seconds=JOIN_TIMEOUT_S)
        address, port = settings.master_address, settings.master_port
        name, size = settings.group_name, settings.world_size
        # The master's end of the store must live as long as the group.
        self._store = _make_store(address, port, size, rank == 0, joining)
        keys = _c10d.PrefixStore(f"{name}/", _c10d.PrefixStore(name, self._store))
        keys = _c10d.PrefixStore(f"{self._device.type}/", keys)
        if self._device.type == "cuda":
            options = _c10d.ProcessGroupNCCL.Options()
            options._timeout = self._timeout
            self._group = _c10d.ProcessGroupNCCL(keys, rank, size, options)
        else:
            self._group = _c10d.ProcessGroupGloo(keys, rank, size, _gloo_options(address, joining))

    def send(self, outbox: Outbox) -> None:
        """Broadcast the outbox in portions, each as soon as it is filled."""
        for portion in TensorLayout.of(outbox).portions(PORTION_BYTES):
            tensors = outbox.take(portion.specs, self._timeout.total_seconds())
            self._broadcast([tensor.contiguous().to(self._device) for tensor in tensors], STALL_TIMEOUT_S)

    def receive(self, layout: TensorLayout) -> Weights:
        """Receive the tensors that rank 0 sends next."""
        tensors = layout.allocate(self._device)
        self._broadcast(list(tensors.values()), self._timeout.total_seconds())
        return tensors

    def _broadcast(self, tensors: list[torch.Tensor], timeout_s: float) -> None:
        pending = []
        for tensor in tensors:
            options = dist.BroadcastOptions()
            options.rootRank, options.rootTensor = 0, 0
            options.timeout = timedelta(seconds=timeout_s + tensor.nbytes / MIN_BYTES_PER_S)
            pending.append(self._group.broadcast([tensor], options))
        for work in pending:
            work.wait()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _make_store(address: str, port: int, size: int, is_master: bool, timeout: timedelta) -> Any:
    """Open the master's end of a store, or connect to it.

    By default the master listens on all addresses of the machine.
    """
    options: dict[str, Any] = {"timeout": timeout, "wait_for_workers": False}
    if is_master:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        # The store owns the descriptor.
        options["master_listen_fd"] = socket.create_server((address, port), family=family).detach()
    return _c10d.TCPStore(address, port, size, is_master=is_master, **options)


def _gloo_options(master_address: str, timeout: timedelta) -> Any:
    """Have gloo listen where the master's network is.

    By default it listens on the address of the host name, which on many machines is a loopback address.
    """
    options = _c10d.ProcessGroupGloo._Options()
    options._timeout = timeout
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    place = {"interface": interface} if interface else {"hostname": host_address(master_address)}
    options._devices = [_c10d.ProcessGroupGloo.create_device(**place)]
    return options


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
        if distributed.rank() == 0:
            fill_outbox(self.path, owner.gather_weights())
        else:
            # Other ranks only take part in gathering.
            deque(owner.gather_weights(), maxlen=0)

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
        except ServerError:
            # This member or another one has failed. Servers that wait for its part are asked again in groups of their
            # own, as soon as the connections of this group close.
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
        settings = GroupSettings(address, port, size, 1, self._name, "nccl" if on_gpu else "gloo")
        # gloo waits without a limit for a member that is cut off now. That must not keep the process from ending.
        own = asyncio.ensure_future(run_beside(partial(WeightGroup, settings, 0, SEND_TIMEOUT_S, device)))
        joining, rank = [], 1
        for server in servers:
            joining.append(client.join_group(server, asdict(replace(settings, rank_offset=rank))))
            rank += server.num_ranks
        try:
            await asyncio.gather(*joining)
        except BaseException:
            # `own` is not awaited any more: read its error, so that asyncio does not report it.
            own.add_done_callback(lambda done: done.cancelled() or done.exception())
            raise
        try:
            return await asyncio.wait_for(own, JOIN_TIMEOUT_S)
        except (RuntimeError, TimeoutError) as error:
            raise ServerError(f"the servers did not join the group for weights: {error!r}") from error
