"""Small pictures in real files, and what a reader found in them."""

import io
import tarfile
from pathlib import Path

from PIL import Image

from vitctl.data.writer.items import Originals


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
