"""Rows of files that are larger than memory, read when they are needed.

`open_streamed` returns a sequence: an index of byte offsets for .jsonl, row groups for .parquet, a memory map for
.arrow and for datasets of the hub. It takes at most 24 bytes of memory per row. The index is built in one pass over the
file and kept in a folder of the run, if one is given. `LazyRows` applies a function to each row at its use.
"""

import hashlib
import json
import logging
import os
from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, overload

from arealite.api.dataset_args import DataSourceConfig
from arealite.api.errors import DatasetError
from arealite.dataset.columns import make_row
from arealite.dataset.rows import check_rows, find_files, import_pyarrow, load_from_hub, read_table, report_long_rows
from arealite.utils.rundir import write_file

logger = logging.getLogger("arealite.dataset")
Row = dict[str, Any]
Make = Callable[[Row], Row | None]
# Row groups of a .parquet file that are kept in memory; rows are shuffled within so many.
WINDOW = 8


class _Rows(Sequence[Row]):
    """Base of sequences whose rows are read one by one."""

    # Rows that are read together: a shuffle stays within `WINDOW` of them. Empty: any row costs the same.
    blocks: Sequence[int] = ()

    def read(self, index: int) -> Row:
        raise NotImplementedError

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return [self.read(i) for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        return self.read(index % len(self))


class JsonLines(_Rows):
    """Rows of a .jsonl file, found by the offset of each line."""

    def __init__(self, file: Path, cache: Path | None = None):
        self.file, self.blocks = file, ()
        self._handle = file.open("rb")
        self._offsets = cached_index(cache, [file], "lines", lambda: _line_offsets(file))

    def __len__(self) -> int:
        return len(self._offsets) // 2

    def read(self, index: int) -> Row:
        start, end = self._offsets[2 * index], self._offsets[2 * index + 1]
        line = os.pread(self._handle.fileno(), end - start, start)
        try:
            (row,) = check_rows([json.loads(line)])
        except (ValueError, RecursionError) as error:
            raise DatasetError(f"cannot read {self.file}, row {index + 1}: not a valid row: {error}") from error
        return row


class ParquetRows(_Rows):
    """Rows of a .parquet file; the last row groups that were used stay in memory."""

    def __init__(self, file: Path):
        self.file = file
        pyarrow = import_pyarrow()
        try:
            self._parquet = pyarrow.parquet.ParquetFile(file)
        except (pyarrow.ArrowException, OSError) as error:
            raise DatasetError(f"cannot read {file}: {error}") from error
        metadata = self._parquet.metadata
        self.blocks = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
        self._starts = [0, *accumulate(self.blocks)]
        self._groups: OrderedDict[int, Any] = OrderedDict()

    def __len__(self) -> int:
        return self._starts[-1]

    def read(self, index: int) -> Row:
        number = bisect_right(self._starts, index) - 1
        try:
            if number not in self._groups:
                if len(self._groups) == WINDOW:
                    self._groups.popitem(last=False)
                self._groups[number] = self._parquet.read_row_group(number)
            self._groups.move_to_end(number)
            return self._groups[number].slice(index - self._starts[number], 1).to_pylist()[0]
        except (import_pyarrow().ArrowException, OSError, ValueError) as error:
            raise DatasetError(f"cannot read {self.file}, row {index + 1}: {' '.join(str(error).split())}") from error


class ArrowRows(_Rows):
    """Rows of an .arrow file, which is mapped into memory."""

    def __init__(self, file: Path):
        self.file = file
        try:
            self._table = read_table(file)
        except (ValueError, OSError) as error:
            raise DatasetError(f"cannot read {file}: {error}") from error

    def __len__(self) -> int:
        return self._table.num_rows

    def read(self, index: int) -> Row:
        try:
            return self._table.slice(index, 1).to_pylist()[0]
        except ValueError as error:
            raise DatasetError(f"cannot read {self.file}, row {index + 1}: {error}") from error


class JoinedRows(_Rows):
    """The rows of several sequences, one after the other."""

    def __init__(self, parts: Sequence[Sequence[Row]]):
        self.parts = parts
        self.starts = [0, *accumulate(map(len, parts))]
        blocks = [getattr(part, "blocks", ()) for part in parts]
        if any(blocks):
            pairs = zip(blocks, parts, strict=True)
            self.blocks = [size for own, part in pairs for size in (own or [len(part)])]

    def __len__(self) -> int:
        return self.starts[-1]

    def locate(self, index: int) -> tuple[int, int]:
        """Return which sequence a row belongs to, and its number there."""
        number = bisect_right(self.starts, index) - 1
        return number, index - self.starts[number]

    def read(self, index: int) -> Row:
        number, inside = self.locate(index)
        return self.parts[number][inside]


class LazyRows(_Rows):
    """`make` of the rows in `kept`, those for which it returns a row."""

    def __init__(self, rows: Sequence[Row], make: Make, source: str, kept: Sequence[int]):
        self.rows, self.make, self.source, self.kept = rows, make, source, kept
        sizes = getattr(rows, "blocks", ())
        ends = [bisect_right(kept, end - 1) for end in accumulate(sizes)]
        self.blocks = [end - start for start, end in zip([0, *ends], ends, strict=False)]

    def __len__(self) -> int:
        return len(self.kept)

    def read(self, index: int) -> Row:
        number = self.kept[index]
        row = make_row(self.rows[number], number + 1, self.make, self.source)
        if row is None:
            raise DatasetError(f"{self.source} has changed since its rows were counted: start another run")
        return row


def open_streamed(config: DataSourceConfig, cache: Path | None = None) -> Sequence[Row]:
    """Return the rows that `config` names without loading them."""
    files = find_files(config)
    if files is None:
        return load_from_hub(config)
    parts = [_open(file, cache) for file in files]
    rows = parts[0] if len(parts) == 1 else JoinedRows(parts)
    if not len(rows):
        raise DatasetError(f"the dataset {config.path} is empty")
    return rows


def map_lazily(
    rows: Sequence[Row],
    make: Make,
    config: DataSourceConfig,
    settings: str,
    cache: Path | None = None,
    num_skipped: int = 0,
) -> LazyRows:
    """Return `make` of each row but the first ones, which is looked up when it is needed.

    A first pass over all rows finds those for which it returns one. `settings` names what `make` depends on besides
    `config`.
    """

    def find_kept() -> array:
        numbers = range(num_skipped, len(rows))
        return array("q", (i for i in numbers if make_row(rows[i], i + 1, make, config.path) is not None))

    kept = cached_index(cache, find_files(config) or [], f"{config} {settings}", find_kept)
    if not kept:
        raise DatasetError(f"all rows of {config.path} are longer than max_length={config.max_length} tokens")
    num_all = len(rows) - num_skipped
    report_long_rows(num_all - len(kept), num_all, config)
    return LazyRows(rows, make, config.path, kept)


def cached_index(cache: Path | None, files: list[Path], settings: str, build: Callable[[], array]) -> array:
    """Return `build()`, or what an earlier call with the same files and settings wrote to `cache`."""
    if cache is None or not files:
        return build()
    states = [(str(file.absolute()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    key = hashlib.sha256(repr((states, settings)).encode()).hexdigest()[:16]
    path = cache / f"{key}.index"
    index = array("q")
    if path.exists():
        index.frombytes(path.read_bytes())
        return index
    index = build()
    try:
        cache.mkdir(parents=True, exist_ok=True)
        write_file(path, index.tobytes(), private=False)
    except OSError as error:
        logger.warning("the index of the rows is not kept, the next start reads them all again: %s", error)
    return index


def _open(file: Path, cache: Path | None) -> Sequence[Row]:
    if file.suffix == ".parquet":
        return ParquetRows(file)
    if file.suffix == ".arrow":
        return ArrowRows(file)
    if file.suffix == ".jsonl":
        return JsonLines(file, cache)
    raise DatasetError(
        f"{file} cannot be read row by row: give .jsonl, .parquet or .arrow, or leave out `streaming`, if it fits into "
        "memory"
    )


def _line_offsets(file: Path) -> array:
    """Return start and end of each line that is not empty."""
    offsets, position = array("q"), 0
    with file.open("rb") as lines:
        for line in lines:
            end = position + len(line)
            if line.strip():
                start = position + 3 if position == 0 and line.startswith(b"\xef\xbb\xbf") else position
                offsets.extend((start, end))
            position = end
    return offsets
