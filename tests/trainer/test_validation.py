"""The validation set of loops over fixed data."""

from __future__ import annotations

import pytest

from arealite.api.cli_args import DatasetConfig, SFTConfig, TrainEngineConfig
from arealite.api.errors import ConfigError, DatasetError
from arealite.trainer.sft import SFTTrainer
from arealite.trainer.stats_logger import read_stats
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
    assert trainer.evaluate()["eval/valid/loss"] == pytest.approx(mean, rel=1e-5)
    trainer.train()
    steps = read_stats(RunDir(config))
    assert [step["step"] for step in steps] == [-1, 0, 1, 2, 3]
    assert [step["step"] for step in steps if "eval/valid/loss" in step] == [-1, 1, 3]
    assert steps[0]["eval/valid/loss"] == pytest.approx(mean, rel=1e-5) != steps[-1]["eval/valid/loss"]
    # The loss has fallen, so the last model is the best.
    assert (RunDir(config).checkpoints / "best").resolve().name == "step000004"


@pytest.mark.parametrize(("at_ends", "expected"), [(True, [-1, 3]), (False, [])])
def test_each_set_is_measured_before_and_after_training_by_default(model_path, tokenizer, tmp_path, at_ends, expected):
    config = make_config(model_path, tmp_path)
    config.evaluator.freq_steps, config.evaluator.at_start_and_end = None, at_ends
    sets = {"short": make_rows([4, 5]), "long": make_rows([9, 8])}
    SFTTrainer(config, make_rows([5] * 8), tokenizer, sets).train()
    lines = [step for step in read_stats(RunDir(config)) if any(key.startswith("eval/") for key in step)]
    assert [line["step"] for line in lines] == expected
    assert all(line["eval/short/loss"] != line["eval/long/loss"] for line in lines)


def test_a_validation_set_smaller_than_the_ranks_is_refused(model_path, tokenizer, tmp_path):
    config = make_config(model_path, tmp_path)
    config.allocation_mode = "d2"
    with pytest.raises(DatasetError, match="valid has 1 rows, and each of 2 data-parallel ranks"):
        SFTTrainer(config, make_rows([5] * 8), tokenizer, make_rows([4]))


def test_an_evaluator_without_evaluate_is_an_error(model_path, tokenizer, tmp_path):
    trainer = SFTTrainer(make_config(model_path, tmp_path), make_rows([5] * 8), tokenizer)
    with pytest.raises(ConfigError, match="gives its Run no `evaluator`"):
        trainer.train()
