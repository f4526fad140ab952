"""Images in one folder per class, on disk or inside a tar file."""

import os
import tarfile
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from vitctl.data.scan import IMAGE_EXTENSIONS, MAX_MEMBER_BYTES, check_end
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
Read = Callable[[], bytes]


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
    return arrange({name: partial(_read_file, folder / name) for name in _walk(folder)}, str(folder))


def read_class_tar(path: Path) -> dict[str, Originals]:
    """The same as `read_class_folder`, inside a plain tar file that stays packed.

    Raises:
        DataError: as `read_class_folder`; or the tar is damaged, compressed or unsafe.
    """
    reads: dict[str, Read] = {}
    try:
        with tarfile.open(path, "r:") as tar:
            for member in tar:
                name = member.name.removeprefix("./")
                if member.isreg() and not member.issparse() and _is_image(name):
                    if name.startswith("/") or ".." in name.split("/"):
                        raise DataError(f"{path}: member {name!r} points outside the archive")
                    reads[name] = partial(read_part, path, member.offset_data, member.size)
            check_end(path, tar)
    except (tarfile.TarError, OSError) as error:
        raise DataError(f"{path}: not a whole, uncompressed tar file ({error})") from None
    return arrange(reads, str(path))


def arrange(reads: dict[str, Read], source: str) -> dict[str, Originals]:
    """Sort images by the folders in their names into splits and classes.

    Args:
        reads: relative path, with `/`, to the function that gives the bytes. The path within its split becomes the key.
        source: where they come from, in words.

    Raises:
        DataError: as `read_class_folder`.
    """
    if not reads:
        raise DataError(f"{source}: no images found, should hold <class>/<image> or train/<class>/<image>")
    tops = sorted({name.partition("/")[0] for name in reads})
    splits = [top for top in tops if top.lower() in SPLITS]
    if not splits:
        return {"train": _split(reads, _classes(reads, source), source)}
    if len(splits) < len(tops):
        others = [top for top in tops if top not in splits]
        raise DataError(f"{source}: {splits[0]}/ looks like a split but {others[0]} beside it does not; keep one kind")
    inner: dict[str, dict[str, Read]] = {}
    for name, read in reads.items():
        top, _, rest = name.partition("/")
        inner.setdefault(SPLITS[top.lower()], {})[rest] = read
    classes = _classes((name for names in inner.values() for name in names), source)
    return {split: _split(names, classes, source) for split, names in inner.items()}


def _classes(names: Iterable[str], source: str) -> tuple[str, ...]:
    found = set()
    for name in names:
        top, slash, _ = name.partition("/")
        if not slash:
            raise DataError(f"{source}: {name} lies in no class folder, should be <class>/{name}")
        found.add(top)
    return tuple(sorted(found))


def _split(reads: dict[str, Read], class_names: tuple[str, ...], source: str) -> Originals:
    labels = {name: label for label, name in enumerate(class_names)}
    items = [Item(name, labels[name.partition("/")[0]], reads[name]) for name in sorted(reads)]
    return Originals(items, class_names, source)


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


def _read_file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None


def read_part(path: Path, offset: int, size: int) -> bytes:
    """An image that lies within another file.

    Raises:
        DataError: it is larger than any image should be, or the file ends before it.
    """
    if size > MAX_MEMBER_BYTES:
        raise DataError(f"{path}: an image of {size} bytes, should have at most {MAX_MEMBER_BYTES}")
    with path.open("rb") as file:
        data = os.pread(file.fileno(), size, offset)
    if len(data) < size:
        raise DataError(f"{path}: ends before byte {offset + size}, should hold an image there")
    return data
