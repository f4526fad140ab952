"""TFRecord files and the Example messages in them, read without TensorFlow; DMLab comes in such files."""

import struct
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from vitctl.data.datasets.readers.arrays import Rows
from vitctl.data.datasets.readers.files import MissingOriginalsError, check_labels, read_part
from vitctl.data.writer.intake import Originals
from vitctl.errors import DataError
from vitctl.system.files import RECORD, open_regular

_DMLAB_CLASSES = tuple(f"reward sign and distance, class {number}" for number in range(6))
_HEADER = struct.Struct("<QI")  # length, and its checksum
_FOOTER_BYTES = 4  # checksum of the data


def read_dmlab(root: Path) -> dict[str, Originals]:
    """Read DMLab, `dmlab-{train,validation,test}.tfrecord-*`; keys are the field `filename`.

    All files are read through once, which takes as long as reading 3 GB.
    """
    return {split: _dmlab_split(root, split) for split in ("train", "validation", "test")}


def _dmlab_split(root: Path, split: str) -> Originals:
    paths = sorted(root.glob(f"dmlab-{split}.tfrecord*"))
    if not paths:
        raise MissingOriginalsError(f"{root}: dmlab-{split}.tfrecord* is missing")
    places: list[tuple[Path, int, int]] = []
    keys, labels = [], []
    for path in paths:
        for offset, data in records(path):
            example = parse_example(data)
            places.append((path, offset, len(data)))
            keys.append(_only(example, "filename", path).decode())
            labels.append(_only(example, "label", path))
    checked = check_labels(np.array(labels), len(_DMLAB_CLASSES), paths[0])
    items = Rows(checked, partial(_dmlab_image, places), keys.__getitem__)
    return Originals(items, _DMLAB_CLASSES, "DMLab of the benchmark")


def _dmlab_image(places: list[tuple[Path, int, int]], row: int) -> bytes:
    return bytes(_only(parse_example(read_part(*places[row])), "image", places[row][0]))


def _only(example: dict[str, list[Any]], name: str, path: Path) -> Any:
    values = example.get(name, [])
    if len(values) != 1:
        raise DataError(f"{path}: an example has {len(values)} values of '{name}', should have one")
    return values[0]


def records(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield offset and data of every record. The checksum of each length is compared, those of the data are not.

    Raises:
        DataError: the file is damaged or cut short.
    """
    with open_regular(path, error=DataError) as file:
        while header := file.read(_HEADER.size):
            offset = file.tell()
            length, checksum = _HEADER.unpack(header) if len(header) == _HEADER.size else (0, -1)
            if checksum == _masked_crc32c(header[:8]) and length > RECORD.limit:
                raise DataError(f"{path}: a record of {length:,} bytes, should be at most {RECORD}")
            if checksum != _masked_crc32c(header[:8]):
                raise DataError(
                    f"{path}: damaged or not a TFRecord file, at byte {offset - len(header)}; copy it again"
                )
            data = file.read(length)
            if len(data) < length or len(file.read(_FOOTER_BYTES)) < _FOOTER_BYTES:
                raise DataError(f"{path}: truncated within the record at byte {offset}; copy it again")
            yield offset, data


def parse_example(data: bytes) -> dict[str, list[Any]]:
    """Return the features of a `tf.train.Example`: lists of bytes or of integers; floats are left out.

    Raises:
        DataError: the message is malformed.
    """
    try:
        features: dict[str, list[Any]] = {}
        for _, group in _fields(memoryview(data)):
            for _, entry in _fields(group):
                pair = dict(_fields(entry))
                name, kinds = bytes(pair[1]).decode(), dict(_fields(pair.get(2, memoryview(b""))))
                if 1 in kinds:
                    features[name] = [bytes(value) for _, value in _fields(kinds[1])]
                elif 3 in kinds:
                    features[name] = list(_integers(kinds[3]))
        return features
    except (IndexError, KeyError, TypeError, ValueError) as error:
        raise DataError(f"not an Example message ({type(error).__name__}: {error})") from None


def _integers(message: memoryview) -> Iterator[int]:
    """Yield the values of an Int64List, packed or not."""
    for _, value in _fields(message):
        if isinstance(value, int):
            yield value
            continue
        place = 0
        while place < len(value):
            number, place = _varint(value, place)
            yield number


def _fields(message: memoryview) -> Iterator[tuple[int, Any]]:
    """Yield the fields of a protocol buffer: number and value, an integer or bytes."""
    place = 0
    while place < len(message):
        tag, place = _varint(message, place)
        if tag & 7 == 0:
            value, place = _varint(message, place)
            yield tag >> 3, value
        elif tag & 7 == 2:
            length, place = _varint(message, place)
            if place + length > len(message):
                raise ValueError("a field runs over the end")
            yield tag >> 3, message[place : place + length]
            place += length
        else:
            raise ValueError(f"wire type {tag & 7}")


def _varint(message: memoryview, place: int) -> tuple[int, int]:
    """Return the integer at a place, seven bits to a byte, and the place after it."""
    value = 0
    for shift in range(0, 70, 7):
        byte = message[place]
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, place
    raise ValueError("an integer of more than 64 bits")


def _masked_crc32c(data: bytes) -> int:
    """Return TFRecord's checksum: CRC-32C, rotated by 15 bits, plus a constant."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    crc ^= 0xFFFFFFFF
    return (crc >> 15 | crc << 17 & 0xFFFFFFFF) + 0xA282EAD8 & 0xFFFFFFFF
