"""Weights from real gloo ranks in several layouts to real servers with one and two ranks, in a stream."""

from dataclasses import replace

import pytest
import torch

from arealite.api.alloc_mode import AllocationMode
from arealite.api.cli_args import InferenceEngineConfig
from arealite.api.io_struct import SaveLoadMeta, WeightUpdateMeta
from arealite.engine.sft.lm_engine import FSDPLMEngine
from arealite.engine.sglang_remote import RemoteSGLangEngine
from arealite.utils import distributed
from arealite.utils.data import select_rows
from arealite.utils.network import free_port
from arealite.weights.stream import publish
from arealite.weights.sync import sync_weights
from tests.engine.engine_testing import SPEC, engine_config, random_batch
from tests.engine.test_fleet import is_open, until
from tests.server_process import server_process


@pytest.fixture(scope="module")
def servers(model_dirs):
    """Servers of each kind of model, started once: two with two ranks and one with one."""
    started, stack = {}, []

    def start(kind):
        if kind not in started:
            options = [{"tensor_parallel": 2}, {"tensor_parallel": 2}, {}]
            contexts = [server_process(model_dirs[kind], max_total_tokens=512, **o) for o in options]
            started[kind] = [context.__enter__() for context in contexts]
            stack.extend(contexts)
        return started[kind]

    yield start
    for context in stack:
        context.__exit__(None, None, None)


def _train_and_stream(rank, path, layout, addresses, out, settings):
    """Train and publish three times; returns statistics of each update, and the bytes of this rank's shards."""
    engine = FSDPLMEngine(replace(engine_config(path, lr=1e-3), **settings), AllocationMode.from_str(layout).train)
    engine.initialize(SPEC)
    rollout = RemoteSGLangEngine(InferenceEngineConfig(setup_timeout_s=60, health_timeout_s=30))
    rollout.initialize(addresses)
    stats, share = [], []
    for version in (1, 2, 3):
        batch = random_batch([9, 14, 6, 20], seed=version)
        if engine.dp_size == 2:
            batch = select_rows(batch, [[0, 1, 2], [3]][engine.layout.dp_rank])
        engine.train_lm(batch)
        sync_weights(engine, rollout, WeightUpdateMeta("stream" if version == 1 else "delta", layout, version))
        stats.append({k: v for k, v in rollout.stats().items() if k.startswith("weights/")})
        share.append(publish._publishers[layout].board.size_bytes)
    engine.save(SaveLoadMeta(out))
    rollout.destroy()
    engine.destroy()
    assert layout not in publish._publishers
    distributed.set_replica_size(1)
    return stats, max(share)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("kind", "layout", "settings"),
    [
        ("qwen2", "d2t2", {"dtype": "float32"}),
        ("qwen3_moe", "d2p2e2", {"dtype": "float32"}),
        ("deepseek_v3", "d4e2", {"router_bias_update_rate": 0.1}),
        ("qwen2", "p2c2", {}),
    ],
)
def test_every_bit_arrives_from_any_layout(four_ranks, servers, model_dirs, tmp_path, kind, layout, settings):
    machines, out = servers(kind), str(tmp_path / "saved")
    addresses = [server.address for server in machines]
    results = four_ranks.run(_train_and_stream, model_dirs[kind], layout, addresses, out, settings)
    held = [server.get("weights_checker") for server in machines]
    assert {answer["fingerprint"] for answer in held} == {held[0]["fingerprint"]}
    assert [answer["weight_version"] for answer in held] == ["3"] * 3
    tensors = machines[0].get("weights_checker?tensors=1")["tensors"]
    assert any(name.endswith("e_score_correction_bias") for name in tensors) == (kind == "deepseek_v3")
    machines[-1].post("update_weights_from_disk", model_path=out, weight_version="4")
    assert machines[-1].get("weights_checker")["fingerprint"] == held[0]["fingerprint"]
    for server in machines:
        server.post("update_weights_from_disk", model_path=model_dirs[kind], weight_version="0", reset_version=True)
    size = sum(share for _, share in results)
    assert all(share < 0.6 * size for _, share in results)
    for stats in results[0][0]:
        assert set(stats) == {f"weights/{k}" for k in ("sent_bytes", "link_bytes", "peak_bytes", "delta_share")}
        # A server with one rank holds everything; the trainer's ranks send less than twice the model.
        assert stats["weights/peak_bytes"] <= 1.1 * size and stats["weights/sent_bytes"] < 3 * size


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_server_that_comes_back_pulls_everything_and_then_changes(model_dirs):
    engine = FSDPLMEngine(engine_config(model_dirs["qwen2"], lr=1e-3))
    engine.initialize(SPEC)
    rollout = RemoteSGLangEngine(InferenceEngineConfig(setup_timeout_s=60, health_timeout_s=30))
    port, options = free_port(), {"max_total_tokens": 512}
    with server_process(model_dirs["qwen2"], **options) as steady:
        try:
            with server_process(model_dirs["qwen2"], port=port, **options) as first:
                rollout.initialize([steady.address, first.address])
                sync_weights(engine, rollout, WeightUpdateMeta("delta", "back", 1))
            engine.train_lm(random_batch([9, 14]))
            sync_weights(engine, rollout, WeightUpdateMeta("delta", "back", 2))
            with server_process(model_dirs["qwen2"], port=port, **options) as second:
                until(lambda: is_open(rollout, second))
                assert second.get("weights_checker") == steady.get("weights_checker")
                with torch.no_grad():
                    engine.model.get_input_embeddings().weight[5, 7] += 1.0
                sync_weights(engine, rollout, WeightUpdateMeta("delta", "back", 3))
                answers = [server.get("weights_checker") for server in (steady, second)]
                assert answers[0] == answers[1] and answers[0]["weight_version"] == "3"
                assert rollout.stats()["weights/delta_share"] < 0.1
        finally:
            rollout.destroy()
            engine.destroy()
