"""`ImageFolder`: writes each image of kept rollouts once, as `rollouts/images/HASH.png`.

The folder is in the run directory. Written by the ledger's thread, read by the dashboard. Images above `MAX_KEPT_IMAGE`
(`api/vision_api.py`) never arrive here, and nothing is written once the folder has `MAX_FOLDER_BYTES`. The dashboard
then says that images are missing.
"""

import io
import logging
import os
from pathlib import Path

from arealite.api.errors import ConfigError, RequestError
from arealite.utils.images.encoded import decode_image

logger = logging.getLogger("arealite.ledger")
MAX_FOLDER_BYTES = 1 << 30
_PNG = b"\x89PNG\r\n\x1a\n"


def image_name(number: int) -> str:
    """Return the file name, without suffix, of the image with this hash."""
    return f"{number:016x}"


class ImageFolder:
    """Writes images into a run directory."""

    def __init__(self, run_dir: Path, max_bytes: int = MAX_FOLDER_BYTES):
        self.path, self.max_bytes = run_dir / "rollouts" / "images", max_bytes
        # Names and size of what is there; None before the first image.
        self._names: set[str] | None = None
        self._num_bytes = 0
        self._is_closed = False

    def keep(self, images: dict[int, bytes]) -> None:
        """Write the images that are not there yet. A disk that cannot be written costs images only."""
        try:
            for number, data in images.items():
                if self._is_closed:
                    return
                self._write(image_name(number), data)
        except OSError as error:
            self._close(f"{self.path} cannot be written ({error.strerror})")

    def _write(self, name: str, data: bytes) -> None:
        if self._names is None:
            self.path.mkdir(parents=True, exist_ok=True)
            found = list(self.path.glob("*.png"))
            self._names, self._num_bytes = {file.stem for file in found}, sum(file.stat().st_size for file in found)
        if name in self._names:
            return
        try:
            png = _to_png(data)
        except (RequestError, ConfigError):
            # Decoding has succeeded before, where the model's processor may be another.
            return
        if self._num_bytes + len(png) > self.max_bytes:
            return self._close(f"{self.path} has {self.max_bytes >> 20} MiB, which is the most")
        # Readers never see half a file.
        aside = self.path / f".{name}"
        aside.write_bytes(png)
        os.replace(aside, self.path / f"{name}.png")
        self._names.add(name)
        self._num_bytes += len(png)

    def _close(self, reason: str) -> None:
        self._is_closed = True
        logger.warning("further images of rollouts are not kept: %s", reason)


def _to_png(data: bytes) -> bytes:
    if data.startswith(_PNG):
        return data
    buffer = io.BytesIO()
    decode_image(data).save(buffer, "PNG")
    return buffer.getvalue()
