"""A LoRA actor and a real embedded server: only adapters travel, unless the base is in low bits."""

import json
import time

import pytest
import torch

from arealite.api.cli_args import GenerationHyperparameters, GRPOConfig, InferenceEngineConfig, PPOActorConfig
from arealite.api.errors import WeightUpdateError
from arealite.api.io_struct import Batch, ModelRequest
from arealite.core.waits import NamedWait
from arealite.engine.ppo.actor import FSDPPPOActor
from arealite.engine.sglang_remote import RemoteSGLangEngine
from arealite.utils.network import free_port
from arealite.weights.sync import make_weight_meta, needs_first_sync, sync_weights
from arealite.workflow.rlvr import RLVRWorkflow
from tests.engine.engine_testing import SPEC, engine_config
from tests.server_process import server_process

pytest.importorskip("peft")


def vowels(completion, **data):
    return float(sum(letter in "aeiou" for letter in completion))


def run(engine, coroutine):
    return engine.executor.run_coroutine(coroutine, NamedWait("the test", "an answer", 60))


def train(actor: FSDPPPOActor, batch: Batch) -> None:
    batch["prox_logp"] = actor.compute_logp(batch)
    actor.compute_advantages(batch)
    actor.ppo_update(batch)


def gap(actor, engine) -> float:
    """Return the distance of the server's log-probs from a forward pass of the actor."""
    gconfig = GenerationHyperparameters(max_new_tokens=24, ignore_eos=True)
    answer = run(engine, engine.agenerate(ModelRequest(list(range(5, 15)), gconfig, seed=3)))
    assert set(answer.output_versions) == {engine.get_version()}
    ids = torch.tensor([answer.input_tokens + answer.output_tokens])
    logp = actor.forward({"input_ids": ids, "attention_mask": torch.ones_like(ids)})["logp"]
    return float((logp[0, 10:] - torch.tensor(answer.output_logprobs)).abs().max())


@pytest.mark.parametrize("mode", ["in_place", pytest.param("abort", marks=pytest.mark.slow)])
def test_grpo_steps_push_adapters_and_a_new_server_gets_them(mode, model_path, tokenizer, tmp_path):
    config = GRPOConfig("e", "t")
    config.actor = engine_config(str(model_path), PPOActorConfig, lr=5e-2, lora_rank=2)
    config.rollout = InferenceEngineConfig(pause_mode=mode, setup_timeout_s=60)
    actor = FSDPPPOActor(config.actor)
    actor.initialize(SPEC)
    engine, port = RemoteSGLangEngine(config.rollout), free_port()
    gconfig = GenerationHyperparameters(n_samples=4, max_new_tokens=12)
    workflow = RLVRWorkflow(vowels, gconfig, tokenizer, reward_inline=True)
    rows = [[{"prompt": f"say {i} and {j}"} for i in range(4)] for j in range(3)]
    weights = make_weight_meta(config, tmp_path, engine)
    assert weights.is_adapter
    try:
        with server_process(model_path, port=port) as server:
            engine.initialize([server.address], 4)
            for step in range(3):
                train(actor, engine.prepare_batch(rows, workflow))
                sync_weights(actor, engine, weights.with_version(step + 1))
                assert gap(actor, engine) < 1e-3
            (folder,) = (tmp_path / "weights").iterdir()
            names = {file.name for file in folder.iterdir()}
            assert {"adapter_config.json", "adapter_model.safetensors"} <= names <= {
                "adapter_config.json", "adapter_model.safetensors", "README.md"
            }  # fmt: skip
            assert server.get("server_info")["adapter"] == "v3"
            pushed = (folder / "adapter_model.safetensors").stat().st_size
            assert pushed < (model_path / "model.safetensors").stat().st_size / 2
            held = server.get("weights_checker?tensors=1")["tensors"]
            assert sum(".lora_B." in name for name in held) == 14
        # What took its place knows the base model only: it must get the adapter before its first request.
        with server_process(model_path, port=port) as server:
            deadline = time.monotonic() + 60
            assert gap(actor, engine) < 1e-3 and time.monotonic() < deadline
            assert server.get("server_info")["adapter"] == "v3"
            torn = json.loads((folder / "adapter_config.json").read_text()) | {"use_dora": True}
            (folder / "adapter_config.json").write_text(json.dumps(torn))
            meta = weights.with_version(4)
            with pytest.raises(WeightUpdateError, match="use_dora"):
                engine.update_weights(type(meta)("disk", str(folder), 4, is_adapter=True))
            assert server.get("server_info")["weight_version"] == "3"
    finally:
        engine.destroy()
        actor.destroy()


def test_a_base_in_low_bits_is_pushed_merged(model_path, tokenizer, tmp_path):
    config = GRPOConfig("e", "t")
    config.actor = engine_config(str(model_path), PPOActorConfig, lr=5e-2, lora_rank=2, frozen_weight_dtype="nf4")
    config.rollout = InferenceEngineConfig(setup_timeout_s=60)
    actor = FSDPPPOActor(config.actor)
    actor.initialize(SPEC)
    engine = RemoteSGLangEngine(config.rollout)
    workflow = RLVRWorkflow(
        vowels, GenerationHyperparameters(n_samples=4, max_new_tokens=12), tokenizer, reward_inline=True
    )
    rows = [[{"prompt": f"say {i}"} for i in range(4)]]
    try:
        with server_process(model_path) as server:
            engine.initialize([server.address], 4)
            weights = make_weight_meta(config, tmp_path, engine)
            assert not weights.is_adapter and needs_first_sync(config, engine)
            # Servers start with the base as it is in the folder.
            assert gap(actor, engine) > 1e-3
            sync_weights(actor, engine, weights.with_version(0))
            assert gap(actor, engine) < 1e-3
            for step in range(2):
                train(actor, engine.prepare_batch(rows, workflow))
                sync_weights(actor, engine, weights.with_version(step + 1))
                assert gap(actor, engine) < 1e-3
    finally:
        engine.destroy()
        actor.destroy()
