"""Pixels by the range that their file declares, against a reading of the samples by NumPy; and drawings in
the alpha channel.
"""

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from tests.data.conftest import encoded
from tests.data.images.tiff_files import tiff
from tests.matrix import each
from vitctl.data.images.decode import BadSample, decode, from_pillow

GREY = np.random.default_rng(0).integers(0, 256, (6, 16))
GREY[0, :2] = 0, 255
DEEP = GREY * 257


def given(image: Image.Image) -> np.ndarray:
    return from_pillow(image).region(0, 0, image.height, image.width)


def high_bits(values: np.ndarray, bits: int) -> np.ndarray:
    """The eight high bits; of fewer bits all, spread over 0 to 255."""
    return values >> (bits - 8) if bits >= 8 else np.rint(values * 255 / (2**bits - 1)).astype(int)


@each("bits", [1, 2, 4, 8, 10, 12, 14, 16])
@each("photometric", [0, 1])
def test_decode__tiff_has_its_declared_range_or_is_refused(bits: int, photometric: int) -> None:
    values = np.random.default_rng(bits).integers(0, 2**bits, (6, 16))
    expected = high_bits(values if photometric else 2**bits - 1 - values, bits)
    read = 0
    for order in "<>":
        for deflate in (False, True):
            data = tiff([values], bits, photometric=photometric, order=order, deflate=deflate)
            try:
                found = decode(data)
            except BadSample as error:
                refusal = str(error)
                continue
            read += 1
            np.testing.assert_array_equal(found, np.repeat(expected[:, :, None], 3, axis=2))
            np.testing.assert_array_equal(given(Image.open(io.BytesIO(data))), found)
    # Pillow reads 12 bits, and 16 bits with a white of 0, in one byte order alone; 10 and 14 bits in none
    least = 4 if bits <= 8 else {(12, 1): 2, (16, 0): 2, (16, 1): 4}.get((bits, photometric), 0)
    assert read >= least
    assert read == 4 or "damaged: Pillow cannot open this TIFF: convert it to PNG" in refusal


@each("bits", [8, 16, 32])
@each("order", "<>")
@each("deflate", [False, True])
def test_decode__signed_and_wide_pixels_are_refused(bits: int, order: str, deflate: bool) -> None:
    """Pillow's mode L showed -1 as 255, its mode I these photographs as black, and of compressed ones in the
    other byte order noise.
    """
    for sample_format in (1, 2, 3):
        if (sample_format, bits) in ((1, 8), (1, 16), (3, 8), (3, 16)):
            continue
        data = tiff([GREY], bits, sample_format=sample_format, order=order, deflate=deflate)
        with pytest.raises(BadSample, match=r"no known range; convert to 8 or 16 bits|cannot open this TIFF"):
            decode(data)


@pytest.mark.parametrize("order", "<>")
@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("deflate", [False, True])
def test_decode__planes_of_a_tiff(bits: int, order: str, deflate: bool) -> None:
    """Pillow reads planes of 16 bits, not compressed, as if they had 8."""
    planes = np.random.default_rng(1).integers(0, 2**bits, (3, 6, 8))
    data = tiff(planes, bits, photometric=2, order=order, deflate=deflate)
    if bits == 16 and not deflate:
        with pytest.raises(BadSample, match="unsupported pixels: 16-bit planes, not compressed"):
            decode(data)
    else:
        np.testing.assert_array_equal(decode(data), high_bits(planes, bits).transpose(1, 2, 0))


@pytest.mark.parametrize("bits", [8, 16])
def test_decode__bigtiff(bits: int) -> None:
    values = GREY if bits == 8 else DEEP
    found = decode(tiff([values], bits, big=True))
    np.testing.assert_array_equal(found[:, :, 0], GREY)
    with pytest.raises(BadSample, match="unsupported format: big-endian BigTIFF; convert it to PNG"):
        decode(tiff([values], bits, big=True, order=">"))


@each("bits", [1, 4, 8])
@each("order", "<>")
@each("deep", [False, True])
def test_decode__colour_map_of_a_tiff_with_8_or_16_bits(bits: int, order: str, deep: bool) -> None:
    """Pillow shows colours of 8 bits as black; libtiff takes them for what they are."""
    rng = np.random.default_rng(bits)
    colours, values = rng.integers(0, 256, (3, 2**bits)), rng.integers(0, 2**bits, (6, 16))
    stored = (colours * (257 if deep else 1)).ravel().tolist()
    data = tiff([values], bits, photometric=3, order=order, colours=stored)
    np.testing.assert_array_equal(decode(data), colours.T[values])
    opened = Image.open(io.BytesIO(data))
    np.testing.assert_array_equal(given(opened), colours.T[values])
    assert (np.asarray(opened.convert("RGB")) == (colours.T[values] if deep else 0)).all()  # is left alone


@each("white", [1, 100, 255, 1000, 4095, 65535])
@each("bands", [1, 3])
def test_decode__pnm_by_its_white(white: int, bands: int) -> None:
    values = np.random.default_rng(white).integers(0, white + 1, (6, 8, bands))
    header = f" # by hand\n8 6\n{white}\n".encode()
    plain = (b"P2" if bands == 1 else b"P3") + header + " ".join(map(str, values.ravel())).encode()
    binary = (
        (b"P5" if bands == 1 else b"P6") + header + values.astype(">u2" if white > 255 else "u1").tobytes()
    )
    expected = np.broadcast_to(values * 255 / white, (6, 8, 3))
    for data in (plain, binary):
        np.testing.assert_array_equal(decode(data), np.rint(expected))
        if bands == 1 and white > 255:  # Pillow rounds other halves up
            np.testing.assert_array_equal(given(Image.open(io.BytesIO(data))), np.rint(expected))
    if bands == 3 or white < 256:
        image = Image.open(io.BytesIO(binary))
        np.testing.assert_array_equal(decode(binary), np.asarray(image.convert("RGB")))


def test_decode__pbm_and_short_pnm() -> None:
    ink = GREY > 127
    for data in (
        b"P1 16 6\n" + b"".join(b"%d" % one for one in ink.ravel().astype(int)),
        b"P4\n16 6\n" + np.packbits(ink, axis=1).tobytes(),
    ):
        np.testing.assert_array_equal(decode(data)[:, :, 0], np.where(ink, 0, 255))
    with pytest.raises(BadSample, match="damaged"):
        decode(b"P5 8 6 4095\n" + bytes(90))
    with pytest.raises(BadSample, match="too large: 8,388,"):
        decode(b"P2 2000 2000 255\n" + b"1 " * 2**22)


def test_decode__sixteen_bits_of_png_keep_the_high_byte() -> None:
    deep = np.random.default_rng(2).integers(0, 65536, (6, 8, 3))

    def png(values: np.ndarray, colour: int, *chunks: tuple[bytes, bytes]) -> bytes:
        rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
        head = struct.pack(">IIBBBBB", 8, 6, 16, colour, 0, 0, 0)
        parts = [(b"IHDR", head), *chunks, (b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
        return b"\x89PNG\r\n\x1a\n" + b"".join(
            struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
            for name, data in parts
        )

    np.testing.assert_array_equal(decode(png(deep, 2)), deep >> 8)
    twelve = (deep[..., 0] >> 4) << 4  # sBIT says that 12 bits count; they are the high ones
    for chunk in ((), ((b"sBIT", b"\x0c"),)):
        np.testing.assert_array_equal(decode(png(twelve, 0, *chunk))[..., 1], deep[..., 0] >> 8)


@pytest.mark.parametrize("dtype", ["int16", "int32", "uint32", "float32", "float64"])
def test_from_pillow__arrays_of_no_known_range_are_refused(dtype: str) -> None:
    for scale in (1, 100):
        with pytest.raises(BadSample, match="unsupported pixels: signed, 32-bit and floating-point"):
            given(Image.fromarray((GREY * scale).astype(dtype)))


def test_from_pillow__arrays_of_a_known_range() -> None:
    for image in (Image.fromarray(GREY.astype(np.uint8)), Image.fromarray(DEEP.astype(np.uint16))):
        np.testing.assert_array_equal(given(image)[:, :, 2], GREY)
    np.testing.assert_array_equal(given(Image.fromarray(GREY > 99))[:, :, 0], np.where(GREY > 99, 255, 0))
    pgm = Image.open(io.BytesIO(b"P5 16 6 65535\n" + DEEP.astype(">u2").tobytes()))
    np.testing.assert_array_equal(given(pgm)[:, :, 0], GREY)


# Drawings in the alpha channel

ALPHA = Image.fromarray(np.tile(np.arange(0, 256, 5, dtype=np.uint8), (24, 1)))
FLAT = {"black": 0, "dark": 100, "light": 200, "white": 255}


def drawn(ink: int, form: str) -> bytes:
    band = Image.new("L", ALPHA.size, ink)
    if form == "palette":
        image = Image.fromarray(np.asarray(ALPHA) // 86, "P")
        image.putpalette([ink] * 9)
        return encoded(image, "PNG", transparency=b"\0\x80\xff")
    bands = [band, ALPHA] if form == "LA" else [band, band, band, ALPHA]
    kind = form if form in ("WEBP", "TIFF") else "PNG"
    options = {"lossless": True, "exact": True} if kind == "WEBP" else {}
    return encoded(Image.merge("LA" if form == "LA" else "RGBA", bands), kind, **options)


@pytest.mark.parametrize("form", ["RGBA", "LA", "palette", "WEBP", "TIFF"])
@pytest.mark.parametrize("ink", FLAT.values(), ids=FLAT)
def test_decode__a_drawing_in_alpha_is_seen(ink: int, form: str) -> None:
    data = drawn(ink, form)
    opened = Image.open(io.BytesIO(data))
    alpha = np.asarray(opened.convert("RGBA"))[..., 3:] / 255
    expected = ink * alpha + (255 if ink < 128 else 0) * (1 - alpha)
    found = decode(data)
    assert np.abs(found - expected).max() <= 1
    assert np.ptp(found) > 90
    np.testing.assert_array_equal(given(opened), found)


def test_decode__where_colours_show_the_picture_alpha_is_dropped() -> None:
    """The pixels of `convert("RGB")`, which timm, torchvision and transformers see."""
    rng = np.random.default_rng(3)
    photo = rng.integers(0, 256, (24, 52, 3), np.uint8)
    white_on_nothing = np.where(np.asarray(ALPHA)[..., None] > 127, 255, np.zeros((1, 1, 3))).astype(np.uint8)
    almost_flat = np.zeros((24, 52, 3), np.uint8)
    almost_flat[-1, -1] = 1
    flat = np.full((24, 52, 3), 7, np.uint8)
    alpha = np.asarray(ALPHA)
    for colours, opacity in (
        (photo, alpha), (photo, 255), (photo, 0), (white_on_nothing, alpha), (almost_flat, alpha),
        (flat, 255), (flat, 128), (flat, 0),
    ):  # fmt: skip
        pixels = np.dstack([colours, np.broadcast_to(np.uint8(opacity), alpha.shape)])
        for kind in ("PNG", "TIFF"):
            np.testing.assert_array_equal(decode(encoded(Image.fromarray(pixels), kind)), colours)
    keyed = Image.fromarray(photo)
    np.testing.assert_array_equal(decode(encoded(keyed, transparency=tuple(photo[0, 0].tolist()))), photo)
