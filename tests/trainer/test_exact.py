"""With η = 0, training through the executor equals a plain synchronous loop."""

from __future__ import annotations

import asyncio
from pathlib import Path

import torch

from arealite.api.cli_args import (
    DatasetConfig,
    GenerationHyperparameters,
    InferenceEngineConfig,
    OptimizerConfig,
    PPOActorConfig,
)
from arealite.api.io_struct import FinetuneSpec, WeightUpdateMeta
from arealite.core.waits import NamedWait
from arealite.dataset import StatefulDataLoader
from arealite.engine.ppo.actor import FSDPPPOActor
from arealite.engine.sglang_remote import RemoteSGLangEngine
from arealite.utils.data import concat_padded
from arealite.utils.seeds import derive_seed
from arealite.weights.sync import sync_weights
from arealite.workflow.rlvr import RLVRWorkflow
from tests.server_process import server_process

NUM_STEPS, BATCH_SIZE = 4, 4


def vowels(prompt: str, completion: str, prompt_ids, completion_ids, **data) -> float:
    """A reward with signal on random text."""
    return float(sum(letter in "aeiou" for letter in completion))


class Parts:
    """A small actor, the client of a real server, and data, all from one seed."""

    def __init__(self, model_path: Path, tokenizer, address: str, shm: Path):
        rows = [{"prompt": f"{i}: "} for i in range(64)]
        config = DatasetConfig(path="made", batch_size=BATCH_SIZE)
        self.dataloader = StatefulDataLoader(rows, config, seed=3)
        optimizer = OptimizerConfig(lr=1e-2, weight_decay=0.0)
        self.actor = FSDPPPOActor(
            PPOActorConfig(
                path=str(model_path), dtype="float32", device="cpu", ppo_n_minibatches=2, optimizer=optimizer
            )
        )
        self.actor.initialize(FinetuneSpec(1, 64, BATCH_SIZE))
        self.rollout = RemoteSGLangEngine(InferenceEngineConfig(weight_update="shm"), seed=5)
        self.rollout.initialize([address], train_batch_size=BATCH_SIZE)
        gconfig = GenerationHyperparameters(n_samples=4, max_new_tokens=12)
        self.workflow = RLVRWorkflow(vowels, gconfig, tokenizer, reward_inline=True)
        self.meta = WeightUpdateMeta("shm", path=str(shm))
        # Servers are shared by the loops of a test: both start from these weights.
        sync_weights(self.actor, self.rollout, self.meta)

    def update(self, batch, version: int) -> None:
        batch["prox_logp"] = self.actor.compute_logp(batch)
        self.actor.compute_advantages(batch)
        self.actor.ppo_update(batch)
        self.actor.step_lr_scheduler()
        sync_weights(self.actor, self.rollout, self.meta.with_version(version))

    def weights(self) -> dict[str, torch.Tensor]:
        return {n: p.detach().clone() for n, p in self.actor.model.named_parameters()}

    def close(self) -> None:
        self.rollout.destroy()
        self.actor.destroy()


def executor_loop(parts: Parts) -> list[dict[str, torch.Tensor]]:
    batches = []
    for step in range(NUM_STEPS):
        batch = parts.rollout.prepare_batch(parts.dataloader, parts.workflow)
        batches.append(dict(batch))
        parts.update(batch, step + 1)
    return batches


def plain_loop(parts: Parts) -> list[dict[str, torch.Tensor]]:
    """No admission, no queue: run the rows of a batch, wait for all, train."""
    batches, next_id = [], 0
    rows_of_step = parts.dataloader.cycle()
    for step in range(NUM_STEPS):
        rows = next(rows_of_step)
        data = [{**row, "seed": derive_seed(5, next_id + i)} for i, row in enumerate(rows)]

        async def play(data=data):
            return await asyncio.gather(*(parts.workflow.arun_episode(parts.rollout, row) for row in data))

        episodes = parts.rollout.executor.run_coroutine(play(), NamedWait("test", "episodes", 60.0))
        batch = concat_padded(episodes)
        batch["group_ids"] = torch.arange(next_id, next_id + len(rows)).repeat_interleave(4)
        next_id += len(rows)
        batches.append(dict(batch))
        parts.update(batch, step + 1)
    return batches


def test_synchronous_training_through_the_executor_equals_a_plain_loop(model_path, tokenizer, tmp_path):
    results = []
    with server_process(model_path, deterministic="true") as server:
        for loop in (executor_loop, plain_loop):
            parts = Parts(model_path, tokenizer, server.address, tmp_path / "weights")
            start = parts.weights()
            batches = loop(parts)
            results.append((batches, parts.weights()))
            assert any(not torch.equal(start[n], w) for n, w in results[-1][1].items())
            parts.close()
    (one, weights_one), (two, weights_two) = results
    for a, b in zip(one, two, strict=True):
        for key in ("input_ids", "logprobs", "versions", "rewards", "loss_mask", "group_ids"):
            assert torch.equal(a[key], b[key]), key
    for name, weight in weights_one.items():
        assert torch.equal(weight, weights_two[name]), name
