"""What a script would reject before its engines start is told by a dry run, and where possible by a real start."""

import json
import shutil
from pathlib import Path

import pytest

from arealite.api.errors import ConfigError
from arealite.launcher import local
from arealite.launcher.launch_config import LaunchConfig
from arealite.launcher.script_check import check_source
from tests import warm_python

EXAMPLES = Path(__file__).parents[2] / "examples" / "arealite"
LOADS = """
from arealite.api.cli_args import GRPOConfig
from arealite.dataset import load_tokenizer
from arealite.utils.config import load_config, run_main

def main(argv):
    config = load_config(argv, GRPOConfig)
    load_tokenizer(config.tokenizer_path or config.actor.path, for_chat=True)

run_main(main)
"""
TRAINS = """
from arealite.api.cli_args import GRPOConfig
from arealite.dataset import load_tokenizer
from arealite.trainer.ppo import PPOTrainer
from arealite.utils.config import load_config, run_main
from arealite.workflow.rlvr import RLVRWorkflow

def score(completion, answer, **row):
    return 1.0

def main(argv):
    config = load_config(argv, GRPOConfig)
    tokenizer = load_tokenizer(config.tokenizer_path or config.actor.path)
    PPOTrainer(config, {rows}, tokenizer).train(RLVRWorkflow(score, config.gconfig, tokenizer))

if __name__ == "__main__":
    run_main(main)
"""


@pytest.fixture
def model(work) -> Path:
    """A folder that looks like a model with a tokenizer and a chat template."""
    folder = work / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2", "vocab_size": 8}))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    return folder


@pytest.fixture(params=["dry run", "real run"])
def refused(request, work, model, arguments, monkeypatch):
    """Launch script.py, and check that it is refused before anything has started."""

    def launch(match: str, *more: str) -> None:
        monkeypatch.setattr(local, "run_attempts", lambda *_: pytest.fail("the job was started"))
        with pytest.raises(ConfigError, match=match):
            local.launch("script.py", arguments(f"actor.path={model}", *more), dry_run=request.param == "dry run")
        assert not (work / "runs").exists()

    return launch


def test_a_package_that_is_not_installed(refused, work):
    (work / "script.py").write_text("import os\nimport no_such_package.part\n" + LOADS)
    refused(r"script\.py imports no_such_package\.part, which is not installed in .*: pip install no_such_package")
    (work / "script.py").write_text("from no_such_package import thing\n" + LOADS)
    refused(r"script\.py imports no_such_package, which")


@pytest.mark.parametrize("script", ["train.sh", "folder/train", "no_such_package.train"])
def test_what_is_neither_a_file_nor_a_module_is_not_started(work, script):
    with pytest.raises(ConfigError, match=f"cannot run {script}: give a file that ends with .py"):
        local.launch(script, ["allocation_mode=d1"])
    assert not (work / "runs").exists()


@pytest.mark.parametrize("first", ["--config", "--dry-run", "trial_name=a"])
def test_options_before_the_script(first):
    with pytest.raises(ConfigError, match=f"the script comes before {first.partition('=')[0]}: arealite launch local"):
        local.main([first, "x.yaml", "script.py"])


def test_a_script_may_find_modules_in_a_folder_of_its_own(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import sys\nsys.path.insert(0, 'elsewhere')\nfrom no_such_package import thing\n")
    check_source(LaunchConfig(), str(script), runs_here=True)


def test_a_folder_without_a_tokenizer(refused, work, model):
    (work / "script.py").write_text(LOADS)
    (model / "tokenizer.json").unlink()
    (model / "tokenizer_config.json").unlink()
    refused(r"actor\.path=.*model has no tokenizer .* as tokenizer_path=…")


def test_a_tokenizer_without_a_chat_template(refused, work, model):
    (work / "script.py").write_text(LOADS)
    (model / "tokenizer_config.json").write_text("{}")
    refused(r"the tokenizer of .*model \(actor\.path\) has no chat template, and the script sends messages: use an")
    shutil.copytree(model, work / "other")
    refused(r"the tokenizer of .*other \(tokenizer_path\) has no chat template", f"tokenizer_path={work / 'other'}")


def test_a_script_that_may_be_right_passes(work, model, arguments, capsys):
    """Modules beside the script, optional imports, templates in a file of their own."""
    (work / "mine.py").write_text("")
    (work / "script.py").write_text("import mine\ntry:\n    import no_such\nexcept ImportError:\n    pass\n" + LOADS)
    (model / "tokenizer_config.json").write_text("{}")
    (model / "chat_template.jinja").write_text("{{ messages }}")
    assert local.launch("script.py", arguments(f"actor.path={model}"), dry_run=True) == 0
    assert "checking the script" not in capsys.readouterr().out, "it has no engine at which it would end"


def dry_run(script: Path, *more: str) -> tuple[int, list[str]]:
    """Return the code and the lines of a dry run."""
    command = ("-m", "arealite.launcher.local", str(script), *more, "--dry-run")
    done = warm_python.run(command, timeout=120)
    return done.returncode, (done.stdout + done.stderr).strip().splitlines()


def rehearse(script: Path, *more: str) -> tuple[int, str]:
    """Return the code and the last line of a dry run."""
    code, lines = dry_run(script, *more)
    return code, lines[-1]


def of_example(name: str, model: Path, data: Path, root: Path) -> tuple[Path, list[str]]:
    keys = {"actor.path": model, "train_dataset.path": data, "cluster.fileroot": root / "runs"}
    given = [*(f"{key}={value}" for key, value in keys.items()), "train_dataset.batch_size=1"]
    config = ["--config", str(EXAMPLES / "configs" / f"{name}.yaml"), "allocation_mode=embedded.d1+d1"]
    return EXAMPLES / f"{name}.py", [*config, *given]


def test_a_dry_run_of_an_example_ends_where_its_engines_start(model_path, gsm8k_path, tmp_path):
    script, argv = of_example("gsm8k_grpo", model_path, gsm8k_path, tmp_path)
    code, lines = dry_run(script, *argv)
    assert lines[-2] == "checking the script up to where its engines start"
    assert (code, lines[-1]) == (0, "dry run: nothing was started, and no error was found")
    assert not list(tmp_path.iterdir())


def test_columns_that_are_missing(model_path, tmp_path):
    data = tmp_path / "gsm8k.jsonl"
    data.write_text('{"q": "1+1?", "answer": "#### 2"}\n')
    script, argv = of_example("tool_math", model_path, data, tmp_path)
    code, line = rehearse(script, *argv)
    assert code == 2 and line.startswith(f"error: {data}, row 1: ") and "question" in line
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ('[{"messages": [{"role": "user", "content": "1"}], "answer": "2"}]', "the tokenizer has no chat template"),
        ('[{"prompt": "1"}]', "the reward score needs 'answer', and a row has the columns prompt"),
        ("[]", "has no rows"),
        ("[][0]", "script.py ended before its engines were made: IndexError: list index out of range (File "),
    ],
)
def test_rows_that_cannot_be_played(model_path, gsm8k_path, tmp_path, rows, message):
    folder = shutil.copytree(model_path, tmp_path / "model")
    (folder / "chat_template.jinja").unlink()
    (tmp_path / "script.py").write_text(TRAINS.replace("{rows}", rows))
    _, argv = of_example("gsm8k_grpo", folder, gsm8k_path, tmp_path)
    code, line = rehearse(tmp_path / "script.py", *argv)
    assert code == 2 and message in line


def test_a_class_instead_of_a_workflow(model_path, gsm8k_path, tmp_path):
    script = TRAINS.replace("{rows}", '[{"prompt": "1", "answer": "2"}]')
    script = script.replace("RLVRWorkflow(score, config.gconfig, tokenizer)", "RLVRWorkflow")
    (tmp_path / "script.py").write_text(script)
    _, argv = of_example("gsm8k_grpo", model_path, gsm8k_path, tmp_path)
    code, line = rehearse(tmp_path / "script.py", *argv)
    assert (code, line) == (2, "error: workflow is the class RLVRWorkflow: pass an object, RLVRWorkflow(…)")


def test_what_is_not_downloaded_is_not_checked(gsm8k_path, tmp_path):
    script, argv = of_example("gsm8k_grpo", Path("nobody/nothing"), gsm8k_path, tmp_path)
    code, lines = dry_run(script, *argv)
    assert (code, lines[-2]) == (0, "note: not checked further: the tokenizer nobody/nothing is not downloaded")
