"""How a photograph is to be turned: cameras store that in EXIF data, beside pixels that lie.

`datasets`, viewers and newer vLLM follow EXIF data; SGLang and image processors do not. So an image is turned once,
where it comes in.
"""

from __future__ import annotations

import contextlib
import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image, Transpose

_ORIENTATION = 0x0112
# EXIF data in JPEG, WebP and PNG files begin with one of these.
_MARKS = (b"Exif", b"EXIF", b"eXIf")


def has_exif(data: bytes) -> bool:
    """Whether an encoded image may have EXIF data; most have none, and need not be opened."""
    return any(mark in data for mark in _MARKS)


def turn_of(image: Image) -> Transpose | None:
    """Return how to turn an opened image; None if it is upright, or if its EXIF data are damaged."""
    # `ImageOps.exif_transpose` also writes the other tags again, and fails at those of some cameras.
    from PIL.Image import Transpose as To

    turns = {
        2: To.FLIP_LEFT_RIGHT, 3: To.ROTATE_180, 4: To.FLIP_TOP_BOTTOM, 5: To.TRANSPOSE, 6: To.ROTATE_270,
        7: To.TRANSVERSE, 8: To.ROTATE_90,
    }  # fmt: skip
    with contextlib.suppress(OSError, ValueError, SyntaxError, TypeError, LookupError, struct.error):
        return turns.get(image.getexif().get(_ORIENTATION, 1))
    return None
