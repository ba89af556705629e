"""`arealite config`: values with their origin, help, differences."""

import pytest
import yaml

from arealite.api.cli_args import GRPOConfig
from arealite.api.errors import ConfigError
from arealite.cli import config
from arealite.utils.config import load_config, to_yaml
from arealite.utils.rundir import RunDir

FILE = """experiment_name: e
trial_name: t
actor: {path: m, optimizer: {lr: 0.0001}}
train_dataset: {path: d}
gconfig: {n_samples: 4}
"""


@pytest.fixture
def file(tmp_path) -> str:
    (tmp_path / "run.yaml").write_text(FILE)
    return str(tmp_path / "run.yaml")


def shown(capsys, *argv: str) -> dict[str, str]:
    """Return the comment of each line by the text before it."""
    assert config.main(["show", *argv]) == 0
    lines = capsys.readouterr().out.splitlines()
    return {line.partition("  # ")[0].strip(): line.partition("  # ")[2] for line in lines}


def test_show_says_where_each_value_is_from(file, capsys):
    lines = shown(capsys, "grpo", "--config", file, "seed=7", "gconfig.n_samples=8")
    assert lines["lr: 0.0001"] == file
    assert lines["seed: 7"] == "command line" and lines["n_samples: 8"] == "command line"
    assert lines["total_train_epochs: null"] == "default"


def test_what_is_shown_can_be_read_back(file, capsys, tmp_path):
    argv = ["--config", file, "seed=7", "valid_datasets.a.path=b", 'gconfig.stop=["#", "a: b"]']
    assert config.main(["show", "grpo", *argv]) == 0
    (tmp_path / "again.yaml").write_text(capsys.readouterr().out)
    again = load_config(["--config", str(tmp_path / "again.yaml")], GRPOConfig)
    assert to_yaml(again) == to_yaml(load_config(argv, GRPOConfig))


def test_only_set_values(file, capsys):
    assert config.main(["show", "grpo", "--set", "--config", file]) == 0
    assert yaml.safe_load(capsys.readouterr().out) == {
        **yaml.safe_load(FILE),
        "actor": {"path": "m", "optimizer": {"lr": 0.0001}},
    }


def test_show_of_a_script(file, capsys, tmp_path):
    script = tmp_path / "train.py"
    script.write_text("from arealite.utils.config import load_config\nload_config(argv, GRPOConfig)\n")
    assert shown(capsys, str(script), "--config", file)["n_samples: 4"] == file
    # A class of its own: the script is run in check mode.
    script.write_text(
        "import sys\nfrom dataclasses import dataclass\nfrom arealite.api.cli_args import GRPOConfig\n"
        "from arealite.utils.config import load_config\n\n\n@dataclass\nclass Mine(GRPOConfig):\n    horizon: int = 3\n"
        "\n\nload_config(sys.argv[1:], Mine)\nraise SystemExit('not reached')\n"
    )
    lines = shown(capsys, str(script), "--config", file, "horizon=4")
    assert lines["horizon: 4"] == "command line" and lines["n_samples: 4"] == file


def test_show_of_a_run_marks_what_is_not_default(file, capsys, tmp_path):
    RunDir(tmp_path).create(load_config(["--config", file, "server.api_key=secret"], GRPOConfig))
    lines = shown(capsys, str(tmp_path))
    assert lines["n_samples: 4"] == "config.yaml" and lines["total_train_epochs: null"] == "default"
    assert not any("secret" in line for line in lines)
    with pytest.raises(ConfigError, match="does not change"):
        config.main(["show", str(tmp_path), "seed=1"])


def test_a_key_is_not_shown(file, capsys):
    assert not any("secret" in line for line in shown(capsys, "grpo", "--config", file, "server.api_key=secret"))


def test_secrets_are_not_shown_and_only_they_are_hidden(file, capsys):
    lines = shown(capsys, "grpo", "--config", file, "workflow_args.my_token=abc", "tokenizer_path=here")
    assert "my_token: (hidden)" in lines and "tokenizer_path: here" in lines
    assert sum("(hidden)" in line for line in lines) == 1


def test_help_of_a_part_of_a_kind_and_of_a_script(capsys, tmp_path):
    assert config.main(["help", "grpo", "gconfig"]) == 0
    assert "\n  gconfig.n_samples " in capsys.readouterr().out
    assert config.main(["help"]) == 0
    assert "trainer.grpo.actor.path" in capsys.readouterr().out
    (tmp_path / "s.py").write_text("load_config(argv, SFTConfig)")
    assert config.main(["help", str(tmp_path / "s.py"), "model"]) == 0
    assert "\n  model.path " in capsys.readouterr().out


def test_diff_of_runs_and_files(file, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    runs = [tmp_path / "a", tmp_path / "b"]
    for number, run in enumerate(runs):
        RunDir(run).create(load_config(["--config", file, f"actor.optimizer.lr=1e-{number + 5}"], GRPOConfig))
    assert config.main(["diff", *map(str, runs)]) == 1
    out = capsys.readouterr().out.splitlines()
    assert len(out) == 2 and out[1].split() == ["actor.optimizer.lr", "1.0e-05", "1.0e-06"]
    assert config.main(["diff", str(runs[0]), str(runs[0] / "config.yaml")]) == 0
    assert capsys.readouterr().out == ""
    assert config.main(["diff", file, str(runs[0])]) == 1
    assert "(absent)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["shw"], "did you mean show"),
        (["show", "gropo"], "did you mean grpo"),
        (["show", "missing.py"], "there is no script"),
        (["show", "grpo", "seeed=1"], "did you mean seed"),
        (["help", "actr"], "did you mean actor"),
        (["diff", "one"], "takes two"),
        (["diff", "one", "two"], "there is no configuration at one"),
    ],
)
def test_wrong_arguments(argv, message):
    with pytest.raises(ConfigError, match=message):
        config.main(argv)
