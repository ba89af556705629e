"""Images from rows and requests: what is read, and that bad ones are refused before they cost memory."""

import base64
import io
import itertools
import os
import struct
import zlib

import pytest
from PIL import Image, ImageOps

from arealite.api.errors import RequestError
from arealite.utils.images import encoded as images
from arealite.utils.images.encoded import decode_image, from_base64, from_data_url, image_bytes, read_image, to_data_url
from tests.tiny_vision import picture


def encode(image: Image.Image, form: str = "PNG", **settings) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, form, **settings)
    return buffer.getvalue()


def png_header(width: int, height: int) -> bytes:
    """A PNG whose header claims a size, with next to no data."""
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", head), (b"IDAT", zlib.compress(b"\0" * 64)), (b"IEND", b"")]
    parts = [struct.pack(">I", len(d)) + k + d + struct.pack(">I", zlib.crc32(k + d)) for k, d in chunks]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "BMP", "GIF"])
def test_all_forms_of_an_image_give_the_same_bytes(tmp_path, form):
    data = picture(0, form=form)
    (tmp_path / "a.img").write_bytes(data)
    forms = [data, bytearray(data), tmp_path / "a.img", str(tmp_path / "a.img"), {"bytes": data, "path": None}]
    forms += [{"bytes": None, "path": str(tmp_path / "a.img")}, to_data_url(data)]
    assert all(image_bytes(one) == data for one in forms)
    assert decode_image(data).mode == "RGB"


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "RGBA", "CMYK"])
def test_pil_images_keep_their_pixels(mode):
    image = decode_image(picture(0)).convert(mode)
    assert decode_image(image_bytes(image)).tobytes() == image.convert("RGB").tobytes()


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_photographs_are_turned_as_datasets_turns_them(tmp_path, form, orientation):
    exif, image = Image.Exif(), Image.new("RGB", (64, 32), "red")
    # Four colours, so that every orientation differs.
    for corner, colour in (((32, 0), "lime"), ((0, 16), "blue"), ((32, 16), "white")):
        image.paste(colour, (*corner, corner[0] + 32, corner[1] + 16))
    exif[0x0112] = orientation
    data = encode(image, form, exif=exif)
    shown = ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")
    (tmp_path / "photo").write_bytes(data)
    url = f"data:image/{form.lower()};base64,{base64.b64encode(data).decode()}"
    for upright in (image_bytes(data), image_bytes(tmp_path / "photo"), from_data_url(url)):
        found = decode_image(upright)
        assert found.size == shown.size and image_bytes(upright) == upright
        for x, y in itertools.product((0.25, 0.75), repeat=2):
            at = int(x * found.width), int(y * found.height)
            assert max(abs(a - b) for a, b in zip(found.getpixel(at), shown.getpixel(at), strict=True)) < 16
    assert (image_bytes(data) == data) is (orientation == 1)


def test_damaged_exif_data_say_nothing():
    exif = Image.Exif()
    exif[0x0112] = 6
    data = encode(Image.new("RGB", (8, 4)), "JPEG", exif=exif)
    damaged = data.replace(b"Exif\0\0", b"Exif\0\0\xff\xff\xff")
    assert image_bytes(damaged) == damaged and decode_image(damaged).size == (8, 4)


def test_damaged_and_foreign_files_are_refused():
    good = picture(0)
    svg, tiff = b"<svg xmlns='http://www.w3.org/2000/svg'/>", encode(Image.new("RGB", (4, 4)), "TIFF")
    for bad in (b"no image", svg, tiff, b"%PDF-1.4"):
        with pytest.raises(RequestError, match="damaged or of another format than PNG"):
            decode_image(bad)
    with pytest.raises(RequestError, match="damaged"):
        decode_image(good[: len(good) // 2])
    with pytest.raises(RequestError, match="damaged"):
        decode_image(good[:20])
    with pytest.raises(RequestError, match="no bytes"):
        image_bytes(b"")


def test_decompression_bombs_are_refused_by_their_header(monkeypatch):
    with pytest.raises(RequestError, match=r"20000 × 20000 pixels|more than"):
        decode_image(png_header(20000, 20000))
    with pytest.raises(RequestError, match="pixels"):
        decode_image(png_header(65000, 65000))
    with pytest.raises(RequestError, match=r"damaged|empty|another format"):
        decode_image(png_header(0, 10))
    monkeypatch.setattr(images, "MAX_IMAGE_BYTES", 100)
    with pytest.raises(RequestError, match="more than 0 MiB"):
        image_bytes(picture(0))


def test_animated_images_are_refused():
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    for form in ("GIF", "WEBP", "PNG"):
        with pytest.raises(RequestError, match="animated"):
            decode_image(encode(frames[0], form, save_all=True, append_images=frames[1:]))


def test_of_several_pictures_in_a_photograph_the_first_is_read():
    frames = [Image.new("RGB", (16, 8), colour) for colour in ("red", "blue")]
    exif = Image.Exif()
    for orientation, size in ((1, (16, 8)), (6, (8, 16))):
        exif[0x0112] = orientation
        data = image_bytes(encode(frames[0], "MPO", save_all=True, append_images=frames[1:], exif=exif))
        decoded = decode_image(data)
        assert decoded.size == size and to_data_url(data).startswith("data:image/jpeg;")
        red, _, blue = decoded.getpixel((4, 4))
        assert red > 250 and blue < 5


def test_urls_are_never_fetched():
    for url in ("http://localhost/a.png", "https://example.com/a.png", "ftp://host/a.png", "file:///etc/passwd"):
        with pytest.raises(RequestError, match="never fetched"):
            image_bytes(url)
    with pytest.raises(RequestError, match="not supported"):
        from_data_url("data:image/svg+xml,<svg/>")
    with pytest.raises(RequestError, match="base64"):
        from_base64("not base64!")
    with pytest.raises(RequestError, match="expected encoded bytes"):
        image_bytes(7)


def test_files_outside_the_folder_are_refused(tmp_path):
    folder = tmp_path / "images"
    folder.mkdir()
    (folder / "in.png").write_bytes(picture(0))
    (tmp_path / "out.png").write_bytes(picture(0))
    (folder / "link.png").symlink_to(tmp_path / "out.png")
    os.mkfifo(folder / "fifo.png")
    assert read_image("in.png", folder) == read_image(str(folder / "in.png"), folder) == picture(0)
    for path in ("../out.png", str(tmp_path / "out.png"), "link.png", "/etc/passwd"):
        with pytest.raises(RequestError, match="outside of the folder"):
            read_image(path, folder)
    for path, why in (("none.png", "No such file"), ("fifo.png", "not a file"), (".", "not a file"), ("a\0b", "path")):
        with pytest.raises(RequestError, match=why):
            read_image(path, folder)


def test_data_urls_hold_the_format():
    url = to_data_url(picture(0, form="JPEG"))
    assert url.startswith("data:image/jpeg;base64,")
    assert from_data_url(url) == from_base64(base64.b64encode(picture(0, form="JPEG")).decode())
