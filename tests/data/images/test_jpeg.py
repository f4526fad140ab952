"""Decoding no further than needed gives the pixels of decoding it all, which are Pillow's."""

import io
import tarfile
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from tests.conftest import SHARED
from tests.data import conftest
from tests.matrix import each
from vitctl.data.images.decode import BadSample, decode, open_picture
from vitctl.data.images.jpeg import cut_out, decode_rows, read_header
from vitctl.data.images.transforms import TrainTransform, augmentation_rng

PHOTOS = SHARED / "imagenet-500.tar"
HEIGHT, WIDTH = 83, 101


def photo(mode: str = "RGB", height: int = HEIGHT, width: int = WIDTH) -> Image.Image:
    """Waves with a little noise, so that every frequency of the code is met."""
    rows, columns = np.mgrid[:height, :width][..., None] / np.array([5.0, 9.0, 14.0])
    noise = np.random.default_rng(0).normal(0, 12, rows.shape)
    return Image.fromarray(
        np.clip(128 + 90 * np.sin(rows) * np.cos(columns) + noise, 0, 255).astype(np.uint8)
    ).convert(mode)


encoded = partial(conftest.encoded, kind="JPEG", quality=85)


def by_pillow(data: bytes) -> np.ndarray:
    return np.array(Image.open(io.BytesIO(data)).convert("RGB"))


KINDS: dict[str, bytes] = {
    "420": encoded(photo(), subsampling=2),
    "422": encoded(photo(), subsampling=1),
    "444": encoded(photo(), subsampling=0),
    "grey": encoded(photo("L")),
    "progressive": encoded(photo(), progressive=True),
    "restarts": encoded(photo(), restart_marker_rows=1),
    "rgb": encoded(photo(), keep_rgb=True),
    "exif": encoded(photo(), exif=b"Exif\0\0" + bytes(500), comment=b"a comment"),
}


def test_read_header__leaves_the_unusual_alone() -> None:
    good = KINDS["420"]
    assert read_header(good) is not None
    for odd in (
        b"",
        good[:-2],
        good + b"\0",
        good[:300] + b"\xff\xd9",
        b"\x89PNG" + good,
        encoded(photo("CMYK")),
    ):
        assert read_header(odd) is None
    frame = good.index(b"\xff\xc0")
    for factors in (0x00, 0x20, 0x02):
        unsampled = bytearray(good)
        unsampled[frame + 11 : frame + 18 : 3] = [factors] * 3
        assert read_header(bytes(unsampled)) is None
    for marker in (0xC3, 0xC9, 0xCB):  # lossless and arithmetic frames
        at = good.index(b"\xff\xc0")
        assert read_header(good[: at + 1] + bytes([marker]) + good[at + 2 :]) is None


@given(st.data())
def test_open_picture__regions_are_parts_of_the_whole(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(sorted(KINDS)))
    top, left = data.draw(st.integers(0, HEIGHT - 1)), data.draw(st.integers(0, WIDTH - 1))
    height, width = data.draw(st.integers(1, HEIGHT - top)), data.draw(st.integers(1, WIDTH - left))
    found = open_picture(KINDS[kind]).region(top, left, height, width)
    np.testing.assert_array_equal(found, by_pillow(KINDS[kind])[top : top + height, left : left + width])


def test_open_picture__what_the_fast_way_cannot_read_pillow_does(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr("vitctl.data.images.decode.decode_rows", lambda *call, **_: calls.append(call))
    picture = open_picture(KINDS["420"])
    for _ in range(2):
        np.testing.assert_array_equal(
            picture.region(3, 5, 40, 30, reduce=2), by_pillow(KINDS["420"])[3:43, 5:35]
        )
    assert len(calls) == 1


def test_region__only_short_lived_pixels_are_overwritten() -> None:
    one, other = (encoded(photo(height=height)) for height in (60, 40))
    kept, fleeting = (
        open_picture(one).region(0, 0, 60, WIDTH, reuse_buffer=reuse_buffer) for reuse_buffer in (False, True)
    )
    assert np.array_equal(fleeting, by_pillow(one))
    again = open_picture(other).region(0, 0, 40, WIDTH, reuse_buffer=True)
    assert np.shares_memory(fleeting, again)
    assert np.array_equal(again, by_pillow(other))
    assert np.array_equal(kept, by_pillow(one))
    assert kept.flags.writeable


def test_transforms__scaled_is_exact_where_nothing_can_be_saved_and_close_elsewhere() -> None:
    data = encoded(photo(height=120, width=160).resize((800, 600)), quality=95)
    small = TrainTransform(32, resample="bilinear_antialias", decode="scaled", flip=False)
    exact = TrainTransform(32, resample="bilinear_antialias", flip=False)
    large = TrainTransform(590, decode="scaled", flip=False)
    differences = []
    for sample in range(20):
        rng = [augmentation_rng(0, 0, sample) for _ in range(4)]
        same = TrainTransform(590, flip=False)(open_picture(data), rng[0])
        assert torch.equal(large(open_picture(data), rng[1]), same)
        differences.append(
            (small(open_picture(data), rng[2]).float() - exact(open_picture(data), rng[3])).abs().mean()
        )
    assert max(differences) > 0
    assert max(differences) < 6  # grey levels of 255


@pytest.mark.skipif(not PHOTOS.is_file(), reason="needs shared/data/imagenet-500.tar")
def test_photographs__are_pillows_bit_for_bit_however_little_is_decoded() -> None:
    rng, fast = np.random.default_rng(0), 0
    with tarfile.open(PHOTOS) as tar:
        members = [member for member in tar if member.isreg()]
        for member in members[::5]:
            file = tar.extractfile(member)
            assert file is not None
            data = file.read()
            whole = by_pillow(data)
            bottom = int(rng.integers(1, len(whole) + 1))
            fast += read_header(data) is not None
            np.testing.assert_array_equal(open_picture(data).region(0, 0, bottom, 50), whole[:bottom, :50])
    assert fast == len(members[::5]) == 100


END = b"\xff\xd9"


@each("kind", KINDS)
@each("kept", [0.1, 0.5, 0.9])
@each("end", [END, b""])
def test_decode__zeros_in_place_of_code_are_a_bad_sample(kind: str, kept: float, end: bytes) -> None:
    data = KINDS[kind]
    begin = data.rindex(b"\xff\xda") if kind == "progressive" else data.index(b"\xff\xda")
    keep = begin + 14 + int(kept * (len(data) - begin - 14))
    hollow = data[:keep] + bytes(len(data) - keep - len(end)) + end
    with pytest.raises(BadSample) as caught:
        decode(hollow)
    assert caught.value.reason in ("truncated", "damaged")
    padded = decode(hollow, truncated="pad")
    assert padded.shape == (HEIGHT, WIDTH, 3)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "progressive"])
def test_decode__code_cut_off_is_truncated(kind: str) -> None:
    cut = KINDS[kind][: -len(KINDS[kind]) // 4]
    for data in (cut, cut + END):
        with pytest.raises(BadSample, match="truncated: the compressed data of the JPEG end before its"):
            decode(data)
        rows = HEIGHT // 4
        np.testing.assert_array_equal(decode(data, truncated="pad")[:rows], by_pillow(KINDS[kind])[:rows])


@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_decode__a_progressive_picture_without_its_last_scans(mode: str) -> None:
    """Zeros from somewhere within a scan to the end: what the decoder makes of the scans before looks like a
    picture.
    """
    data = encoded(photo(mode), progressive=True)
    scans = [at for at in range(len(data)) if data[at : at + 2] == b"\xff\xda"]
    assert len(scans) > 5
    for begin, end in zip(scans[1:], [*scans[2:], len(data)], strict=True):
        cut, header = data[: (begin + end) // 2], data[: begin + 6]
        zeros = [
            part.ljust(len(data) - 2, b"\0") + after
            for part in (cut, header)
            for after in (b"\0\0", data[-2:])
        ]
        for held in (*zeros, data[:begin], data[:begin] + data[-2:]):
            with pytest.raises(BadSample) as caught:
                decode(held)
            assert caught.value.reason in ("truncated", "damaged")
    padded = data[:-2] + bytes(300) + data[-2:]
    np.testing.assert_array_equal(decode(padded), decode(data))


@each("kind", KINDS)
@each("number", [1, 3, 600])
def test_decode__bytes_that_fill_up_before_a_marker(kind: str, number: int) -> None:
    """Source: ITU-T T.81, section B.1.1.2"""
    data = KINDS[kind]
    scan = data.find(b"\xff\xda")
    filled = data[:2] + b"\xff" * number + data[2:scan] + b"\xff" * number + data[scan:]
    np.testing.assert_array_equal(decode(filled), decode(data))


@pytest.mark.parametrize("kind", KINDS)
def test_decode__what_harms_no_row_is_taken(kind: str) -> None:
    good = KINDS[kind]
    expected = by_pillow(good)
    behind = (b"\0", bytes(4096), b"Samsung" * 40, good)
    for data in (
        good[:-2],
        *(good + more for more in behind),
        good[:-2] + bytes(40) + END,
        good[:-2] + b"abc" + END,
    ):
        np.testing.assert_array_equal(decode(data), expected)
        np.testing.assert_array_equal(open_picture(data).region(0, 0, 20, 30), expected[:20, :30])


def test_decode__a_picture_of_one_colour_is_zeros_and_whole() -> None:
    flat = encoded(Image.new("L", (800, 800), 128), optimize=True)
    assert bytes(64) in flat
    np.testing.assert_array_equal(decode(flat), by_pillow(flat))


def test_decode__cmyk_is_held_to_the_same() -> None:
    whole = encoded(photo("CMYK"))
    assert decode(whole).shape == (HEIGHT, WIDTH, 3)
    with pytest.raises(BadSample):
        decode(whole[: len(whole) // 2] + bytes(len(whole) // 2 - 2) + END)


def with_restarts(**options: Any) -> list[bytes]:
    """Return JPEGs with restart markers, in intervals of columns, of one row and of several rows."""
    image, units = photo(options.pop("mode", "RGB"), HEIGHT, 112), options.pop("units")
    sizes = [number for number in range(1, units) if units % number == 0]
    every = [{"restart_marker_blocks": size} for size in sizes] + [
        {"restart_marker_rows": n} for n in (1, 2, 20)
    ]
    return [encoded(image, **options, **one) for one in every]


RESTARTS = {
    "420": with_restarts(subsampling=2, units=7),
    "422": with_restarts(subsampling=1, units=7),
    "444": with_restarts(subsampling=0, units=14),
    "grey": with_restarts(mode="L", units=14),
    "optimized": with_restarts(subsampling=2, units=7, optimize=True, quality=98),
}


@pytest.mark.parametrize("kind", RESTARTS)
@given(st.data())
def test_cut_out__a_box_has_the_pixels_of_the_whole(kind: str, data: st.DataObject) -> None:
    coded = data.draw(st.sampled_from(RESTARTS[kind]))
    jpeg, whole = read_header(coded), by_pillow(coded)
    assert jpeg is not None
    height, width = whole.shape[:2]
    top, left = data.draw(st.integers(0, height - 1)), data.draw(st.integers(0, width - 1))
    bottom, right = data.draw(st.integers(top + 1, height)), data.draw(st.integers(left + 1, width))
    cut, y, x = cut_out(jpeg, top, left, bottom, right)
    assert y <= top and x <= left and bottom <= y + cut.height and right <= x + cut.width
    pixels = by_pillow(cut.data)
    assert pixels.shape == (cut.height, cut.width, 3)
    box = slice(top, bottom), slice(left, right)
    np.testing.assert_array_equal(pixels[top - y : bottom - y, left - x : right - x], whole[box])
    picture = open_picture(coded)
    np.testing.assert_array_equal(picture.region(top, left, bottom - top, right - left), whole[box])
    for reduce in (2, 4, 8):
        at = [side // reduce * reduce for side in (top, left)]
        found = picture.region(*at, bottom - at[0], right - at[1], reduce=reduce)
        small = decode_rows(jpeg, height, reduce)
        assert small is not None
        rows, columns = (
            slice(a // reduce, -(-b // reduce)) for a, b in zip(at, (bottom, right), strict=True)
        )
        np.testing.assert_array_equal(found, small[rows, columns])


def test_cut_out__leaves_most_out_where_markers_allow_it() -> None:
    for kind, units in (("420", 7), ("444", 14)):
        for number, coded in enumerate(RESTARTS[kind]):
            jpeg = read_header(coded)
            assert jpeg is not None
            cut, _, x = cut_out(jpeg, 40, 62, 41, 63)
            by_column = number < len(RESTARTS[kind]) - 3
            assert (cut.width < 112) == by_column and (x > 0) == by_column, (kind, units)
            assert (cut.height < HEIGHT) == (number < len(RESTARTS[kind]) - 1)
            assert len(cut.data) <= len(coded)


def test_cut_out__other_files_stay_as_they_are() -> None:
    good = RESTARTS["420"][1]
    marker = good.index(b"\xff\xd1")
    odd = [
        KINDS["420"],
        encoded(photo(), restart_marker_blocks=4),  # 7 MCUs in a row
        encoded(photo(), restart_marker_rows=1, progressive=True),
        good[:marker] + b"\xff\xd2" + good[marker + 2 :],  # out of order
        good[:marker] + good[marker + 2 :],  # lost
        good[:marker] + b"\xff" + good[marker:],  # filled up
        good[:marker] + b"\xff\xd3" + good[marker:],  # one too many
    ]
    for coded in odd:
        jpeg = read_header(coded)
        assert jpeg is not None
        assert cut_out(jpeg, 0, 0, 8, 8) == (jpeg, 0, 0)
