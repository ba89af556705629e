"""docs/statistics.md explains every name that can stand in stats.jsonl."""

import ast
import json
import re
from dataclasses import fields
from pathlib import Path

from arealite.core.staleness_manager import Counts
from tests.source_trees import nodes_of

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs/statistics.md").read_text()
PACKAGE = "\n".join(file.read_text() for file in (ROOT / "arealite").rglob("*.py"))
# Names in the first cell of a row.
NAMES = [
    name for line in PAGE.splitlines() if line.startswith("| `") for name in re.findall("`([^`]+)`", line.split("|")[1])
]
# Stands for what a configuration chooses.
PATTERNS = [re.compile(re.escape(name).replace("NAME", "[^ ]+").replace("@K", "@[0-9]+")) for name in NAMES]
# Where statistics are made.
SOURCES = ("algo", "engine", "core/ledger/accounts.py", "core/ledger/audit.py", "core/workflow_executor.py",
           "dataset/order.py", "trainer/run.py", "trainer/guard.py", "trainer/evaluator.py")  # fmt: skip
# Summed or replaced before they are written.
INTERNAL = {"behav_weight/mean_square", "flops", "idle"}


def is_documented(name: str) -> bool:
    return (
        name in INTERNAL
        or any(p.fullmatch(name) for p in PATTERNS)
        or any(p.fullmatch(f"critic/{name}") for p in PATTERNS)
    )


def names_in_code() -> set[str]:
    """Literal names: keys of dicts with a `Stat`, and assignments to `stats["…"]`, `values["…"]` and the like."""
    found = {field.name for field in fields(Counts)}
    for source in SOURCES:
        path = ROOT / "arealite" / source
        for file in path.rglob("*.py") if path.is_dir() else [path]:
            text = file.read_text()
            for node in nodes_of(file):
                pairs = zip(node.keys, node.values, strict=True) if isinstance(node, ast.Dict) else ()
                found |= {str(k.value) for k, v in pairs if isinstance(k, ast.Constant) and _is_stat(v)}
            found |= set(re.findall(r'(?:stats|values|result|_last)\["([a-z_/0-9]+)"\] = ', text))
    return found


def _is_stat(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("Stat", "_mean_over_samples")


def test_every_name_in_the_code_is_explained():
    names = names_in_code()
    assert len(names) > 50
    assert sorted(name for name in names if not is_documented(name)) == []


def test_every_name_of_a_recorded_run_is_explained():
    lines = (ROOT / "benchmark/results/learning/qwen2.5-coder-0.5b/stats.jsonl").read_text().splitlines()
    names = {name for line in lines for name in json.loads(line)}
    assert len(names) > 50
    assert sorted(name for name in names if not is_documented(name)) == []


def test_no_name_is_explained_that_the_code_does_not_have():
    """The literal part of each name stands somewhere in the package."""
    words = set(re.findall(r"\w+", PACKAGE))
    parts = {name: max(re.split("NAME|@K|/", name), key=len) for name in NAMES}
    assert len(parts) > 100
    absent = [name for name, part in parts.items() if part not in words]
    assert [name for name in absent if not re.search(rf"\b{re.escape(parts[name])}\b", PACKAGE)] == []


def test_no_name_is_explained_twice():
    assert len(NAMES) == len(set(NAMES))
