"""A training loop in process that is recorded, and replayed with other settings."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from arealite.api.cli_args import (
    DatasetConfig,
    GenerationHyperparameters,
    GRPOConfig,
    InferenceEngineConfig,
    OptimizerConfig,
    PPOActorConfig,
    RecoverConfig,
    ServerConfig,
)
from arealite.api.io_struct import FinetuneSpec
from arealite.controller.factory import make_engine
from arealite.dataset import StatefulDataLoader
from arealite.engine.embedded import EmbeddedEngine
from arealite.engine.ppo.actor import FSDPPPOActor
from arealite.engine.replay.plan import REPLAY_ENV, ReplayPlan
from arealite.engine.replay.replaying import current_replay
from arealite.trainer.run import Run
from arealite.utils.rundir import RunDir
from arealite.weights.sync import make_weight_meta, sync_weights
from arealite.workflow.multi_turn import MultiTurnWorkflow

NUM_STEPS, BATCH_SIZE, SPEC = 4, 4, FinetuneSpec(1, 64, 4, 4)


def vowels(completion: str, **data: Any) -> float:
    """A reward with signal on random text."""
    return float(sum(letter in "aeiou" for letter in completion))


def make_config(model: Path, folder: Path, **changes: Any) -> GRPOConfig:
    """Return the configuration of a small run in `folder`."""
    actor = PPOActorConfig(
        path=str(model),
        dtype="float32",
        device="cpu",
        ppo_n_minibatches=2,
        optimizer=OptimizerConfig(lr=1e-2, weight_decay=0.0),
    )
    config = GRPOConfig(
        experiment_name="e",
        trial_name=folder.name,
        actor=actor,
        gconfig=GenerationHyperparameters(n_samples=2, max_new_tokens=12),
        rollout=InferenceEngineConfig(max_head_offpolicyness=1, weight_update="disk", batch_timeout_s=60.0),
        train_dataset=DatasetConfig(path="made", batch_size=BATCH_SIZE),
        recover=RecoverConfig(mode="auto", freq_steps=2),
        **changes,
    )
    config.cluster.fileroot = str(folder.parent)
    config.stats_logger.console = False
    return config


def train(
    config: GRPOConfig,
    tokenizer: Any,
    reward: Any = vowels,
    hint: str = "again",
    between: Any = None,
    num_steps: int = NUM_STEPS,
) -> RunDir:
    """Run the loop of the example scripts; `between` is called with the actor before each step."""
    spec = replace(SPEC, max_steps=num_steps)
    rows = [{"prompt": f"{i}: "} for i in range(64)]
    loader = StatefulDataLoader(rows, config.train_dataset, seed=config.seed)
    workflow = MultiTurnWorkflow(
        reward, config.gconfig, tokenizer, reward_inline=True, max_turns=2, success=3.0, feedback=hint
    )
    actor = make_engine(FSDPPPOActor, config.actor)
    actor.initialize(spec)
    server = ServerConfig(
        model_path=config.actor.path, device="cpu", dtype="float32", max_total_tokens=8192, deterministic=True
    )
    rollout = make_engine(EmbeddedEngine, config.rollout, server, 5, RunDir(config).db_path)
    rollout.initialize(train_batch_size=BATCH_SIZE)
    with Run(config, spec, actor, rollout, loader) as run:
        weights = make_weight_meta(config, run.dir, rollout)
        for step in run.steps():
            if between is not None:
                between(step, actor)
            batch = rollout.prepare_batch(loader, workflow)
            batch["prox_logp"] = actor.compute_logp(batch)
            actor.compute_advantages(batch)
            stats = actor.ppo_update(batch)
            actor.step_lr_scheduler()
            sync_weights(actor, rollout, weights.with_version(step + 1))
            run.commit(step, stats)
    return run.dir


def replay(recorded: GRPOConfig, tokenizer: Any, folder: Path, plan: dict[str, Any], **how: Any) -> dict[str, Any]:
    """Replay a run in this process, and return its result."""
    config = make_config(Path(recorded.actor.path), folder, record=0)
    config.recover, config.gconfig = RecoverConfig(), recorded.gconfig
    config.actor, config.seed = how.pop("actor", config.actor), how.pop("seed", recorded.seed)
    return as_replay(RunDir(recorded).record, folder, plan, lambda: train(config, tokenizer, **how))


def as_replay(record: Path, folder: Path, plan: dict[str, Any], run: Callable[[], Any]) -> dict[str, Any]:
    """Call `run` as the process of a replay, and return the result."""
    settings = dict(mode="whole", first=0, last=NUM_STEPS - 1, checkpoint=None, uses_servers=False) | plan
    result, plan_path = folder / "result.json", folder / "plan.json"
    ReplayPlan(record=str(record), result=str(result), **settings).save(plan_path)
    os.environ[REPLAY_ENV] = str(plan_path)
    current_replay.cache_clear()
    try:
        run()
    finally:
        del os.environ[REPLAY_ENV]
        current_replay.cache_clear()
    return json.loads(result.read_text())


def with_lr(config: GRPOConfig, lr: float) -> PPOActorConfig:
    assert config.actor.optimizer is not None
    return replace(config.actor, optimizer=replace(config.actor.optimizer, lr=lr))
