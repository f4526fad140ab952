"""Images in one folder per class, on disk or inside a tar file."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from vitctl.data.datasets.archives import archive_items
from vitctl.data.datasets.files import file_size, read_bytes
from vitctl.data.scan import IMAGE_EXTENSIONS
from vitctl.data.shards import Item, Originals
from vitctl.errors import DataError

SPLITS = {
    "train": "train",
    "training": "train",
    "val": "validation",
    "valid": "validation",
    "validation": "validation",
    "test": "test",
}


def read_class_folder(folder: Path) -> dict[str, Originals]:
    """Find the splits and classes of `FOLDER/<class>/**` or `FOLDER/{train,val,test}/<class>/**`.

    Links to files are followed, links to folders are not. Hidden files and files without an image's extension are
    left out.

    Args:
        folder: the top of the tree.

    Returns:
        split name to its images, `train` alone when there are no split folders; classes sorted by code point.

    Raises:
        DataError: no images, an image outside of a class folder, or split folders beside others.
    """
    found = [(name, folder / name) for name in _walk(folder)]
    return arrange([Item(name, -1, partial(read_bytes, path), file_size(path)) for name, path in found], str(folder))


def read_class_tar(path: Path) -> dict[str, Originals]:
    """The same as `read_class_folder`, inside a plain tar file that stays packed; a class may be a tar file of its own.

    Raises:
        DataError: as `read_class_folder`; or the tar is damaged, compressed or unsafe.
    """
    return arrange([item for item in archive_items(path) if _is_image(item.key)], str(path))


def arrange(items: Sequence[Item], source: str) -> dict[str, Originals]:
    """Sort images by the folders in their names into splits and classes.

    Args:
        items: their keys are relative paths, with `/`; the path within its split becomes the key. Labels are not looked at.
        source: where they come from, in words.

    Raises:
        DataError: as `read_class_folder`.
    """
    if not items:
        raise DataError(f"{source}: no images found, should hold <class>/<image> or train/<class>/<image>")
    tops = sorted({item.key.partition("/")[0] for item in items})
    splits = [top for top in tops if top.lower() in SPLITS]
    if not splits:
        return {"train": _split(items, _classes(items, source), source)}
    if len(splits) < len(tops):
        others = [top for top in tops if top not in splits]
        raise DataError(f"{source}: {splits[0]}/ looks like a split but {others[0]} beside it does not; keep one kind")
    inner: dict[str, list[Item]] = {}
    for item in items:
        top, _, rest = item.key.partition("/")
        inner.setdefault(SPLITS[top.lower()], []).append(replace(item, key=rest))
    classes = _classes([item for own in inner.values() for item in own], source)
    return {split: _split(own, classes, source) for split, own in inner.items()}


def _classes(items: Sequence[Item], source: str) -> tuple[str, ...]:
    found = set()
    for item in items:
        top, slash, _ = item.key.partition("/")
        if not slash:
            raise DataError(f"{source}: {item.key} lies in no class folder, should be <class>/{item.key}")
        found.add(top)
    return tuple(sorted(found))


def _split(items: Sequence[Item], class_names: tuple[str, ...], source: str) -> Originals:
    labels = {name: label for label, name in enumerate(class_names)}
    ordered = sorted(items, key=lambda item: item.key)
    return Originals([replace(item, label=labels[item.key.partition("/")[0]]) for item in ordered], class_names, source)


def _walk(folder: Path) -> Iterable[str]:
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder")
    for parent, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        inside = Path(parent).relative_to(folder)
        yield from ((inside / name).as_posix() for name in sorted(files) if _is_image(name))


def _is_image(name: str) -> bool:
    base = name.rpartition("/")[2]
    return not base.startswith(".") and base.rpartition(".")[2].lower() in IMAGE_EXTENSIONS
