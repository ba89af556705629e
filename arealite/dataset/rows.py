"""Rows of a dataset as plain dicts, from local files or a hub name. Nothing in a row is ever evaluated.

A local path may be a .jsonl (also .gz), .json, .csv (all values are text) or .parquet file, or a folder of them; `split` then picks the files whose name or folder
contains it. A hub name needs the optional `datasets` package.
"""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from arealite.api.cli_args import DatasetConfig
from arealite.api.errors import DatasetError

Row = dict[str, Any]
_ENDINGS = (".jsonl", ".jsonl.gz", ".json", ".csv", ".parquet")


def load_dataset(config: DatasetConfig) -> list[Row]:
    """All rows that `config` names; at least one, or an error."""
    path = Path(config.path).expanduser()
    if path.exists():
        rows = [row for file in _files(path, config.split) for row in _read(file)]
    elif path.is_absolute() or config.path.startswith((".", "~")) or config.path.endswith(_ENDINGS):
        raise DatasetError(f"there is no dataset at {path.absolute()}")
    else:
        rows = _load_from_hub(config)
    if not rows:
        raise DatasetError(f"the dataset {config.path} is empty")
    return rows


def require_columns(rows: list[Row], columns: list[str], source: str = "the dataset") -> None:
    """Raise unless every row has these columns."""
    for number, row in enumerate(rows, 1):
        missing = [column for column in columns if column not in row]
        if missing:
            raise DatasetError(
                f"{source} needs the columns {', '.join(columns)}; row {number} lacks {', '.join(missing)} "
                f"and has {', '.join(map(str, row)) or 'none'}"
            )


def _files(path: Path, split: str | None) -> list[Path]:
    if path.is_file():
        return [path]
    if any(path.rglob("*.arrow")):
        raise DatasetError(
            f"{path} was written by `save_to_disk` of datasets: write it with `to_parquet`, or give your script's StatefulDataLoader "
            "what `datasets.load_from_disk` returns"
        )
    found = sorted(p for p in path.rglob("*") if p.name.endswith(_ENDINGS) and p.is_file())
    if not found:
        raise DatasetError(f"the folder {path} holds no {', '.join(_ENDINGS)} file")
    if split is None:
        return found
    chosen = [p for p in found if split in str(p.relative_to(path))]
    if not chosen:
        names = ", ".join(str(p.relative_to(path)) for p in found)
        raise DatasetError(f"no file in {path} belongs to split {split!r}; there are: {names}")
    return chosen


def _read(file: Path) -> Iterator[Row]:
    if file.suffix == ".parquet":
        yield from _read_parquet(file)
        return
    opener = gzip.open if file.suffix == ".gz" else open
    readers = {".json": lambda text, _: json.load(text), ".csv": _csv_rows}
    try:
        with opener(file, "rt", encoding="utf-8-sig", newline="") as text:
            yield from _as_rows(readers.get(file.suffix, _json_lines)(text, file), file)
    except json.JSONDecodeError as error:
        raise DatasetError(f"{file} is not valid JSON: {error}") from error
    except (UnicodeDecodeError, OSError) as error:
        raise DatasetError(f"cannot read {file}: {error}") from error


def _json_lines(text: Any, file: Path) -> Iterator[Any]:
    for number, line in enumerate(text, 1):
        if line.strip():
            try:
                yield json.loads(line)
            except json.JSONDecodeError as error:
                told = f"{file}, line {number} is not valid JSON: {error.msg}"
                raise DatasetError(told) from error


def _csv_rows(text: Any, file: Path) -> Iterator[Row]:
    reader = csv.DictReader(text, strict=True)
    try:
        for row in reader:
            if None in row or None in row.values():
                told = f"{file}, line {reader.line_num} has another number of values than the header"
                raise DatasetError(told)
            yield row
    except csv.Error as error:
        told = f"{file} is not valid CSV after line {reader.line_num}: {error}"
        raise DatasetError(told) from error


def _as_rows(values: Any, file: Path) -> Iterator[Row]:
    if isinstance(values, dict):
        raise DatasetError(f"{file} holds one object; a list of rows is needed")
    for number, row in enumerate(values, 1):
        if not isinstance(row, dict):
            kind = type(row).__name__
            raise DatasetError(f"{file}: row {number} is {kind}, not an object with columns")
        yield row


def _read_parquet(file: Path) -> list[Row]:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise DatasetError(f"reading {file} needs pyarrow: pip install 'arealite[hub]'") from error
    return pyarrow.parquet.read_table(file).to_pylist()


def _load_from_hub(config: DatasetConfig) -> list[Row]:
    try:
        import datasets
    except ImportError as error:
        raise DatasetError(
            f"{config.path!r} is no local path, and hub datasets need `datasets`: pip install 'arealite[hub]', or give a .jsonl file"
        ) from error
    try:
        found = datasets.load_dataset(config.path, config.name, split=config.split or "train")
    except (OSError, ValueError) as error:
        raise DatasetError(f"cannot load {config.path!r} from the hub: {error}") from error
    return list(found)
