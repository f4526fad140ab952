"""Images inside a tar file, or inside the tar files inside it, as ImageNet comes; everything stays packed."""

import tarfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import IO

from vitctl.data.datasets.readers.files import read_part
from vitctl.data.shards.tar import check_end, open_tar
from vitctl.data.writer.items import Item
from vitctl.errors import DataError
from vitctl.system.files import leads_out, open_regular


def archive_items(path: Path) -> list[Item]:
    """All plain files of a tar file, in its order, read from it when they are asked for; their labels come
    later.

    Args:
        path: a plain tar file. Of a tar file in it the files are taken, named `<name without .tar>/<name>`;
            no deeper.

    Returns:
        items without labels, whose keys are their paths in the archive.

    Raises:
        DataError: the archive, or one in it, is damaged, compressed, or has members that point outside.
    """
    items = []
    try:
        with open_regular(path, error=DataError) as file:
            for name, offset, size in list(_members(path, file)):
                if not name.lower().endswith(".tar"):
                    items.append(_item(path, name, offset, size))
                    continue
                file.seek(offset)
                items += [
                    _item(path, f"{name[:-4]}/{inner}", *place) for inner, *place in _members(path, file)
                ]
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None
    return items


def _item(path: Path, name: str, offset: int, size: int) -> Item:
    return Item(name, -1, partial(read_part, path, offset, size), size)


def _members(path: Path, file: IO[bytes]) -> Iterator[tuple[str, int, int]]:
    """Name, first byte and size of the plain files of the tar that begins where the file stands."""
    try:
        with open_tar(file) as tar:
            for member in tar:
                name = member.name.removeprefix("./")
                if leads_out(name):
                    raise DataError(f"{path}: member {name!r} points outside the archive")
                if member.isreg() and not member.issparse():
                    yield name, member.offset_data, member.size
            check_end(path, tar)
    except (tarfile.TarError, ValueError, OverflowError, RecursionError) as error:
        raise DataError(f"{path}: not a whole, uncompressed tar file ({error})") from None
