"""What `arealite.cli.main` checks and writes before a run starts."""

from __future__ import annotations

import re

import pytest

from arealite.api.cli_args import GRPOConfig
from arealite.api.errors import AReaLiteError, ConfigError
from arealite.cli.main import MainConfig, _config_file, flatten, main
from arealite.utils.config import load_config
from arealite.utils.rundir import RunDir

ARGV = ["trainer.type=sft", "trainer.sft.model.path=some/model"]


@pytest.fixture
def argv(tmp_path, gsm8k_path) -> list[str]:
    return [*ARGV, f"train_dataset.path={gsm8k_path}", "train_dataset.batch_size=8", f"cluster.fileroot={tmp_path}"]


def test_a_second_run_leaves_the_settings_of_the_first_alone(argv, tmp_path):
    run_dir = RunDir(tmp_path / "arealite" / "sft")
    with run_dir.lock():
        run_dir.config_path.write_text("of the first")
        with pytest.raises(ConfigError, match="another run uses"):
            main([*argv, "seed=7"])
        assert run_dir.config_path.read_text() == "of the first"


def test_a_folder_that_cannot_be_written_is_named(argv, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot write to the run directory .*cluster\.fileroot"):
        main([*argv, f"cluster.fileroot={tmp_path / 'file'}"])


@pytest.mark.parametrize("more", [[], ["--dry-run"]])
def test_data_of_no_known_task_is_refused_before_anything_starts(argv, tmp_path, more):
    (tmp_path / "mine.jsonl").write_text("{}\n")
    for key in ("train_dataset", "valid_dataset"):
        with pytest.raises(ConfigError, match=r"no reward is known for the dataset '.*mine\.jsonl'"):
            main([*argv, "trainer.type=grpo", f"{key}.path={tmp_path / 'mine.jsonl'}", *more])
    assert [path.name for path in tmp_path.iterdir()] == ["mine.jsonl"]


def test_a_refused_run_leaves_no_file_behind(argv, tmp_path):
    with pytest.raises(AReaLiteError):
        main([*argv, "allocation_mode=d4096"])
    assert not list(tmp_path.iterdir())
    # What was there stays.
    kept = tmp_path / "arealite" / "sft" / "stats.jsonl"
    kept.parent.mkdir(parents=True)
    kept.write_text("{}")
    with pytest.raises(AReaLiteError):
        main([*argv, "allocation_mode=d4096"])
    assert [path.name for path in kept.parent.iterdir()] == ["stats.jsonl"]


def test_the_file_that_ranks_read_has_no_key(tmp_path, gsm8k_path, monkeypatch):
    # Restored after the test.
    monkeypatch.setenv("AREALITE_API_KEY", "")
    argv = ["trainer.grpo.actor.path=m", f"train_dataset.path={gsm8k_path}", "trainer.grpo.server.api_key=secret"]
    flat = flatten(load_config(argv, MainConfig))
    with _config_file(flat, tmp_path) as path:
        assert "secret" not in path.read_text()
        assert load_config(["--config", str(path)], GRPOConfig).server.api_key == "secret"


@pytest.mark.parametrize("more", [[], ["--dry-run"]])
@pytest.mark.parametrize("key", ["valid_dataset.path", "valid_datasets.mine.path"])
def test_a_missing_validation_set_of_an_evaluation_is_named_by_its_key(tmp_path, key, more):
    options = ["trainer.type=null", f"{key}=/nope.jsonl", f"cluster.fileroot={tmp_path}"]
    with pytest.raises(AReaLiteError, match=rf"no dataset at /nope\.jsonl \({re.escape(key)}\)"):
        main([*options, *more])
