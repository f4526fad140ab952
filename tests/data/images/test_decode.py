import io

import numpy as np
import pytest
from PIL import Image

from vitctl.data.images.decode import BadSample, decode

GREY = np.arange(48, dtype=np.uint8).reshape(6, 8) * 5


def encoded(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF", "GIF", "WEBP"])
def test_decode__lossless_formats_give_the_pixels(kind: str) -> None:
    pixels = np.repeat(GREY[:, :, None], 3, axis=2)
    options = {"lossless": True} if kind == "WEBP" else {}
    found = decode(encoded(Image.fromarray(pixels), kind, **options))
    assert found.dtype == np.uint8
    assert found.flags.writeable
    np.testing.assert_array_equal(found, pixels)


def test_decode__jpeg_is_close() -> None:
    pixels = np.repeat(GREY[:, :, None], 3, axis=2)
    assert (
        np.abs(decode(encoded(Image.fromarray(pixels), "JPEG", quality=100)).astype(int) - pixels).max() <= 4
    )


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


def test_decode__sixteen_bit_grey_keeps_the_high_byte() -> None:
    deep = GREY.astype(np.uint16) * 256 + 77
    np.testing.assert_array_equal(decode(encoded(Image.fromarray(deep)))[:, :, 1], GREY)


def test_decode__transparent_palette_does_not_warn() -> None:
    image = Image.fromarray(GREY).convert("P")
    assert decode(encoded(image, transparency=b"\0\1\2")).shape == (6, 8, 3)


CUT = encoded(Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)), "JPEG")


@pytest.mark.parametrize(
    ("data", "reason", "message"),
    [
        (b"", "not an image", "not an image: begins with nothing"),
        (b"hello world", "not an image", "not an image: begins with 68 65 6c 6c"),
        (
            CUT[: len(CUT) // 2],
            "truncated",
            "truncated: the compressed data of the JPEG end before its last row",
        ),
        (
            encoded(Image.new("F", (4, 4)), "TIFF"),
            "damaged",
            "damaged: floating-point pixels have no known range",
        ),
        (encoded(Image.new("L", (64, 64)), "PPM"), "not an image", "not an image: begins with"),
    ],
)
def test_decode__bad_bytes_have_a_reason(data: bytes, reason: str, message: str) -> None:
    with pytest.raises(BadSample, match=message) as caught:
        decode(data)
    assert caught.value.reason == reason
    assert "\n" not in str(caught.value)


def test_decode__limit_is_exact_and_holds_before_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encoded(Image.new("L", (40, 30)))
    monkeypatch.setenv("VITCTL_MAX_PIXELS", "1200")
    assert decode(data).shape == (30, 40, 3)
    monkeypatch.setenv("VITCTL_MAX_PIXELS", "1199")
    with pytest.raises(BadSample, match="too large: 40x30 pixels, should be at most 1,199"):
        decode(data)


@pytest.mark.parametrize("side", [9_460, 20_000])
def test_decode__bombs_are_refused_from_their_header(side: int) -> None:
    data = bytearray(encoded(Image.new("1", (8, 8)), "BMP"))
    data[18:26] = side.to_bytes(4, "little") * 2
    with pytest.raises(BadSample) as caught:
        decode(bytes(data))
    assert caught.value.reason == "too large"


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
