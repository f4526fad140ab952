"""Small pictures in real files, and what a reader found in them."""

import io
import struct
import tarfile
from pathlib import Path

from PIL import Image

from vitctl.data.datasets.readers.original_files import class_list
from vitctl.data.datasets.vtab import VTAB
from vitctl.data.writer.intake import Item, Originals
from vitctl.data.writer.shard_writer import write_split


def plant(
    path: Path, number: int = 0, *, form: str = "JPEG", mode: str = "RGB", size: tuple[int, int] = (6, 5)
) -> bytes:
    """Write a picture of one colour, whatever its name says, and return its bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    colour = {"RGB": (number, 0, 0), "RGBA": (number, 0, 0, 255), "L": number, "P": number}[mode]
    Image.new(mode, size, colour).save(path, form)
    return path.read_bytes()


def labels(originals: Originals) -> dict[str, int]:
    """Key -> label of a split."""
    found = {item.key: item.label for item in originals.items if isinstance(item.label, int)}
    assert len(found) == len(originals.items)
    return found


def sizes(splits: dict[str, Originals]) -> dict[str, int]:
    """Split -> number of images."""
    return {split: len(originals.items) for split, originals in splits.items()}


def tar_of(members: dict[str, bytes]) -> bytes:
    """A plain tar file."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        for name, data in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return file.getvalue()


BY_NAME = {task.name: task for task in VTAB}
TASK = BY_NAME["dtd"]
TEXTURES = class_list("dtd")


SPLITS = {"train": TASK.train800, "validation": TASK.val200, "test": TASK.test}


def keys_of(split: str) -> list[str]:
    first = 40 * list(SPLITS).index(split)
    return [f"{name}/{name}_{first + number:04d}.jpg" for name in TEXTURES for number in range(40)]


def write(out: Path, keys: dict[str, list[str]], source: str = "DTD") -> Path:
    """Two pictures, which tell whether a copy keeps bytes and formats, under all the names."""
    jpg, png = plant(out / "a.jpg"), plant(out / "a.png", form="PNG")
    for split, names in keys.items():
        items = [
            Item(key, TEXTURES.index(key.partition("/")[0]), lambda n=n: png if n % 3 == 0 else jpg)
            for n, key in enumerate(names)
        ]
        write_split(items, out / "dtd" / split, TEXTURES, seed=0, source_text=source)
    return out


def record(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return length + bytes(4) + data + bytes(4)


def varint(value: int) -> bytes:
    value %= 2**64
    return bytes([value]) if value < 128 else bytes([value % 128 + 128]) + varint(value >> 7)


def field(number: int, value: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(value)) + value


def example(features: dict[str, bytes | int | list[int]]) -> bytes:
    """A `tf.train.Example`, as it is defined: lists of bytes are field 1 of a feature, of integers 3."""
    entries = b""
    for name, value in features.items():
        if isinstance(value, bytes):
            kind = field(1, field(1, value))
        else:
            kind = field(3, field(1, b"".join(map(varint, value if isinstance(value, list) else [value]))))
        entries += field(1, field(1, name.encode()) + field(2, kind))
    return field(1, entries)
