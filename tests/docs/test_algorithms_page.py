"""docs/algorithms.md is complete and true: every algorithm, its defaults, its functions, keys and papers."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from arealite.algo import preferences
from arealite.algo.policy_losses import LOSSES
from arealite.api.algorithms import ALGORITHMS, Algorithm
from arealite.api.cli_args import DPOConfig, EvalConfig
from arealite.utils.config_help import keys_of

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "algorithms.md").read_text()
FUNCTION = re.compile(r"\[`([\w.]+)`\]\(\.\./(arealite/[\w/]+\.py)\)")
SECTIONS = dict(re.findall(r"^### .*?\(`(\w+)`\)\n(.*?)(?=^##)", PAGE, re.DOTALL | re.MULTILINE))


def test_every_algorithm_has_a_section_and_a_row_of_the_table():
    assert list(SECTIONS) == list(ALGORITHMS)
    assert re.findall(r"^\| `(\w+)` \|.*(?:yes|no) \|$", PAGE, re.MULTILINE) == list(ALGORITHMS)


def row_of(name: str, algorithm: Algorithm) -> str:
    norm = algorithm.norm
    mean = norm.mean_level + (", leave one out" if norm.leave_one_out else "")
    whitened = ", ".join("yes" if value else "no" for value in algorithm.norm_advantages)
    parts = mean, norm.std_level, ", ".join(algorithm.loss), ", ".join(algorithm.mean), whitened
    return f"| `{name}` | {' | '.join(parts)} |"


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_table_has_the_defaults_of_the_code(name):
    assert row_of(name, ALGORITHMS[name]) in PAGE


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name != "custom"])
def test_a_section_has_functions_keys_use_configuration_and_the_paper_of_the_code(name):
    section = SECTIONS[name]
    missing = [word for word in ("Functions:", "Keys:", "When:", "Configuration:", "Paper") if word not in section]
    assert not missing and FUNCTION.search(section)
    (paper,) = re.findall(r"arXiv ([\d.]+):", ALGORITHMS[name].summary)
    assert f"https://arxiv.org/abs/{paper}" in section
    assert f"configs/algorithms/{name}.yaml" in section


def test_every_configuration_and_loss_is_on_the_page():
    folder = ROOT / "examples" / "arealite" / "configs" / "algorithms"
    assert [file.name for file in folder.glob("*.yaml") if f"/{file.name})" not in PAGE] == []
    losses = {"policy_losses": [f"{name}_loss" for name in LOSSES]}
    losses["preferences"] = [name for name in vars(preferences) if name.endswith("_loss")]
    absent = [
        name
        for module, names in losses.items()
        for name in names
        if f"[`{name}`](../arealite/algo/{module}.py)" not in PAGE
    ]
    assert absent == []


@pytest.mark.parametrize(("name", "file"), sorted(set(FUNCTION.findall(PAGE))))
def test_named_functions_are_defined_in_the_linked_file(name, file):
    body: ast.AST = ast.parse((ROOT / file).read_text())
    for part in name.split("."):
        found = [
            node
            for node in ast.iter_child_nodes(body)
            if part == getattr(node, "name", None)
            or (isinstance(node, ast.Assign) and part in [ast.unparse(target) for target in node.targets])
        ]
        assert found, f"{file} does not define {name}"
        body = found[0]


def test_named_keys_exist():
    known = {key.path for cls in (EvalConfig, DPOConfig) for key in keys_of(cls)}
    keys = set(re.findall(r"`((?:actor|critic|model|rollout|ref|teacher|gconfig)\.\w+)(?:=\S+)?`", PAGE))
    assert len(keys) > 30 and sorted(keys - known) == []
