"""One pass over a WebDataset shard that nobody vouches for: what is in it, and where."""

import hashlib
import io
import json
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from vitctl.errors import DataError

ROW = np.dtype([("header", "<u8"), ("data", "<u4"), ("size", "<u4"), ("label", "<i4")])
IMAGE_EXTENSIONS = ("jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff")
LABEL_EXTENSIONS = ("cls", "json")
MAX_MEMBER_BYTES = 64 * 2**20
_MAX_LABEL_BYTES = 2**20
_MAX_HEADER_BYTES = 2**16
_BLOCK = 512


@dataclass
class _Sample:
    """The members of one sample, as they come by."""

    key: str
    image: tarfile.TarInfo | None = None
    label: int | None = None
    extensions: list[str] = field(default_factory=list)


def scan_shard(path: Path) -> tuple[np.ndarray, str]:
    """Read every header and label of one shard; image bytes are only hashed.

    Members other than images (jpg, jpeg, png, webp, gif, bmp, tif, tiff) and labels (cls, or json with `label`
    or `cls`) are never opened. The label may stand before or after its image.

    Args:
        path: a plain tar file, members grouped by sample.

    Returns:
        rows, a structured array `[n]` of type `ROW` in shard order, and the SHA-256 of the file in hex.

    Raises:
        DataError: the tar is damaged or compressed, a member is unsafe or too large, a sample lacks a field.
    """
    try:
        with path.open("rb") as file:
            with tarfile.open(fileobj=file, mode="r:") as tar:
                rows = [_row(path, sample) for sample in _samples(path, tar)]
            file.seek(0)
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except tarfile.TarError as error:
        raise DataError(f"{path}: not a whole, uncompressed tar file ({error})") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None
    return np.array(rows, ROW), digest


def split_name(name: str) -> tuple[str, str]:
    """Split a member name into key and extension, at the first dot of its base name, as WebDataset does."""
    folder, slash, base = name.rpartition("/")
    stem, _, extension = base.partition(".")
    return folder + slash + stem, extension.lower()


def member_name(header: bytes) -> str:
    """Read a name off the header blocks of one member; empty when they are none.

    Splits are ordered by the names of all their samples, so the usual single block is read without tarfile,
    which takes five times as long.
    """
    if len(header) == _BLOCK:
        prefix = header[345:500].rstrip(b"\0") if header[257:263] == b"ustar\0" else b""
        name = b"/".join(filter(None, (prefix, header[:100].rstrip(b"\0"))))
        return name.decode("utf-8", "surrogateescape")
    try:
        with tarfile.open(fileobj=io.BytesIO(header), mode="r:") as tar:
            member = tar.next()
    except tarfile.TarError:
        return ""
    return member.name if member else ""


def escape_key(key: str) -> str:
    """Make a key safe in a shard, where the first dot of the base name ends it."""
    return key.replace("%", "%25").replace(".", "%2E")


def unescape_key(key: str) -> str:
    """Undo `escape_key`."""
    return key.replace("%2E", ".").replace("%25", "%")


def _samples(path: Path, tar: tarfile.TarFile) -> Iterator[_Sample]:
    sample: _Sample | None = None
    for member in tar:
        if member.isdir():
            continue
        _check_member(path, member)
        key, extension = split_name(member.name)
        if sample is None or sample.key != key:
            if sample is not None:
                yield sample
            sample = _Sample(key)
        _add(path, tar, sample, member, extension)
    check_end(path, tar)
    if sample is not None:
        yield sample


def _add(path: Path, tar: tarfile.TarFile, sample: _Sample, member: tarfile.TarInfo, extension: str) -> None:
    sample.extensions.append(extension)
    if extension in IMAGE_EXTENSIONS:
        if sample.image is not None:
            raise DataError(f"{path}: sample {sample.key} has two images, should have one")
        sample.image = member
    elif extension in LABEL_EXTENSIONS and (label := _label(path, tar, member, extension)) is not None:
        if sample.label not in (None, label):
            raise DataError(f"{path}: sample {sample.key} has two labels, {sample.label} and {label}")
        sample.label = label


def _label(path: Path, tar: tarfile.TarFile, member: tarfile.TarInfo, extension: str) -> int | None:
    file = tar.extractfile(member) if member.size <= _MAX_LABEL_BYTES else None
    text = file.read() if file is not None else b""
    try:
        if extension == "cls":
            return int(text)
        fields = json.loads(text)
        found = fields.get("label", fields.get("cls")) if isinstance(fields, dict) else None
        return None if found is None else int(found)
    except (ValueError, TypeError, RecursionError):
        shown = text[:40].decode(errors="replace")
        raise DataError(f"{path}: {member.name} holds {shown!r}, should hold an integer label") from None


def _row(path: Path, sample: _Sample) -> tuple[int, int, int, int]:
    if sample.image is None or sample.label is None:
        found = ", ".join(sample.extensions)
        missing = "an image (jpg, png, webp ...)" if sample.image is None else "a label (cls, or json with label)"
        raise DataError(f"{path}: sample {sample.key} lacks {missing}; found: {found}")
    if not -1 <= sample.label < 2**31:
        raise DataError(f"{path}: sample {sample.key} has label {sample.label}, should be 0 or more, or -1 for none")
    header, data = sample.image.offset, sample.image.offset_data
    if data - header > _MAX_HEADER_BYTES:
        raise DataError(f"{path}: {sample.image.name[:80]} has a header of {data - header} bytes")
    return header, data - header, sample.image.size, sample.label


def _check_member(path: Path, member: tarfile.TarInfo) -> None:
    name = member.name
    if name.startswith("/") or ".." in name.split("/"):
        raise DataError(f"{path}: member {name!r} points outside the shard, should be a relative path without '..'")
    if not member.isreg() or member.issparse():
        raise DataError(f"{path}: member {name!r} is a link, a device or sparse, should be a plain file")
    if member.size > MAX_MEMBER_BYTES:
        raise DataError(f"{path}: member {name!r} has {member.size} bytes, should have at most {MAX_MEMBER_BYTES}")


def check_end(path: Path, tar: tarfile.TarFile) -> None:
    """Make sure that a tar which was read to its end has ended there.

    Python's tarfile takes a damaged header for the end of the archive, and would lose the rest in silence.

    Raises:
        DataError: it goes on, or is cut off.
    """
    assert tar.fileobj is not None
    tar.fileobj.seek(tar.offset)
    if tar.fileobj.read(_BLOCK) != bytes(_BLOCK):
        raise DataError(f"{path}: damaged or cut off at byte {tar.offset}, should end there with a block of zeros")
