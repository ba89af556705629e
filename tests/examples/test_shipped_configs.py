"""The real loader accepts every example configuration as it is shipped, with what its script loads it as."""

from pathlib import Path

import pytest

from arealite.api.alloc_mode import AllocationMode
from arealite.api.cli_args import GRPOConfig
from arealite.cli.main import MainConfig, flatten
from arealite.launcher.launch_config import find_config_class
from arealite.utils.config import load_config

EXAMPLES = Path(__file__).parents[2] / "examples" / "arealite"
CONFIGS = EXAMPLES / "configs"
FILES = sorted(EXAMPLES.parent.rglob("*.yaml"))
# Imports the trainer that it names, and torch with it.
SLOW = ("custom_trainer",)
PARAMETERS = [pytest.param(f, id=f.stem, marks=[pytest.mark.slow] if f.stem in SLOW else []) for f in FILES]
# What a user must give: `path: ???` in the file.
GIVEN = {
    "clevr_count_grpo": ["actor.path"],
    "clevr_count_sft": ["model.path"],
    "demo": ["actor.path"],
    "preference_dpo": ["train_dataset.path"],
    "preference_rw": ["train_dataset.path"],
}
# Files whose script has another name.
SCRIPTS = {"demo": "reverse_grpo"}
# Files for `arealite.cli.main`, and the trainers that they are for; None: the one in the file.
TREES = {
    "custom_trainer": [None],
    "custom_workflow": [None],
    "hhrlhf": ["sft", "rw", "dpo", "grpo"],
    "tldr": ["sft", "rw", "dpo", "grpo"],
}


def arguments(path: Path) -> list[str]:
    # An algorithm's file is merged into the one of GSM8K.
    base = ["--config", str(CONFIGS / "gsm8k_grpo.yaml")] if path.parent.name == "algorithms" else []
    return [*base, "--config", str(path), *(f"{key}=given" for key in GIVEN.get(path.stem, []))]


def load_all(path: Path) -> list:
    """Return the configuration of the script, or of each stage."""
    if path.stem in TREES:
        kinds = [[f"trainer.type={kind}"] if kind else [] for kind in TREES[path.stem]]
        return [flatten(load_config([*arguments(path), *kind], MainConfig)) for kind in kinds]
    name = "gsm8k_grpo" if path.parent.name == "algorithms" else SCRIPTS.get(path.stem, path.stem)
    config_class = find_config_class(str(EXAMPLES / f"{name}.py"))
    assert config_class is not None, f"{name}.py loads no configuration of arealite.api.cli_args"
    return [load_config(arguments(path), config_class)]


@pytest.mark.parametrize("path", PARAMETERS)
def test_the_loader_accepts_a_shipped_configuration(path, monkeypatch):
    # A file may name a class of the script beside it.
    monkeypatch.syspath_prepend(EXAMPLES)
    for config in load_all(path):
        assert config.experiment_name
        # A job with rollouts has servers; no other has.
        assert (AllocationMode.from_str(config.allocation_mode).gen is not None) == isinstance(config, GRPOConfig)


def test_only_the_listed_files_leave_a_key_to_the_user():
    assert {path.stem for path in FILES if "???" in path.read_text()} == set(GIVEN)


@pytest.mark.parametrize("name", ["openai_agent", "agents_sdk"])
def test_agents_run_in_worker_processes(name):
    config = load_config(["--config", str(CONFIGS / f"{name}.yaml")], GRPOConfig)
    assert config.rollout.num_workers == 2
