import pytest

from arealite.api.cli_args import SFTConfig
from arealite.api.errors import ConfigError
from arealite.utils.config import load_config
from arealite.utils.rundir import RunDir


def config(root, name="e"):
    return load_config(
        [f"experiment_name={name}", "trial_name=t", "train_dataset.path=d", "model.path=m", f"cluster.fileroot={root}"],
        SFTConfig,
    )  # fmt: skip


def test_all_paths_are_inside_and_the_configuration_reads_back(tmp_path):
    made = RunDir(config(tmp_path)).create(config(tmp_path))
    assert made.path == tmp_path / "e" / "t"
    assert len(vars(made)) > 8
    outside = [name for name, path in vars(made).items() if not path.is_relative_to(made.path)]
    assert outside == ["shared_weights"]
    assert load_config(["--config", str(made.config_path)], SFTConfig) == config(tmp_path)
    assert RunDir(made.path).db_path == made.db_path


@pytest.mark.parametrize("name", ["../x", "a/b", ".hidden", "'a b'"])
def test_names_that_cannot_be_folders(tmp_path, name):
    with pytest.raises(ConfigError, match="becomes a folder"):
        RunDir(config(tmp_path, name))


def test_unwritable_root_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cluster\.fileroot"):
        RunDir(config(tmp_path / "file")).create()
