"""Token ids and log-probs as JSON text, made by whole arrays: most of what a server writes, in a fraction of the encoder's time.

Numbers have a fixed width (JSON allows blanks before them), so their texts are looked up in tables. Nine significant digits give
back the very float32 that was computed. Used by the `/generate` endpoint.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cache

import numpy as np

_FEW = 64  # numbers: formatting them one by one is faster
_POWERS = range(-60, 40)  # of ten; what is smaller is told as zero
_SCALES = 10.0 ** (8 - np.array(_POWERS, np.float64))
_POWER_TEXT = np.array([f"e{power:+03d}" for power in _POWERS], "S4")


def encode_tokens(ids: Sequence[int], logprobs: Sequence[float], vocab_size: int) -> tuple[str, str]:
    """`1,23,456` and `[-1.5,1,null],[…]`: the insides of SGLang's `output_ids` and `output_token_logprobs`. Log-probs are finite."""
    if len(ids) < _FEW:
        entries = ("[%.9g,%d,null]," * len(ids))[:-1]
        pairs = itertools.chain.from_iterable(zip(logprobs, ids, strict=True))
        return ",".join(map(str, ids)), entries % tuple(pairs)
    values = np.asarray(logprobs, np.float64)
    mantissa, power = _decimal(np.abs(values))
    high, low = np.divmod(mantissa, 100_000)
    id_text = _id_text(vocab_size)[np.asarray(ids, np.int64)]
    columns = {
        "open": np.where(values < 0, b"[-", b"[ "),
        "high": _digit_text()[0][high],
        "low": _digit_text()[1][low],
        "power": _POWER_TEXT[power],
        "id": id_text,
        "close": b",null],",
    }
    entries = np.empty(len(values), _entry_type(id_text.itemsize))
    for name, column in columns.items():
        entries[name] = column
    return id_text.tobytes()[1:].decode(), entries.tobytes()[:-1].decode()


def _decimal(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Nine-digit mantissas and indices of `_POWERS`: value = mantissa · 10^(power − 8)."""
    values = np.where(values < 10.0 ** _POWERS[0], 0.0, values)
    exponent = np.log10(values, out=np.zeros_like(values), where=values > 0)
    power = np.floor(exponent).astype(np.int64) - _POWERS[0]
    mantissa = np.rint(values * _SCALES[power])
    over = mantissa >= 1e9  # ten digits: rounded up, or the logarithm was a hair too small
    mantissa[over] /= 10.0
    return mantissa.astype(np.int32), power + over


@cache
def _entry_type(id_width: int) -> np.dtype:
    widths = {"open": 2, "high": 5, "low": 5, "power": 4, "id": id_width, "close": 7}
    return np.dtype([(name, f"S{width}") for name, width in widths.items()])


@cache
def _digit_text() -> tuple[np.ndarray, np.ndarray]:
    """The first four digits of a mantissa with their point, and the last five."""
    high = np.array([f"{i // 1000}.{i % 1000:03d}" for i in range(10_000)], "S5")
    return high, np.array([f"{i:05d}" for i in range(100_000)], "S5")


@cache
def _id_text(vocab_size: int) -> np.ndarray:
    """A comma and an id, right-aligned, for each id."""
    width = len(str(vocab_size))
    return np.array([f",{i:{width}d}" for i in range(vocab_size)], f"S{width + 1}")
