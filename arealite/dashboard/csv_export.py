"""Writes tables as CSV for downloads.

Text that begins like a formula is marked as text: a spreadsheet would run what a model wrote. Steps count from 1, as on
the page that offers the download.
"""

import csv
import io
from collections.abc import Iterable, Sequence
from typing import Any

_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def to_csv(names: Sequence[str], rows: Iterable[Sequence[Any]]) -> bytes:
    """Return a table with a heading as CSV."""
    file = io.StringIO()
    writer = csv.writer(file)
    writer.writerow([_cell(name) for name in names])
    writer.writerows([_cell(value) for value in row] for row in rows)
    return file.getvalue().encode(errors="replace")


def shown_step(step: float | None) -> float | None:
    """Return the number that the page shows for a stored step, which counts from 0."""
    return None if step is None else step + 1


def _cell(value: Any) -> Any:
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value
