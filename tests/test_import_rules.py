"""Rules of the package that a machine can check: which room imports which, sizes, docstrings, mentioned documents."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.source_trees import nodes_of, tree_of

REPOSITORY = Path(__file__).parent.parent
ROOT = REPOSITORY / "arealite"
FILES = sorted(ROOT.rglob("*.py"))

BASE = {"api", "utils"}
# Rooms, and which other rooms their files may import, for type checkers too. Files of one room may import each other.
MAY_IMPORT = {
    "api": set(),
    "utils": {"api"},
    "algo": BASE,
    "weights": BASE,
    "dataset": BASE,
    "reward": BASE,
    "launcher": BASE,
    "dashboard": BASE | {"core"},
    "doctor": BASE | {"core"},
    "protocol": BASE,
    "agents": BASE | {"protocol"},
    "inference": BASE | {"weights", "protocol"},
    "core": BASE | {"weights"},
    "workflow": BASE | {"reward", "protocol", "agents"},
    "env": BASE | {"reward"},
    "engine": BASE | {"algo", "weights", "inference", "core"},
    "controller": BASE | {"weights", "core", "engine", "launcher"},
    "trainer": BASE | {"algo", "weights", "dataset", "reward", "core", "engine", "controller", "workflow", "launcher"},
}
MAY_IMPORT["easy"] = MAY_IMPORT["trainer"] | {"trainer"}
MAY_IMPORT["plan"] = BASE | {"weights", "core", "engine", "inference"}
MAY_IMPORT["cli"] = set(MAY_IMPORT)

MAX_FILE, MAX_FUNCTION, MAX_FOLDER, MAX_FIRST_LINE = 400, 50, 4_000, 99
# A training loop is read from top to bottom, and a Triton kernel is one program: neither gains by being split.
MAX_WHOLE_FUNCTION = 100

# Optional dependencies are imported in the function of the one adapter that needs them.
OPTIONAL = {"datasets", "pyarrow", "tensorboard", "torch.utils.tensorboard", "peft", "ray", "triton", "sympy"}
OPTIONAL |= {"vllm", "llguidance", "mpmath", "uvloop", "matplotlib", "PIL", "gymnasium", "reasoning_gym"}
# This module needs Triton, which CPU builds of torch do not have.
OPTIONAL |= {"arealite.inference.cuda.runner"}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def name_of(file: Path) -> str:
    parts = ["arealite", *file.relative_to(ROOT).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def functions_of(file: Path) -> list[Function]:
    return [node for node in nodes_of(file) if isinstance(node, Function)]


@functools.cache
def imports_of(file: Path) -> set[str]:
    """Return the dotted names of the package that a file imports, at run time or for type checkers."""
    found = set()
    for node in nodes_of(file):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in found if name.startswith("arealite")}


def test_imports_run_downwards():
    rooms = {file: file.relative_to(ROOT).parts[0] for file in FILES if file.parent != ROOT}
    unknown = set(rooms.values()) - set(MAY_IMPORT)
    assert not unknown, f"{unknown} are no known rooms: add them to MAY_IMPORT with the rooms that they may import"
    bad = []
    for file, room in rooms.items():
        imported = {name.split(".")[1] for name in imports_of(file) if "." in name}
        forbidden = imported - MAY_IMPORT[room] - {room} - {"__version__"}
        bad += [f"{name_of(file)} ({room}) may not import {forbidden}"] if forbidden else []
    assert not bad, "\n".join(bad)


def test_no_import_cycles():
    names = {name_of(file): file for file in FILES}
    graph = {name: imports_of(file) & set(names) - {name} for name, file in names.items()}
    # `from package import module` imports both; the package's __init__ counts only if it imports something itself.
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


def test_files_are_small_and_have_a_docstring():
    bad = []
    for file in FILES:
        text = file.read_text()
        if (lines := text.count("\n")) > MAX_FILE:
            bad.append(f"{name_of(file)} has {lines} lines, at most {MAX_FILE}: split the file")
        if text.strip() and not ast.get_docstring(tree_of(file)):
            bad.append(f"{name_of(file)} has no docstring")
    assert not bad, "\n".join(bad)


def test_functions_are_small_and_import_nothing():
    bad = [f"{name_of(file)}: {error}" for file in FILES for f in functions_of(file) for error in errors_of(f)]
    assert not bad, "\n".join(bad)


def errors_of(function: Function) -> Iterator[str]:
    lines = (function.end_lineno or 0) - function.lineno + 1
    is_kernel = any("triton.jit" in ast.unparse(decorator) for decorator in function.decorator_list)
    limit = MAX_WHOLE_FUNCTION if is_kernel or function.name == "train" else MAX_FUNCTION
    if lines > limit:
        yield f"{function.name} has {lines} lines, at most {limit}: split it"
    for node in ast.walk(function):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        local = [n for n in names if n not in OPTIONAL and n.split(".")[0] not in OPTIONAL]
        if local:
            yield f"{function.name} imports {local}: move the import to the top of the file"


def test_folders_are_small():
    """Lines of a folder's own files, without those of its sub-folders."""
    sizes = Counter()
    for file in FILES:
        sizes[str(file.parent.relative_to(ROOT))] += file.read_text().count("\n")
    assert {folder: size for folder, size in sizes.items() if size > MAX_FOLDER} == {}


def test_docstrings_start_with_one_short_sentence():
    bad = []
    for file in FILES:
        for node in nodes_of(file):
            docstring = ast.get_docstring(node) if isinstance(node, ast.Module | ast.ClassDef | Function) else None
            first = docstring.splitlines()[0] if docstring else "."
            if len(first) > MAX_FIRST_LINE or not first.endswith((".", ":", "?")):
                bad.append(f"{name_of(file)}: {first}")
    assert not bad, "\n".join(bad)


def test_names_of_test_files_are_unique():
    """pytest imports test files by their names alone."""
    names = Counter(file.name for file in (REPOSITORY / "tests").rglob("test_*.py"))
    assert not [name for name, count in names.items() if count > 1]


def test_launcher_imports_nothing_of_what_it_starts():
    for file in (ROOT / "launcher").rglob("*.py"):
        others = {n for n in imports_of(file) if n.split(".")[1:2] not in (["api"], ["utils"], ["launcher"])}
        assert not others, f"{file.name} imports {others}"


def test_no_mention_of_documents_that_the_repository_does_not_have():
    absent = re.compile(r"\b(FACTS|DESIGN|STYLE)(\.md\b|\s*§|\b)")
    listed = subprocess.run(["git", "ls-files"], cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    bad = []
    for name in listed.splitlines():
        file = REPOSITORY / name
        if file == Path(__file__) or not file.is_file():
            continue
        for number, line in enumerate(file.read_text(errors="replace").splitlines(), 1):
            bad += [f"{name}:{number}: {line.strip()[:80]}"] if absent.search(line) else []
    assert not bad, "\n".join(bad)
