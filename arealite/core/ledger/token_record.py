"""The tokens of one rollout as a compact blob: ids, loss mask, versions, log-probs and advantages.

Written by `rollouts.py`, read by `reading.py`; the format is known here only. Columns follow each other, compressed by
zlib. Log-probs of the trainer are kept as their distance from those of the server: in half precision the difference of
two numbers would be lost.
"""

import re
import zlib
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from arealite.utils.text import clean, text_decoder

_FORMAT = 1
_HEADER = np.dtype([("format", "u1"), ("has_gap", "?"), ("has_advantages", "?"), ("count", "<u4")])
# Fast: levels above 1 save a few percent for several times the work.
_LEVEL = 1


class TokenRecord(NamedTuple):
    """Columns `[n]` of one rollout; the last two are None if the trainer has not seen it."""

    ids: np.ndarray
    loss_mask: np.ndarray
    # -1: not generated.
    versions: np.ndarray
    logprobs: np.ndarray
    # NaN where the trainer computed none.
    train_logp: np.ndarray | None = None
    advantages: np.ndarray | None = None

    def to_bytes(self) -> bytes:
        rows = TokenRecord(*(None if column is None else column[None] for column in self))  # type: ignore[arg-type]
        return rows.rows_to_bytes([len(self.ids)])[0]

    def rows_to_bytes(self, lengths: list[int]) -> list[bytes]:
        """Return the record of each row; columns are padded, `[rows, n]`."""
        columns = [self.ids.astype("<i4"), self.loss_mask.astype("u1"), self.versions.astype("<i4")]
        columns.append(_half(self.logprobs))
        if self.train_logp is not None:
            columns.append(_half(self.train_logp - self.logprobs))
        if self.advantages is not None:
            columns.append(_half(self.advantages))
        headers = np.zeros(len(lengths), _HEADER)
        headers["format"], headers["count"] = _FORMAT, lengths
        headers["has_gap"], headers["has_advantages"] = self.train_logp is not None, self.advantages is not None
        rows = zip(headers, zip(*columns, strict=True), lengths, strict=True)
        return [
            zlib.compress(b"".join((header.tobytes(), *(column[:length].tobytes() for column in row))), _LEVEL)
            for header, row, length in rows
        ]

    @classmethod
    def from_bytes(cls, blob: bytes) -> "TokenRecord":
        """Return the record; raises `ValueError` or `zlib.error` if the blob is damaged or of another format."""
        data = zlib.decompress(blob)
        if len(data) < _HEADER.itemsize or data[0] != _FORMAT:
            raise ValueError("the tokens of a rollout are damaged, or written by another version of arealite")
        header = np.frombuffer(data, _HEADER, 1)[0]
        count, position = int(header["count"]), _HEADER.itemsize

        def take(dtype: str) -> np.ndarray:
            nonlocal position
            column = np.frombuffer(data, dtype, count, position)
            position += column.nbytes
            return column

        ids, mask, versions, logprobs = take("<i4"), take("u1"), take("<i4"), take("<f2").astype(np.float32)
        train_logp = logprobs + take("<f2").astype(np.float32) if header["has_gap"] else None
        advantages = take("<f2").astype(np.float32) if header["has_advantages"] else None
        return cls(ids, mask, versions, logprobs, train_logp, advantages)


def _half(values: np.ndarray) -> np.ndarray:
    limit = float(np.finfo(np.float16).max)
    return np.clip(values, -limit, limit).astype("<f2")


# ------------------------------------------------------------------------------------------------ texts of tokens


def _byte_names() -> dict[str, int]:
    """Return the character by which byte-level vocabularies name each byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTE_OF = _byte_names()


def token_bytes(tokenizer: Any, token: int) -> bytes:
    """Return the text of a token as UTF-8. A token may be a part of a character only."""
    if tokenizer is None:
        return f"{token} ".encode()
    text = str(tokenizer.decode([token]))
    convert = getattr(tokenizer, "convert_ids_to_tokens", None)
    name = convert(token) if convert is not None else None
    if isinstance(name, str):
        if "\ufffd" in text and all(char in _BYTE_OF for char in name):
            return bytes(_BYTE_OF[char] for char in name)
        if match := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", name):
            return bytes([int(match[1], 16)])
        # SentencePiece drops the space at the start of a text.
        if name.startswith("\u2581") and not text.startswith(" "):
            text = f" {text}"
    return text.encode("utf-8", "replace")


def join_token_texts(tokens: Iterable[bytes]) -> list[str]:
    """Return the text of each token; a character that several make up is that of the last one."""
    decoder = text_decoder()
    return [clean(decoder.decode(token)) for token in tokens]
