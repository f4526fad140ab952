"""One gate for files: what is sniffed as an image is decoded, and what is refused is named everywhere."""

import io
import tarfile
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.data import conftest
from tests.data.images.tiff_files import tiff
from tests.matrix import each
from vitctl.data.datasets.readers.class_folder import sort_files
from vitctl.data.images.decode import BadSample, decode, open_picture, without_heic
from vitctl.data.images.image_types import IMAGE_EXTENSIONS, exclusion_reason, image_extension
from vitctl.data.shards.tar import read_shard
from vitctl.data.writer.intake import Item, check_image
from vitctl.data.writer.shard_writer import write_split
from vitctl.errors import DataError

PIXELS = np.random.default_rng(0).integers(0, 256, (20, 30, 3), np.uint8)
GREY = PIXELS[..., 0].astype(int)


encoded = partial(conftest.encoded, Image.fromarray(PIXELS))


# A lossless WEBP by hand, 8 x 8 black pixels: eight bytes, fewer than the headers of other chunks have
SMALL_WEBP = b"RIFF\x14\0\0\0WEBPVP8L\x08\0\0\0" + bytes.fromhex("2f07c00100888808")

READ = {
    "jpg": encoded("JPEG"),
    "png": encoded("PNG"),
    "gif": encoded("GIF"),
    "bmp": encoded("BMP"),
    "webp": encoded("WEBP"),
    "webp of one colour": SMALL_WEBP,
    "tif": encoded("TIFF"),
    "BigTIFF": tiff([GREY], 8, big=True),
    "pgm": b"P5 30 20 255\n" + GREY.astype(np.uint8).tobytes(),
    "pgm of 12 bits": b"P5\n# of a camera\n30 20 4095\n" + GREY.astype(">u2").tobytes(),
    "pbm": b"P1\n3 2\n010\n101\n",
    "ppm": b"P6\n30 20\n255\n" + PIXELS.tobytes(),
}
UNREAD = {
    "AVIF": bytes.fromhex("0000001c66747970617669660000000061766966"),
    "AVIF of another brand": bytes.fromhex("0000001c667479706d696631000000006d696631617669666d696166"),
    "JPEG 2000": encoded("JPEG2000"),
    "JPEG 2000 codestream": encoded("JPEG2000", no_jp2=True),
    "JPEG XL": b"\xff\x0a" + bytes(30),
    "PFM": b"Pf\n3 2\n-1.0\n" + bytes(24),
    "JPEG XR": b"II\xbc\1" + bytes(20),
    "Radiance HDR": b"#?RADIANCE\nFORMAT=32-bit_rle_rgbe\n",
    "PAM": b"P7\nWIDTH 3\n",
    "big-endian BigTIFF": tiff([GREY], 8, big=True, order=">"),
    "Photoshop file": b"8BPS\0\1" + bytes(20),
}
OTHER = {"P5 is a road\n": ".dat file", "P3 12 of 40": ".dat file", "BM, a note to all of us": ".dat file"}


@each("name", READ)
def test_gate__a_format_that_is_read_is_read_everywhere(name: str, tmp_path: Path) -> None:
    data = READ[name]
    extension = image_extension(data)
    assert extension in IMAGE_EXTENSIONS
    assert (decode(data).shape[2], check_image(data)[0]) == (3, "")
    for called in (f"a.{extension}", "a.dat", "a"):
        assert exclusion_reason(called, lambda: data[:300]) == ""
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.dat").write_bytes(data)
    assert sort_files(tmp_path / "photos")[0] == ["a.dat"]
    write_split([Item("a", 0, lambda: data)], tmp_path / "s", ("c",), seed=0, source_text="x")
    (shard,) = (tmp_path / "s").glob("*.tar")
    assert len(read_shard(shard).rows) == 1
    with tarfile.open(shard) as tar:
        assert {name.rpartition(".")[2] for name in tar.getnames()} == {extension, "cls"}


@each("name", UNREAD)
def test_gate__a_format_that_is_not_read_is_named_everywhere(name: str, tmp_path: Path) -> None:
    data, word = UNREAD[name], name.removesuffix(" of another brand").removesuffix(" codestream")
    said = f"unsupported format: {word}; convert it to PNG or JPEG"
    assert image_extension(data) is None
    assert (exclusion_reason("a.dat", lambda: data[:300]), check_image(data)[0]) == (said, said)
    with pytest.raises(BadSample) as caught:
        decode(data)
    assert (str(caught.value), caught.value.reason) == (said, "unsupported format")
    with pytest.raises(DataError, match=f"a: {said}; remove it"):
        write_split([Item("a", 0, lambda: data)], tmp_path / "s", ("c",), seed=0, source_text="x")


def test_gate__texts_that_begin_like_images_are_none() -> None:
    for text, said in OTHER.items():
        assert exclusion_reason("a.dat", text.encode) == f"not an image: {said}"


def test_webp__of_one_colour() -> None:
    assert (decode(SMALL_WEBP) == 0).all()


def test_heic__is_read_as_the_jpeg_that_shards_hold() -> None:
    heif = pytest.importorskip("pillow_heif")
    file = io.BytesIO()
    heif.from_pillow(Image.fromarray(np.repeat(np.repeat(PIXELS, 4, 0), 4, 1))).save(file)
    data = file.getvalue()
    assert exclusion_reason("a", lambda: data[:300]) == ""
    whole = open_picture(data).region(0, 0, 80, 120)
    np.testing.assert_array_equal(whole, decode(without_heic(data)))
