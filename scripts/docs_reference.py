"""Hook of mkdocs (mkdocs.yml): makes the pages under reference/ from the code.

`reference/configuration.md` has every key of the config dataclasses, `reference/api.md` and `reference/api/*.md` the
public classes and functions with their docstrings. The source is parsed and not run, except for the config classes.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from arealite.api.cli_args import BaseExperimentConfig, DPOConfig, EvalConfig, GRPOConfig, RWConfig, SFTConfig
from arealite.utils.config_help import Key, keys_of, parts_of

ROOT = Path(__file__).parents[1]
Node = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
# Title of a page of the API, and the files whose public names it has.
GROUPS = {
    "Contracts": ("api/*_api.py", "api/io_struct.py", "api/trajectory.py", "api/chat.py", "api/alloc_mode.py",
                  "api/algorithms.py", "api/errors.py"),
    "Trainers": ("trainer/ppo.py", "trainer/sft.py", "trainer/rw.py", "trainer/dpo.py", "trainer/evaluate.py",
                 "trainer/run.py", "trainer/evaluator.py", "trainer/saver.py", "trainer/recover.py"),
    "Notebooks": ("easy/*.py",),
    "Engines": ("engine/*.py", "engine/ppo/*.py", "engine/sft/*.py", "engine/rw/*.py", "engine/dpo/*.py",
                "engine/remote/collecting.py", "engine/remote/base.py", "controller/factory.py"),
    "Workflows": ("workflow/*.py",),
    "Rewards": tuple(f"reward/{name}.py" for name in (
        "math", "gsm8k", "code", "choice", "countdown", "qa", "reasoning", "format", "length", "extraction", "combined",
        "endpoint", "judge", "model", "pool")),
    "Environments": ("env/*.py",),
    "Data": ("dataset/*.py",),
    "Losses": ("algo/*.py",),
    "Weights": ("weights/sync.py", "weights/transport.py", "weights/layout.py"),
    "Rollout": ("core/workflow_executor.py", "core/staleness_manager.py", "core/ledger/*.py"),
}  # fmt: skip


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Add the generated pages to the site."""
    pages = {"configuration.md": configuration_page(), "api.md": index_page()}
    pages |= {f"api/{title.lower()}.md": group_page(title) for title in GROUPS}
    for name, content in pages.items():
        files.append(File.generated(config, f"reference/{name}", content=content))


def configuration_page() -> str:
    """Return the page of all configuration keys."""
    own = {key.path for key in keys_of(BaseExperimentConfig)}
    lines = [
        "# Configuration",
        "",
        "Every key, as `--help all` prints it. Scripts take them from `--config FILE.yaml` and as `key=value`; for "
        "`arealite train` the keys of one kind of training stand below `trainer.TYPE.`, such as "
        "`trainer.grpo.actor.path`. Within a section the name of the section is left out: `lr` of `actor.optimizer` is "
        "`actor.optimizer.lr`.",
    ]
    lines += _sections("Every run", BaseExperimentConfig, set())
    kinds = {"Reinforcement learning": GRPOConfig, "Supervised fine-tuning": SFTConfig, "Reward models": RWConfig}
    kinds |= {"Preferences": DPOConfig}
    for title, cls in kinds.items():
        lines += _sections(title, cls, own)
    lines += _sections("Evaluation without training", EvalConfig, {key.path for key in keys_of(GRPOConfig)})
    return "\n".join(lines) + "\n"


def _sections(title: str, cls: type, known: set[str]) -> Iterator[str]:
    """Yield the tables of a config class without the keys that were shown before: plain keys first, then sections."""
    rows = [key for key in keys_of(cls) if key.path not in known]
    parts = {path: help_line for path, _, help_line in parts_of(cls)}
    named = {key.path.split(".NAME.")[0] for key in rows if ".NAME." in key.path}
    parts |= {f"{path}.NAME": "One such section for each name." for path in sorted(named)}
    yield from ["", f"## {title}", "", (cls.__doc__ or "").strip().splitlines()[0], ""]
    yield from _table([key for key in rows if _part(key, parts) == ""], "")
    for path, help_line in parts.items():
        inside = [key for key in rows if _part(key, parts) == path]
        if inside:
            yield from ["", f"### `{path}` {{#{title.split()[0].lower()}-{path.replace('.', '-')}}}", "", help_line, ""]
            yield from _table(inside, f"{path}.")


def _part(key: Key, parts: dict[str, str]) -> str:
    """Return the innermost section that a key belongs to."""
    return max((path for path in parts if key.path.startswith(f"{path}.")), key=len, default="")


def _table(rows: list[Key], prefix: str) -> Iterator[str]:
    """Yield the rows of a table; keys are relative to `prefix`."""
    if rows:
        yield from ["| key | type and default | |", "|---|---|---|"]
    for key in rows:
        value = f"`{key.kind}`, required" if key.default == "(required)" else f"`{key.kind} = {key.default}`"
        yield f"| `{key.path.removeprefix(prefix)}` | {value} | {_cell(key.text)} |"


def _plain(text: str) -> str:
    """Return text in which nothing outside of code is HTML or emphasis."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(p if p.startswith("`") else re.sub(r"([<*_\[\]])", r"\\\1", p) for p in parts)


@dataclass(frozen=True)
class Item:
    """A public class or function of the package."""

    file: Path
    node: Node

    @property
    def summary(self) -> str:
        return (ast.get_docstring(self.node) or "").split("\n")[0]


def items_of(title: str) -> list[Item]:
    """Return the public classes and functions of a group, in the order of its files."""
    files = [file for pattern in GROUPS[title] for file in sorted((ROOT / "arealite").glob(pattern))]
    nodes = [(file, node) for file in files for node in ast.parse(file.read_text()).body]
    return [Item(file, node) for file, node in nodes if isinstance(node, Node) and not node.name.startswith("_")]


def index_page() -> str:
    """Return the page that lists all public names."""
    lines = ["# API", "", "Public classes and functions by what they are for. Names that begin with `_` are internal."]
    for title in GROUPS:
        lines += ["", f"## {title}", "", "| name | module | |", "|---|---|---|"]
        for item in items_of(title):
            name, page = item.node.name, f"api/{title.lower()}.md"
            lines.append(f"| [`{name}`]({page}#{_anchor(item)}) | `{_module(item.file)}` | {_cell(item.summary)} |")
    return "\n".join(lines) + "\n"


def group_page(title: str) -> str:
    """Return the page with signatures and docstrings of one group."""
    lines, last = [f"# {title}"], None
    for item in items_of(title):
        if item.file != last:
            last = item.file
            lines += ["", f"## `{_module(item.file)}`", "", *_docstring(ast.parse(item.file.read_text()))]
        lines += ["", f"### `{item.node.name}` {{#{_anchor(item)}}}", "", *_described(item.node)]
    return "\n".join(lines) + "\n"


def _described(node: Node) -> Iterator[str]:
    yield from ["```python", *_signature(node), "```", "", *_docstring(node)]
    if isinstance(node, ast.ClassDef):
        for member in node.body:
            if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef) and not member.name.startswith("_"):
                yield from ["", f"#### `{node.name}.{member.name}`", "", "```python", *_signature(member), "```", ""]
                yield from _docstring(member)


def _signature(node: Node) -> Iterator[str]:
    """Yield the declaration of a function, or of a class with its constructor or fields."""
    if isinstance(node, ast.ClassDef):
        bases = ", ".join(ast.unparse(base) for base in node.bases)
        yield f"class {node.name}({bases})" if bases else f"class {node.name}"
        for member in node.body:
            if isinstance(member, ast.FunctionDef) and member.name == "__init__":
                yield from (f"    {line}" for line in _signature(member))
            elif isinstance(member, ast.AnnAssign) and not ast.unparse(member.target).startswith("_"):
                yield f"    {ast.unparse(member.target)}: {ast.unparse(member.annotation)}"
        return
    decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
    yield from (f"@{name}" for name in decorators if name in ("property", "classmethod", "staticmethod"))
    word = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    result = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    whole = f"{word} {node.name}({ast.unparse(node.args)}){result}"
    if len(whole) <= 100:
        yield whole
        return
    yield f"{word} {node.name}("
    yield from (f"    {argument}," for argument in _arguments(node.args))
    yield f"){result}"


def _arguments(arguments: ast.arguments) -> list[str]:
    """Return the arguments one by one, as written."""
    parts = [ast.unparse(a) for a in (*arguments.posonlyargs, *arguments.args)]
    first = len(parts) - len(arguments.defaults)
    parts[first:] = [f"{p} = {ast.unparse(d)}" for p, d in zip(parts[first:], arguments.defaults, strict=True)]
    if arguments.vararg or arguments.kwonlyargs:
        parts.append(f"*{ast.unparse(arguments.vararg)}" if arguments.vararg else "*")
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        parts.append(ast.unparse(argument) + (f" = {ast.unparse(default)}" if default else ""))
    return parts + ([f"**{ast.unparse(arguments.kwarg)}"] if arguments.kwarg else [])


def _docstring(node: ast.Module | Node) -> Iterator[str]:
    """Yield the paragraphs of a docstring; indented ones are code."""
    for paragraph in (ast.get_docstring(node) or "").split("\n\n"):
        if paragraph.startswith("    ") or ">>>" in paragraph:
            yield from ["```", *(line.removeprefix("    ") for line in paragraph.split("\n")), "```", ""]
        else:
            yield from [_plain(paragraph), ""]


def _cell(text: str) -> str:
    return _plain(text).replace("|", "&#124;")


def _module(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _anchor(item: Item) -> str:
    return f"{_module(item.file)}.{item.node.name}"
