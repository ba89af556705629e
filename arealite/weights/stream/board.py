"""`Board`: the pieces of weights that a rank holds for others, and the server of them.

A trainer's rank fills its board at once, a server's rank unit by unit while its own children already pull: that makes
the tree of servers a pipeline. Frames are JSON with a length before it; tensors follow as bytes, nothing is unpickled.
Every connection begins with the key of the stream, which only the processes of the job know.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from arealite.api.errors import WeightUpdateError
from arealite.weights.stream.pieces import UNIT_BYTES, Box, bits, encode_changes, move_indices, sampled_places

# For one answer. A process that dies closes its connections; this limit is for one that hangs.
TIMEOUT_S = 60.0
_MAX_FRAME_BYTES = 64 << 20
FULL, CHANGES = 0, 1


@dataclass
class Unit:
    """Rows of a piece.

    `changed`: indices that differ from the version before; None if they are not known. `missing` elements are still to
    arrive. `arrived` has the changes of each part so far, None for a full part.
    """

    box: Box
    tensor: torch.Tensor
    changed: torch.Tensor | None = None
    missing: int = 0
    arrived: list[torch.Tensor | None] = field(default_factory=list)


@dataclass
class Piece:
    """This rank's part of a tensor, and its units."""

    shape: tuple[int, ...]
    box: Box
    tensor: torch.Tensor
    units: list[Unit] = field(default_factory=list)

    def cut(self, is_filled: bool) -> None:
        """Cut the piece into units."""
        itemsize, numel = self.tensor.element_size(), self.box.numel
        boxes = self.box.rows(itemsize, UNIT_BYTES) if numel else iter(())
        self.units = [
            Unit(box, self.box.view(self.tensor, box), missing=0 if is_filled else box.numel) for box in boxes
        ]


class Board:
    """Pieces by name. `base` is the version to which `changed` of the units refers."""

    def __init__(self, version: int, base: int | None = None):
        self.version, self.base = version, base
        self.pieces: dict[str, Piece] = {}
        self.change = threading.Condition()
        self.failure = ""
        self._num_readers = 0

    @property
    def size_bytes(self) -> int:
        return sum(piece.tensor.numel() * piece.tensor.element_size() for piece in self.pieces.values())

    def layout(self) -> dict[str, Any]:
        """Describe the units that this board holds or will hold."""
        names = {
            name: [str(p.tensor.dtype).removeprefix("torch."), list(p.shape), [list(map(list, u.box)) for u in p.units]]
            for name, p in self.pieces.items()
        }
        return {"base": self.base, "pieces": names}

    @contextmanager
    def reading(self, version: int) -> Iterator[None]:
        """Wait until the board holds `version`; it is not changed within the block."""
        with self.change:
            self.change.wait_for(lambda: self.version >= version or self.failure, TIMEOUT_S)
            if self.failure or self.version != version:
                raise WeightUpdateError(self.failure or f"version {self.version} is published, not {version}")
            self._num_readers += 1
        try:
            yield
        finally:
            with self.change:
                self._num_readers -= 1
                self.change.notify_all()

    @contextmanager
    def writing(self, version: int, base: int | None) -> Iterator[None]:
        """Change all pieces to a new version, once nobody reads the old one."""
        with self.change:
            if not self.change.wait_for(lambda: self._num_readers == 0, TIMEOUT_S):
                raise WeightUpdateError(f"servers still read version {self.version} after {TIMEOUT_S:.0f} s")
            # If the block raises, the pieces are of two versions: nobody may read them.
            self.failure = f"version {version} was published in part only"
            yield
            self.failure, self.version, self.base = "", version, base
            self.change.notify_all()

    def add(self, unit: Unit, count: int, changed: torch.Tensor | None) -> None:
        """Record that `count` more elements of a unit are there, of which these were `changed`."""
        with self.change:
            unit.missing -= count
            unit.arrived.append(changed)
            if unit.missing > 0:
                return
            parts, unit.arrived = unit.arrived, []
            known = [part for part in parts if part is not None]
            if len(known) == len(parts):
                unit.changed = known[0] if len(known) == 1 else torch.cat(known).sort().values
            self.change.notify_all()

    def restart(self) -> None:
        """Forget the parts of units that are not complete: they come from elsewhere."""
        for piece in self.pieces.values():
            for unit in piece.units:
                if unit.missing > 0:
                    unit.missing, unit.arrived = unit.box.numel, []

    def fail(self, reason: str) -> None:
        with self.change:
            self.failure = reason
            self.change.notify_all()

    def take(self, name: str, number: int, box: Box, with_changes: bool) -> tuple[int, bytes | torch.Tensor]:
        """Return a part of a unit once it is there: its bytes, or its changes if these are known."""
        unit = self.pieces[name].units[number]
        with self.change:
            if not self.change.wait_for(lambda: unit.missing <= 0 or self.failure, TIMEOUT_S) or self.failure:
                raise WeightUpdateError(self.failure or f"{name} did not arrive within {TIMEOUT_S:.0f} s")
        if unit.box.meet(box) != box:
            raise WeightUpdateError(f"{name}: {box} is not in {unit.box}")
        part = unit.box.view(unit.tensor, box).contiguous()
        if with_changes and unit.changed is not None:
            _, index = move_indices(unit.changed.long(), unit.box, box)
            return CHANGES, encode_changes(index, part.reshape(-1)[index])
        return FULL, bits(part).view(torch.uint8)

    def sample(self) -> tuple[list[list[Any]], bytes]:
        """Return the elements that fingerprints are made of: what they belong to, and their bytes."""
        described, data = [], []
        for name, piece in self.pieces.items():
            _, index = sampled_places(piece.shape, piece.box)
            values = piece.tensor.reshape(-1)[index]
            kind = str(piece.tensor.dtype).removeprefix("torch.")
            described.append([name, kind, list(piece.shape), *map(list, piece.box), len(index)])
            data.append(bits(values).view(torch.uint8).numpy().tobytes())
        return described, b"".join(data)


Handler = Callable[[dict[str, Any]], dict[str, Any]]


class BoardServer:
    """Serves a board on a port until `close`. `calls` answers further operations by name."""

    def __init__(self, board: Board, key: str, host: str, calls: dict[str, Handler] | None = None):
        self.board, self._key, self._calls = board, key.encode(), calls or {}
        self._socket = socket.create_server((host, 0), backlog=128)
        self.address = "{}:{}".format(*self._socket.getsockname()[:2])
        self.num_done = 0
        self.done = threading.Condition()
        threading.Thread(target=self._accept, name="weight stream", daemon=True).start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            # Wakes the thread that accepts.
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def wait_done(self, count: int, timeout_s: float) -> None:
        """Wait until so many connections have everything they want."""
        with self.done:
            self.done.wait_for(lambda: self.num_done >= count, timeout_s)

    def _accept(self) -> None:
        while True:
            try:
                peer, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(peer,), name="weight stream", daemon=True).start()

    def _serve(self, peer: socket.socket) -> None:
        # A peer that ends closes its connection, and one without the key is not answered.
        with peer, contextlib.suppress(OSError, ValueError, KeyError, TypeError, IndexError):
            wait_in_kernel(peer)
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if not hmac.compare_digest(read_exactly(peer, len(self._key)), self._key):
                return
            while True:
                self._answer(peer, read_frame(peer))

    def _answer(self, peer: socket.socket, asked: dict[str, Any]) -> None:
        try:
            if asked["op"] in self._calls:
                send_frame(peer, self._calls[asked["op"]](asked))
            elif asked["op"] == "done":
                with self.done:
                    self.num_done += 1
                    self.done.notify_all()
            else:
                with self.board.reading(int(asked["version"])):
                    getattr(self, f"_send_{asked['op']}", self._refuse)(peer, asked)
        except WeightUpdateError as error:
            send_frame(peer, {"error": str(error)})
            raise ConnectionAbortedError from error

    def _refuse(self, peer: socket.socket, asked: dict[str, Any]) -> None:
        raise WeightUpdateError(f"unknown operation {asked['op']!r:.40}")

    def _send_layout(self, peer: socket.socket, asked: dict[str, Any]) -> None:
        send_frame(peer, self.board.layout())

    def _send_pull(self, peer: socket.socket, asked: dict[str, Any]) -> None:
        with_changes = asked["base"] is not None and asked["base"] == self.board.base
        for name, number, offset, shape in asked["boxes"]:
            mode, data = self.board.take(name, int(number), Box.from_json(offset, shape), with_changes)
            raw = data.numpy().data if isinstance(data, torch.Tensor) else data
            send_frame(peer, {"mode": mode, "size": len(raw)})
            peer.sendall(raw)

    def _send_sample(self, peer: socket.socket, asked: dict[str, Any]) -> None:
        described, data = self.board.sample()
        send_frame(peer, {"samples": described, "size": len(data)})
        peer.sendall(data)


class Connection:
    """The asking end of a connection to a `BoardServer`. Counts the bytes of weights that it receives."""

    def __init__(self, address: str, key: str):
        self.address, self.num_bytes = address, 0
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), TIMEOUT_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        wait_in_kernel(self._socket)
        self._socket.sendall(key.encode())

    @property
    def local_host(self) -> str:
        """The address of this end."""
        return self._socket.getsockname()[0]

    def ask(self, op: str, **fields: Any) -> dict[str, Any]:
        """Send a request and return the first frame of the answer."""
        self.tell(op, **fields)
        return self.read()

    def tell(self, op: str, **fields: Any) -> None:
        send_frame(self._socket, {"op": op, **fields})

    def read(self) -> dict[str, Any]:
        answer = read_frame(self._socket)
        if "error" in answer:
            raise WeightUpdateError(f"{self.address}: {answer['error']}")
        return answer

    def read_into(self, buffer: memoryview) -> None:
        read_into(self._socket, buffer)
        self.num_bytes += len(buffer)

    def read_bytes(self, size: int) -> bytearray:
        buffer = bytearray(size)
        self.read_into(memoryview(buffer))
        return buffer

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def wait_in_kernel(peer: socket.socket) -> None:
    """Give a socket its time limit in the kernel: then one call receives a whole unit.

    Python would return after each packet, and wait for its lock each time while another thread generates.
    """
    peer.settimeout(None)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        peer.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(TIMEOUT_S), 0))


def send_frame(peer: socket.socket, fields: dict[str, Any]) -> None:
    text = json.dumps(fields, separators=(",", ":")).encode()
    peer.sendall(len(text).to_bytes(8, "little") + text)


def read_frame(peer: socket.socket) -> dict[str, Any]:
    size = int.from_bytes(read_exactly(peer, 8), "little")
    if size > _MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {size} bytes")
    return json.loads(read_exactly(peer, size))


def read_exactly(peer: socket.socket, size: int) -> bytes:
    buffer = bytearray(size)
    read_into(peer, memoryview(buffer))
    return bytes(buffer)


def read_into(peer: socket.socket, buffer: memoryview) -> None:
    """Fill the buffer; raises `OSError` if the peer closes or is silent."""
    received = 0
    while received < len(buffer):
        count = peer.recv_into(buffer[received:], 0, socket.MSG_WAITALL)
        if not count:
            raise ConnectionError("the connection was closed")
        received += count
