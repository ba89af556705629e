"""Images in requests: base64, `data:` URLs, and files of the folder that the server is told to read.

Nothing is fetched from the network, and no other file is read. Sizes and formats are checked in `utils.images.encoded`.
"""

from typing import Any

from arealite.api.errors import RequestError
from arealite.utils.images.encoded import check_count, from_base64, from_data_url, read_image

_FILE = "file://"


def read_images(given: Any, folder: str) -> list[bytes]:
    """Read the images of a request: one or a list of base64 texts, `data:` URLs or `file://` URLs.

    Args:
        folder: where files may lie; empty: none are read.
    """
    images = given if isinstance(given, list) else [given]
    # SGLang takes a list of images for each prompt too.
    if len(images) == 1 and isinstance(images[0], list):
        images = images[0]
    check_count(len(images))
    return [_read(image, folder) for image in images]


def split_images(messages: list[dict[str, Any]], folder: str) -> tuple[list[dict[str, Any]], list[bytes]]:
    """Take the images out of chat messages: parts of type `image_url` become parts of type `image`.

    The images are in the order of the parts.
    """
    urls: list[Any] = []

    def part_of(part: dict[str, Any]) -> dict[str, Any]:
        if part.get("type") != "image_url":
            return part
        urls.append(part["image_url"]["url"])
        return {"type": "image"}

    split = [
        {**message, "content": [part_of(part) for part in message["content"]]}
        if isinstance(message.get("content"), list)
        else message
        for message in messages
    ]
    return split, read_images(urls, folder)


def _read(image: Any, folder: str) -> bytes:
    if not isinstance(image, str):
        raise RequestError(f"an image must be base64 text or a data: URL, got {type(image).__name__}")
    if image.startswith("data:"):
        return from_data_url(image)
    if image.startswith(_FILE):
        if not folder:
            raise RequestError("this server reads no image files: send the image, or start it with image_folder=...")
        return read_image(image.removeprefix(_FILE), folder)
    if "://" in image[:16]:
        raise RequestError(f"the image {image[:80]!r} is a URL: images are never fetched; send it as a data: URL")
    return from_base64(image)
