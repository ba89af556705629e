"""A server rank's side of a stream: pulls its parts of the weights and serves its children.

The parent in the tree of servers is asked first, then the trainer's ranks for whatever is missing: a parent that dies
costs time, not the update. Each rank holds its own parts, and of what is on the way at most one unit per connection.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from arealite.api.errors import WeightUpdateError
from arealite.weights.files import logger
from arealite.weights.layout import dtype_of
from arealite.weights.stream.board import CHANGES, Board, BoardServer, Connection, Piece, Unit
from arealite.weights.stream.pieces import Box, bits, decode_changes, move_indices

# Sources from which a rank pulls at the same time.
_MAX_CONNECTIONS = 8
# A child that died is not waited for longer: the parts that it would pull take memory.
_CHILDREN_S = 120.0
_PORT = re.compile("[0-9]{1,5}")


@dataclass(frozen=True)
class StreamOrder:
    """Tells a server where to get a version of the weights.

    `sources` are the trainer's ranks; the first one also knows where the ranks of other servers listen (`find`).
    `member` is the number of this server in the tree of round `round`, `parent` that of the server it pulls from.
    """

    key: str
    sources: tuple[str, ...]
    version: int
    round: int
    member: int = 0
    parent: int | None = None
    num_children: int = 0

    @classmethod
    def from_json(cls, fields: Any) -> StreamOrder:
        """Read an order; raises `ValueError`, `TypeError` or `KeyError` for anything else."""
        parent, sources = fields["parent"], tuple(map(str, fields["sources"]))
        numbers = {name: int(fields[name]) for name in ("version", "round", "member", "num_children")}
        ports = [source.rpartition(":")[2] for source in sources]
        if not sources or not all(_PORT.fullmatch(port) and int(port) < 1 << 16 for port in ports):
            raise ValueError(f"sources must be host:port of the trainer's ranks, got {sources!r:.200}")
        return cls(str(fields["key"]), sources, parent=None if parent is None else int(parent), **numbers)


class Wanted(NamedTuple):
    """A part of a tensor that this rank needs, and its present value. An optional one need not be sent."""

    shape: tuple[int, ...]
    box: Box
    held: torch.Tensor
    is_optional: bool = False


class Receiver:
    """One update of one of the `size` ranks of a server. `base`: the version of what it holds."""

    def __init__(self, order: StreamOrder, wanted: Mapping[str, Wanted], base: int | None, rank: int, size: int):
        self.order, self.wanted, self.base = order, wanted, base
        self.place = {"round": order.round, "rank": rank, "size": size}
        self.board = Board(order.version)
        self.server: BoardServer | None = None
        self.received: dict[str, int] = {}
        self._buffers, self._peak_buffers = 0, 0
        self._lock = threading.Lock()

    def run(self) -> dict[str, torch.Tensor]:
        """Return the parts of all tensors once they are there."""
        order, is_complete = self.order, False
        try:
            parent = None
            if order.parent is not None:
                parent = self._ask_hub("find", member=order.parent)["address"]
            if parent is not None:
                try:
                    self._pull([parent])
                except (OSError, WeightUpdateError) as error:
                    logger.warning("weights of version %d: the parent %s failed: %s", order.version, parent, error)
                    self.board.restart()
            self._pull(list(order.sources))
            self._ask_hub("report", member=order.member, **self._report())
            is_complete = True
        except (OSError, ValueError, KeyError, TypeError) as error:
            problem = f"the stream of version {order.version} broke off: {error!r}. The old weights are still served"
            raise WeightUpdateError(problem) from error
        finally:
            if not is_complete:
                # Children must not wait for what will never come.
                self.board.fail(f"the server that should send version {order.version} has failed")
                self.close()
        if self.server is not None:
            threading.Thread(target=self._serve_children, name="weight stream", daemon=True).start()
        return {name: piece.tensor for name, piece in self.board.pieces.items()}

    def close(self) -> None:
        """Stop serving the parts to children."""
        if self.server is not None:
            self.server.close()

    def _serve_children(self) -> None:
        assert self.server is not None
        self.server.wait_done(self.order.num_children, _CHILDREN_S)
        self.server.close()

    def _ask_hub(self, op: str, **fields: Any) -> dict[str, Any]:
        with Connection(self.order.sources[0], self.order.key) as hub:
            return hub.ask(op, **self.place, **fields)

    def _pull(self, addresses: list[str]) -> None:
        """Pull what is still missing from these addresses."""
        if self.board.pieces and not any(unit.missing > 0 for _, unit in self._units()):
            return
        layouts, own_host = [], ""
        for address in addresses:
            with Connection(address, self.order.key) as source:
                layouts.append(source.ask("layout", version=self.order.version))
                own_host = own_host or source.local_host
        if not self.board.pieces:
            self._prepare(layouts)
            self._listen(own_host)
        plans = [self._plan(layout["pieces"]) for layout in layouts]
        # A source gives up a silent connection, so each is opened when its turn has come.
        with ThreadPoolExecutor(_MAX_CONNECTIONS, thread_name_prefix="weight pull") as pool:
            futures = [pool.submit(self._pull_from, *pair) for pair in zip(addresses, plans, strict=True)]
            for future in futures:
                future.result()
        lacking = next((name for name, unit in self._units() if unit.missing > 0), None)
        if lacking is not None:
            raise WeightUpdateError(f"nobody sends all of {lacking}: it is not a model of the served kind")

    def _units(self) -> list[tuple[str, Unit]]:
        return [(name, unit) for name, piece in self.board.pieces.items() for unit in piece.units]

    def _prepare(self, layouts: list[dict[str, Any]]) -> None:
        """Allocate this rank's parts; with the present values if only changes are to come."""
        kinds = {name: (dtype_of(k), tuple(s)) for layout in layouts for name, (k, s, _) in layout["pieces"].items()}
        # Every source has its pieces of the same version, and thus the same base. Changes are bits of one dtype.
        takes_changes = self.base is not None and layouts[0]["base"] == self.base
        takes_changes &= all(w.held.dtype == kinds[n][0] for n, w in self.wanted.items() if n in kinds)
        self.board.base = self.base if takes_changes else None
        for name, wanted in self.wanted.items():
            if name not in kinds:
                if wanted.is_optional:
                    continue
                raise WeightUpdateError(f"the stream lacks {name}: it is not of this model")
            dtype, shape = kinds[name]
            if shape != wanted.shape or not dtype.is_floating_point:
                raise WeightUpdateError(f"{name} is {dtype} {list(shape)}, expected {list(wanted.shape)}")
            if takes_changes:
                tensor = wanted.held.detach().to("cpu", copy=True).contiguous()
            else:
                tensor = torch.empty(wanted.box.shape, dtype=dtype)
            piece = self.board.pieces[name] = Piece(shape, wanted.box, tensor)
            piece.cut(is_filled=False)

    def _listen(self, host: str) -> None:
        if self.order.num_children:
            self.server = BoardServer(self.board, self.order.key, host)
            self._ask_hub("register", member=self.order.member, address=self.server.address)

    def _plan(self, held: dict[str, Any]) -> list[tuple[str, int, Unit, Box]]:
        """List what to pull from a source: name, number of its unit, our unit, and their meeting."""
        plan = []
        for name, unit in self._units():
            if unit.missing <= 0 or name not in held:
                continue
            for number, (offset, shape) in enumerate(held[name][2]):
                box = unit.box.meet(Box.from_json(offset, shape))
                if box is not None:
                    plan.append((name, number, unit, box))
        return plan

    def _pull_from(self, address: str, plan: list[tuple[str, int, Unit, Box]]) -> None:
        boxes = [[name, number, *map(list, box)] for name, number, _, box in plan]
        with Connection(address, self.order.key) as source:
            source.tell("pull", version=self.order.version, base=self.board.base, boxes=boxes)
            for name, _, unit, box in plan:
                header = source.read()
                self._take(source, self.board.pieces[name], unit, box, int(header["mode"]), int(header["size"]))
            source.tell("done")
        with self._lock:
            self.received[address] = self.received.get(address, 0) + source.num_bytes

    def _take(self, source: Connection, piece: Piece, unit: Unit, box: Box, mode: int, size: int) -> None:
        """Receive one part of a unit into its place."""
        dtype, target = piece.tensor.dtype, unit.box.view(unit.tensor, box)
        full = box.numel * dtype.itemsize
        if size > full + 64 or (mode != CHANGES and size != full):
            raise ValueError(f"{size} bytes for {full} bytes of weights")
        if mode == CHANGES:
            with self._buffer(size):
                index, values = decode_changes(bytes(source.read_bytes(size)), dtype, box)
            _, index = move_indices(index, box, unit.box)
            bits(unit.tensor).numpy()[index.numpy()] = bits(values).numpy()
            self.board.add(unit, box.numel, index)
            return
        if target.is_contiguous():
            source.read_into(target.reshape(-1).view(torch.uint8).numpy().data)
        else:
            with self._buffer(size):
                buffer = torch.empty(size, dtype=torch.uint8)
                source.read_into(buffer.numpy().data)
                target.copy_(buffer.view(dtype).view(box.shape))
        self.board.add(unit, box.numel, None)

    def _buffer(self, size: int) -> _Counted:
        return _Counted(self, size)

    def _count(self, size: int) -> None:
        with self._lock:
            self._buffers += size
            self._peak_buffers = max(self._peak_buffers, self._buffers)

    def _report(self) -> dict[str, Any]:
        size = self.board.size_bytes
        return {"received": self.received, "full_bytes": size, "peak_bytes": size + self._peak_buffers}


class _Counted:
    """Counts the bytes of a buffer while it exists."""

    def __init__(self, receiver: Receiver, size: int):
        self.receiver, self.size = receiver, size

    def __enter__(self) -> None:
        self.receiver._count(self.size)

    def __exit__(self, *_: object) -> None:
        self.receiver._count(-self.size)
