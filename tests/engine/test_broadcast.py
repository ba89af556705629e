"""Broadcast of weights: to two servers, in portions, during generation, with a server that dies."""

import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import torch
from transformers import Qwen2ForCausalLM

from arealite.api.errors import ServerError
from arealite.api.io_struct import WeightUpdateMeta
from arealite.utils.network import free_port
from arealite.weights import process_group as weight_group
from arealite.weights.layout import TensorLayout
from arealite.weights.process_group import GroupSettings, Outbox, WeightGroup, fill_outbox
from arealite.weights.sync import sync_weights
from tests.engine.test_fleet import background, connect, is_open, request, run, steady, steady_process, until  # noqa: F401
from tests.server_process import server_process


@pytest.mark.parametrize("portion_bytes", [128, 1 << 20])
def test_tensors_arrive_bit_for_bit_with_any_portion_size(monkeypatch, portion_bytes):
    monkeypatch.setattr(weight_group, "PORTION_BYTES", portion_bytes)
    torch.manual_seed(0)
    tensors = {
        "a": torch.randn(7, 3),
        "b": torch.randn(50).bfloat16(),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
        "c": torch.randint(0, 9, (33,)),
    }
    settings, got = GroupSettings("127.0.0.1", free_port(), 2, 1, "test"), []

    def receive():
        group = WeightGroup(settings, 1, timeout_s=20)
        got.extend(group.receive(TensorLayout.of(tensors)) for _ in range(2))

    thread = threading.Thread(target=receive)
    thread.start()
    group, box = WeightGroup(settings, 0, timeout_s=20), Outbox()
    box.fill(tensors.items())
    group.send(box)
    group.send(box)
    listening = [c.laddr for c in psutil.Process().net_connections("inet") if c.status == "LISTEN"]
    assert {place.ip for place in listening if place.port == settings.master_port} == {"127.0.0.1"}
    thread.join(20)
    assert len(got) == 2
    for received in got:
        assert received.keys() == tensors.keys()
        assert all(torch.equal(received[name], tensors[name]) for name in tensors)


def test_a_sender_fails_when_weights_are_not_gathered():
    def breaks_off():
        yield "a", torch.ones(2)
        raise OSError("no more")

    box = Outbox()
    box.fill([("a", torch.zeros(2)), ("b", torch.zeros(3))])
    box.expect()
    with pytest.raises(RuntimeError, match="b was not gathered within"):
        box.take(["b"], 0.01)
    with pytest.raises(OSError, match="no more"):
        box.fill(breaks_off())
    with pytest.raises(RuntimeError, match="could not gather its weights"):
        box.take(["b"], 20)


def other_weights(model_path):
    model = Qwen2ForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    torch.manual_seed(1)
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter), alpha=0.5)
    return model


class Gathering:
    """An actor that stops in the middle of gathering until `may_go_on` is set."""

    def __init__(self, model):
        self.model = model
        self.has_begun, self.may_go_on = threading.Event(), threading.Event()

    def update_weights(self, meta):
        fill_outbox(meta.path, self.parameters())

    def parameters(self):
        for index, pair in enumerate(self.model.named_parameters()):
            if index == 3:
                self.has_begun.set()
                assert self.may_go_on.wait(60)
            yield pair

    def set_version(self, version):
        self.version = version


def test_portions_are_sent_while_others_are_gathered_and_servers_generate(
    model_path,
    connect,  # noqa: F811
    steady,  # noqa: F811
    monkeypatch,
):
    monkeypatch.setattr(weight_group, "PORTION_BYTES", 1)  # every tensor is a bucket of its own
    sent, broadcast = [], WeightGroup._broadcast
    monkeypatch.setattr(WeightGroup, "_broadcast", lambda *a: (broadcast(*a), sent.append(1)))
    engine = connect(steady, pause_mode="in_place", health_timeout_s=60.0)
    actor = Gathering(other_weights(model_path))
    meta = WeightUpdateMeta("broadcast", "beside", 1)
    actor.may_go_on.set()
    sync_weights(actor, engine, meta)  # the first one tells what there is to send
    actor.has_begun.clear(), actor.may_go_on.clear(), sent.clear()
    with ThreadPoolExecutor(1) as thread:
        update = thread.submit(sync_weights, actor, engine, meta.with_version(2))
        assert actor.has_begun.wait(60)
        until(lambda: len(sent) == 3)  # these have left, the rest does not exist yet
        whole = run(engine, engine.agenerate(request(3, max_new_tokens=20)))
        under_way = background(engine, engine.agenerate(request(4, max_new_tokens=400)))
        until(lambda: steady.get("server_info")["running"] > 0)
        actor.may_go_on.set()
        update.result(60)
    assert len(sent) == len(list(actor.model.parameters())) and actor.version == 2
    assert set(whole.output_versions) == {1}
    answer = under_way.result(60)
    assert answer.num_interruptions == 0 and answer.output_versions[0] == 1
    assert answer.output_versions == sorted(answer.output_versions)
    assert steady.get("model_info")["weight_version"] == "2"


def test_servers_receive_a_broadcast_and_a_dead_one_is_skipped(model_path, connect, steady):  # noqa: F811
    model, two = other_weights(model_path), steady
    with server_process(model_path, deterministic="true") as one:
        engine = connect(one, two)
        before = run(engine, engine.agenerate(request(3, max_new_tokens=20))).output_tokens
        fill_outbox("", model.named_parameters())
        for version in (1, 2):
            engine.update_weights(WeightUpdateMeta("broadcast", "", version))
        assert one.get("weights_checker") == two.get("weights_checker")
        assert one.get("model_info")["weight_version"] == "2"
        after = run(engine, engine.agenerate(request(3, max_new_tokens=20)))
        assert after.output_tokens != before and set(after.output_versions) == {2}
        one.signal(signal.SIGKILL)
        one.process.wait()
        engine.update_weights(WeightUpdateMeta("broadcast", "", 3))
        assert two.process.poll() is None, "".join(two.lines)
        until(lambda: is_open(engine, two))
        assert two.get("model_info")["weight_version"] == "3"


def test_a_server_that_dies_before_the_group_is_formed_does_not_stop_others(model_path, connect, steady):  # noqa: F811
    with server_process(model_path) as one:
        engine = connect(one, steady, health_timeout_s=60.0)
        fill_outbox("early", other_weights(model_path).named_parameters())
        one.signal(signal.SIGKILL)
        one.process.wait()
        engine.update_weights(WeightUpdateMeta("broadcast", "early", 1))
        assert is_open(engine, steady) and steady.get("model_info")["weight_version"] == "1"


def test_an_abandoned_transfer_does_not_disturb_the_next(
    model_path,
    connect,  # noqa: F811
    steady,  # noqa: F811
    monkeypatch,
):
    monkeypatch.setattr(weight_group, "PORTION_BYTES", 1)
    engine = connect(steady, pause_mode="in_place", health_timeout_s=60.0)
    actor = Gathering(other_weights(model_path))
    meta = WeightUpdateMeta("broadcast", "twice", 1)
    actor.may_go_on.set()
    sync_weights(actor, engine, meta)
    actor.has_begun.clear(), actor.may_go_on.clear()
    with ThreadPoolExecutor(1) as thread:
        update = thread.submit(sync_weights, actor, engine, meta.with_version(2))
        assert actor.has_begun.wait(60)
        (server,) = engine.router.servers.values()
        until(lambda: server.has_requests)  # it receives now
        given_up = ServerError("as if it had been silent")
        engine.executor.runner.loop.call_soon_threadsafe(engine.fleet.lose, server, given_up)
        until(lambda: steady.get("server_info")["paused"])  # and is now sent the weights alone
        actor.may_go_on.set()
        update.result(60)
    until(lambda: is_open(engine, steady))
    assert steady.process.poll() is None, "".join(steady.lines)
    assert set(run(engine, engine.agenerate(request(3))).output_versions) == {2}
