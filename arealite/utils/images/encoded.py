"""Images as encoded bytes: read, check and decode them within limits.

The canonical form of an image in requests and rows is the bytes of a PNG, JPEG, WebP, GIF or BMP file. `image_bytes`
makes it of what datasets hold, and turns photographs upright. Nothing is fetched from the network. `decode_image`
checks format and size in the header before it decodes, so a small file cannot fill the memory. Errors are
`RequestError`: they cost one request or episode.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arealite.api.errors import ConfigError, RequestError
from arealite.utils.images.orientation import has_exif, turn_of

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_IMAGES = 64  # of one request
MAX_IMAGE_BYTES = 16 << 20
MAX_IMAGE_PIXELS = 1 << 25  # 96 MiB once decoded
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
# Columns of rows; one of them has the images.
IMAGE_COLUMNS = ("images", "image")
_FILES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp")


def find_images(row: Mapping[str, Any]) -> list[Any]:
    """Return the images of a row, of whichever form; empty if it has none.

    A table of several datasets has both columns, and one of them is empty in each row.
    """
    for name in IMAGE_COLUMNS:
        given = row.get(name)
        listed = list(given) if isinstance(given, list | tuple) else [] if given is None else [given]
        if listed:
            return listed
    return []


def has_images(row: Mapping[str, Any]) -> bool:
    """Return whether a row has images, which reading its text alone would leave out.

    Text in `image` may be something else, such as the name of a container.
    """
    listed = row.get("images")
    return bool(isinstance(listed, list | tuple | Mapping) and listed) or any(map(_is_image, find_images(row)))


def _is_image(value: Any) -> bool:
    if isinstance(value, Mapping):
        return bool(value.get("bytes") or value.get("path"))
    if isinstance(value, str):
        return value.startswith("data:image/") or value.lower().endswith(_FILES)
    return isinstance(value, bytes | bytearray | memoryview) or hasattr(value, "save")


def image_bytes(image: Any, folder: str | Path | None = None) -> bytes:
    """Return the encoded bytes of an image: bytes, a file, a PIL image, or a dict of `datasets`.

    Args:
        folder: if given, files must be in this folder.
    """
    if isinstance(image, Mapping):  # an undecoded image of `datasets`
        image = image.get("bytes") or image.get("path")
    if isinstance(image, str) and image.startswith("data:"):
        return from_data_url(image)
    if isinstance(image, str) and "://" in image[:16]:
        raise RequestError(f"the image {image[:80]!r} is a URL: images are never fetched; send data: URLs or bytes")
    if isinstance(image, str | Path):
        return read_image(image, folder)
    if isinstance(image, bytes | bytearray | memoryview):
        return _checked(bytes(image))
    if hasattr(image, "save") and hasattr(image, "size"):
        buffer = io.BytesIO()
        # PNG keeps every pixel. Modes that it lacks (CMYK, YCbCr) are those of photographs, which are RGB.
        (image if image.mode in ("1", "L", "LA", "P", "RGB", "RGBA") else image.convert("RGB")).save(buffer, "PNG")
        return _checked(buffer.getvalue())
    raise RequestError(
        f"an image is {type(image).__name__}; expected encoded bytes, a path, a data: URL or a PIL image"
    )


def from_data_url(url: str) -> bytes:
    """Decode `data:image/png;base64,…`."""
    head, comma, data = url.partition(",")
    if not comma or not head.startswith("data:") or not head.endswith(";base64"):
        raise RequestError(f"the image URL {url[:40]!r} is not supported: use data:image/png;base64,…")
    return from_base64(data)


def from_base64(data: str) -> bytes:
    """Decode base64 text, after its length was checked."""
    if len(data) > MAX_IMAGE_BYTES * 4 // 3 + 4:
        raise RequestError(f"an image has more than {MAX_IMAGE_BYTES >> 20} MiB: send a smaller one")
    try:
        decoded = base64.b64decode(data, validate=True)
    except ValueError as error:
        raise RequestError(f"an image is not valid base64: {error}") from error
    return _checked(decoded)


def to_data_url(image: bytes) -> str:
    """Return the `data:` URL of an encoded image."""
    return f"data:image/{image_format(image).lower()};base64,{base64.b64encode(image).decode()}"


def read_image(path: str | Path, folder: str | Path | None = None) -> bytes:
    """Read a file of at most `MAX_IMAGE_BYTES`; with `folder`, only a plain file below it."""
    try:
        file = Path(path).expanduser() if folder is None else Path(folder, path).resolve(strict=True)
        if folder is not None and not file.is_relative_to(Path(folder).resolve(strict=True)):
            raise RequestError(f"the image {str(path)[:200]!r} is outside of the folder that images are read from")
        if not file.is_file():  # a FIFO or a device could block
            raise RequestError(f"the image {str(path)[:200]!r} is not a file")
        with file.open("rb") as opened:
            return _checked(opened.read(MAX_IMAGE_BYTES + 1))
    except (OSError, ValueError) as error:
        if isinstance(error, RequestError):
            raise
        reason = error.strerror if isinstance(error, OSError) else "it is not a path"
        raise RequestError(f"the image {str(path)[:200]!r} cannot be read: {reason}") from error


def decode_image(data: bytes) -> Image:
    """Decode to RGB; raises `RequestError` for damaged, too large, animated or unknown images."""
    image = _open(data)
    try:
        # Of the pictures in the JPEG file of a phone, which Pillow calls MPO, the first is the photograph.
        if image.format != "MPO" and getattr(image, "n_frames", 1) > 1:
            raise RequestError(f"an image is animated ({image.format}): send one frame")
        return image.convert("RGB")
    except RequestError:
        raise
    except (OSError, ValueError, SyntaxError, EOFError, ArithmeticError, LookupError, MemoryError) as error:
        raise RequestError(f"an image is damaged: {error}") from error


def image_format(data: bytes) -> str:
    """Return the format of an encoded image, such as PNG, from its header."""
    return _format(_open(data))


def check_count(count: int) -> None:
    """Raise `RequestError` for more images than a request may have."""
    if count > MAX_IMAGES:
        raise RequestError(f"{count} images in one request; at most {MAX_IMAGES} are allowed")


def _open(data: bytes) -> Image:
    """Read the header; check format and size."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError as error:
        raise ConfigError("images need Pillow: pip install 'arealite[vision]'") from error
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError as error:
        known = ", ".join(FORMATS)
        raise RequestError(f"an image ({len(data)} bytes) is damaged or of another format than {known}") from error
    except Image.DecompressionBombError as error:
        raise RequestError(f"an image has more than {MAX_IMAGE_PIXELS} pixels: send a smaller one") from error
    except (OSError, ValueError, SyntaxError, EOFError, ArithmeticError, LookupError) as error:
        raise RequestError(f"an image is damaged: {error}") from error
    width, height = image.size
    if width < 1 or height < 1:
        raise RequestError(f"an image has {width} × {height} pixels: it is empty")
    if width * height > MAX_IMAGE_PIXELS:
        raise RequestError(f"an image has {width} × {height} pixels; at most {MAX_IMAGE_PIXELS} are allowed")
    return image


def _format(image: Image) -> str:
    return "JPEG" if image.format == "MPO" else str(image.format)


def _checked(data: bytes) -> bytes:
    if not data:
        raise RequestError("an image is empty: it has no bytes")
    if len(data) > MAX_IMAGE_BYTES:
        raise RequestError(f"an image has more than {MAX_IMAGE_BYTES >> 20} MiB: send a smaller one")
    return _upright(data) if has_exif(data) else data


def _upright(data: bytes) -> bytes:
    """Return an image with its pixels turned as its EXIF data say, and without these."""
    image = _open(data)
    turn = turn_of(image)
    if turn is None:
        return data
    buffer = io.BytesIO()
    decode_image(data).transpose(turn).save(buffer, _format(image), quality=90)
    return buffer.getvalue()
