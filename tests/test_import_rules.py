"""The house rules that a machine can check: who imports whom, sizes, imports inside functions, opening docstrings."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "arealite"
FILES = sorted(ROOT.rglob("*.py"))
MIDDLE = {"algo", "inference", "core", "dataset", "reward", "env", "launcher"}
# Rooms, and which other rooms their files may import (DESIGN §3). Within a room everything may be imported.
MAY_IMPORT = {
    "api": set(),
    "utils": {"api"},
    "weights": {"utils", "api"},
    **{room: {"utils", "api", "weights"} for room in MIDDLE},
    "engine": MIDDLE - {"launcher"} | {"utils", "api", "weights"},
    "controller": {"utils", "api", "weights", "core", "engine", "launcher"},
    "workflow": {"api", "utils", "reward", "env"},
    "trainer": MIDDLE | {"utils", "api", "weights", "engine", "controller", "workflow"},
    "dashboard": {"utils", "api", "core"},
    "cli": MIDDLE | {"utils", "api", "weights", "engine", "workflow", "trainer", "dashboard"},
}
MAX_FILE, MAX_FUNCTION = 500, 60
# A training loop is read from top to bottom, and a Triton kernel is one program: neither gains by being cut up.
MAX_WHOLE = 100
# Optional dependencies, imported in the function of the one adapter that needs them.
OPTIONAL = {"datasets", "pyarrow", "tensorboard", "torch.utils.tensorboard", "peft", "ray", "triton", "sympy", "vllm", "mpmath", "uvloop"}  # fmt: skip
# Needs Triton, which CPU builds of torch do not bring.
OPTIONAL |= {"arealite.inference.cuda.runner"}


def name_of(file: Path) -> str:
    parts = ["arealite", *file.relative_to(ROOT).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(file: Path, runtime_only: bool = False) -> set[str]:
    """Dotted names of the package that a file imports; without those that only type checkers see, if asked."""
    tree = ast.parse(file.read_text())
    skipped: set[ast.AST] = set()
    if runtime_only:
        for node in ast.walk(tree):
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                skipped |= set(ast.walk(node))
    found = set()
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in found if name.startswith("arealite")}


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_imports_run_downwards(file):
    room = file.relative_to(ROOT).parts[0]
    if room == "__init__.py":
        return
    assert room in MAY_IMPORT, f"{room} is not a room of the house: see DESIGN §3"
    rooms = {name.split(".")[1] for name in imports_of(file) if name.count(".") >= 1}
    forbidden = rooms - MAY_IMPORT[room] - {room} - {"__version__"}
    assert not forbidden, f"{file.name} ({room}) may not import {forbidden}"


def test_no_cycles():
    names = {name_of(file): file for file in FILES}
    graph = {n: imports_of(f, runtime_only=True) & set(names) - {n} for n, f in names.items()}
    # `from package import module` names both; the package's own __init__ counts only if it is not empty.
    empty = {n for n, f in names.items() if f.name == "__init__.py" and "import" not in f.read_text()}
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join([*path[path.index(name) :], name])
        if name not in done:
            for other in sorted(graph[name] - empty):
                visit(other, (*path, name))
            done.add(name)

    for name in sorted(graph):
        visit(name, ())


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_files_are_small_and_open_with_what_they_are(file):
    text = file.read_text()
    assert text.count("\n") <= MAX_FILE, f"{text.count(chr(10))} lines: split the file"
    if text.strip():
        docstring = ast.get_docstring(ast.parse(text))
        assert docstring, "a file opens with what it owns, who calls it, what it guarantees"


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_functions_are_small_and_import_nothing(file):
    for node in ast.walk(ast.parse(file.read_text())):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        lines = (node.end_lineno or 0) - node.lineno + 1
        whole = node.name == "train" or node.name.endswith("_kernel")
        limit = MAX_WHOLE if whole else MAX_FUNCTION
        assert lines <= limit, f"{node.name} has {lines} lines"
        for inner in ast.walk(node):
            names = [a.name for a in inner.names] if isinstance(inner, ast.Import) else []
            names += [inner.module or ""] if isinstance(inner, ast.ImportFrom) else []
            lazy = [n for n in names if n not in OPTIONAL and n.split(".")[0] not in OPTIONAL]
            assert not lazy, f"{node.name} imports {lazy}: imports stand at the top of a file"


def test_the_launcher_imports_nothing_of_what_it_starts():
    for file in (ROOT / "launcher").rglob("*.py"):
        heavy = {n for n in imports_of(file) if n.split(".")[1:2] not in (["api"], ["utils"], ["launcher"])}
        assert not heavy, f"{file.name} imports {heavy}"
