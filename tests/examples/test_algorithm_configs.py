"""Every algorithm's example config, merged into the GSM8K one, trains a tiny model for two steps."""

from pathlib import Path

import pytest
import torch

from arealite.api.algorithms import ALGORITHMS
from arealite.api.cli_args import GRPOConfig
from arealite.api.io_struct import FinetuneSpec
from arealite.engine.fsdp_engine import FSDPEngine
from arealite.engine.ppo.actor import FSDPPPOActor
from arealite.engine.ppo.critic import FSDPPPOCritic
from arealite.utils.config import load_config
from tests.engine.engine_testing import make_model, random_batch

CONFIGS = Path(__file__).parents[2] / "examples" / "arealite" / "configs"
OVERLAYS = sorted((CONFIGS / "algorithms").glob("*.yaml"))


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"), "qwen2")


def load(overlay, model_path):
    argv = ["--config", str(CONFIGS / "gsm8k_grpo.yaml"), "--config", str(overlay)]
    argv += [f"actor.path={model_path}", "actor.dtype=float32", "actor.device=cpu"]
    config = load_config(argv, GRPOConfig)
    if config.teacher is not None:
        config.teacher.path = model_path
    return config


@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda path: path.stem)
def test_config_trains(overlay, model_path):
    torch.set_num_threads(1)
    config = load(overlay, model_path)
    name = overlay.stem
    assert config.actor.algorithm == ("grpo" if name == "distillation" else name)
    spec = FinetuneSpec(1, 10, 1)
    actor = FSDPPPOActor(config.actor)
    actor.initialize(spec)
    others = {"ref_logp": config.ref, "teacher_logp": config.teacher}
    helpers = {key: FSDPEngine(c) for key, c in others.items() if c is not None}
    critic = FSDPPPOCritic(config.critic) if config.critic else None
    for engine in [*helpers.values(), *([critic] if critic else [])]:
        engine.initialize(spec)
    for step in range(2):
        batch = random_batch([6, 15, 9, 9, 20, 5, 12, 3], seed=step)
        # Four answers to each of two prompts, or one answer to each of eight.
        batch["group_ids"] = torch.arange(8) // min(4, config.gconfig.n_samples)
        batch["prox_logp"] = actor.compute_logp(batch)
        batch["logprobs"] = batch["prox_logp"] + 0.1 * torch.randn(batch["logprobs"].shape)
        for key, engine in helpers.items():
            batch[key] = engine.forward(batch)["logp"]
        if critic:
            batch["values"] = critic.compute_values(batch)
        actor.compute_advantages(batch)
        stats = actor.ppo_update(batch)
        if critic:
            stats += critic.ppo_update(batch)
        assert all(s["grad_norm"] > 0 and s["bad_steps"] == 0 for s in stats)


def test_every_algorithm_has_a_config():
    assert set(ALGORITHMS) - {"custom"} <= {path.stem for path in OVERLAYS}


@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda path: path.stem)
def test_config_has_settings_under_which_a_pretrained_model_learns(overlay, model_path):
    config = load(overlay, model_path)
    optimizer = config.actor.optimizer
    assert optimizer is not None and config.actor.peak_lr == 2e-6 and config.actor.max_update_kl is not None
    assert optimizer.warmup_steps_proportion >= 0.03 and 0 < optimizer.gradient_clipping <= 1
    assert config.train_dataset.batch_size * config.gconfig.n_samples == 512
    assert config.actor.eps_clip <= 0.2 or config.actor.algorithm == "cispo"
