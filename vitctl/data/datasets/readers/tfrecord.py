"""TFRecord files and the Example messages in them, read without TensorFlow."""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vitctl.errors import DataError
from vitctl.system.bounds import RECORD
from vitctl.system.files import open_regular

_HEADER = struct.Struct("<QI")  # length, and its checksum
_FOOTER_BYTES = 4  # checksum of the data


def records(path: Path) -> Iterator[tuple[int, bytes]]:
    """Every record with the place of its first byte. The checksum of each length is compared, those of the
    data are not.

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
                    f"{path}: damaged, or no TFRecord file, at byte {offset - len(header)}; copy it again"
                )
            data = file.read(length)
            if len(data) < length or len(file.read(_FOOTER_BYTES)) < _FOOTER_BYTES:
                raise DataError(f"{path}: ends within the record at byte {offset}; copy it again")
            yield offset, data


def parse_example(data: bytes) -> dict[str, list[Any]]:
    """The features of a `tf.train.Example`: lists of bytes or of integers; lists of floats are left out.

    Raises:
        DataError: the message is malformed.
    """
    try:
        features: dict[str, list[Any]] = {}
        for entry in _repeated(memoryview(data), 1, 1):
            name, feature = dict(_fields(entry))[1], dict(_fields(entry)).get(2, memoryview(b""))
            kinds = dict(_fields(feature))
            if 1 in kinds:
                features[bytes(name).decode()] = [bytes(value) for _, value in _fields(kinds[1])]
            elif 3 in kinds:
                features[bytes(name).decode()] = list(_integers(kinds[3]))
        return features
    except (IndexError, KeyError, TypeError, ValueError) as error:
        raise DataError(f"not an Example message ({type(error).__name__}: {error})") from None


def _repeated(message: memoryview, *path: int) -> Iterator[memoryview]:
    """The messages at the end of a path of field numbers."""
    for number, value in _fields(message):
        if number == path[0]:
            yield from _repeated(value, *path[1:]) if path[1:] else (value,)


def _integers(message: memoryview) -> Iterator[int]:
    """The values of an Int64List, packed or not."""
    for _, value in _fields(message):
        if isinstance(value, int):
            yield value
            continue
        place = 0
        while place < len(value):
            number, place = _varint(value, place)
            yield number


def _fields(message: memoryview) -> Iterator[tuple[int, Any]]:
    """Field number and value, an integer or bytes, of a protocol buffer."""
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
    """The integer at a place, seven bits to a byte, and the place behind it."""
    value = 0
    for shift in range(0, 70, 7):
        byte = message[place]
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, place
    raise ValueError("an integer of more than 64 bits")


def _crc32c_of_byte(value: int) -> int:
    for _ in range(8):
        value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
    return value


_CRC32C = tuple(_crc32c_of_byte(value) for value in range(256))


def _masked_crc32c(data: bytes) -> int:
    """TFRecord's checksum: CRC-32C, turned by 15 bits, plus a constant."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _CRC32C[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    return (crc >> 15 | crc << 17 & 0xFFFFFFFF) + 0xA282EAD8 & 0xFFFFFFFF
