"""The validation set of loops over fixed data."""

from __future__ import annotations

import json

import pytest

from arealite.api.cli_args import DatasetConfig, SFTConfig, TrainEngineConfig
from arealite.api.errors import ConfigError, DatasetError
from arealite.trainer.sft import SFTTrainer
from arealite.utils.rundir import RunDir
from tests.engine.engine_testing import engine_config


def make_rows(lengths: list[int]) -> list[dict[str, list[int]]]:
    return [{"input_ids": list(range(3, 3 + n)), "loss_mask": [0] + [1] * (n - 1)} for n in lengths]


def make_config(model_path, folder) -> SFTConfig:
    config = SFTConfig(
        experiment_name="e",
        trial_name="t",
        train_dataset=DatasetConfig(path="rows", batch_size=2),
        model=engine_config(str(model_path), TrainEngineConfig),
    )
    config.cluster.fileroot, config.evaluator.freq_steps = str(folder), 2
    config.stats_logger.console = False
    return config


def test_the_loss_is_the_mean_over_all_validation_tokens_when_due(model_path, tokenizer, tmp_path):
    config, valid_rows = make_config(model_path, tmp_path), make_rows([4, 9, 6])
    trainer = SFTTrainer(config, make_rows([5] * 8), tokenizer, valid_rows)
    singles = [trainer.measure(trainer.collate([row]))["loss"] for row in valid_rows]
    mean = sum(loss * count for loss, count in zip(singles, (3, 8, 5), strict=True)) / 16
    assert trainer.evaluate()["eval/loss"] == pytest.approx(mean, rel=1e-5)
    trainer.train()
    lines = RunDir(config).stats_path.read_text().splitlines()
    assert ["eval/loss" in json.loads(line) for line in lines] == [False, True, False, True]
    # The loss has fallen, so the last model is the best.
    assert (RunDir(config).checkpoints / "best").resolve().name == "step000004"


def test_a_validation_set_smaller_than_the_ranks_is_refused(model_path, tokenizer, tmp_path):
    config = make_config(model_path, tmp_path)
    config.allocation_mode = "d2"
    with pytest.raises(DatasetError, match="has 1 rows, and each of 2 data-parallel ranks"):
        SFTTrainer(config, make_rows([5] * 8), tokenizer, make_rows([4]))


def test_an_evaluator_without_evaluate_is_an_error(model_path, tokenizer, tmp_path):
    trainer = SFTTrainer(make_config(model_path, tmp_path), make_rows([5] * 8), tokenizer)
    with pytest.raises(ConfigError, match="gives its Run no `evaluate`"):
        trainer.train()
