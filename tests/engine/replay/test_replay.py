"""A recorded run is replayed bit for bit; a change is named with its step, its tensor and its cause."""

import shutil
from dataclasses import replace

import pytest
from safetensors.torch import load_file, save_file

from arealite.api.cli_args import DatasetConfig, OptimizerConfig, RecoverConfig, SFTConfig, TrainEngineConfig
from arealite.core.record.step_file import read_step, recorded_steps
from arealite.dataset import StatefulDataLoader
from arealite.engine.replay import replaying
from arealite.engine.replay.compare import Difference
from arealite.engine.replay.replaying import ReplayedLoader, checkpoint_parts
from arealite.trainer.sft import SFTTrainer
from arealite.utils.rundir import RunDir
from tests.engine.replay.recorded_loop import NUM_STEPS, as_replay, make_config, replay, train, vowels, with_lr


@pytest.fixture(scope="module")
def recorded(model_path, tokenizer, tmp_path_factory):
    config = make_config(model_path, tmp_path_factory.mktemp("run"))
    train(config, tokenizer)
    return config


def describe(result):
    return Difference(**result["difference"]).describe(result["changes"])


def test_a_step_of_the_record_is_small_and_whole(recorded):
    folder = RunDir(recorded).record
    assert recorded_steps(folder) == list(range(NUM_STEPS))
    assert max(path.stat().st_size for path in folder.glob("*.rec")) < 10_000
    record = read_step(folder, 2)
    (batch,), (episodes,) = record.batches, record.info["episodes"]
    assert batch["input_ids"].shape == batch["logprobs"].shape and len(batch["rewards"]) == 8
    assert [e["group"] for e in episodes for _ in range(e["rows"])] == batch["group_ids"].tolist()
    # All answers are parts of trajectories: they are stored once.
    samples = [sample for e in episodes for request in e["requests"] for sample in request["samples"]]
    assert len(samples) > 8 and all("at" in sample for sample in samples)
    assert record.info["weights"]["actor"] and record.info["stats"][0]["grad_norm"] > 0
    order = [event for step in range(NUM_STEPS) for event in read_step(folder, step).info["order"]]
    assert order.index("+0@0") < order.index("-0") < len(order)


@pytest.mark.parametrize("mode", ["trainer-only", "rollout-only", "whole"])
def test_a_replay_is_equal_bit_for_bit(recorded, tokenizer, tmp_path, mode):
    result = replay(recorded, tokenizer, tmp_path, {"mode": mode})
    assert result["difference"] is None and result["num_steps"] == NUM_STEPS and result["changes"] == []
    assert result["num_episodes"] == (0 if mode == "trainer-only" else 4 * NUM_STEPS)


@pytest.mark.parametrize("uses_servers", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_replay_starts_from_a_checkpoint(recorded, tokenizer, tmp_path, uses_servers):
    checkpoint = RunDir(recorded).recover / "step000002"
    plan = {"first": 2, "checkpoint": str(checkpoint), "uses_servers": uses_servers}
    result = replay(recorded, tokenizer, tmp_path, plan)
    assert result["difference"] is None and result["num_steps"] == NUM_STEPS - 2


@pytest.mark.parametrize("mode", ["trainer-only", "whole"])
def test_another_seed_is_named_and_changes_nothing_that_is_recorded(recorded, tokenizer, tmp_path, mode):
    plan = {"mode": mode, "first": 2, "checkpoint": str(RunDir(recorded).recover / "step000002")}
    result = replay(recorded, tokenizer, tmp_path, plan, seed=5)
    assert result["difference"] is None and result["num_steps"] == NUM_STEPS - 2
    assert result["changes"] == ["seed: 1, now 5"]


@pytest.mark.slow
def test_servers_generate_the_recorded_answers_at_their_versions(recorded, tokenizer, tmp_path):
    steps = [read_step(RunDir(recorded).record, step) for step in range(NUM_STEPS)]
    ages = [step - int(v) for step, r in enumerate(steps) for v in r.batches[0]["versions"].unique() if v >= 0]
    assert max(ages) == 1, "the run was not asynchronous"
    result = replay(recorded, tokenizer, tmp_path, {"uses_servers": True})
    assert result["difference"] is None and result["num_steps"] == NUM_STEPS


def test_another_learning_rate_is_named(recorded, tokenizer, tmp_path):
    result = replay(recorded, tokenizer, tmp_path, {"mode": "trainer-only"}, actor=with_lr(recorded, 2e-2))
    text = describe(result)
    assert text.startswith("step 1: lr of minibatch 1 differs: recorded 0.01, replayed 0.02"), text
    assert "actor.optimizer.lr: 0.01, now 0.02" in text and result["num_steps"] == 0


def test_an_altered_reward_is_named(recorded, tokenizer, tmp_path):
    record = read_step(RunDir(recorded).record, 1)
    episode, old = record.info["episodes"][0][2], record.batches[0]["rewards"][4].item()

    def reward(completion, prompt, **data):
        return vowels(completion) + 0.5 * prompt.startswith(episode["data"]["prompt"])

    result = replay(recorded, tokenizer, tmp_path, {"mode": "rollout-only", "first": 1}, reward=reward)
    text = describe(result)
    assert text.startswith(f"step 2: rewards of episode {episode['id']}, sample 0 differs: recorded {old!r}"), text
    assert "the reward, or what it reads" in text and "a service that has changed" in text


def test_another_prompt_is_named(recorded, tokenizer, tmp_path):
    result = replay(recorded, tokenizer, tmp_path, {"mode": "rollout-only"}, hint="think")
    text = describe(result)
    assert "step 1: prompt of a request of episode" in text and "the workflow asked for something else" in text


def test_an_altered_weight_of_the_model_is_named(recorded, tokenizer, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(recorded.actor.path, model)
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 3] += 1e-3
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    actor = replace(recorded.actor, path=str(model))
    text = describe(replay(recorded, tokenizer, tmp_path / "r", {"mode": "trainer-only"}, actor=actor))
    assert "weights before the first step: actor: model.layers.1.mlp.up_proj.weight differs" in text
    assert f"actor.path: {recorded.actor.path}, now {model}" in text


def test_a_weight_that_changes_during_training_is_named(recorded, tokenizer, tmp_path):
    def alter(step, actor):
        if step == 2:
            actor.model.model.norm.weight.data[0] += 1e-3

    result = replay(recorded, tokenizer, tmp_path, {"mode": "trainer-only"}, between=alter)
    text = describe(result)
    assert text.startswith("step 3: prox_logp differs") and "kernel that does not repeat" in text
    assert result["num_steps"] == 2


def test_supervised_training_is_replayed_from_a_checkpoint_and_another_seed_is_named(
    model_path, tokenizer, tmp_path, capfd
):
    def fit(name, record, mode, seed=1):
        config = SFTConfig(
            experiment_name="e",
            trial_name=name,
            total_train_steps=4,
            model=TrainEngineConfig(path=str(model_path), dtype="float32", device="cpu", optimizer=OptimizerConfig()),
            train_dataset=DatasetConfig(path="made", batch_size=2),
            recover=RecoverConfig(mode=mode, freq_steps=2),
            record=record,
            seed=seed,
        )
        config.cluster.fileroot, config.stats_logger.console = str(tmp_path), False
        rows = [{"input_ids": list(range(2, 9 + i)), "loss_mask": [1] * (7 + i)} for i in range(16)]
        SFTTrainer(config, rows, tokenizer).train()
        return RunDir(config)

    recorded = fit("run", 1, "auto")
    plan = {"mode": "trainer-only", "first": 2, "checkpoint": str(recorded.recover / "step000002")}
    result = as_replay(recorded.record, tmp_path / "result", plan, lambda: fit("again", 0, "disabled"))
    assert result["difference"] is None and result["num_steps"] == 2

    result = as_replay(recorded.record, tmp_path / "result", plan, lambda: fit("other", 0, "disabled", seed=5))
    assert "the replay reads other data than the run: seed was 1 and is 5" in capfd.readouterr().out
    text = describe(result)
    assert text.startswith("step 3: ") and text.endswith("changed since the run:\n  seed: 1, now 5")


def test_loaders_of_others_restore_their_state_themselves(monkeypatch):
    class Loader:
        def load_state_dict(self, state):
            pass

    monkeypatch.setattr(replaying, "current_replay", object)
    loader, own = Loader(), StatefulDataLoader([{}] * 4, DatasetConfig(path="rows", batch_size=2))
    assert checkpoint_parts(loader, None) == {"dataloader": loader} and checkpoint_parts([], None) == {}
    assert isinstance(checkpoint_parts(own, None)["dataloader"], ReplayedLoader)
    assert "dataloader" not in checkpoint_parts(own, Loader())
