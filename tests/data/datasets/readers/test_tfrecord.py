"""Records and messages are written here from the formats' descriptions, by a writer that shares nothing with
the reader.
"""

import struct
from pathlib import Path

import pytest

from tests.data.datasets.conftest import crc32c, example, masked, record
from vitctl.data.datasets.readers.tfrecord import parse_example, records
from vitctl.errors import DataError


def test_crc32c__as_published() -> None:
    assert crc32c(b"123456789") == 0xE3069283


def test_records__give_places_and_data(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(record(b"one") + record(b"") + record(b"three" * 99))
    found = list(records(tmp_path / "x"))
    assert [data for _, data in found] == [b"one", b"", b"three" * 99]
    whole = (tmp_path / "x").read_bytes()
    assert all(whole[offset : offset + len(data)] == data for offset, data in found)


@pytest.mark.parametrize("packed", [True, False])
def test_parse_example__bytes_and_integers(packed: bool) -> None:
    data = example({"image": b"\xff\xd8" * 200, "label": 5, "many": [0, 300, 2**40]}, packed=packed)
    assert parse_example(data) == {"image": [b"\xff\xd8" * 200], "label": [5], "many": [0, 300, 2**40]}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (record(b"one")[:-1], "truncated within the record at byte 12; copy it again"),
        (record(b"one")[:14], "truncated within the record at byte 12"),
        (record(b"one") + record(b"two")[:7], "damaged or not a TFRecord file, at byte 19"),
        (b"\x04" + record(b"one")[1:], "damaged or not a TFRecord file, at byte 0"),
        (b"\x1f\x8b\x08 a packed file, and so on", "damaged or not a TFRecord file, at byte 0"),
        (
            struct.pack("<QI", 2**40, masked(struct.pack("<Q", 2**40))),
            "a record of 1,099,511,627,776 bytes, should be at most",
        ),
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


@pytest.mark.parametrize("data", [b"\xff" * 20, b"\x0d\x00\x00\x00\x00", b"\x08\x01"])
def test_parse_example__refuses_other_bytes(data: bytes) -> None:
    with pytest.raises(DataError, match="not an Example message"):
        parse_example(data)
