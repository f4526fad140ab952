"""Arrays and records: samples that are rows, labels from row numbers, NORB's format, TFRecord files.

Records are written from the format's description, by a writer that shares nothing with the reader."""

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest

from tests.data.datasets.conftest import example, record
from tests.data.datasets.readers.test_contract import TOY_INFO, dsprites, norb, sprites
from vitctl.data.datasets.known_sets import DATA_SETS
from vitctl.data.datasets.readers import arrays
from vitctl.data.datasets.readers.arrays import (
    DIGITS_SIZES,
    SPRITE_LABELS,
    digit_items,
    parse_example,
    read_norb,
    records,
)
from vitctl.data.images.decode import decode
from vitctl.errors import DataError


@pytest.mark.parametrize("rows_at_once", [7, 4096])
def test_dsprites__bits_become_black_and_white(
    rows_at_once: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrays, "_SPRITES_AT_ONCE", rows_at_once)
    dsprites(tmp_path)
    items = DATA_SETS["dsprites-loc"].open(tmp_path)["train"].items
    for row in (0, 7, 2049):
        pixels = decode(items[row].read())
        assert np.flatnonzero(pixels[:, :, 1]).tolist() == [row]
        assert pixels.max() == 255


def test_dsprites__a_damaged_file(tmp_path: Path) -> None:
    data = sprites(np.random.default_rng(0).integers(0, 2, (99, 64, 64), dtype=np.uint8))
    for damaged in (data[:-100], b"<html>", data[:200] + bytes(40) + data[240:]):
        (tmp_path / arrays.DSPRITES_FILE).write_bytes(damaged)
        with pytest.raises(DataError, match="not the images of dSprites"):
            DATA_SETS["dsprites-loc"].open(tmp_path)


def test_dsprites__labels_equal_the_factors_of_every_row() -> None:
    factors = np.indices((3, 6, 40, 32, 32)).reshape(5, -1)  # shape, scale, orientation, x, y
    rows = np.arange(factors.shape[1])
    assert len(rows) == 737_280
    np.testing.assert_array_equal(SPRITE_LABELS["location"](rows), np.floor(factors[3] / 2))
    np.testing.assert_array_equal(SPRITE_LABELS["orientation"](rows), np.floor(factors[2] / 2.5))
    assert np.bincount(SPRITE_LABELS["orientation"](np.arange(40) * 1024)).tolist() == [3, 2] * 8


def test_read_norb__one_axis_still_has_three_lengths(tmp_path: Path) -> None:
    (tmp_path / "cat.mat").write_bytes(norb(np.array([3, 1, 4], "<i4")))
    assert read_norb(tmp_path / "cat.mat").tolist() == [3, 1, 4]


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("x.mat", norb(TOY_INFO)[:-1]),
        ("x.mat", b"MATLAB 5.0 MAT-file, Platform: PCWIN" + bytes(100)),
        ("x.mat", b""),
        ("x.mat.gz", gzip.compress(norb(TOY_INFO), mtime=0)[:-12]),
        ("x.mat.gz", norb(TOY_INFO)),
        ("x.mat", struct.pack("<ii", 0x1E3D4C55, 2**30)),
    ],
)
def test_read_norb__refuses_other_formats(name: str, data: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError, match="not a complete NORB file"):
        read_norb(tmp_path / name)


def test_digits__splits_are_the_whole_set_once() -> None:
    splits = {split: digit_items(split) for split in ("train", "test")}
    assert {split: len(items) for split, items in splits.items()} == DIGITS_SIZES
    keys = [item.key for items in splits.values() for item in items]
    assert sorted(keys) == [f"digit_{number:04d}" for number in range(1797)]
    assert {item.label for items in splits.values() for item in items} == set(range(10))


def test_digits__pictures_are_the_scans() -> None:
    from sklearn.datasets import load_digits

    scans, targets = load_digits(return_X_y=True)
    for item in digit_items("test")[:20]:
        number = int(item.key[-4:])
        picture = decode(item.read())
        assert picture.shape == (32, 32, 3)
        np.testing.assert_array_equal(picture, picture[:, :, :1].repeat(3, 2))
        blocks = picture[:, :, 0].reshape(8, 4, 8, 4).mean(axis=(1, 3))
        scan = scans[number].reshape(8, 8) * 255 / 16
        assert np.corrcoef(blocks.ravel(), scan.ravel())[0, 1] > 0.98
        assert item.label == targets[number]


def test_records__give_places_and_data(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(record(b"one") + record(b"") + record(b"three" * 99))
    found = list(records(tmp_path / "x"))
    assert [data for _, data in found] == [b"one", b"", b"three" * 99]
    whole = (tmp_path / "x").read_bytes()
    assert all(whole[offset : offset + len(data)] == data for offset, data in found)


def test_parse_example__bytes_and_integers() -> None:
    data = example({"image": b"\xff\xd8" * 200, "label": 5, "many": [0, 300, 2**40]})
    assert parse_example(data) == {"image": [b"\xff\xd8" * 200], "label": [5], "many": [0, 300, 2**40]}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (record(b"one")[:-1], "truncated within the record at byte 12; copy it again"),
        (record(b"one")[:14], "truncated within the record at byte 12"),
        (record(b"one") + record(b"two")[:7], "truncated within the record at byte 26"),
        (b"\x1f\x8b\x08 a packed file, and so on", "a record of [0-9,]+ bytes, should be at most"),
    ],
)
def test_records__refuse_damage(data: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(data)
    with pytest.raises(DataError, match=message):
        list(records(tmp_path / "x"))


@pytest.mark.parametrize("cut", range(1, 30, 4))
def test_parse_example__refuses_what_is_cut_short(cut: int) -> None:
    with pytest.raises(DataError, match="not an Example message"):
        parse_example(example({"label": 5, "filename": b"a.jpg"})[:-cut])


@pytest.mark.parametrize("data", [b"\xff" * 20, b"\x0a\x05\x01"])
def test_parse_example__refuses_other_bytes(data: bytes) -> None:
    with pytest.raises(DataError, match="not an Example message"):
        parse_example(data)
