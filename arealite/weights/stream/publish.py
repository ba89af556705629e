"""`StreamTransport`: every trainer rank serves its own shards, servers pull their parts in a tree.

No tensor is gathered, and no rank holds more than its own share: a trainer's rank copies its shards to the host, a
server's rank pulls the slices that it computes with. The first server pulls from the trainer, each further one from
another server (two children each), unit by unit as they arrive. With `delta` a server that holds the version before
gets the changed elements only; one that missed a version gets all.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

from arealite.api.errors import ServerError, WeightUpdateError
from arealite.api.io_struct import WeightUpdateMeta
from arealite.utils import distributed
from arealite.utils.network import host_address
from arealite.weights.fingerprint import Fingerprints, digest, stride
from arealite.weights.layout import dtype_of
from arealite.weights.stream.board import TIMEOUT_S, Board, BoardServer, Connection, Piece
from arealite.weights.stream.pieces import Box, find_changes, sampled_places
from arealite.weights.stream.receive import StreamOrder
from arealite.weights.transport import T, Transport, WeightClient, WeightOwner, Weights

NUM_CHILDREN = 2


class Hub:
    """What trainer rank 0 knows of the servers' ranks: where they listen, and what they have received."""

    def __init__(self) -> None:
        self._change = threading.Condition()
        self._version = -1
        self._addresses: dict[tuple[int, int, int], tuple[int, str]] = {}
        self._failed: set[tuple[int, int]] = set()
        self.reports: dict[tuple[int, int, int], dict[str, Any]] = {}

    def begin(self, version: int) -> None:
        """Forget earlier versions."""
        with self._change:
            if version != self._version:
                self._version = version
                self._addresses.clear()
                self._failed.clear()
                self.reports.clear()

    def register(self, asked: dict[str, Any]) -> dict[str, Any]:
        with self._change:
            self._addresses[_place(asked)] = (int(asked["size"]), str(asked["address"]))
            self._change.notify_all()
        return {}

    def find(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Wait for a server's rank to listen. No address: it has failed, or its parts are others."""
        place = _place(asked)
        with self._change:
            self._change.wait_for(lambda: place in self._addresses or place[:2] in self._failed, TIMEOUT_S / 2)
            size, address = self._addresses.get(place, (0, None))
        return {"address": address if size == int(asked["size"]) else None}

    def report(self, asked: dict[str, Any]) -> dict[str, Any]:
        with self._change:
            self.reports[_place(asked)] = asked
        return {}

    def fail(self, number: int, member: int) -> None:
        """Record that a server will not listen any more."""
        with self._change:
            self._failed.add((number, member))
            self._change.notify_all()


def _place(asked: dict[str, Any]) -> tuple[int, int, int]:
    return int(asked["round"]), int(asked["member"]), int(asked["rank"])


class Publisher:
    """The shards of one trainer rank, for servers to pull. Lives as long as the transport that publishes."""

    def __init__(self) -> None:
        self.board = Board(-1)
        self.hub = Hub()
        self.server: BoardServer | None = None
        self.key = ""
        self.sources: tuple[str, ...] = ()
        # Bytes of the shards of each trainer rank.
        self.sizes: list[int] = []
        self.num_rounds = 0

    def publish(self, owner: WeightOwner, version: int, with_changes: bool) -> None:
        """Copy this rank's shards to the host. Called by all ranks; the first call is collective."""
        if self.server is None:
            self._start(owner)
        # After a failure the pieces are no version, so changes of them would be wrong.
        is_known = self.board.version >= 0 and not self.board.failure
        base = self.board.version if with_changes and is_known else None
        with self.board.writing(version, base), torch.no_grad():
            for name, _, _, shard in owner.local_weights():
                piece = self.board.pieces.get(name)
                if piece is not None:
                    _renew(piece, shard.detach(), base is not None)

    def _start(self, owner: WeightOwner) -> None:
        held = [(name, Box(offset, tuple(t.shape)), t) for name, _, offset, t in owner.local_weights()]
        described = [[name, *map(list, box), t.element_size()] for name, box, t in held]
        size = distributed.world_size()
        owners, self.sizes = _assign([distributed.broadcast_json(described, rank) for rank in range(size)])
        own = distributed.rank()
        for name, shape, offset, shard in owner.local_weights():
            box = Box(offset, tuple(shard.shape))
            if owners[name, box] == own:
                piece = Piece(tuple(shape), box, torch.empty(shard.shape, dtype=shard.dtype))
                piece.cut(is_filled=True)
                self.board.pieces[name] = piece
        self.key = distributed.broadcast_json(secrets.token_hex(16) if own == 0 else None)
        calls = {"register": self.hub.register, "find": self.hub.find, "report": self.hub.report} if own == 0 else None
        self.server = BoardServer(self.board, self.key, host_address(), calls)
        self.sources = tuple(distributed.broadcast_json(self.server.address, rank) for rank in range(size))

    def orders(self, addresses: list[str]) -> dict[str, StreamOrder]:
        """Return the order of each server: a tree in which each has at most `NUM_CHILDREN` children."""
        self.num_rounds += 1
        count, result = len(addresses), {}
        for member, address in enumerate(addresses):
            parent = (member - 1) // NUM_CHILDREN if member else None
            children = range(NUM_CHILDREN * member + 1, min(NUM_CHILDREN * (member + 1) + 1, count))
            result[address] = StreamOrder(
                self.key, self.sources, self.board.version, self.num_rounds, member, parent, len(children)
            )
        return result

    def samples(self) -> dict[str, tuple[torch.Tensor, tuple[int, ...]]]:
        """Return the elements of each tensor that its fingerprint is made of, and its shape."""
        found: dict[str, tuple[torch.Tensor, tuple[int, ...]]] = {}
        for address in self.sources:
            with Connection(address, self.key) as source:
                answer = source.ask("sample", version=self.board.version)
                data, start = source.read_bytes(answer["size"]), 0
            for name, kind, whole, offset, shape, count in answer["samples"]:
                dtype, whole = dtype_of(kind), tuple(whole)
                if name not in found:
                    numel = Box.whole(whole).numel
                    found[name] = torch.empty(-(-numel // stride(numel)), dtype=dtype), whole
                end = start + count * dtype.itemsize
                if count:
                    places, _ = sampled_places(whole, Box.from_json(offset, shape))
                    found[name][0][places] = torch.frombuffer(data[start:end], dtype=dtype)
                start = end
        return found

    def stats(self) -> dict[str, float]:
        """Return statistics of the last update, from what the servers' ranks have reported."""
        reports = list(self.hub.reports.values())
        if not reports:
            return {}
        links = {(n, source): size for n, r in enumerate(reports) for source, size in r["received"].items()}
        sent = sum(size for (_, source), size in links.items() if source in self.sources)
        peaks = [float(report["peak_bytes"]) for report in reports]
        return {
            "weights/sent_bytes": float(sent),
            "weights/link_bytes": float(max(links.values())),
            "weights/peak_bytes": max([*map(float, self.sizes), *peaks]),
            "weights/delta_share": sum(links.values()) / max(1, sum(r["full_bytes"] for r in reports)),
        }


def _assign(held: list[list[list[Any]]]) -> tuple[dict[tuple[str, Box], int], list[int]]:
    """Give each shard to the rank with the fewest bytes among its holders; the same on all ranks."""
    holders: dict[tuple[str, Box], tuple[int, list[int]]] = {}
    for rank, shards in enumerate(held):
        for name, offset, shape, itemsize in shards:
            box = Box.from_json(offset, shape)
            holders.setdefault((name, box), (box.numel * itemsize, []))[1].append(rank)
    sizes = [0] * len(held)
    owners: dict[tuple[str, Box], int] = {}
    for place, (size, ranks) in holders.items():
        owners[place] = min(ranks, key=lambda rank: sizes[rank])
        sizes[owners[place]] += size
    return owners, sizes


def _renew(piece: Piece, shard: torch.Tensor, with_changes: bool) -> None:
    """Copy new values into a piece, unit by unit, and find what has changed."""
    for unit in piece.units:
        new = piece.box.view(shard, unit.box).to("cpu").contiguous()
        unit.changed = find_changes(unit.tensor, new) if with_changes else None
        unit.tensor.copy_(new)


_publishers: dict[str, Publisher] = {}


class StreamTransport(Transport):
    """Streams the shards of all trainer ranks to the ranks of all servers."""

    is_in_process = True

    def __init__(self, path: str):
        super().__init__(path)
        self._has_published = False
        self._orders: dict[str, StreamOrder] = {}
        self._samples: tuple[int, dict[str, tuple[torch.Tensor, tuple[int, ...]]]] = (-1, {})

    @property
    def _publisher(self) -> Publisher:
        if self.path not in _publishers:
            raise WeightUpdateError(
                "nothing was published in this process: call the actor's update_weights first. In controller mode set "
                "rollout.weight_update=disk or broadcast"
            )
        return _publishers[self.path]

    def publish(self, owner: WeightOwner, meta: WeightUpdateMeta) -> None:
        publisher = _publishers.setdefault(self.path, Publisher())
        self._has_published = True
        publisher.publish(owner, meta.version, with_changes=meta.type == "delta")

    def open(self, meta: WeightUpdateMeta) -> Weights:
        """Return the tensors if this process is the only rank."""
        pieces = self._publisher.board.pieces
        if any(piece.box.shape != piece.shape for piece in pieces.values()) or len(self._publisher.sources) > 1:
            raise WeightUpdateError("the weights are divided over ranks: an engine in this process cannot read them")
        return {name: piece.tensor for name, piece in pieces.items()}

    def forget_read(self) -> None:
        super().forget_read()
        self._samples = (-1, {})

    def first_mismatch(self, meta: WeightUpdateMeta, held: Fingerprints) -> str | None:
        if self._samples[0] != meta.version:
            try:
                self._samples = (meta.version, self._publisher.samples())
            except OSError as error:
                raise WeightUpdateError(f"a trainer rank does not answer: {error}") from error
        for name, (sample, shape) in self._samples[1].items():
            if name in held:
                kind, text = held[name]
                if digest(sample.to(dtype_of(kind)), torch.Size(shape)) != text:
                    return name
        return None

    def close(self) -> None:
        if self._has_published:
            publisher = _publishers.pop(self.path, None)
            if publisher is not None and publisher.server is not None:
                publisher.server.close()
        self._has_published = False

    def stats(self) -> dict[str, float]:
        return _publishers[self.path].stats() if self.path in _publishers else {}

    async def connect(self, client: WeightClient[T], servers: Sequence[T]) -> None:
        publisher = self._publisher
        publisher.hub.begin(publisher.board.version)
        # A server may join while others still load.
        self._orders |= publisher.orders([server.address for server in servers])

    async def load(self, client: WeightClient[T], server: T, meta: WeightUpdateMeta) -> None:
        try:
            await super().load(client, server, meta)
        except (ServerError, WeightUpdateError):
            order = self._orders[server.address]
            # Its children then pull from the trainer.
            self._publisher.hub.fail(order.round, order.member)
            raise

    async def _load(self, client: WeightClient[T], server: T, meta: WeightUpdateMeta) -> None:
        await client.load_stream(server, meta, asdict(self._orders[server.address]))
