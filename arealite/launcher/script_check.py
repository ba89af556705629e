"""Checks imports and tokenizer of a script before a start, and for `--dry-run` all up to its engines.

`check_source` reads the script and a few files, for every start. `rehearse` runs the script once in a child process, in
the check mode of `arealite.utils.script_check`. The launcher itself imports nothing of the script.
"""

import ast
import importlib.machinery
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from arealite.api.backends import API_KEY_ENV
from arealite.api.errors import ConfigError
from arealite.launcher.job import Job
from arealite.launcher.launch_config import LaunchConfig
from arealite.utils.activity import activity
from arealite.utils.process import end_families, last_error, python_path
from arealite.utils.script_check import CHECK_SCRIPT_ENV, UNCHECKED

_TIMEOUT_S = 300.0
_PACKAGE = Path(__file__).parents[1]
# Modules at which check mode ends: a script without them might train during a dry run.
_ENDS = ("arealite.trainer", "arealite.engine", "arealite.controller")
# Files of which a folder with a tokenizer has at least one.
_TOKENIZER_FILES = ("tokenizer*", "*vocab*", "spiece.model", "sentencepiece*", "*.tiktoken", "tekken.json")
_TEMPLATE_FILES = ("chat_template.jinja", "additional_chat_templates")
# Nothing is downloaded, and no device is used.
_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}


def check_source(config: LaunchConfig, script: str, runs_here: bool) -> None:
    """Raise `ConfigError` for a missing script, package or tokenizer. `runs_here`: in this environment."""
    if not script:
        # A trainer in a script or notebook of the user.
        return
    if not script.endswith(".py"):
        return _check_module(script, runs_here)
    tree = ast.parse(Path(script).read_bytes())
    if runs_here:
        _check_imports(tree, Path(script))
    for call in _calls(tree, "load_tokenizer"):
        for_chat = any(word.arg == "for_chat" and ast.unparse(word.value) == "True" for word in call.keywords)
        key, path = _tokenizer_of(config)
        if Path(path).is_dir():
            _check_tokenizer(Path(path), key, for_chat)


def rehearse(job: Job) -> None:
    """Run the script up to its engines in a child process. Raises `ConfigError` with what it raises."""
    script = Path(job.script)
    # Loops of the package: `arealite train` checks their data. A trainer of the user's own is run by `custom`, and a
    # workflow of the user's own, which checks the first row, by `ppo`.
    runs_own_code = script.stem == "custom" or (script.stem == "ppo" and job.config.names_workflow)
    is_own = script.suffix == ".py" and (runs_own_code or not script.is_relative_to(_PACKAGE))
    if not is_own or not _has_end(ast.parse(script.read_bytes())):
        return
    print("checking the script up to where its engines start", flush=True)
    activity.note_output()
    code, output = _run(job)
    if code is None:
        print(f"note: {UNCHECKED}the script made no engine within {_TIMEOUT_S:.0f} s", flush=True)
    elif code != 0:
        raise ConfigError(_explain(job.script, output))
    elif (last := output.strip().rpartition("\n")[2]).startswith(UNCHECKED):
        print(f"note: {last}", flush=True)


def _run(job: Job) -> tuple[int | None, str]:
    """Return exit code and output of the script in check mode; no code if it did not end in time."""
    env = {**os.environ, **_ENVIRONMENT, "PYTHONPATH": python_path(), CHECK_SCRIPT_ENV: "1"}
    if job.config.server.api_key:
        env[API_KEY_ENV] = job.config.server.api_key
    options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    child = subprocess.Popen(job.command(), env=env, cwd=job.cwd, start_new_session=True, errors="replace", **options)
    try:
        output, _ = child.communicate(timeout=_TIMEOUT_S)
        return child.returncode, output
    except subprocess.TimeoutExpired:
        return None, ""
    finally:
        end_families([child.pid], 2.0)
        child.wait()


def _explain(script: str, output: str) -> str:
    """Return one message for what a script has printed before it ended."""
    known = last_error(output)
    if known:
        return known.strip()
    lines = [line for line in output.strip().splitlines() if line.strip()] or ["(no output)"]
    missing = re.match(r"ModuleNotFoundError: No module named '([^']+)'", lines[-1])
    if missing:
        return _missing(script, missing[1])
    places = [line.strip() for line in lines if line.startswith("  File ")]
    where = f" ({places[-1]})" if places else ""
    return f"{script} ended before its engines were made: {lines[-1]}{where}"


def _missing(script: str | Path, name: str) -> str:
    top = name.partition(".")[0]
    return (
        f"{script} imports {name}, which is not installed in {sys.executable}: pip install {top}, or add the folder "
        "that has it to PYTHONPATH"
    )


def _check_imports(tree: ast.Module, script: Path) -> None:
    """Raise for a package that is imported at the top level of the script and cannot be found.

    An import inside `try` or `if` may be optional, and one after a change of `sys.path` may be found there.
    """
    for node in tree.body:
        if isinstance(node, ast.Expr | ast.Assign | ast.AugAssign) and "sys.path" in ast.unparse(node):
            return
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module]
        for name in names:
            top = name.partition(".")[0]
            if not _is_found(top, script.absolute().parent):
                raise ConfigError(_missing(script, name))


def _check_module(name: str, runs_here: bool) -> None:
    """Raise for a script that is neither a .py file nor the dotted name of a module."""
    is_name = all(part.isidentifier() for part in name.split("."))
    if not is_name or (runs_here and not _is_found(name.partition(".")[0], Path.cwd())):
        raise ConfigError(f"cannot run {name}: give a file that ends with .py, or the dotted name of a module")


def _is_found(name: str, folder: Path) -> bool:
    if name in sys.modules or name in sys.stdlib_module_names:
        return True
    # Ranks search the folder of the script first.
    return bool(importlib.machinery.PathFinder.find_spec(name, [str(folder)]) or importlib.util.find_spec(name))


def _calls(tree: ast.Module, name: str) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (getattr(node.func, "id", "") or getattr(node.func, "attr", "")) == name:
            yield node


def _has_end(tree: ast.Module) -> bool:
    modules = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    loads = any(True for _ in _calls(tree, "load_config"))
    return loads and any(f"{module}.".startswith(tuple(f"{end}." for end in _ENDS)) for module in modules)


def _tokenizer_of(config: LaunchConfig) -> tuple[str, str]:
    """Return the key and the path of the tokenizer that the scripts of the package load."""
    if config.tokenizer_path:
        return "tokenizer_path", config.tokenizer_path
    return next(iter(config.model_paths.items()), ("", ""))


def _check_tokenizer(folder: Path, key: str, for_chat: bool) -> None:
    if not any(True for pattern in _TOKENIZER_FILES for _ in folder.glob(pattern)):
        raise ConfigError(
            f"{key}={folder} has no tokenizer (tokenizer.json or the files of another kind): give a folder that holds "
            "one, or a hub name, as tokenizer_path=…"
        )
    if for_chat and not _has_chat_template(folder):
        raise ConfigError(
            f"the tokenizer of {folder} ({key}) has no chat template, and the script sends messages: use an instruct "
            "model, or set tokenizer_path=… to the tokenizer of one"
        )


def _has_chat_template(folder: Path) -> bool:
    if any((folder / name).exists() for name in _TEMPLATE_FILES):
        return True
    try:
        settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        # The tokenizer may bring one in its code; the script finds out.
        return (folder / "tokenizer_config.json").exists()
    return bool(isinstance(settings, dict) and settings.get("chat_template"))
