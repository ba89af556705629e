"""A reward model in the process that computes rewards."""

import asyncio

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from arealite.api.errors import ConfigError
from arealite.reward.model import LocalRewardModel
from arealite.reward.pool import RewardPool


@pytest.fixture(scope="module")
def classifier(model_path, tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("rewards")
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(model_path, num_labels=1)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.mark.slow
def test_a_classifier_scores_text_and_tokens(classifier, tokenizer):
    model = AutoModelForSequenceClassification.from_pretrained(classifier)
    ids = [*tokenizer.encode("2+2?4", add_special_tokens=False), tokenizer.eos_token_id]
    with torch.inference_mode():
        expected = float(model(torch.tensor([ids])).logits[0, 0])
    row = dict(prompt="2+2?", completion="4", prompt_ids=ids[:-1], completion_ids=ids[-1:])
    pool = RewardPool(num_workers=1, timeout_s=120.0)
    try:
        scores = asyncio.run(pool.run(LocalRewardModel(classifier), [row]))
    finally:
        pool.close()
    assert scores == pytest.approx([expected])
    assert LocalRewardModel(classifier, uses_ids=True)(**row) == pytest.approx(expected)
    assert LocalRewardModel(classifier, max_tokens=2)(**row) != pytest.approx(expected)


def test_other_models_are_refused(model_path, tokenizer, tmp_path):
    with pytest.raises(ConfigError, match="cannot load a reward model"):
        LocalRewardModel(str(tmp_path))("q", "a")
    config = AutoConfig.from_pretrained(model_path, num_labels=3)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="has 3 labels"):
        LocalRewardModel(str(tmp_path))("q", "a")
