"""Tests of weights on a GPU: CUDA IPC, adapters with CUDA graphs, all-reduce in a graph, released memory."""

from __future__ import annotations

import copy
import gc
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from transformers import Qwen2Config, Qwen2ForCausalLM

from arealite.api.cli_args import InferenceEngineConfig, ServerConfig
from arealite.api.errors import WeightUpdateError
from arealite.api.io_struct import WeightUpdateMeta
from arealite.engine.fsdp_engine import FSDPEngine
from arealite.engine.sglang_remote import RemoteSGLangEngine
from arealite.inference.engine import Engine
from arealite.inference.sharding import TensorGroup, shard_model
from arealite.inference.weights import WeightSource
from arealite.weights.device_memory import DeviceWeights, visible_gpus
from arealite.weights.sync import _probe, make_transport
from tests.engine.engine_testing import engine_config
from tests.inference.conftest import SMALL, forward_logprobs, generate, make_model, prompts, run
from tests.server_process import server_process

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
SETTINGS = {"max_total_tokens": 2048, "block_size": 16, "max_running_requests": 8, "max_prefill_tokens": 64}


@pytest.fixture
def make_engine():
    engines: list[Engine] = []

    def make(model) -> Engine:
        engines.append(Engine(ServerConfig(**SETTINGS), model=model.cuda()))
        return engines[-1].start()

    yield make
    for engine in engines:
        engine.close()


def test_cuda_ipc_update_of_a_server_on_the_same_gpu(tmp_path):
    torch.manual_seed(0)
    Qwen2ForCausalLM(Qwen2Config(**SMALL)).save_pretrained(tmp_path / "model")
    config = engine_config(str(tmp_path / "model"))
    config.dtype, config.device = "bfloat16", "cuda"
    actor = FSDPEngine(config)
    actor.initialize()
    path = f"/dev/shm/arealite-test-{tmp_path.name}.cuda"
    engine = RemoteSGLangEngine(InferenceEngineConfig(pause_mode="in_place", setup_timeout_s=120))
    try:
        with server_process(tmp_path / "model", device="cuda", dtype="bfloat16", **SETTINGS) as server:
            engine.initialize([server.address])
            assert _probe(WeightUpdateMeta("shm", path), engine) == ""
            seen = [server.get("weights_checker")["fingerprint"]]
            for version in (1, 2):
                with torch.no_grad():
                    for parameter in actor.model.parameters():
                        parameter.mul_(1.5)
                meta = WeightUpdateMeta("shm", path, version)
                actor.update_weights(meta)
                engine.update_weights(meta)  # compares fingerprints
                seen.append(server.get("weights_checker")["fingerprint"])
            assert len(set(seen)) == 3
            published = {n: p.full_tensor().to(torch.bfloat16) for n, p in actor.model.named_parameters()}
            held = make_transport(meta).open(meta)
            assert all(torch.equal(held[n], p) for n, p in published.items())
            # A file that names another GPU is rejected, and the old weights stay in use.
            with open(path) as file:
                text = file.read()
            with open(path + ".other.cuda", "w") as file:
                file.write(text.replace(visible_gpus()[0], "GPU-of-another-machine"))
            with pytest.raises(WeightUpdateError, match="does not see"):
                engine.update_weights(WeightUpdateMeta("shm", path + ".other.cuda", 3))
            assert server.get("weights_checker")["fingerprint"] == seen[-1]
    finally:
        engine.destroy()
        actor.destroy()


@pytest.mark.parametrize("is_mapped", [False, True])
def test_trainer_exits_without_a_cuda_ipc_warning(tmp_path, is_mapped):
    """torch warns at exit about shared CUDA memory that it counts as in use, even if no process uses it."""
    path = tmp_path / "weights.cuda"
    producer = subprocess.Popen(
        [sys.executable, "-c", PRODUCER, str(path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert producer.stdout.readline() == "published\n"
    held = DeviceWeights.attach(path).tensors["w"] if is_mapped else None
    _, messages = producer.communicate("", timeout=60)
    assert producer.returncode == 0 and not path.exists()
    assert "CUDA" not in messages and "roducer" not in messages, messages
    del held
    DeviceWeights.detach(path)


PRODUCER = """
import sys, torch
from arealite.weights.device_memory import DeviceWeights
made = DeviceWeights.create(sys.argv[1], {"w": torch.empty(1000)})
made.tensors["w"].fill_(1)
made.flush()
print("published", flush=True)
sys.stdin.read()
made.unlink()
"""


def test_adapters_are_swapped_with_captured_graphs(make_engine, tmp_path):
    peft = pytest.importorskip("peft")
    model = make_model()
    engine = make_engine(copy.deepcopy(model))
    folders, adapted = [tmp_path / "one", tmp_path / "two"], []
    for seed, folder in enumerate(folders):
        torch.manual_seed(seed)
        settings = peft.LoraConfig(
            r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM"
        )
        adapted.append(peft.get_peft_model(copy.deepcopy(model), settings).eval())
        adapted[-1].save_pretrained(folder)
    first = None
    for version, which in enumerate([0, 1, 0], 1):
        engine.update(WeightSource.adapter(str(folders[which]), version)).result(60)
        (output,) = run(engine, [5, 6, 7], max_new_tokens=12, ignore_eos=True, sampling_seed=1)
        expected = forward_logprobs(adapted[which], [5, 6, 7], output.token_ids)
        torch.testing.assert_close(torch.tensor(output.logprobs), expected, atol=1e-4, rtol=0)
        if version == 1:
            first = output
    assert output.token_ids == first.token_ids and output.logprobs == first.logprobs


def test_all_reduce_is_captured_in_the_graph(make_engine):
    model = make_model()
    cut = copy.deepcopy(model).cuda()
    group = TensorGroup(0, 1, dist.HashStore(), torch.device("cuda", 0))
    assert len(shard_model(cut, group).dims) == 3 * (7 + 3)
    engine = make_engine(cut)
    for prompt in prompts(4):
        (output,) = run(engine, prompt, temperature=0.0, max_new_tokens=20, ignore_eos=True)
        assert output.token_ids == generate(model, prompt, 20, None)


def test_release_and_resume_restore_the_weights(make_engine):
    model = make_model()
    engine = make_engine(copy.deepcopy(model))
    asked = {"temperature": 0.0, "max_new_tokens": 20, "ignore_eos": True}
    before, digest = run(engine, [1, 2, 3], **asked), engine.fingerprint().result(60)
    gc.freeze()  # as the server does
    held, cache = torch.cuda.memory_allocated(), engine.core.runner.cache.nbytes
    engine.release_memory().result(60)
    weights = sum(p.nbytes for p in model.parameters())
    assert held - torch.cuda.memory_allocated() > 0.9 * (cache + weights)  # cuBLAS keeps its workspace
    with pytest.raises(WeightUpdateError, match="released"):
        engine.update(WeightSource.received({}, 1))
    engine.resume_memory().result(60)
    assert engine.fingerprint().result(60) == digest
    engine.update(WeightSource.received({n: p.clone() for n, p in model.named_parameters()}, 1)).result(60)
    assert run(engine, [1, 2, 3], **asked)[0].token_ids == before[0].token_ids
