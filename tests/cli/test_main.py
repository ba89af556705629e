"""What `arealite.cli.main` writes before a run starts."""

from __future__ import annotations

import pytest

from arealite.api.errors import ConfigError
from arealite.cli.main import main
from arealite.utils.rundir import RunDir

ARGV = ["trainer.type=sft", "train_dataset.path=some/gsm8k", "trainer.sft.model.path=some/model"]


def test_a_second_run_leaves_the_settings_of_the_first_alone(tmp_path):
    run_dir = RunDir(tmp_path / "arealite" / "sft")
    with run_dir.held():
        run_dir.config_path.write_text("of the first")
        with pytest.raises(ConfigError, match="a run is going on"):
            main([*ARGV, f"cluster.fileroot={tmp_path}", "seed=7"])
        assert run_dir.config_path.read_text() == "of the first"


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot write to the run directory .*cluster\.fileroot"):
        main([*ARGV, f"cluster.fileroot={tmp_path / 'file'}"])


def test_data_of_no_known_task_is_refused_before_anything_starts(tmp_path):
    for which in ("train_dataset", "valid_dataset"):
        with pytest.raises(ConfigError, match=r"no built-in task for dataset 'mine\.jsonl'"):
            main([*ARGV, f"{which}.path=mine.jsonl", f"cluster.fileroot={tmp_path}"])
    assert not list(tmp_path.iterdir())
