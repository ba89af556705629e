"""The package's metadata: declared dependencies, one version number, files that belong to a wheel."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import arealite

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# CUDA builds of torch bring triton.
BROUGHT_BY_OTHERS = {"triton"}
# For packages that are not installed here: the distribution of an import.
DISTRIBUTIONS = {"yaml": "pyyaml", "math_verify": "math-verify"}


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def declared() -> set[str]:
    groups = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    return {canonical(re.split(r"[\[<>=!~; ]", requirement)[0]) for group in groups for requirement in group}


def third_party_imports() -> dict[str, Path]:
    """Top-level modules that the package imports, each with one file that does."""
    found = {}
    for file in (ROOT / "arealite").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            found |= {name.split(".")[0]: file for name in names}
    return {name: file for name, file in found.items() if name not in {*sys.stdlib_module_names, "arealite"}}


def test_every_import_is_declared():
    installed = packages_distributions()
    for module, file in third_party_imports().items():
        distributions = {canonical(name) for name in [DISTRIBUTIONS.get(module, module), *installed.get(module, [])]}
        is_declared = bool(distributions & declared()) or module in BROUGHT_BY_OTHERS
        assert is_declared, f"{file.relative_to(ROOT)} imports {module}: declare it in pyproject.toml"


def test_the_version_is_written_once():
    assert "version" in PROJECT["dynamic"] and "version" not in PROJECT
    assert f"[{arealite.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


def test_every_folder_is_a_package():
    """A folder without `__init__.py` would be missing in a wheel."""
    for folder in {file.parent for file in (ROOT / "arealite").rglob("*.py")}:
        assert (folder / "__init__.py").is_file(), f"{folder.relative_to(ROOT)} has no __init__.py"
    assert (ROOT / "arealite" / "py.typed").is_file()


def test_pins_cover_all_plain_dependencies():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = {canonical(line.split("==")[0]) for line in lines if "==" in line}
    plain = {canonical(re.split(r"[\[<>=!~; ]", requirement)[0]) for requirement in PROJECT["dependencies"]}
    assert plain <= pins
