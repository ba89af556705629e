"""Weights in a stream: any layout to any other, in a tree, with changes alone, without a whole model anywhere."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from arealite.api.errors import WeightUpdateError
from arealite.weights.fingerprint import fingerprints
from arealite.weights.stream import board, pieces, publish, receive
from arealite.weights.stream.pieces import Box, decode_changes, encode_changes, find_changes, move_indices
from arealite.weights.stream.publish import Publisher, StreamTransport
from arealite.weights.stream.receive import Receiver, Wanted


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn])
@pytest.mark.parametrize("share", [0.0, 0.001, 0.1])
def test_changes_restore_every_bit(dtype, share):
    torch.manual_seed(0)
    old = torch.randn(300, 40).to(dtype)
    new, count = old.clone(), int(share * old.numel())
    places = torch.randperm(old.numel())[:count]
    new.view(-1).view(torch.uint8).view(-1, dtype.itemsize)[places, 0] ^= 1
    index = find_changes(old, new)
    assert index is not None and len(index) == count
    data = encode_changes(index, new.reshape(-1)[index.long()])
    found, values = decode_changes(data, dtype, Box.whole(old.shape))
    old.view(-1)[found] = values
    assert torch.equal(old.view(torch.uint8), new.view(torch.uint8))
    assert len(data) < 64 + count * (3 + dtype.itemsize)


def test_changes_that_do_not_fit_are_refused():
    data = encode_changes(torch.tensor([3, 90_000]), torch.ones(2))
    assert decode_changes(data, torch.float32, Box.whole((90_001,)))[0].tolist() == [3, 90_000]
    fits = (90_001,)
    for shape, bad in (((9,), data), (fits, data[:-9]), (fits, data[:8] + b"\x07" + data[9:]), (fits, data[:9] + data)):
        with pytest.raises(ValueError, match="change"):
            decode_changes(bad, torch.float32, Box.whole(shape))


def test_indices_move_between_boxes():
    whole, part = Box.whole((4, 6)), Box((1, 2), (2, 3))
    tensor = torch.arange(24).view(4, 6)
    inside, index = move_indices(torch.arange(24), whole, part)
    assert torch.equal(tensor.view(-1)[inside], whole.view(tensor, part).reshape(-1))
    assert index.tolist() == list(range(6))
    assert torch.equal(move_indices(index, part, whole)[1], tensor.view(-1)[inside])
    assert [b.shape for b in whole.rows(4, 50)] == [(2, 6), (2, 6)]
    assert Box((0, 0), (1, 2)).meet(part) is None


class Owner:
    """One trainer rank that holds these boxes of the tensors."""

    def __init__(self, tensors, boxes):
        self.tensors, self.boxes = tensors, boxes

    def local_weights(self):
        for name, box in self.boxes.items():
            whole = self.tensors[name]
            yield name, tuple(whole.shape), box.offset, Box.whole(whole.shape).view(whole, box)


SHAPES = {"embed": (40, 8), "up": (24, 8), "down": (8, 24), "norm": (8,), "scale": ()}
# The dimension along which two ranks of a server cut each tensor.
DIMS = {"up": 0, "down": 1}
# Trainer ranks: a tensor-parallel pair, sharded by rows elsewhere; norms are on both.
TRAINERS = [
    {"embed": Box((0, 0), (20, 8)), "up": Box((0, 0), (24, 4)), "down": Box((0, 0), (3, 24)), "norm": Box((0,), (8,))},
    {"embed": Box((20, 0), (20, 8)), "up": Box((0, 4), (24, 4)), "down": Box((3, 0), (5, 24)), "norm": Box((0,), (8,)),
     "scale": Box((), ())},
]  # fmt: skip


class Trainer:
    """Trainer ranks in this process: what `Publisher._start` agrees on by collectives is set here."""

    def __init__(self, monkeypatch, dtype=torch.bfloat16):
        torch.manual_seed(0)
        self.tensors = {name: torch.randn(shape).to(dtype) for name, shape in SHAPES.items()}
        self.owners = [Owner(self.tensors, boxes) for boxes in TRAINERS]
        self.ranks = [Publisher() for _ in TRAINERS]
        described = [
            [[name, *map(list, box), dtype.itemsize] for name, box in owner.boxes.items()] for owner in self.owners
        ]
        owned, sizes = publish._assign(described)
        for number, (rank, owner) in enumerate(zip(self.ranks, self.owners, strict=True)):
            for name, shape, offset, shard in owner.local_weights():
                if owned[name, Box(offset, tuple(shard.shape))] == number:
                    piece = board.Piece(
                        tuple(shape), Box(offset, tuple(shard.shape)), torch.empty_like(shard).contiguous()
                    )
                    piece.cut(is_filled=True)
                    rank.board.pieces[name] = piece
            rank.key, rank.sizes = "k" * 32, sizes
            hub = self.ranks[0].hub
            calls = {"register": hub.register, "find": hub.find, "report": hub.report}
            rank.server = board.BoardServer(rank.board, rank.key, "127.0.0.1", calls)
        for rank in self.ranks:
            rank.sources = tuple(r.server.address for r in self.ranks)

    def publish(self, version, with_changes=False):
        for rank, owner in zip(self.ranks, self.owners, strict=True):
            rank.publish(owner, version, with_changes)
        self.ranks[0].hub.begin(version)

    def close(self):
        for rank in self.ranks:
            rank.server.close()


@pytest.fixture
def trainer(monkeypatch):
    monkeypatch.setattr(board, "UNIT_BYTES", 64)
    monkeypatch.setattr(board, "TIMEOUT_S", 20.0)
    trainer = Trainer(monkeypatch)
    yield trainer
    trainer.close()


class Server:
    """A server with several ranks: only what a stream needs of it."""

    def __init__(self, num_ranks):
        self.parts, self.base = [{} for _ in range(num_ranks)], None
        self.receivers = []

    def wanted(self, rank, held):
        size, found = len(self.parts), {}
        for name, shape in SHAPES.items():
            offset, part, dim = [0] * len(shape), list(shape), DIMS.get(name)
            if dim is not None:
                part[dim] //= size
                offset[dim] = rank * part[dim]
            found[name] = Wanted(shape, Box(tuple(offset), tuple(part)), held.get(name, torch.empty(part)))
        return found

    def pull(self, order):
        size = len(self.parts)
        self.receivers = [
            Receiver(order, self.wanted(rank, self.parts[rank]), self.base, rank, size) for rank in range(size)
        ]
        with ThreadPoolExecutor(size) as pool:
            self.parts = list(pool.map(Receiver.run, self.receivers))
        self.base = order.version

    def whole(self, name):
        dim = DIMS.get(name)
        return self.parts[0][name] if dim is None else torch.cat([part[name] for part in self.parts], dim)


def update(trainer, servers, skip=()):
    orders = trainer.ranks[0].orders([str(n) for n in range(len(servers))])
    with ThreadPoolExecutor(len(servers)) as pool:
        futures = [pool.submit(s.pull, orders[str(n)]) for n, s in enumerate(servers) if n not in skip]
        for future in futures:
            future.result(60)


def check(trainer, servers):
    for server in servers:
        for name, tensor in trainer.tensors.items():
            assert torch.equal(server.whole(name), tensor), name


def test_five_servers_get_every_bit_and_no_rank_holds_the_model(trainer):
    servers = [Server(2) for _ in range(4)] + [Server(1)]
    trainer.publish(1)
    update(trainer, servers)
    check(trainer, servers)
    size = sum(t.numel() * t.element_size() for t in trainer.tensors.values())
    hub, stats = trainer.ranks[0].hub, trainer.ranks[0].stats()
    divided = {place: report for place, report in hub.reports.items() if report["size"] == 2}
    assert len(divided) == 8
    cut = sum(trainer.tensors[name].nbytes for name in DIMS)
    for report in divided.values():
        assert report["full_bytes"] == size - cut // 2
        assert report["peak_bytes"] <= size - cut // 2 + 2 * 64 < size
    assert all(sum(p.tensor.nbytes for p in rank.board.pieces.values()) <= 0.7 * size for rank in trainer.ranks)
    # The trainer sends to the first server, and to the last one, which is divided in another way.
    assert stats["weights/sent_bytes"] == 2 * (size - cut // 2) + size
    assert stats["weights/delta_share"] == 1.0


def test_changes_alone_travel_down_the_tree_and_a_server_that_missed_a_version_gets_all(trainer):
    servers = [Server(2) for _ in range(3)]
    trainer.publish(1, with_changes=True)
    update(trainer, servers)
    trainer.tensors["embed"][7, 3] = 9.0
    trainer.tensors["down"][1, 20] = 9.0
    servers[1].base = 0  # as if it had not got version 1
    trainer.publish(2, with_changes=True)
    update(trainer, servers)
    check(trainer, servers)
    received = [sum(r.received.values()) for s in servers for r in s.receivers]
    full = trainer.ranks[0].hub.reports[2, 0, 0]["full_bytes"]
    assert received[2] == received[3] == full
    assert all(size < full for size in received[:2] + received[4:])


def test_many_changes_are_sent_in_full(trainer):
    server = Server(1)
    trainer.publish(1, with_changes=True)
    update(trainer, [server])
    for tensor in trainer.tensors.values():
        tensor.mul_(-1)
    trainer.publish(2, with_changes=True)
    update(trainer, [server])
    check(trainer, [server])
    assert trainer.ranks[0].stats()["weights/delta_share"] == 1.0


def test_children_of_a_server_that_fails_get_their_weights_from_the_trainer(trainer, monkeypatch):
    trainer.publish(1)
    servers = [Server(2) for _ in range(3)]
    monkeypatch.setattr(publish, "TIMEOUT_S", 1.0)  # for a parent that never listens
    update(trainer, servers, skip=[0])
    check(trainer, servers[1:])
    # A parent that listens, and dies before it has everything.
    orders = trainer.ranks[0].orders(["0", "1"])
    lazy = Receiver(orders["0"], servers[1].wanted(0, {}), None, 0, 1)
    layout = trainer.ranks[1].board.layout()
    lazy._prepare([trainer.ranks[0].board.layout(), layout])
    lazy._listen("127.0.0.1")
    single = Server(1)
    with ThreadPoolExecutor(1) as pool:
        child = pool.submit(single.pull, orders["1"])
        lazy.board.fail("it was killed")
        child.result(60)
    lazy.close()
    check(trainer, [single])


def test_other_models_wrong_keys_and_old_versions_are_refused(trainer, monkeypatch):
    trainer.publish(2)
    server = Server(1)
    (order,) = trainer.ranks[0].orders(["0"]).values()
    wanted = server.wanted(0, {})
    for name, other in (("up", wanted["up"]._replace(shape=(24, 9))), ("head", wanted["up"])):
        with pytest.raises(WeightUpdateError, match=name):
            Receiver(order, wanted | {name: other}, None, 0, 1).run()
    with pytest.raises(WeightUpdateError, match="broke off"):
        Receiver(order.__class__(**{**vars(order), "key": "x" * 32}), wanted, None, 0, 1).run()
    with pytest.raises(WeightUpdateError, match="version 2 is published, not 1"):
        Receiver(order.__class__(**{**vars(order), "version": 1}), wanted, None, 0, 1).run()


def test_a_publication_that_breaks_off_is_not_read_and_not_a_base(trainer, monkeypatch):
    server = Server(1)
    trainer.publish(1, with_changes=True)
    update(trainer, [server])
    trainer.tensors["norm"][3] = 5.0

    def break_off():
        yield from list(Owner.local_weights(trainer.owners[0]))[:1]
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="out of memory"):
        patch.setattr(trainer.owners[0], "local_weights", break_off, raising=False)
        trainer.publish(2, with_changes=True)
    (order,) = trainer.ranks[0].orders(["0"]).values()
    with pytest.raises(WeightUpdateError, match="version 2 was published in part only"):
        Receiver(order, server.wanted(0, {}), None, 0, 1).run()
    trainer.publish(3, with_changes=True)
    assert trainer.ranks[0].board.base is None
    update(trainer, [server])
    check(trainer, [server])


def test_a_source_is_connected_when_its_turn_has_come(trainer, monkeypatch):
    """One that waits behind others would be silent for longer than sources are patient."""
    num_open = [0]

    class Counted(board.Connection):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            num_open.append(num_open[-1] + 1)

        def close(self):
            super().close()
            num_open.append(num_open[-1] - 1)

    monkeypatch.setattr(receive, "Connection", Counted)
    monkeypatch.setattr(receive, "_MAX_CONNECTIONS", 1)
    server = Server(1)
    trainer.publish(1)
    update(trainer, [server])
    check(trainer, [server])
    assert max(num_open) == 1 and num_open[-1] == 0


def test_children_do_not_wait_for_a_server_with_an_unexpected_error(trainer, monkeypatch):
    trainer.publish(1)
    order = trainer.ranks[0].orders(["0", "1"])["0"]
    receiver = Receiver(order, Server(1).wanted(0, {}), None, 0, 1)

    def fail(*_):
        raise RuntimeError("no memory")

    monkeypatch.setattr(receiver, "_take", fail)
    with pytest.raises(RuntimeError, match="no memory"):
        receiver.run()
    assert "has failed" in receiver.board.failure
    with pytest.raises(OSError, match="refused"):
        board.Connection(receiver.server.address, order.key)


def test_a_server_that_joins_leaves_the_orders_of_others(trainer, monkeypatch):
    trainer.publish(1)
    monkeypatch.setitem(publish._publishers, "here", trainer.ranks[0])
    transport = StreamTransport("here")
    for address in ("a", "b"):
        asyncio.run(transport.connect(None, [SimpleNamespace(address=address)]))
    assert {address: order.round for address, order in transport._orders.items()} == {"a": 1, "b": 2}


def test_fingerprints_come_from_samples_of_the_shards(trainer, monkeypatch):
    trainer.publish(1)
    monkeypatch.setitem(publish._publishers, "here", trainer.ranks[0])
    transport = StreamTransport("here")
    held = fingerprints(trainer.tensors.items())
    meta = publish.WeightUpdateMeta("stream", "here", 1)
    assert transport.first_mismatch(meta, held) is None
    wrong = fingerprints((trainer.tensors | {"down": trainer.tensors["down"] + 1}).items())
    assert transport.first_mismatch(meta, wrong) == "down"
    assert threading.active_count() < 200 and pieces.UNIT_BYTES > 64
