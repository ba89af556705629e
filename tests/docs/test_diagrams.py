"""The diagrams of docs/architecture are true: their folders, imports, classes and calls are those of the package."""

from __future__ import annotations

import ast
import functools
import re
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import pytest

from scripts.diagrams import FOLDER, mark
from tests.source_trees import nodes_of
from tests.test_import_rules import FILES, MAY_IMPORT, ROOT, imports_of

LAYERS = Path("AReaLite_architecture.puml"), Path("AReaLite_architecture.zh.puml")
SOURCES = sorted(FOLDER.glob("*.puml"))
CALLS = [source for source in SOURCES if source.name not in {str(name) for name in LAYERS}]
ENGLISH = [source for source in SOURCES if not source.name.endswith(".zh.puml")]
STEP = re.compile(r"^\d+\. \[`([\w.]+)`\]\(\.\./arealite/([\w/]+\.py)\)", re.MULTILINE)


class Arrow(NamedTuple):
    start: str
    end: str
    label: str


class Diagram(NamedTuple):
    # Lines of text in each box, by the name that arrows use.
    boxes: dict[str, list[str]]
    # Names of the boxes of each package, from top to bottom.
    packages: dict[str, list[str]]
    arrows: list[Arrow]


def read(source: Path) -> Diagram:
    """Parse the part of PlantUML that the diagrams use."""
    text = source.read_text()
    boxes = {name: body.split("\n") for name, body in re.findall(r"rectangle (\w+) \[\n(.*?)\n *\]", text, re.DOTALL)}
    named = re.findall(r'^(?:participant|actor|database) "(.*?)" as (\w+)', text, re.MULTILINE)
    boxes |= {name: body.split("\\n") for body, name in named}
    packages = {
        name: re.findall(r"rectangle (\w+) \[", body)
        for name, body in re.findall(r'^package ".*?" as (\w+) #\w+ \{\n(.*?)^\}', text, re.DOTALL | re.MULTILINE)
    }
    drawn = re.findall(r"^ *(\w+) --?(?:up|down|left|right)?-?> (\w+)(?: : (.*))?$", text, re.MULTILINE)
    return Diagram(boxes, packages, [Arrow(*arrow) for arrow in drawn])


@functools.cache
def real_imports() -> dict[str, set[str]]:
    """Return the folders that each folder of the package imports."""
    graph: dict[str, set[str]] = {room: set() for room in MAY_IMPORT}
    for file in FILES:
        room = file.relative_to(ROOT).parts[0]
        if room in graph:
            found = {name.split(".")[1] for name in imports_of(file) if "." in name}
            # Commands import what takes long only when it is needed.
            found |= set(re.findall(r'import_module\(f?"arealite\.(\w+)', file.read_text()))
            graph[room] |= found & set(MAY_IMPORT) - {room}
    return graph


def definitions(files: list[Path]) -> set[str]:
    nodes = [node for file in files for node in nodes_of(file)]
    return {node.name for node in nodes if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)}


def files_of(lines: list[str]) -> list[Path]:
    """Return the files of the package that a box names."""
    return [ROOT / name for line in lines for name in re.findall(r"\b\w+/[\w/]+\.py", line)]


@pytest.mark.parametrize("source", LAYERS, ids=str)
def test_every_folder_of_the_package_is_in_one_layer(source):
    diagram = read(FOLDER / source)
    assert len(diagram.packages) == 6
    assert sorted(name for names in diagram.packages.values() for name in names) == sorted(MAY_IMPORT)


@pytest.mark.parametrize("source", LAYERS, ids=str)
def test_arrows_are_imports_and_every_import_follows_arrows(source):
    drawn, imports = defaultdict(set), real_imports()
    for start, end, _ in read(FOLDER / source).arrows:
        drawn[start].add(end)
    invented = [f"{start} -> {end}" for start, ends in drawn.items() for end in ends - imports[start]]
    assert not invented, f"no file has these imports: {invented}"

    def reached(room: str) -> set[str]:
        return drawn[room].union(*(reached(end) for end in drawn[room]))

    missing = {room: sorted(ends - reached(room) - {"api", "utils"}) for room, ends in imports.items()}
    assert not any(missing.values()), f"no path of arrows for these imports: {missing}"


@pytest.mark.parametrize("source", LAYERS, ids=str)
def test_arrows_do_not_lead_to_a_higher_layer(source):
    diagram = read(FOLDER / source)
    depth = {name: level for level, names in enumerate(diagram.packages.values()) for name in names}
    # Engines implement the contracts of the layer above them.
    upwards = [(a, b) for a, b, _ in diagram.arrows if depth[b] < depth[a] and b != "api"]
    assert upwards == []


@pytest.mark.parametrize("source", LAYERS, ids=str)
def test_modules_of_a_folder_exist(source):
    for room, lines in read(FOLDER / source).boxes.items():
        assert lines[0].strip() == f"<b>{room}</b>"
        names = re.findall(r"[\w/]+", " ".join(lines[1:]).replace(".py", ""))
        absent = [
            name for name in names if not (ROOT / room / name).is_dir() and not (ROOT / room / f"{name}.py").exists()
        ]
        assert names and not absent, f"{room} has no {absent}"


@pytest.mark.parametrize("source", CALLS, ids=lambda path: path.name)
def test_classes_and_called_functions_are_defined_in_the_named_files(source):
    diagram = read(source)
    assert diagram.arrows and {end for arrow in diagram.arrows for end in arrow[:2]} <= set(diagram.boxes)
    for lines in diagram.boxes.values():
        files = files_of(lines)
        name = re.sub(r"</?b>", "", lines[0]).strip()
        assert not files or name in definitions(files), f"{files} do not define {name}"
    for start, end, label in diagram.arrows:
        for function in re.findall(r"(\w+)\(\)", label):
            files = files_of(diagram.boxes[start]) + files_of(diagram.boxes[end])
            assert function in definitions(files), f"{start} -> {end}: {files} do not define {function}"


def test_calls_of_a_batch_are_in_the_order_of_the_page():
    page = (FOLDER.parent / "architecture.md").read_text()
    steps = [name for name, _ in STEP.findall(page.split("## A batch\n")[1].split("\n## ")[0])]
    diagram = read(FOLDER / "batch.puml")
    calls = [f"{diagram.boxes[a.end][0]}.{f}" for a in diagram.arrows for f in re.findall(r"(\w+)\(\)", a.label)]
    drawn = [call for call in calls if call in steps]
    assert len(drawn) > 8 and drawn == sorted(drawn, key=steps.index)


@pytest.mark.parametrize("source", ENGLISH, ids=lambda path: path.name)
def test_the_chinese_diagram_has_the_same_boxes_and_arrows(source):
    ours, theirs = read(source), read(source.with_suffix(".zh.puml"))
    assert ours.packages == theirs.packages and list(ours.boxes) == list(theirs.boxes)
    skeletons = [
        [(a.start, a.end, re.findall(r"\w+\(\)", a.label, re.ASCII)) for a in diagram.arrows]
        for diagram in (ours, theirs)
    ]
    assert skeletons[0] == skeletons[1]


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.name)
def test_every_drawing_was_made_from_its_source(source):
    drawing = source.with_suffix(".svg")
    assert drawing.exists() and drawing.read_text().endswith(mark(source)), "run `make diagrams`"
