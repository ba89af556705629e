"""Load the rows of a dataset as plain dicts, from local files or from a hub.

A local path is a .jsonl (also .gz), .json, .csv (all values are text) or .parquet file, or a folder of them. A hub name
needs the optional `datasets` package. Without `split`, training reads the train split and validation the validation or
test split; a dataset that has splits but not that one is an error.
"""

import csv
import gzip
import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from arealite.api.cli_args import DatasetConfig
from arealite.api.errors import DatasetError

Row = dict[str, Any]
_ENDINGS = (".jsonl", ".jsonl.gz", ".json", ".csv", ".parquet")
# Names of splits, the preferred ones first.
_TRAINING = ("train", "training")
_VALIDATION = ("validation", "valid", "val", "dev", "test", "eval")

logger = logging.getLogger("arealite.dataset")


def load_dataset(config: DatasetConfig) -> list[Row]:
    """Load all rows that `config` names. Raises `DatasetError` if there are none."""
    path = Path(config.path).expanduser()
    if path.exists():
        rows = [row for file in _files(path, config) for row in _read(file)]
    elif path.is_absolute() or config.path.startswith((".", "~")) or config.path.endswith(_ENDINGS):
        raise DatasetError(f"there is no dataset at {path.absolute()}")
    else:
        rows = _load_from_hub(config)
    if not rows:
        raise DatasetError(f"the dataset {config.path} is empty")
    return rows


def require_columns(rows: list[Row], columns: list[str], source: str = "the dataset") -> None:
    """Raise `DatasetError` unless every row has these columns."""
    for number, row in enumerate(rows, 1):
        missing = [column for column in columns if column not in row]
        if missing:
            raise DatasetError(
                f"{source} needs the columns {', '.join(columns)}; row {number} lacks {', '.join(missing)} "
                f"and has {', '.join(map(str, row)) or 'none'}"
            )


def _files(path: Path, config: DatasetConfig) -> list[Path]:
    """Return the files of the split that `config` names, or of the one that its role implies."""
    if path.is_file():
        return [path]
    if any(path.rglob("*.arrow")):
        raise DatasetError(
            f"{path} was written by `save_to_disk` of datasets: write it with `to_parquet`, or give your script's "
            "StatefulDataLoader what `datasets.load_from_disk` returns"
        )
    files = sorted(p for p in path.rglob("*") if p.name.endswith(_ENDINGS) and p.is_file())
    if not files:
        raise DatasetError(f"the folder {path} holds no {', '.join(_ENDINGS)} file")
    names = {file: str(file.relative_to(path)) for file in files}
    words = {file: set(re.split(r"[^a-z]+", name.lower())) for file, name in names.items()}
    if config.split is not None:
        chosen = [f for f in files if config.split.lower() in words[f]]
        chosen = chosen or [f for f in files if config.split in names[f]]
        if not chosen:
            raise DatasetError(
                f"no file in {path} belongs to split {config.split!r}; there are: {', '.join(names.values())}"
            )
        return chosen
    splits = [word for word in (*_TRAINING, *_VALIDATION) if any(word in words[file] for file in files)]
    if not splits:
        return files
    split = _split_for_role(splits, config, ", ".join(names.values()))
    return [file for file in files if split in words[file]]


def _split_for_role(splits: list[str], config: DatasetConfig, choices: str) -> str:
    """Return the split for training or validation, by its name."""
    key, wanted = ("valid_dataset", _VALIDATION) if config.is_validation else ("train_dataset", _TRAINING)
    found = next((name for name in wanted if name in splits), None)
    if found is None and len(splits) == 1 and splits[0] not in (*_TRAINING, *_VALIDATION):
        found = splits[0]
    if found is None:
        kind = "validation or test" if config.is_validation else "training"
        raise DatasetError(
            f"{config.path} has no {kind} split by name; it has: {choices}. Set {key}.split to the one to read"
        )
    logger.info("%s: reading split %r of %s (set %s.split for another)", key, found, config.path, key)
    return found


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
                raise DatasetError(f"{file}, line {number} is not valid JSON: {error.msg}") from error


def _csv_rows(text: Any, file: Path) -> Iterator[Row]:
    reader = csv.DictReader(text, strict=True)
    try:
        for row in reader:
            if None in row or None in row.values():
                raise DatasetError(f"{file}, line {reader.line_num} has another number of values than the header")
            yield row
    except csv.Error as error:
        raise DatasetError(f"{file} is not valid CSV after line {reader.line_num}: {error}") from error


def _as_rows(values: Any, file: Path) -> Iterator[Row]:
    if isinstance(values, dict):
        raise DatasetError(f"{file} holds one object; a list of rows is needed")
    for number, row in enumerate(values, 1):
        if not isinstance(row, dict):
            raise DatasetError(f"{file}: row {number} is {type(row).__name__}, not an object with columns")
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
            f"{config.path!r} is no local path, and hub datasets need `datasets`: pip install 'arealite[hub]', or give "
            "a .jsonl file"
        ) from error
    try:
        loaded = datasets.load_dataset(config.path, config.name, split=config.split)
    except (OSError, ValueError) as error:
        raise DatasetError(f"cannot load {config.path!r} from the hub: {error}") from error
    if config.split is not None:
        return list(loaded)
    splits = list(loaded)
    return list(loaded[_split_for_role(splits, config, ", ".join(splits))])
