"""Writes a small project that trains as it is: script, configuration, test, README.

The script has a reward and a workflow of its own to start from. The test trains a few steps with a tiny random model,
on any machine. Nothing is overwritten.
"""

import re
import shlex
from importlib import resources
from pathlib import Path

from arealite.api.errors import ConfigError
from arealite.cli.arguments import ArgumentParser
from arealite.utils.config import run_main

FILES = ("train.py", "config.yaml", "test_train.py", "README.md")
# Replaced by the name of the project.
_PLACEHOLDER = "PROJECT"


def main(argv: list[str]) -> int:
    parser = ArgumentParser("init", __doc__, "arealite init my-task", "cd my-task && pytest")
    parser.add_argument("name", nargs="?", default=".", help="folder to make; by default the current one")
    folder = Path(parser.parse_args(argv).name)
    write_project(folder)
    into = "" if folder == Path() else f"cd {shlex.quote(str(folder))} && "
    print(f"wrote {', '.join(str(folder / name) for name in FILES)}\n")
    print(f"  {into}pytest                                                 # a few steps with a tiny random model")
    print(f"  {into}arealite launch local train.py --config config.yaml    # the run of config.yaml")
    return 0


def write_project(folder: Path) -> None:
    """Write all files of the project; its name is that of the folder. Raises `ConfigError` if one exists."""
    name = folder.absolute().name
    # It becomes the name of the run directory.
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise ConfigError(f"{name!r} cannot be the name of a project: use letters, digits, '.', '_' and '-'")
    existing = [file for file in FILES if (folder / file).exists()]
    if existing:
        raise ConfigError(f"{folder / existing[0]} exists and is not overwritten: choose another folder")
    templates = resources.files("arealite.cli") / "template"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file in FILES:
            text = (templates / f"{file}.template").read_text(encoding="utf-8")
            # x: a file that another process has made meanwhile is not overwritten either.
            with (folder / file).open("x", encoding="utf-8") as out:
                out.write(text.replace(_PLACEHOLDER, name))
    except OSError as error:
        raise ConfigError(f"cannot write to {folder}: {error.strerror}") from error


if __name__ == "__main__":
    run_main(main)
