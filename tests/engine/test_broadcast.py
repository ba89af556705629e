"""Weights over a process group: to two servers at once, in buckets, with one dying in between."""

import signal
import threading

import pytest
import torch
from transformers import Qwen2ForCausalLM

from arealite.api.io_struct import WeightUpdateMeta
from arealite.utils import weight_group
from arealite.utils.network import free_port
from arealite.utils.weight_group import WeightGroup, put_outbox, specs_of
from tests.engine.test_fleet import connect, is_open, request, run, steady, steady_process, until  # noqa: F401
from tests.server_process import server_process

LIMITS = {"join_timeout_s": 20, "timeout_s": 20}


@pytest.mark.parametrize("bucket_bytes", [128, 1 << 20])
def test_tensors_arrive_bit_for_bit_whatever_the_bucket(monkeypatch, bucket_bytes):
    monkeypatch.setattr(weight_group, "BUCKET_BYTES", bucket_bytes)
    torch.manual_seed(0)
    tensors = {
        "a": torch.randn(7, 3),
        "b": torch.randn(50).bfloat16(),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
        "c": torch.randint(0, 9, (33,)),
    }
    port, got = free_port(), []

    def receive():
        group = WeightGroup("127.0.0.1", port, 1, 2, "test", **LIMITS)
        got.extend(group.receive(specs_of(tensors)) for _ in range(2))

    thread = threading.Thread(target=receive)
    thread.start()
    group = WeightGroup("127.0.0.1", port, 0, 2, "test", **LIMITS)
    group.send(tensors)
    group.send(tensors)
    thread.join(20)
    assert len(got) == 2
    for received in got:
        assert received.keys() == tensors.keys()
        assert all(torch.equal(received[name], tensors[name]) for name in tensors)


def test_servers_take_a_broadcast_and_a_dead_one_is_left_behind(model_path, connect, steady):  # noqa: F811
    model = Qwen2ForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    torch.manual_seed(1)
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter), alpha=0.5)
    two = steady
    with server_process(model_path, deterministic="true") as one:
        engine = connect(one, two)
        before = run(engine, engine.agenerate(request(3, max_new_tokens=20))).output_tokens
        put_outbox("", model.named_parameters())
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
