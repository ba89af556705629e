"""Reads the files of a run that are shown as they are: configuration, logs and images of prompts.

Only regular files directly in `logs/` and `rollouts/images/` can be named, and links are not followed: nothing else of
the machine can be read, and nothing of `private/`.
"""

import os
import re
import stat
from collections.abc import Iterator
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

from aiohttp import web

from arealite.api.errors import RequestError
from arealite.dashboard.opening import open_regular
from arealite.dashboard.runs import Run, modified
from arealite.utils.text import clean, clean_stream
from arealite.utils.yaml_reader import MAX_CHARACTERS, read_yaml

_MAX_NAME, _MAX_LOG_FILES = 255, 10_000
# The least is more than `_INCOMPLETE` takes.
_MIN_LOG_BYTES, LOG_BYTES, _MAX_LOG_BYTES = 1 << 6, 1 << 16, 1 << 20
_MAX_IMAGE_BYTES, _PNG = 1 << 24, b"\x89PNG\r\n\x1a\n"
_IMAGE_NAME = re.compile(r"[0-9a-f]{8,64}")
# Colours of terminals.
_COLOR = re.compile(r"\x1b\[[0-9;]*m")
# The beginning of a colour, or of a character of two, three or four bytes, whose rest is not written yet.
_INCOMPLETE = re.compile(rb"(?:\x1b(?:\[[0-9;]{0,20})?|[\xc2-\xf4]|[\xe0-\xf4][\x80-\xbf]|[\xf0-\xf4][\x80-\xbf]{2})\Z")


def read_config(run: Run) -> dict[str, str]:
    """Return the configuration as the run wrote it."""
    data = _read(run.dir.config_path, 0, 4 * MAX_CHARACTERS)
    return {"yaml": clean(data.decode(errors="replace"))}


def describe_config(run: Run) -> dict[str, Any]:
    """Return what the list of runs tells of a configuration.

    That is the number of steps, None if it follows from the data, and whether the run generates answers: supervised
    training has a section `model` and no `rollout`.
    """
    changed = modified(run.dir.config_path)
    return {"total_steps": None, "has_rollouts": True} if changed is None else _describe_config(run, changed)


@lru_cache(maxsize=4096)
def _describe_config(run: Run, changed: float) -> dict[str, Any]:
    try:
        values = _flat_config(run)
    except (RequestError, OSError):
        values = {}
    steps, sections = values.get("total_train_steps", ""), {key.partition(".")[0] for key in values}
    return {
        "total_steps": int(steps) if steps.isdecimal() and len(steps) < 16 else None,
        "has_rollouts": "model" not in sections or "rollout" in sections,
    }


def compare_configs(a: Run, b: Run) -> dict[str, Any]:
    """Return the keys in which the configurations of two runs differ; null where one has no such key."""
    first, second = (_flat_config(run) for run in (a, b))
    keys = sorted({*first, *second})
    rows = [{"key": key, "a": first.get(key), "b": second.get(key)} for key in keys]
    return {"rows": [row for row in rows if row["a"] != row["b"]]}


def _flat_config(run: Run) -> dict[str, str]:
    text = read_config(run)["yaml"]
    try:
        return dict(_leaves(read_yaml(text, None), ""))
    except ValueError as error:
        raise RequestError(f"config.yaml of {run.name} cannot be read: {error}") from error


def _leaves(value: Any, path: str) -> Iterator[tuple[str, str]]:
    """Yield (key, value) of all values in nested sections; a list is one value."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}.{key}" if path else str(key))
    elif path:
        yield path, "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def list_logs(run: Run) -> dict[str, Any]:
    """Return the names and sizes of the logs."""
    try:
        with os.scandir(_logs(run)) as entries:
            found = [(e.name, e.stat(follow_symlinks=False)) for e in islice(entries, _MAX_LOG_FILES)]
    except FileNotFoundError:
        found = []
    files = [{"name": clean(name), "size": state.st_size} for name, state in found if stat.S_ISREG(state.st_mode)]
    return {"files": sorted(files, key=lambda file: file["name"])}


def read_log(run: Run, name: str, since: int | None, end: int | None, size: int) -> dict[str, Any]:
    """Return a part of a log: from `since` on, else before `end`, by default its end.

    A part before `end` begins with a whole line.
    """
    if not name or name.startswith(".") or "/" in name or "\0" in name or len(name) > _MAX_NAME:
        raise web.HTTPNotFound(reason="there is no such log")
    path, size = _logs(run) / name, min(max(size, _MIN_LOG_BYTES), _MAX_LOG_BYTES)
    total = path.stat(follow_symlinks=False).st_size
    # A file that has become shorter is another one: its end is shown.
    if since is not None and since <= total:
        data, start = _read(path, since, min(size, total - since)), since
    else:
        end = total if end is None else min(end, total)
        start = max(0, end - size)
        data = _read(path, start, end - start)
        cut = data.find(b"\n") + 1 if start else 0
        # A line that is longer than the whole part is shown from its middle.
        if cut < len(data):
            data, start = data[cut:], start + cut
    if found := _INCOMPLETE.search(data):
        data = data[: found.start()]
    return {
        "text": clean_stream(_COLOR.sub("", data.decode(errors="replace"))),
        "start": start,
        "end": start + len(data),
        "size": total,
    }


def has_image(run: Run, name: str) -> bool:
    """Whether an image was kept."""
    return _IMAGE_NAME.fullmatch(name) is not None and (run.path / "rollouts" / "images" / f"{name}.png").is_file()


def read_image(run: Run, name: str) -> bytes:
    """Return an image of a prompt, which is named by a hash of its content."""
    folder = run.path / "rollouts" / "images"
    if _IMAGE_NAME.fullmatch(name) is None or folder.parent.is_symlink() or folder.is_symlink():
        raise web.HTTPNotFound(reason="there is no such image")
    data = _read(folder / f"{name}.png", 0, _MAX_IMAGE_BYTES + 1)
    if len(data) > _MAX_IMAGE_BYTES or not data.startswith(_PNG):
        raise web.HTTPNotFound(reason=f"the file is no PNG image of at most {_MAX_IMAGE_BYTES >> 20} MiB")
    return data


def _logs(run: Run) -> Path:
    if run.dir.logs.is_symlink():
        raise web.HTTPNotFound(reason="the folder of logs is a link, which is not followed")
    return run.dir.logs


def _read(path: Path, start: int, size: int) -> bytes:
    with open_regular(path) as file:
        file.seek(start)
        return file.read(size)
