"""Decoded pixels and reasons of bad samples; the Exif orientation against Pillow's own transposition."""

import io
import struct

import numpy as np
import pytest
from PIL import Image, ImageOps

from tests.data.conftest import encoded
from tests.data.images.tiff_files import tiff
from tests.matrix import each
from vitctl.data.images.decode import BadSample, decode, num_pixels, open_picture
from vitctl.data.images.jpeg import read_header
from vitctl.data.inspect.duplicates import perceptual_hash

GREY = np.arange(48, dtype=np.uint8).reshape(6, 8) * 5


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF", "GIF", "WEBP"])
def test_decode__lossless_formats_give_the_pixels(kind: str) -> None:
    pixels = np.repeat(GREY[:, :, None], 3, axis=2)
    options = {"lossless": True} if kind == "WEBP" else {}
    found = decode(encoded(Image.fromarray(pixels), kind, **options))
    assert found.dtype == np.uint8
    assert found.flags.writeable
    np.testing.assert_array_equal(found, pixels)


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF", "GIF", "WEBP", "JPEG", "PPM"])
def test_num_pixels__are_those_that_are_decoded(kind: str) -> None:
    file = io.BytesIO()
    Image.new("RGB", (31, 17), "red").save(file, kind)
    assert num_pixels(file.getvalue()) == decode(file.getvalue())[..., 0].size == 31 * 17
    assert num_pixels(file.getvalue()[:9]) == 0


@pytest.mark.parametrize("mode", ["L", "LA", "RGBA", "1", "P"])
def test_decode__every_mode_becomes_rgb(mode: str) -> None:
    image = Image.fromarray(GREY).convert("RGB").convert(mode)
    found = decode(encoded(image))
    assert found.shape == (6, 8, 3)
    np.testing.assert_array_equal(found, np.array(image.convert("RGB")))


def test_decode__cmyk_jpeg_becomes_rgb() -> None:
    assert decode(encoded(Image.new("CMYK", (8, 6), (0, 255, 255, 0)), "JPEG"))[
        0, 0
    ].tolist() == pytest.approx([254, 0, 0], abs=3)


CUT = encoded(Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)), "JPEG")


@pytest.mark.parametrize(
    ("data", "reason", "message"),
    [
        (b"", "not an image", "not an image: empty file"),
        (b"hello world", "not an image", "not an image: begins with 68 65 6c 6c"),
        (CUT[: len(CUT) // 2], "truncated", "truncated: the compressed data of the JPEG end before its"),
        (encoded(Image.new("F", (4, 4)), "TIFF"), "unsupported pixels", "signed, 32-bit and floating-point"),
    ],
)
def test_decode__bad_bytes_have_a_reason(data: bytes, reason: str, message: str) -> None:
    with pytest.raises(BadSample, match=message) as caught:
        decode(data)
    assert caught.value.reason == reason
    assert "\n" not in str(caught.value)


def test_decode__limit_is_exact_and_holds_before_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encoded(Image.new("L", (40, 30)))
    monkeypatch.setattr("vitctl.system.limits.PIXELS", 1200)
    assert decode(data).shape == (30, 40, 3)
    monkeypatch.setattr("vitctl.system.limits.PIXELS", 1199)
    with pytest.raises(BadSample, match="too large: 40x30 pixels, should be at most 1,199"):
        decode(data)


def test_decode__damage_anywhere_is_a_bad_sample_or_a_picture() -> None:
    good = encoded(Image.fromarray(GREY))
    outcomes = set()
    for position in range(len(good)):
        data = bytearray(good)
        data[position] ^= 0xFF
        try:
            outcomes.add(decode(bytes(data)).ndim)
        except BadSample as error:
            outcomes.add(error.reason)
    assert {"not an image", "damaged"} <= outcomes


def test_decode__a_png_whose_compressed_pixels_changed_is_damaged() -> None:
    """Some changes decompress: Pillow shows other pixels, libpng refuses them all."""
    good = encoded(Image.fromarray(GREY).convert("RGB"), compress_level=9)
    cut = good[: good.index(b"IEND") - 4]
    np.testing.assert_array_equal(decode(cut), decode(good))
    begin = good.index(b"IDAT") + 4
    for position in range(begin, len(good) - 12):
        data = bytearray(good)
        data[position] ^= 1
        with pytest.raises(BadSample, match=r"^damaged: "):
            decode(bytes(data))


def lossless_jpeg(values: np.ndarray) -> bytes:
    """A grey lossless JPEG; each difference to the left (of the first column, above) in four bits of length
    and its bits. ITU-T T.81, annex H.
    """
    left = np.concatenate([np.concatenate([[[128]], values[:-1, :1]]), values[:, :-1]], axis=1)
    bits = ""
    for step in (values.astype(int) - left).ravel().tolist():
        size = abs(step).bit_length()
        bits += f"{size:04b}" + (f"{step if step > 0 else step + (1 << size) - 1:0{size}b}" if size else "")
    coded = int((bits + "1" * (-len(bits) % 8)), 2).to_bytes(-(-len(bits) // 8)).replace(b"\xff", b"\xff\0")
    frame = struct.pack(">BHHB3B", 8, *values.shape, 1, 1, 0x11, 0)
    table = b"\0" + bytes([0, 0, 0, 9, *[0] * 12]) + bytes(range(9))
    segments = ((0xC3, frame), (0xC4, table), (0xDA, bytes([1, 1, 0, 1, 0, 0])))
    parts = (b"\xff%c" % marker + struct.pack(">H", len(body) + 2) + body for marker, body in segments)
    return b"\xff\xd8" + b"".join(parts) + coded + b"\xff\xd9"


def test_decode__a_coding_that_is_not_read_is_named() -> None:
    """A whole lossless JPEG, which Pillow may read, was called truncated."""
    whole = lossless_jpeg(GREY)
    np.testing.assert_array_equal(Image.open(io.BytesIO(whole)), GREY)
    cases = {
        "lossless JPEG": whole,
        "TIFF compressed by WEBP": tiff([GREY.astype(int)], 8, compression=50001),
    }
    for name, frame in (("JPEG-LS", b"\xff\xf7"), ("hierarchical JPEG", b"\xff\xc5")):
        cases[name] = whole.replace(b"\xff\xc3", frame)
    at = CUT.index(b"\xff\xc0") + 4
    cases["JPEG of 12 bits"] = CUT[:at] + b"\x0c" + CUT[at + 1 :]
    for name, data in cases.items():
        with pytest.raises(BadSample, match=f"^unsupported format: {name}; convert it to PNG$"):
            decode(data)


ORIENTATION = 0x0112
FORMATS = {"JPEG": {"quality": 90}, "PNG": {}, "WEBP": {"lossless": True}, "TIFF": {}}


def noise(height: int = 37, width: int = 53) -> Image.Image:
    small = np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(small).resize((3 * width, 3 * height))


def photo(orientation: int, form: str = "JPEG", image: Image.Image | None = None, **options: object) -> bytes:
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    return encoded(image or noise(), form, exif=exif, **{**FORMATS[form], **options})


def by_pillow(data: bytes) -> np.ndarray:
    with Image.open(io.BytesIO(data)) as image:
        return np.asarray(ImageOps.exif_transpose(image).convert("RGB"))


@each("form", FORMATS)
@each("orientation", range(1, 9))
def test_decode__turns_as_pillow_does(orientation: int, form: str) -> None:
    data = photo(orientation, form)
    assert np.array_equal(decode(data), by_pillow(data))


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP"])
def test_decode__leaves_the_pixels_where_it_is_told_to(form: str) -> None:
    assert np.array_equal(decode(photo(6, form), exif_orientation=False), decode(photo(1, form)))
    assert decode(photo(6, form)).shape != decode(photo(1, form)).shape


@each("options", [{}, {"progressive": True}])
@each("orientation", range(1, 9))
def test_region__equals_the_part_of_the_whole(orientation: int, options: dict[str, bool]) -> None:
    data = photo(orientation, **options)
    whole, rng = by_pillow(data), np.random.default_rng(orientation)
    assert read_header(data) is not None
    for _ in range(20):
        picture = open_picture(data)
        assert (picture.height, picture.width) == whole.shape[:2]
        top, left = int(rng.integers(picture.height)), int(rng.integers(picture.width))
        rows, columns = (
            int(rng.integers(1, picture.height - top + 1)),
            int(rng.integers(1, picture.width - left + 1)),
        )
        part = picture.region(top, left, rows, columns, reuse_buffer=True)
        assert np.array_equal(part, whole[top : top + rows, left : left + columns])


@pytest.mark.parametrize("orientation", range(1, 9))
def test_region__of_a_reduced_jpeg_shows_the_same_part(orientation: int) -> None:
    data = photo(orientation, image=noise(40, 56), subsampling=0)  # even sizes: both grids coincide
    picture, whole = open_picture(data), by_pillow(data)
    part = picture.region(16, 32, 48, 64, reduce=2).astype(float)
    exact = whole[16:64, 32:96].astype(float).reshape(24, 2, 32, 2, 3).mean(axis=(1, 3))
    assert part.shape == exact.shape
    assert np.abs(part - exact).mean() < 8


def test_decode__reads_xmp_where_exif_says_nothing() -> None:
    xmp = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><a tiff:Orientation="8"/></x:xmpmeta>'
    data = encoded(noise(), "JPEG", xmp=xmp)
    assert np.array_equal(decode(data), by_pillow(data))
    assert open_picture(data).is_turned


def test_decode__damaged_exif_turns_nothing() -> None:
    whole = photo(6)
    plain, start = decode(photo(1)), whole.index(b"Exif\0\0") + 6
    for at in range(start, start + 26):
        broken = whole[:at] + b"\xff" + whole[at + 1 :]
        assert decode(broken).size == plain.size  # it is read, turned or not
    assert np.array_equal(decode(photo(0)), plain)
    assert np.array_equal(decode(photo(9)), plain)


def test_perceptual_hash__of_a_turned_photograph_is_that_of_the_upright_one() -> None:
    one, other = map(perceptual_hash, (photo(6), encoded(Image.fromarray(decode(photo(6))))))
    assert one is not None and other is not None
    assert (one ^ other).bit_count() <= 4
