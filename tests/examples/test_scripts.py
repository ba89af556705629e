"""The example scripts run through the launcher on a tiny model, and the ready loops equal them."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from arealite.api.cli_args import GRPOConfig
from arealite.utils.config import load_config
from tests import warm_python

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "arealite"
NUM_STEPS = 3
# Statistics of every policy step (on a known accelerator also `mfu`, with a reference also `ref_kl`).
STATISTICS = {
    "reward", "advantage/mean", "behav_kl/k1", "behav_kl/k3", "prox_kl", "ratio/mean", "clip_share", "entropy", "ess",
    "seq_len", "answer_len", "staleness", "grad_norm", "lr", "train_tokens_per_s", "train_tflops", "loss",
}  # fmt: skip


def run(*command: str, timeout_s: float = 240.0) -> str:
    done = warm_python.run(command, timeout=timeout_s)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def common(path: Path, data: Path) -> list[str]:
    return [
        f"cluster.fileroot={path}",
        f"train_dataset.path={data}",
        "train_dataset.batch_size=4",
        f"total_train_steps={NUM_STEPS}",
        f"saver.freq_steps={NUM_STEPS}",
        "stats_logger.tensorboard=false",
    ]


def grpo_overrides(model: Path, prefix: str = "") -> list[str]:
    """Give every answer a reward of 1 and no baseline, so that random text has a gradient too."""
    keys = {
        "actor.path": model,
        "actor.dtype": "float32",
        "actor.reward_bias": 1.0,
        "actor.algorithm": "custom",
        "actor.reward_norm.mean_level": "none",
        "actor.reward_norm.std_level": "none",
        "actor.optimizer.lr": 1e-3,
        "actor.ppo_n_minibatches": 2,
        "actor.gradient_checkpointing": "false",
        "gconfig.n_samples": 2,
        "gconfig.max_new_tokens": 8,
        "rollout.max_head_offpolicyness": 0,
        "rollout.max_concurrent_rollouts": 8,
        "server.deterministic": "true",
        "server.max_total_tokens": 4096,
    }
    return [f"{prefix}{key}={value}" for key, value in keys.items()]


def stats_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "stats.jsonl").read_text().splitlines()]


def test_sft_runs_on_two_ranks_and_its_loss_falls(model_path, gsm8k_path, tmp_path):
    run(
        *("-m", "arealite.launcher.local", str(EXAMPLES / "gsm8k_sft.py")),
        *("--config", str(EXAMPLES / "configs" / "gsm8k_sft.yaml")),
        *common(tmp_path, gsm8k_path),
        *(f"model.path={model_path}", "allocation_mode=d2", "model.dtype=float32"),
        *("model.optimizer.lr=0.01", "model.gradient_checkpointing=false"),
    )
    steps = stats_of(tmp_path / "gsm8k-sft" / "trial0")
    assert [s["step"] for s in steps] == list(range(NUM_STEPS))
    assert steps[-1]["loss"] < steps[0]["loss"]
    checkpoint = tmp_path / "gsm8k-sft" / "trial0" / "checkpoints" / f"step{NUM_STEPS:06d}"
    AutoModelForCausalLM.from_pretrained(checkpoint)
    AutoTokenizer.from_pretrained(checkpoint)


@pytest.mark.slow
def test_ready_loop_equals_script_bit_for_bit(model_path, gsm8k_path, tmp_path):
    script, ready = tmp_path / "script", tmp_path / "ready"
    run(
        *("-m", "arealite.launcher.local", str(EXAMPLES / "gsm8k_grpo.py")),
        *("--config", str(EXAMPLES / "configs" / "gsm8k_grpo.yaml")),
        *(*common(script, gsm8k_path), *grpo_overrides(model_path)),
        "allocation_mode=embedded.d1p1t1+d1p1t1",
    )
    run(
        *("-m", "arealite.cli.main", "trainer.type=grpo", "experiment_name=gsm8k-grpo"),
        *("trial_name=trial0", *common(ready, gsm8k_path)),
        *grpo_overrides(model_path, "trainer.grpo."),
        # Values of the script's config file that differ from the defaults.
        *("train_dataset.max_length=1024", "trainer.grpo.actor.optimizer.weight_decay=0.017"),
        *("trainer.grpo.actor.optimizer.beta2=0.999", "trainer.grpo.actor.max_tokens_per_mb=16384"),
        "trainer.grpo.actor.prox_logp=interpolate",
    )
    one, two = (folder / "gsm8k-grpo" / "trial0" for folder in (script, ready))
    for a, b in zip(stats_of(one), stats_of(two), strict=True):
        for key in ("reward", "loss", "grad_norm", "answer_len", "behav_kl/k1"):
            assert a[key] == b[key], key
        assert a["grad_norm"] > 0
        assert a.keys() >= STATISTICS
    name = f"checkpoints/step{NUM_STEPS:06d}/model.safetensors"
    weights, others = load_file(one / name), load_file(two / name)
    start = load_file(model_path / "model.safetensors")
    assert weights.keys() == others.keys()
    assert all(weights[key].equal(others[key]) for key in weights)
    assert not all(weights[key].equal(start[key]) for key in start)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_grpo_gives_the_same_numbers_with_every_layout(model_path, gsm8k_path, tmp_path):
    """Training is synchronous and seeded, so pipeline, tensor and context parallel ranks must equal one rank."""
    losses = {}
    for layout in ("d1", "d1c2", "d1p2", "d2t2"):
        run(
            *("-m", "arealite.launcher.local", str(EXAMPLES / "gsm8k_grpo.py")),
            *("--config", str(EXAMPLES / "configs" / "gsm8k_grpo.yaml")),
            *(*common(tmp_path, gsm8k_path), *grpo_overrides(model_path)),
            *(f"trial_name={layout}", "actor.ppo_n_minibatches=1", "train_dataset.shuffle=false"),
            *(f"allocation_mode=embedded.d1+{layout}", "total_train_steps=2"),
            timeout_s=600.0,
        )
        steps = stats_of(tmp_path / "gsm8k-grpo" / layout)
        losses[layout] = [(s["reward"], s["grad_norm"], s["entropy"]) for s in steps]
        assert len(steps) == 2 and all(s["behav_kl/k3"] < 1e-6 for s in steps)
    for layout, found in losses.items():
        assert found[0] == pytest.approx(losses["d1"][0], rel=1e-3), layout


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_black_box_agent_trains_through_its_endpoint(model_path, gsm8k_path, tmp_path):
    run(
        *("-m", "arealite.launcher.local", str(EXAMPLES / "openai_agent.py")),
        *("--config", str(EXAMPLES / "configs" / "openai_agent.yaml")),
        *(*common(tmp_path, gsm8k_path), *grpo_overrides(model_path), "allocation_mode=embedded.d1+d1"),
    )
    steps = stats_of(tmp_path / "openai-agent" / "trial0")
    assert len(steps) == NUM_STEPS and all(s["behav_kl/k3"] < 1e-6 and s["grad_norm"] > 0 for s in steps)
    for step in steps:
        assert (step["rollout/turns"], step["rollout/drift_calls"], step["rollout/branches"]) == (2, 0, 1)


def test_a_second_demo_leaves_the_first_one_alone(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    demo = importlib.import_module("demo")
    argv = ["--config", str(EXAMPLES / "configs" / "demo.yaml"), "actor.path=unused", f"cluster.fileroot={tmp_path}"]
    config = load_config(argv, GRPOConfig)
    first = demo.new_run_dir(config)
    (first.path / "model").mkdir()
    names = [first.path.name, *(demo.new_run_dir(config).path.name for _ in range(2))]
    assert names == ["reverse", "reverse-2", "reverse-3"]
    assert (first.path / "model").exists()
