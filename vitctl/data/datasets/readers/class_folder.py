"""Images in one folder per class, on disk or inside a tar file."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

from vitctl.data.datasets.readers.archives import archive_items
from vitctl.data.datasets.readers.files import file_size, read_bytes
from vitctl.data.images.image_types import HEAD_BYTES, SYSTEM_FILE, exclusion_reason, is_system_file
from vitctl.data.writer.items import Item, LeftOut, Originals
from vitctl.errors import DataError

SPLITS = {
    "train": "train",
    "training": "train",
    "val": "validation",
    "valid": "validation",
    "validation": "validation",
    "test": "test",
    "testing": "test",
}


def read_class_folder(folder: Path) -> dict[str, Originals]:
    """Find the splits and classes of `FOLDER/<class>/**` or `FOLDER/{train,val,test}/<class>/**`.

    Every file that may be an image by its name or its content becomes an item; every other is named with the
    reason. Links to files are followed, links to folders are not, and are named.

    Args:
        folder: the top of the tree.

    Returns:
        split name to its images, `train` alone when there are no split folders; classes sorted by code point.

    Raises:
        DataError: no images, an image outside of a class folder, or split folders beside others; a folder
            cannot be read.
    """
    names, left_out, folders = sort_files(folder)
    items = [Item(name, -1, partial(read_bytes, folder / name), file_size(folder / name)) for name in names]
    return arrange(items, str(folder), left_out, folders)


def sort_files(folder: Path) -> tuple[list[str], list[LeftOut], list[str]]:
    """The paths below a folder: of files that may be images, of all others with the reason, and of folders;
    each in order.

    Raises:
        DataError: there is no such folder, or a folder cannot be read.
    """
    names, left_out, folders = list[str](), list[LeftOut](), list[str]()
    for name, kind in _walk(folder):
        if kind == "folder":
            folders.append(name)
        elif reason := _reason(name, folder / name, kind):
            left_out.append(LeftOut(name, reason))
        else:
            names.append(name)
    return names, left_out, folders


def read_class_tar(path: Path) -> dict[str, Originals]:
    """The same as `read_class_folder`, inside a plain tar file that stays packed; a class may be a tar file
    of its own.

    Raises:
        DataError: as `read_class_folder`; or the tar is damaged, compressed or unsafe.
    """
    items, left_out = [], []
    for item in archive_items(path):
        reason = exclusion_reason(item.key, partial(_beginning, item))
        if reason:
            left_out.append(LeftOut(item.key, reason))
        else:
            items.append(item)
    folders = {one.name.rpartition("/")[0] for one in left_out if one.reason != SYSTEM_FILE}
    return arrange(items, str(path), left_out, sorted(folders))


def arrange(
    items: Sequence[Item], source: str, left_out: Sequence[LeftOut] = (), folders: Sequence[str] = ()
) -> dict[str, Originals]:
    """Sort images by the folders in their names into splits and classes.

    Args:
        items: their keys are relative paths, with `/`; the path within its split becomes the key. Labels are
            not looked at.
        source: where they come from, in words.
        left_out: files that are no images, by their paths.
        folders: paths of folders, of which those that should be classes are compared with those that are.

    Raises:
        DataError: as `read_class_folder`.
    """
    if not items:
        raise DataError(f"{source}: no images found, should hold <class>/<image> or train/<class>/<image>")
    tops = sorted({item.key.partition("/")[0] for item in items})
    splits = [top for top in tops if top.lower() in SPLITS]
    if not splits:
        own = _classes(items, source)
        empty = {name.partition("/")[0] for name in folders} - {*own, ""}
        return {"train": _split(items, own, source, left_out, empty)}
    if len(splits) < len(tops):
        others = [top for top in tops if top not in splits]
        raise DataError(
            f"{source}: {splits[0]}/ looks like a split but {others[0]} beside it does not; keep one kind"
        )
    inner: dict[str, list[Item]] = {}
    prefixes: dict[str, str] = {}
    for item in items:
        top, _, rest = item.key.partition("/")
        inner.setdefault(SPLITS[top.lower()], []).append(replace(item, key=rest))
        prefixes.setdefault(SPLITS[top.lower()], f"{top}/")
    classes = _classes([item for own in inner.values() for item in own], source)
    outside = {split: list[LeftOut]() for split in inner}
    for one in left_out:
        split = SPLITS.get(one.name.partition("/")[0].lower(), "")
        outside[split if split in inner else next(iter(inner))].append(one)
    in_splits = [
        name.split("/")[1] for name in folders if name.partition("/")[0].lower() in SPLITS and "/" in name
    ]
    beside = [name for name in folders if "/" not in name and name.lower() not in SPLITS]
    empty = {*in_splits, *beside} - {*classes, ""}
    return {
        split: _split(own, classes, source, outside[split], empty, prefixes[split])
        for split, own in inner.items()
    }


def _classes(items: Sequence[Item], source: str) -> tuple[str, ...]:
    found = set()
    for item in items:
        top, slash, _ = item.key.partition("/")
        if not slash:
            raise DataError(f"{source}: {item.key} lies in no class folder, should be <class>/{item.key}")
        found.add(top)
    return tuple(sorted(found))


def _split(
    items: Sequence[Item],
    class_names: tuple[str, ...],
    source: str,
    left_out: Sequence[LeftOut],
    empty: set[str],
    prefix: str = "",
) -> Originals:
    labels = {name: label for label, name in enumerate(class_names)}
    ordered = sorted(items, key=lambda item: item.key)
    labelled = [replace(item, label=labels[item.key.partition("/")[0]]) for item in ordered]
    return Originals(labelled, class_names, source, True, tuple(left_out), tuple(sorted(empty)), prefix)


def _walk(folder: Path) -> Iterator[tuple[str, Literal["file", "folder", "link"]]]:
    """Every file, every folder and every link to a folder below one, in order; system folders as files, with
    nothing below.
    """
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder")

    def refuse(error: OSError) -> None:
        raise DataError(
            f"{error.filename}: cannot be read ({error.strerror}); its images would be lost"
        ) from None

    for parent, folders, files in os.walk(folder, onerror=refuse):
        inside = Path(parent).relative_to(folder)
        for name in sorted(folders):
            path = (inside / name).as_posix()
            yield path, "file" if is_system_file(name) else "folder"
            if os.path.islink(os.path.join(parent, name)) and not is_system_file(name):
                yield path, "link"
        folders[:] = sorted(name for name in folders if not is_system_file(name))
        yield from (((inside / name).as_posix(), "file") for name in sorted(files))


def _reason(name: str, path: Path, kind: str) -> str:
    if kind == "link":
        return "a link to a folder, which is not followed"
    if not is_system_file(name) and path.exists() and not path.is_file():
        return "a FIFO, a socket or a device"
    return exclusion_reason(name, partial(_head, path))


def _beginning(item: Item) -> bytes:
    return item.read()[:HEAD_BYTES]


def _head(path: Path) -> bytes:
    """The first bytes of a file; empty for what is not a regular file or cannot be read."""
    try:
        if not path.is_file():
            return b""
        with path.open("rb") as file:
            return file.read(HEAD_BYTES)
    except OSError:
        return b""
