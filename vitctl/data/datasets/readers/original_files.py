"""Original files: locate them, read them within bounds as lazy items, and unpack downloads safely.

A reader is a function from a folder of original files to `{split: Originals}`. No reader trusts a file: sizes
are bounded, labels are checked against the classes, and a listed name must stay inside its folder.
"""

import gzip
import hashlib
import importlib
import lzma
import os
import shutil
import stat
import tarfile
import tempfile
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePosixPath
from posixpath import dirname, join, normpath
from typing import IO, Any, NamedTuple

import numpy as np

from vitctl.data.images.image_types import is_system_file
from vitctl.data.shards.tar import BoundedTar, check_end, open_tar
from vitctl.data.source.splits import TABLES
from vitctl.data.writer.intake import Item, LeftOut
from vitctl.errors import DataError, refuse
from vitctl.system import files, limits
from vitctl.system.files import (
    atomic_write,
    cache_folder,
    file_state,
    leads_out,
    locked,
    open_regular,
    parsing,
    read_json,
    write_json,
)
from vitctl.system.text import has_control, one_line

LINKED_FOLDER = "a link to a folder, which is not followed"
_MAX_LINKS = 40  # in a chain, as in Linux
ASSETS = Path(__file__).resolve().parents[2] / "assets"


class MissingOriginalsError(DataError):
    """Original files are missing. A caller that knows the data set adds where to get them."""


def class_list(name: str) -> tuple[str, ...]:
    """Return a data set's class names in label order, from the list that comes with vitctl."""
    return tuple((ASSETS / f"{name}_classes.txt").read_text(encoding="utf-8").splitlines())


def need(root: Path, *places: str, archive: str = "") -> Path:
    """Return the first of some places below `root` that exists; raises DataError if none does.

    Args:
        places: relative paths, the usual one first.
        archive: what holds them and where to get it, if that differs from the data set's row.
    """
    for place in places:
        if (root / place).exists():
            return root / place
    missing = f"{root}: {' or '.join(places)} is missing"
    if archive:
        raise DataError(missing, fix=f"unpack here: {archive}")
    raise MissingOriginalsError(missing)


# Items: one image each, read on demand


def file_items(
    folder: Path, names: Sequence[str], labels: Sequence[int], keys: Sequence[str] | None = None
) -> list[Item]:
    """Return images that are separate files, by paths in the folder from a possibly untrusted list.

    `keys` default to the paths. Raises DataError if a path leads out of the folder, or files are missing.
    """
    outside = next((name for name in names if leads_out(name)), None)
    if outside is not None:
        raise DataError(folder, f"the listed image {outside[:100]!r} is outside this folder")
    sizes = [file_size(folder / name) for name in names]
    absent = [name for name, size in zip(names, sizes, strict=True) if size is None]
    if absent:
        raise DataError(
            folder, f"{len(absent):,} of {len(names):,} listed images are missing, the first is {absent[0]}"
        )
    return [
        Item(key, int(label), partial(read_bytes, folder / name), size)
        for key, name, label, size in zip(keys or names, names, labels, sizes, strict=True)
    ]


class Packed(NamedTuple):
    """The content of a tar file.

    Args:
        files: name, offset and size of each; a linked file occurs under every name; offset -1 for a link to a
            file that is not in the archive.
        folders: those with their own header, inner tar files, and links to folders.
    """

    path: Path
    files: list[tuple[str, int, int]]
    left_out: list[LeftOut]
    folders: list[str]

    def item(self, name: str, offset: int, size: int) -> Item:
        """Return a file as an item without a label."""
        return Item(name, -1, partial(read_part, self.path, offset, size), size if offset >= 0 else None)


def archive_items(path: Path) -> list[Item]:
    """Return the files of a tar file in order, without labels; raises DataError for links and devices."""
    packed = read_archive(path)
    for one in packed.left_out:
        raise DataError(path, f"{one_line(one.name)} is {one.reason}", "pack it as a plain file")
    return [packed.item(*file) for file in packed.files]


def read_archive(path: Path) -> Packed:
    """List a tar file, and the tar files directly inside it, as `<inner name without .tar>/<name>`.

    Raises DataError if an archive is damaged or compressed, or a member's name leads out of it.
    """
    try:
        with open_regular(path, error=DataError) as file:
            outer = _members(path, file)
            packed = outer._replace(files=[])
            for name, offset, size in outer.files:
                if offset < 0 or is_system_file(name) or not name.lower().endswith(".tar"):
                    packed.files.append((name, offset, size))
                    continue
                file.seek(offset)
                inner, prefix = _members(path, file), name[:-4]
                packed.files.extend((f"{prefix}/{one}", start, length) for one, start, length in inner.files)
                packed.left_out.extend(replace(one, name=f"{prefix}/{one.name}") for one in inner.left_out)
                packed.folders.extend((prefix, *(f"{prefix}/{one}" for one in inner.folders)))
    except OSError as error:
        raise DataError(path, f"cannot be read ({error.strerror})") from None
    return packed


def _members(path: Path, file: IO[bytes]) -> Packed:
    """List the tar file that begins at the position of `file`."""
    found, places, links = Packed(path, [], [], []), dict[str, tuple[int, int]](), dict[str, str]()
    try:
        with open_tar(file) as tar:
            for member in tar:
                if leads_out(member.name):
                    raise DataError(path, f"member {member.name!r} points outside the archive")
                name = normpath(member.name)
                if member.isdir():
                    found.folders.append(name)
                elif member.islnk() or member.issym():
                    base = dirname(name) if member.issym() else ""
                    links[name] = normpath(join(base, member.linkname))
                    found.files.append((name, -1, 0))
                elif member.isreg() and not member.issparse():
                    places[name] = member.offset_data, member.size
                    found.files.append((name, *places[name]))
                else:
                    found.left_out.append(LeftOut(name, "a FIFO, a socket or a device"))
            check_end(path, tar)
    except (tarfile.TarError, ValueError, OverflowError, RecursionError) as error:
        raise DataError(
            path, f"not a complete, uncompressed tar file ({error})", "unpack it, and give its folder"
        ) from None
    folders = {*found.folders}
    if links:  # other programs' archives may lack folder headers
        folders |= {str(parent) for name in places for parent in PurePosixPath(name).parents}
    files = list[tuple[str, int, int]]()
    for name, offset, size in found.files:
        target = name
        for _ in range(_MAX_LINKS):
            target = links.get(target, target) if offset < 0 else target
        if offset < 0 and target in folders:
            found.left_out.append(LeftOut(name, LINKED_FOLDER))
            found.folders.append(name)
        else:
            files.append((name, *(places.get(target, (-1, 0)) if offset < 0 else (offset, size))))
    return found._replace(files=files)


def image_names(folder: Path, suffixes: tuple[str, ...] = (".jpg",)) -> list[str]:
    """Return the names of a folder's files with one of the suffixes, sorted by code point."""
    return sorted(path.name for path in folder.iterdir() if path.suffix.lower() in suffixes)


# Reading within bounds


def file_size(path: Path) -> int | None:
    """Return the size of a regular file; None if there is none."""
    try:
        status = path.stat()
    except (OSError, ValueError):  # a name with a zero byte is not a file
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def read_bytes(path: Path, max_bytes: int | None = None) -> bytes:
    """Return a file's content. Raises DataError if it is unreadable or too large (None: limit for lists)."""
    return files.read_bytes(path, limits.LIST_FILE if max_bytes is None else max_bytes, error=DataError)


def read_part(path: Path, offset: int, size: int) -> bytes:
    """Return `size` bytes from `offset` on. Raises DataError if that is too large or beyond the end."""
    refuse(
        DataError,
        (offset < 0, path, "a link to a file that is not in the archive"),
        (
            size > limits.IMAGE_FILE,
            path,
            f"an image of {size} bytes at byte {offset}, should have at most {limits.IMAGE_FILE}",
        ),
    )
    try:
        with open_regular(path, error=DataError) as file:
            data = os.pread(file.fileno(), size, offset)
    except OSError as error:
        raise DataError(path, f"cannot be read ({error.strerror})") from None
    if len(data) != size:
        raise DataError(path, f"truncated within the {size} bytes at offset {offset}", "copy it again")
    return data


def read_lines(path: Path) -> list[str]:
    """Return the stripped, non-empty lines of a text file. Raises DataError if it is not text."""
    try:
        text = read_bytes(path).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise DataError(path, "should be a text file") from None
    return [line.strip() for line in text.splitlines() if line.strip()]


def read_fields(path: Path, num_fields: int) -> list[list[str]]:
    """Return the words of every line. Raises DataError if a line has fewer than `num_fields`."""
    rows = [line.split() for line in read_lines(path)]
    short = next((row for row in rows if len(row) < num_fields), None)
    if short is not None:
        raise DataError(path, f"line {' '.join(short)!r} should have at least {num_fields} columns")
    return rows


def load_mat(path: Path, *names: str) -> list[np.ndarray]:
    """Return variables of a MATLAB 5 file, without axes of length one. Raises DataError if one is missing."""
    scipy_io = library("scipy.io")
    if (size := path.stat().st_size) > limits.TABLE:
        raise DataError(path, f"{size:,} bytes, should be at most {limits.TABLE:,}")
    with parsing(path, DataError, "not a MATLAB file, download it again"):
        variables = scipy_io.loadmat(path, squeeze_me=True, variable_names=names)
    absent = [name for name in names if name not in variables]
    if absent:
        raise DataError(path, f"has no variable {', '.join(absent)}")
    return [np.asarray(variables[name]) for name in names]


def library(name: str) -> Any:
    """Import a module that only some readers need. Raises DataError with the command that installs it."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise DataError(
            f"this data set is read with {name.partition('.')[0]}: pip install 'vitctl[data]'"
        ) from None


# Labels


def check_labels(labels: np.ndarray, num_classes: int, where: Path) -> np.ndarray:
    """Return the labels as int64 `[N]`. Raises DataError if one is not 0 to `num_classes` - 1."""
    labels = np.asarray(labels, np.int64).ravel()
    wrong = labels[(labels < 0) | (labels >= num_classes)]
    if wrong.size:
        raise DataError(
            where, f"{wrong.size:,} labels are out of range, the first is {wrong[0]} of {num_classes} classes"
        )
    return labels


def numbered_labels(words: Iterable[str], num_classes: int, where: Path, first: int = 1) -> list[int]:
    """Return labels from class numbers in text that count from `first`. Raises DataError for other text."""
    try:
        labels = [int(word) - first for word in words]
    except ValueError:
        last = num_classes - 1 + first
        raise DataError(where, f"every row should have a class number, {first} to {last}") from None
    return list(check_labels(np.array(labels, np.int64), num_classes, where).tolist())


def class_labels(words: Sequence[str], class_names: Sequence[str], where: Path) -> list[int]:
    """Return the number of each class name. Raises DataError if a word is not a class name."""
    numbers = {name: label for label, name in enumerate(class_names)}
    unknown = next((word for word in words if word not in numbers), None)
    if unknown is not None:
        raise DataError(
            where, f"{unknown} is not one of the {len(numbers):,} classes, such as {class_names[0]}"
        )
    return [numbers[word] for word in words]


# Downloads: their addresses and digests, and unpacking them

_TARS = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".txz")
# Limit on an archive's growth: text compresses to a twentieth, a bomb to a thousandth.
_MAX_RATIO = 100


@dataclass(frozen=True)
class Archive:
    """A file on the web.

    Args:
        digest: `sha256:...` or `md5:...` of the complete file; empty if none is published.
        into: folder below the originals that it is unpacked into.
        inner: archives within it that are unpacked too.
    """

    url: str
    digest: str = ""
    num_bytes: int = 0
    into: str = ""
    inner: tuple[str, ...] = ()
    packed: bool = False

    @property
    def name(self) -> str:
        return self.url.partition("?")[0].rpartition("/")[2]


def is_unpacked(archive: Archive, folder: Path) -> bool:
    return _marker(archive, folder).exists()


def unpack(archive: Archive, path: Path, folder: Path) -> None:
    """Check a downloaded file, unpack it below `folder`, and remove it.

    Raises DataError if it is damaged or its digest differs, in which case it is removed too.
    """
    _check_digest(archive, path)
    into = folder / archive.into
    into.mkdir(parents=True, exist_ok=True)
    if archive.packed:
        os.replace(path, into / archive.name)
    else:
        _extract(path, archive.name, into)
        for inner in archive.inner:
            _extract(into / inner, inner, (into / inner).parent)
        path.unlink()
    _marker(archive, folder).touch()


_UNPACKED = dict[str, str]()  # folders of the cache, and the archives whose content they hold


def as_given(text: str) -> str:
    """Name archives, as the user gave them, in place of the folders that they were unpacked to."""
    for folder, archive in _UNPACKED.items():
        text = text.replace(folder, archive)
    return text


def unpacked(path: Path) -> Path:
    """Unpack a user's archive into the cache, once for each state of it, and return its folder.

    A single top folder is skipped. Raises DataError if the archive is damaged, unsafe, or grows too much.
    """
    state = repr((str(path.resolve()), file_state(path))).encode()
    name = f"{path.name.partition('.')[0]}-{hashlib.sha256(state).hexdigest()[:12]}"
    folder = cache_folder() / "unpacked" / name
    folder.parent.mkdir(parents=True, exist_ok=True)
    with locked(folder.with_suffix(".lock")):
        record = folder.with_suffix(".json")
        recorded = read_record(record).get("files")
        if not folder.exists() or _num_files(folder) != recorded:  # a cleaner of old files was here
            shutil.rmtree(folder, ignore_errors=True)
            with tempfile.TemporaryDirectory(dir=folder.parent) as aside:
                inside = Path(aside) / "all"
                inside.mkdir()
                _extract(path, path.name.lower(), inside)
                os.rename(inside, folder)
        write_json(record, {"made_of": str(path.resolve()), "files": _num_files(folder)})
    while len(shown := [one for one in folder.iterdir() if not is_system_file(one.name)]) == 1:
        held = [*shown[0].iterdir()] if shown[0].is_dir() else []
        if not any(one.is_dir() or one.suffix.lower() in (*TABLES, ".parquet") for one in held):
            break
        folder = shown[0]
    _UNPACKED[str(folder)] = str(path)
    return folder


def read_record(path: Path) -> dict[str, Any]:
    """Return what was written down of something converted; {} if nothing, or not by vitctl."""
    with suppress(DataError):
        found = read_json(path, limits.INDEX, error=DataError)
        return found if isinstance(found, dict) else {}
    return {}


def _num_files(folder: Path) -> int:
    return sum(len(names) for _, _, names in os.walk(folder))


def _marker(archive: Archive, folder: Path) -> Path:
    return folder / f".{archive.name}.unpacked"


def _check_digest(archive: Archive, path: Path) -> None:
    algorithm, _, wanted = archive.digest.partition(":")
    if not wanted:
        return
    with path.open("rb") as file:
        found = hashlib.file_digest(file, lambda: hashlib.new(algorithm, usedforsecurity=False)).hexdigest()
    if found != wanted:
        path.unlink()
        raise DataError(
            archive.url,
            f"its {algorithm} is {found[:16]}..., should be {wanted[:16]}...; removed",
            "run again to download it",
        )


def _extract(path: Path, name: str, into: Path) -> None:
    most = path.stat().st_size * _MAX_RATIO + limits.UNPACKED
    try:
        if name.endswith(_TARS):
            with BoundedTar.open(path) as tar:
                seen = set[str]()
                for member in tar:
                    most = _check_member(
                        path, member.name, member.size, most, is_plain=member.isfile() or member.isdir()
                    )
                    if member.isfile() and normpath(member.name) in seen:
                        raise DataError(path, f"has {one_line(member.name)} twice", "pack it again")
                    seen.add(normpath(member.name))
                    tar.extract(member, into, filter="data")
        elif name.endswith(".zip"):
            with zipfile.ZipFile(path) as packed:
                names = Counter(normpath(entry.filename) for entry in packed.infolist() if not entry.is_dir())
                if twice := [name for name, count in names.items() if count > 1]:
                    raise DataError(path, f"has {one_line(twice[0])} twice", "pack it again")
                for entry in packed.infolist():
                    is_link = stat.S_ISLNK(entry.external_attr >> 16)
                    most = _check_member(path, entry.filename, entry.file_size, most, is_plain=not is_link)
                packed.extractall(into)
        else:
            _gunzip(path, into / name.removesuffix(".gz"), most)
    except (
        tarfile.TarError,
        zipfile.BadZipFile,
        RuntimeError,
        zlib.error,
        lzma.LZMAError,
        EOFError,
        OSError,
    ) as error:
        raise DataError(path, f"cannot be unpacked ({' '.join(str(error).split())})") from None


def _check_member(path: Path, name: str, num_bytes: int, most: int, *, is_plain: bool) -> int:
    """Check a member, and return how many bytes are left for the members after it.

    Links have escaped from Python's filter (CVE-2025-4517), so none is unpacked.
    """
    shown = one_line(name)
    refuse(
        DataError,
        (
            not is_plain,
            path,
            f"{shown} is a link or a device; image archives may hold only files and folders",
        ),
        (
            leads_out(name) or has_control(name),
            path,
            f"{shown} points outside the archive, or is not a plain name; not unpacked",
        ),
        (
            not 0 <= num_bytes <= most,
            path,
            f"declares more than {_MAX_RATIO} times its packed size, plus {limits.UNPACKED:,}; not unpacked",
        ),
    )
    return most - num_bytes


def _gunzip(path: Path, target: Path, most: int) -> None:
    with atomic_write(target) as aside, gzip.open(path) as source, aside.open("wb") as file:
        while piece := source.read(2**20):
            most -= len(piece)
            if most < 0:
                raise DataError(
                    path, f"over {_MAX_RATIO} times its packed size, plus {limits.UNPACKED:,}; not unpacked"
                )
            file.write(piece)
