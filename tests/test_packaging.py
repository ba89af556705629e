"""The package: declared dependencies, one version number, and a wheel that works where it is installed."""

from __future__ import annotations

import ast
import email
import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

import arealite
from tests.source_trees import nodes_of

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
        for node in nodes_of(file):
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
    pins = {canonical(line.split("==")[0]) for line in lines if "==" in line and not line.startswith("#")}
    plain = {canonical(re.split(r"[\[<>=!~; ]", requirement)[0]) for requirement in PROJECT["dependencies"]}
    loggers = {canonical(name) for name in ("wandb", "swanlab", "trackio")}
    assert plain | loggers <= pins
    assert len(pins) == sum("==" in line for line in lines if not line.startswith("#")), "a package is pinned twice"


def test_loggers_install_together_under_the_pins():
    """Swanlab 0.10 needs protobuf below 7, trackio 0.43 needs pillow below 13 (`pip install --dry-run` says so)."""
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if line[0] != "#")
    assert int(pins["protobuf"].split(".")[0]) < 7 and int(pins["pillow"].split(".")[0]) < 13


def test_links_of_the_readme_on_a_package_index():
    index_readme = runpy.run_path(str(ROOT / "setup.py"), run_name="setup")["index_readme"]
    text = "![page](docs/a.png) [one](docs/a.md#b), [two](https://x.org/y), `f(x)[0](1)`"
    found = index_readme(text, "https://host/owner/name/", "1.0")
    assert "![page](https://host/owner/name/raw/v1.0/docs/a.png)" in found
    assert "[one](https://host/owner/name/blob/v1.0/docs/a.md#b), [two](https://x.org/y)" in found
    assert index_readme(text, "", "1.0").strip().startswith("one, [two](https://x.org/y),")
    readme = (ROOT / "README.md").read_text()
    assert "](docs/" in readme and "](docs/" not in index_readme(readme, "", "1.0")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel, built from the sdist, which is built from a copy: a build leaves files beside the sources."""
    folder = tmp_path_factory.mktemp("build")
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0"):
        if name and (ROOT / name).is_file():
            (folder / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / "tree" / name)
    build = f"from setuptools import build_meta; build_meta.build_sdist({str(folder)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=folder / "tree", capture_output=True, check=True)
    (sdist,) = folder.glob("*.tar.gz")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--no-deps", "--no-build-isolation"]
    done = subprocess.run([*pip, "--no-index", "-w", folder, sdist], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = folder.glob("*.whl")
    return found


@pytest.mark.slow
def test_the_wheel_has_all_files_of_the_package_and_no_others(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = email.message_from_bytes(archive.read(next(n for n in names if n.endswith(".dist-info/METADATA"))))
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "arealite"]
    tracked = set(subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split())
    assert tracked - names == set()
    assert {name for name in names if not name.startswith("arealite")} == set()
    assert {"arealite/py.typed", "arealite/cli/template/train.py.template"} <= names
    assert metadata["Name"] == "arealite" and metadata["Version"] == arealite.__version__
    assert metadata["Description-Content-Type"] == "text/markdown" and metadata["Summary"] == PROJECT["description"]
    assert "# AReaLite" in metadata.get_payload() and "](docs/" not in metadata.get_payload()
    extras = set(metadata.get_all("Provides-Extra"))
    assert extras == {canonical(name) for name in PROJECT["optional-dependencies"]}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_installed_wheel_works_outside_of_the_repository(wheel, tmp_path):
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python, "install"]
    subprocess.run([*pip, "--no-deps", "--no-index", "-q", wheel], check=True, capture_output=True)
    # Dependencies come from here; a path file of that folder, such as the one of an editable install, is not read.
    (site,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    env |= {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}

    def run(*argv: str | Path, cwd: Path = tmp_path) -> str:
        done = subprocess.run(argv, cwd=cwd, env=env, capture_output=True, text=True, timeout=400)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    command = python.with_name("arealite")
    assert str(site) in run(python, "-c", "import arealite; print(arealite.__file__)")
    assert run(command, "--version") == f"arealite {arealite.__version__}\n"
    assert "train and serve:" in run(command, "--help")
    assert "essential keys:" in run(command, "config", "help")
    run(command, "init", "my-task")
    # Trains a few steps.
    assert "7 passed" in run(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", cwd=tmp_path / "my-task")
