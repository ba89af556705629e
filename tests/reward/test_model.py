"""Reward models in a process of the run."""

import asyncio
import os
import signal

import peft
import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from arealite.api.errors import ConfigError, RewardError
from arealite.dataset.sft import tokenize_sft
from arealite.reward import model_process, pool
from arealite.reward.combined import AsyncCombinedReward
from arealite.reward.gsm8k import gsm8k_reward
from arealite.reward.model import LocalRewardModel
from arealite.reward.names import named_reward
from arealite.reward.pool import RewardPool


def save_classifier(folder, model_path, tokenizer, **settings):
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(model_path, **{"num_labels": 1, **settings})
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def classifier(model_path, tokenizer, tmp_path_factory):
    return save_classifier(tmp_path_factory.mktemp("rewards"), model_path, tokenizer)


def score_alone(folder, ids):
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    # Without padding: the last token is the one that is scored.
    model.config.pad_token_id = None
    with torch.inference_mode():
        return float(model(torch.tensor([ids])).logits[0, 0])


def run(scenario):
    return asyncio.run(asyncio.wait_for(scenario, 240))


def test_answers_are_scored_together_as_alone(classifier, tokenizer, monkeypatch):
    """Batches are padded, also with a model whose padding is the token that ends answers."""
    monkeypatch.setitem(model_process._BATCH_TOKENS, "cpu", 40)
    own, model = model_process.load_model(classifier, "cpu")
    own.pad_token_id = model.config.pad_token_id = tokenizer.eos_token_id
    questions = ["2+2?", "a much longer question ", "x", "2+2?", "again and "]
    texts = list(zip(questions, ["4", "to which nobody knows an answer", "", "5", "again and again"], strict=True))
    # As in the training of reward models.
    rows = [tokenize_sft(prompt, answer, own, add_special_tokens=False)["input_ids"] for prompt, answer in texts]
    expected = [score_alone(classifier, row) for row in rows]
    assert model_process.score_answers(own, model, texts, 4096) == pytest.approx(expected, abs=1e-5)
    assert model_process.score_answers(own, model, rows, 4096) == pytest.approx(expected, abs=1e-5)
    cut = [score_alone(classifier, row[-3:]) for row in rows]
    assert model_process.score_answers(own, model, rows, 3) == pytest.approx(cut, abs=1e-5)
    # No token is left for padding.
    all_tokens = list(range(model.config.vocab_size))
    expected = [score_alone(classifier, all_tokens), score_alone(classifier, [1])]
    monkeypatch.setitem(model_process._BATCH_TOKENS, "cpu", 10**6)
    assert model_process.score_answers(own, model, [all_tokens, [1]], 10**6) == pytest.approx(expected, abs=1e-5)


def test_scores_of_a_model_in_bfloat16_are_finer_than_its_numbers(model_path, tokenizer, tmp_path):
    """Answers that differ little would otherwise have equal scores, or scores that differ by rounding only."""
    folder = save_classifier(tmp_path, model_path, tokenizer)
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.bfloat16)
    model_process._compute_scores_in_float32(model)
    rows = [[1, 5, i] for i in range(10, 20)]
    exact = [score_alone(folder, row) for row in rows]
    scores = model_process.score_answers(tokenizer, model, rows, 10)
    assert scores == pytest.approx(exact, abs=0.05)
    assert all(float(torch.tensor(score, dtype=torch.bfloat16)) != score for score in scores)
    assert model.get_input_embeddings().weight.dtype == torch.bfloat16


def test_its_libraries_are_imported_while_the_run_starts(classifier, monkeypatch):
    """Their import takes seconds, which would be part of the first step."""
    modules = []
    monkeypatch.setattr(pool, "start_fork_server", modules.append)
    model = LocalRewardModel(classifier)
    for reward in (model, AsyncCombinedReward({"liked": (1.0, model), "right": (1.0, gsm8k_reward)}), gsm8k_reward):
        RewardPool().warm_up(reward)
    assert modules == [model_process.__name__, model_process.__name__, gsm8k_reward.__module__]


@pytest.mark.slow
def test_one_process_scores_for_a_whole_run(classifier, tokenizer):
    ids = [*tokenizer.encode("2+2?4", add_special_tokens=False), tokenizer.eos_token_id]
    row = dict(prompt="2+2?", completion="4", prompt_ids=ids[:-1], completion_ids=ids[-1:])
    by_text, by_tokens = LocalRewardModel(classifier, "cpu"), LocalRewardModel(classifier, "cpu", uses_ids=True)

    async def scenario():
        scores = await asyncio.gather(*(RewardPool().run(fn, [row] * 3) for fn in (by_text, by_tokens)))
        (process,) = model_process._processes.values()
        (worker,) = process._workers
        # It ends in the middle of the run; the next answer starts another one.
        os.kill(worker.process.pid, signal.SIGKILL)
        with pytest.raises(RewardError, match=r"the process of the reward model .* was killed by signal 9"):
            await by_text(**row)
        return scores, await by_text(**row), process

    scores, again, process = run(scenario())
    expected = score_alone(classifier, ids)
    assert scores == [pytest.approx([expected] * 3, abs=1e-5)] * 2 and again == pytest.approx(expected, abs=1e-5)
    assert process.is_closed and not model_process._processes


@pytest.mark.slow
def test_a_model_that_cannot_score_says_why(model_path, tokenizer, tmp_path):
    folder = save_classifier(tmp_path, model_path, tokenizer)
    model = LocalRewardModel(folder, "cpu", uses_ids=True)
    (tmp_path / "model.safetensors").write_text("damaged")

    async def ask():
        await model(prompt_ids=[1], completion_ids=[2])

    with pytest.raises(RewardError, match=f"the reward model {tmp_path}: "):
        run(ask())


@pytest.mark.slow
def test_a_model_that_cannot_be_used_is_loaded_once(model_path, tokenizer, tmp_path):
    """A large one would be read again for each job, until the run had failed often enough."""
    model = LocalRewardModel(save_classifier(tmp_path, model_path, tokenizer), "cpu")
    for file in tmp_path.glob("token*"):
        file.unlink()

    async def ask():
        with pytest.raises(RewardError, match=f"{tmp_path} holds a reward model without a tokenizer"):
            await model("2+2?", "4")
        (process,) = model_process._processes.values()
        process._acquire = None
        with pytest.raises(RewardError, match="without a tokenizer"):
            await model("2+2?", "4")

    run(ask())


def test_an_unexpected_error_reaches_those_who_wait(classifier, monkeypatch):
    def fail(*_):
        raise RuntimeError("no process")

    async def ask():
        monkeypatch.setattr(model_process.ModelProcess, "_acquire", fail)
        await asyncio.wait_for(LocalRewardModel(classifier, "cpu")("2+2?", "4"), 60)

    with pytest.raises(RewardError, match="no process"):
        run(ask())


def test_an_adapter_scores_with_its_own_head(model_path, tokenizer, tmp_path):
    base = AutoModelForSequenceClassification.from_pretrained(model_path, num_labels=1)
    adapted = peft.get_peft_model(base, peft.LoraConfig(task_type="SEQ_CLS", init_lora_weights=False))
    adapted.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    own, model = model_process.load_model(str(tmp_path), "cpu")
    ids = [*own.encode("2+2?4", add_special_tokens=False), own.eos_token_id]
    with torch.inference_mode():
        expected = float(adapted(torch.tensor([ids])).logits[0, 0])
    assert LocalRewardModel(str(tmp_path)).spec.path == str(tmp_path)
    assert model_process.score_answers(own, model, [("2+2?", "4")], 4096) == pytest.approx([expected], abs=1e-5)
    policy = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"])
    policy.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="holds an adapter without a scalar head"):
        LocalRewardModel(str(tmp_path))


def test_names_of_rewards_may_be_folders(classifier, model_path, monkeypatch):
    assert repr(named_reward(classifier)) == f"LocalRewardModel({classifier!r})"
    parent, name = os.path.split(classifier)
    monkeypatch.chdir(parent)
    assert named_reward(name).spec.path == classifier
    assert named_reward("my-org/my-model").spec.path == "my-org/my-model"
    with pytest.raises(ConfigError, match=r"holds \w+ForCausalLM; a reward model is a sequence classifier"):
        named_reward(str(model_path))
    with pytest.raises(ConfigError, match="there is no reward model in runs/a/b"):
        named_reward("runs/a/b")


def test_other_models_are_refused(model_path, tokenizer, tmp_path):
    with pytest.raises(ConfigError, match="cannot load a reward model"):
        LocalRewardModel(str(tmp_path))
    folder = save_classifier(tmp_path, model_path, tokenizer, num_labels=3)
    with pytest.raises(ConfigError, match="has 3 labels"):
        LocalRewardModel(folder)
    with pytest.raises(ConfigError, match="has 3 labels"):
        model_process.load_model(folder, "cpu")


def test_the_deadline_depends_on_the_kind_of_reward():
    assert (RewardPool().timeout_s, RewardPool().await_timeout_s) == (15.0, 1800.0)
    assert (RewardPool(timeout_s=3).timeout_s, RewardPool(timeout_s=3).await_timeout_s) == (3, 3)
