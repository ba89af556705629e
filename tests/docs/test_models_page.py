"""docs/models.md lists the families and layouts that tests cover."""

import ast
import re
from pathlib import Path

from arealite.utils.model_config import STAGED_FAMILIES

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/models.md").read_text()
MIXTURES = {"qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3"}


def cells(start: str) -> list[str]:
    (line,) = [line for line in PAGE.splitlines() if line.startswith(f"| {start}")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def families_in_tests() -> set[str]:
    """The families of tests/engine/test_families.py, read without importing torch."""
    tree = ast.parse((ROOT / "tests/engine/test_families.py").read_text())
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "FAMILIES":
            assert isinstance(node.value, ast.Dict)
            return {str(key.value).split("-")[0] for key in node.value.keys if isinstance(key, ast.Constant)}
    raise AssertionError("no FAMILIES")


def test_dense_families_are_those_that_are_tested():
    listed = set(re.findall("`([^`]+)`", cells("server and trainer: log-probs of Hugging Face")[1]))
    assert listed | MIXTURES == families_in_tests()
    assert set(STAGED_FAMILIES) - families_in_tests() == {"cohere", "qwen3"}


def test_layouts_of_mixtures_are_those_that_are_tested():
    tests = (ROOT / "tests/engine/test_stream_ranks.py").read_text()
    _, *families, _ = cells("weights in a stream to servers of 1 and 2 ranks")
    for kind, cell in zip(("qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3"), families, strict=True):
        layouts = re.findall(rf'"{kind}", "(\w+)"', tests)
        assert layouts == re.findall(r"from (\w+)", cell), kind


def test_every_named_test_exists():
    names = set(re.findall(r"`(?:tests/\w+/)?(test_\w+\.py)`", PAGE))
    assert len(names) > 8
    assert names <= {file.name for file in (ROOT / "tests").rglob("test_*.py")}
