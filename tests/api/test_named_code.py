"""Code that a configuration names: everything that can be wrong has a message of its own."""

import sys
from pathlib import Path

import pytest

from arealite import trainer
from arealite.api.cli_args import GenerationHyperparameters
from arealite.api.errors import ConfigError
from arealite.api.named_code import load_object
from arealite.api.rollout_api import RolloutWorkflow, check_workflows, load_workflow

MODULE = """
from arealite.api.rollout_api import RolloutWorkflow

class Game(RolloutWorkflow):
    def __init__(self, gconfig, level, speed=1):
        self.gconfig, self.level, self.speed = gconfig, level, speed

    async def arun_episode(self, engine, data):
        return None

def make(level):
    return Game(None, level)

def wrong():
    return 5

number = 3
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """The name of a module in the working directory."""
    name = f"game_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    (tmp_path / f"{name}_broken.py").write_text("import game_that_is_missing")
    (tmp_path / f"{name}_raises.py").write_text("1 / 0")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", ["/nowhere", *__import__("sys").path])
    return name


@pytest.mark.parametrize("name", ["rw", "tasks", "custom"])
def test_modules_of_a_user_are_not_hidden_by_those_beside_the_loop_that_runs(module, name, monkeypatch):
    monkeypatch.setattr("sys.path", [str(Path(trainer.__path__[0])), *sys.path])
    monkeypatch.delitem(sys.modules, name, raising=False)
    Path(f"{name}.py").write_text("def score(completion): return 0.5")
    assert load_object(f"{name}:score", "reward")("") == 0.5
    monkeypatch.delitem(sys.modules, name)


def test_a_workflow_gets_what_it_takes(module):
    offered = {"gconfig": GenerationHyperparameters(), "tokenizer": object()}
    workflow = load_workflow(f"{module}:Game", {"level": 3}, **offered)
    assert isinstance(workflow, RolloutWorkflow)
    assert (workflow.gconfig, workflow.level, workflow.speed) == (offered["gconfig"], 3, 1)  # type: ignore[attr-defined]
    assert load_workflow(f"{module}:make", {"level": 4}).level == 4  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("Game", {}, r"workflow='Game' does not name code: write package.module:Class"),
        ("M:", {}, "does not name code"),
        ("M.py:Game", {}, r"there is no module 'M\.py'"),
        ("missing.module:Game", {}, r"there is no module 'missing'\. Run from the folder"),
        ("M_broken:Game", {}, "importing M_broken failed: No module named 'game_that_is_missing'"),
        ("M_raises:Game", {}, "importing M_raises failed: ZeroDivisionError"),
        ("M:Gane", {}, "has no 'Gane'; did you mean Game"),
        ("M:number", {}, "is a int; it must be a class or a function"),
        ("M:wrong", {}, "made a int; it must be a RolloutWorkflow"),
        ("M:Game", {}, r"needs level: set workflow_args\.level=… \(it gets by name: gconfig, tokenizer\)"),
        ("M:Game", {"levle": 1}, "takes no argument 'levle' \\(workflow_args\\); did you mean level"),
    ],
)
def test_mistakes(module, name, arguments, message):
    with pytest.raises(ConfigError, match=message.replace("M_", f"{module}_").replace("M\\.", rf"{module}\.")):
        load_workflow(name.replace("M", module, 1), arguments, gconfig=None, tokenizer=None)


def test_what_a_trainer_gets_must_be_a_workflow(module):
    game = load_object(f"{module}:Game", "workflow")
    right = game(None, 1)
    assert check_workflows(right) is check_workflows(right, right) is check_workflows(right, {"valid": right}) is right
    for given, message in [
        (game, r"workflow is the class Game: pass an object, Game\(…\)"),
        (
            dict,
            r"workflow is the class dict, which is not a RolloutWorkflow: write `class MyWorkflow\(RolloutWorkflow\)`",
        ),
        (GenerationHyperparameters(), "workflow is a GenerationHyperparameters, which is not a RolloutWorkflow: write"),
        (len, r"workflow is a builtin_function_or_method, .* `async def arun_episode\(self, engine, data\)`"),
    ]:
        with pytest.raises(ConfigError, match=message):
            check_workflows(given)
        with pytest.raises(ConfigError, match=f"eval_{message}"):
            check_workflows(right, {"valid": given})
    with pytest.raises(ConfigError, match="there is no workflow: pass one"):
        check_workflows(None)


def test_modules_of_the_package_are_found():
    assert load_object("arealite.workflow.rlvr:RLVRWorkflow", "workflow").__name__ == "RLVRWorkflow"
