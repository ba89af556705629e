"""Load the rows of a dataset as plain dicts, from local files or from a hub.

A local path is a .jsonl (also .gz), .json, .csv (all values are text), .parquet or .arrow file, or a folder of them,
also one that `save_to_disk` of datasets wrote. A hub name needs the optional `datasets` package. Without `split`,
training reads the train split and validation the validation or test split; a dataset that has splits but not that one
is an error.
"""

import csv
import gzip
import json
import logging
import re
import sys
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from arealite.api.dataset_args import DATA_FILES, GENERATED, DataSourceConfig
from arealite.api.errors import DatasetError
from arealite.dataset.generated import generate_rows
from arealite.utils.console import show_message
from arealite.utils.distributed import rank
from arealite.utils.script_check import end_check

Row = dict[str, Any]
# Names of splits, the preferred ones first.
_TRAINING = ("train", "training")
_VALIDATION = ("validation", "valid", "val", "dev", "test", "eval")

logger = logging.getLogger("arealite.dataset")


def load_dataset(config: DataSourceConfig) -> list[Row]:
    """Load all rows that `config` names. Raises `DatasetError` if there are none."""
    if config.path.startswith(GENERATED):
        return generate_rows(config)
    files = find_files(config)
    rows = list(load_from_hub(config)) if files is None else [row for file in files for row in read_rows(file)]
    if not rows:
        raise DatasetError(f"the dataset {config.path} is empty")
    return rows


def find_files(config: DataSourceConfig) -> list[Path] | None:
    """Return the local files of a dataset; None for a hub name. Raises `DatasetError` if there are none."""
    path = Path(config.path).expanduser()
    if path.exists():
        return _files(path, config)
    if path.is_absolute() or config.path.startswith((".", "~")) or config.path.endswith(DATA_FILES):
        raise DatasetError(f"there is no dataset at {path.absolute()}")
    return None


def _files(path: Path, config: DataSourceConfig) -> list[Path]:
    """Return the files of the split that `config` names, or of the one that its role implies."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise DatasetError(f"the dataset {path} is neither a file nor a folder")
    # A folder of `save_to_disk` also holds .json files that describe it, and caches of `map`.
    found = [p for p in sorted(path.rglob("*")) if p.is_file() and not _is_hidden(p.relative_to(path))]
    arrow = [p for p in found if p.suffix == ".arrow" and not p.name.startswith("cache-")]
    files = arrow or [p for p in found if p.name.endswith(DATA_FILES)]
    if not files:
        raise DatasetError(f"the folder {path} holds no {', '.join(DATA_FILES)} file")
    # A download of a hub dataset has a folder for each configuration.
    files = [f for f in files if config.name in f.relative_to(path).parts[:-1]] or files
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


def _is_hidden(path: Path) -> bool:
    """Whether an editor or an archive may have left the file (`.ipynb_checkpoints/a.jsonl`, `._a.jsonl`)."""
    return any(part.startswith(".") for part in path.parts)


def _split_for_role(splits: list[str], config: DataSourceConfig, choices: str) -> str:
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


def read_rows(file: Path) -> Iterator[Row]:
    """Yield the rows of a file. Whatever is wrong with the file is a `DatasetError` that says where."""
    lines: _Lines | None = None
    try:
        if file.suffix in (".parquet", ".arrow"):
            yield from check_rows(read_table(file).to_pylist())
            return
        opener = gzip.open if file.suffix == ".gz" else open
        # Bytes that are not UTF-8 become lone surrogates, so that the error can name the row.
        with opener(file, "rt", encoding="utf-8-sig", errors="surrogateescape", newline="") as text:
            lines = _Lines(text)
            if file.suffix == ".json":
                yield from check_rows(json.load(text))
            else:
                yield from check_rows(_csv_rows(lines) if file.suffix == ".csv" else _json_lines(lines))
    except (ValueError, OSError, EOFError, OverflowError, RecursionError, zlib.error, csv.Error) as error:
        place = f"{file}, line {lines.number}" if lines is not None and lines.number else file
        known = file.name.endswith(DATA_FILES)
        hint = "" if known else f". A file that is no {', '.join(DATA_FILES)} is read as lines of JSON"
        raise DatasetError(f"cannot read {place}: {_reason(error)}{hint}") from error


class _Lines:
    """Iterates over the lines of a text and counts them."""

    def __init__(self, text: Any):
        self.text, self.number = text, 0

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        self.number += 1
        line = self.text.readline()
        if not line:
            self.number -= 1
            raise StopIteration
        return line


def _json_lines(lines: _Lines) -> Iterator[Any]:
    for line in lines:
        if line.strip():
            try:
                yield json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"not valid JSON: {error.msg} at column {error.colno}") from error


def _csv_rows(lines: _Lines) -> Iterator[Row]:
    # The default limit of 128 KB is less than a long answer with its reasoning.
    csv.field_size_limit(sys.maxsize)
    reader = csv.DictReader(lines, strict=True)
    names = reader.fieldnames or []
    if len(set(names)) < len(names):
        raise ValueError("the header names a column twice")
    for row in reader:
        if None in row or None in row.values():
            raise ValueError("it has another number of values than the header")
        yield row


def read_table(file: Path) -> Any:
    """Return a .parquet or .arrow file as a pyarrow table; that of an .arrow file stays on disk."""
    pyarrow = import_pyarrow()
    try:
        if file.suffix == ".parquet":
            return pyarrow.parquet.read_table(file)
        source = pyarrow.memory_map(str(file))
        try:
            return pyarrow.ipc.open_stream(source).read_all()
        except pyarrow.ArrowInvalid:
            # The other of the two formats.
            return pyarrow.ipc.open_file(source).read_all()
    # Most of them are a ValueError or OSError too, but not all.
    except pyarrow.ArrowException as error:
        raise ValueError(str(error)) from error


def import_pyarrow() -> Any:
    """Import pyarrow; raises `ValueError` if it is not installed."""
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise ValueError("it needs pyarrow: pip install 'arealite[hub]'") from error
    return pyarrow


def check_rows(values: Any) -> Iterator[Row]:
    """Yield the rows; raises `ValueError` for one that is no object or holds text that is not UTF-8."""
    if not isinstance(values, Iterable) or isinstance(values, dict | str):
        raise ValueError(f"it holds one value ({type(values).__name__}); a list of rows is needed")
    for number, row in enumerate(values, 1):
        if not isinstance(row, dict):
            raise ValueError(f"row {number} is {type(row).__name__}, not an object with columns")
        try:
            _encode(row)
        except UnicodeEncodeError:
            raise ValueError(f"row {number} holds text that is not valid UTF-8") from None
        yield row


def _encode(value: Any) -> None:
    """Raise `UnicodeEncodeError` for a text with lone surrogates, which no tokenizer accepts."""
    if isinstance(value, str):
        if not value.isascii():
            value.encode()
    elif isinstance(value, dict):
        for key, inner in value.items():
            _encode(key)
            _encode(inner)
    elif isinstance(value, list):
        for inner in value:
            _encode(inner)


def _reason(error: Exception) -> str:
    """Say in one line what is wrong with a file."""
    if isinstance(error, RecursionError):
        return "its values are nested too deeply"
    if isinstance(error, json.JSONDecodeError):
        hint = ". If each of its lines is a row: rename it to end in .jsonl" if error.msg == "Extra data" else ""
        return f"not valid JSON: {error}{hint}"
    return " ".join(str(error).split())[:500]


def report_long_rows(count: int, num_all: int, config: DataSourceConfig) -> None:
    """Tell the user how many rows are too long, if any: a limit of other trainers cuts them instead."""
    if count and rank() == 0:
        verb = "is" if count == 1 else "are"
        show_message(
            f"note: {count} of {num_all} rows of {config.path} {verb} longer than max_length={config.max_length} "
            f"tokens and {verb} left out"
        )


def load_from_hub(config: DataSourceConfig) -> Sequence[Row]:
    """Return a dataset of the hub. Its rows stay on disk until they are read."""
    try:
        import datasets
    except ImportError as error:
        raise DatasetError(
            f"{config.path!r} is not a local path, and hub datasets need `datasets`: pip install 'arealite[hub]', or "
            "give a .jsonl file"
        ) from error
    try:
        loaded = datasets.load_dataset(config.path, config.name, split=config.split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        end_check(f"the dataset {config.path} is not downloaded")
        raise DatasetError(f"cannot load {config.path!r} from the hub: {_reason(error)}") from error
    if config.split is not None:
        return loaded
    splits = list(loaded)
    return loaded[_split_for_role(splits, config, ", ".join(splits))]
