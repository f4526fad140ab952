"""One pass over an untrusted WebDataset shard: its samples, and their byte offsets."""

import hashlib
import io
import json
import re
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from vitctl.data.images.image_types import IMAGE_EXTENSIONS
from vitctl.data.shards.bounded_tar import open_tar
from vitctl.data.shards.tar import stored_names
from vitctl.errors import DataError
from vitctl.system.bounds import IMAGE_FILE, LABEL_FILE, MEMBER_HEADER
from vitctl.system.files import leads_out, open_regular

ROW = np.dtype([("header", "<u8"), ("data", "<u4"), ("size", "<u4"), ("label", "<i4")])
LABEL_EXTENSIONS = ("cls", "json")
_MAX_LABELS = 256
_BLOCK = 512


@dataclass
class _Sample:
    """The members of one sample, collected while the shard is read."""

    key: str
    image: tarfile.TarInfo | None = None
    label: int | None = None
    labels: tuple[int, ...] | None = None
    extensions: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Fields:
    """Which member of a sample is its image and which its label, where the default extensions do not apply.

    Args:
        image: extension of the image, e.g. `input.jpg`; empty: any image extension.
        label: extension of the label, e.g. `target.cls`, a text with one number or several; for a JSON file
            with its field, e.g. `meta.json:category`; empty: `cls`, or `json` with `label`, `cls` or
            `labels`.
    """

    image: str = ""
    label: str = ""

    def is_image(self, extension: str) -> bool:
        """Whether members of this extension are images."""
        return extension == self.image.lower() if self.image else extension in IMAGE_EXTENSIONS

    def is_label(self, extension: str) -> bool:
        """Whether members of this extension are labels."""
        return (
            extension == self.label.partition(":")[0].lower() if self.label else extension in LABEL_EXTENSIONS
        )


@dataclass(frozen=True, eq=False)
class Scan:
    """The content of a shard.

    Args:
        rows: structured `[n]` of dtype `ROW`, in shard order; of several labels it holds the first.
        labels: int32 `[n, L]`, padded with -1; None when every sample has one label given as one number.
        sha256: of the file, in hex.
        class_names: embedded in the shard, in label order; empty where there are none.
    """

    rows: np.ndarray
    labels: np.ndarray | None
    sha256: str
    class_names: tuple[str, ...] = ()


def read_shard(path: Path, fields: Fields = Fields()) -> Scan:
    """Read every header and label of one shard; image bytes are hashed, not decoded.

    Members other than images (jpg, jpeg, png, webp, gif, bmp, tif, tiff) and labels are ignored. Labels are
    `cls`, one number or several separated by spaces, or `json` with one `label` or `cls`, or a list of
    `labels`. A single label takes precedence over a list. A label may come before or after its image.

    Args:
        path: an uncompressed tar file, members grouped by sample.
        fields: which members are image and label.

    Raises:
        DataError: the tar is damaged or compressed, a member is unsafe or too large, a sample lacks a field.
    """
    try:
        with open_regular(path, error=DataError) as file:
            with open_tar(file) as tar:
                samples = [(_row(path, sample), sample) for sample in _samples(path, tar, fields)]
                class_names = stored_names(tar)
            file.seek(0)
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except tarfile.TarError as error:
        raise DataError(f"{path}: not a whole, uncompressed tar file ({error})") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None
    rows = np.array([row for row, _ in samples], ROW)
    return Scan(rows, _multiple_labels([sample for _, sample in samples]), digest, class_names)


def pad_labels(labels: Sequence[Sequence[int]], width: int = 1) -> np.ndarray:
    """Lists of labels as one table: int32 `[n, L]`, padded with -1; L is the longest list, at least `width`."""
    table = np.full((len(labels), max([width, *map(len, labels)])), -1, np.int32)
    for row, own in enumerate(labels):
        table[row, : len(own)] = own
    return table


def embedded_class_names(folder: Path, scans: Sequence[Scan]) -> tuple[str, ...] | None:
    """The class names embedded in the shards of a split, None where there are none.

    Raises:
        DataError: the shards hold different ones.
    """
    found = list(dict.fromkeys(scan.class_names for scan in scans))
    if len(found) > 1:
        raise DataError(
            f"{folder}: the shards hold {len(found)} different lists of class names; give one with --classes"
        )
    return found[0] or None


def split_name(name: str) -> tuple[str, str]:
    """Split a member name into key and extension, at the first dot of its base name; both empty when it
    belongs to no sample.

    Same rule as webdataset's `base_plus_ext`, which is not used: importing it imports torch, and its time is
    quadratic in the length of a name, seconds for the longest name allowed. It also reads `._a.jpg`, a macOS
    metadata file, as a sample.
    """
    folder, slash, base = name.rpartition("/")
    stem, dot, extension = base.partition(".")
    if not dot or not (stem or slash) or base.startswith("._"):
        return "", ""
    return folder + slash + stem, extension.lower()


def member_name(header: bytes) -> str:
    """The name in the header blocks of one member; empty when they are not a header.

    The md5 order of a split needs the names of all samples, so the common single block is parsed without
    tarfile, which takes five times as long.
    """
    if len(header) == _BLOCK:
        prefix = header[345:500].rstrip(b"\0") if header[257:263] == b"ustar\0" else b""
        name = b"/".join(filter(None, (prefix, header[:100].rstrip(b"\0"))))
        return name.decode("utf-8", "surrogateescape")
    try:
        with open_tar(io.BytesIO(header)) as tar:
            member = tar.next()
    except (tarfile.TarError, OSError):
        return ""
    return member.name if member else ""


def escape_key(key: str) -> str:
    """Escape the dots of a key: in a shard the first dot of the base name ends the key."""
    return key.replace("%", "%25").replace(".", "%2E")


def unescape_key(key: str) -> str:
    """Undo `escape_key`."""
    return key.replace("%2E", ".").replace("%25", "%")


def _samples(path: Path, tar: tarfile.TarFile, fields: Fields) -> Iterator[_Sample]:
    sample: _Sample | None = None
    for member in tar:
        if member.isdir():
            continue
        _check_member(path, member)
        key, extension = split_name(member.name)
        if not key:
            continue
        if sample is None or sample.key != key:
            if sample is not None:
                yield sample
            sample = _Sample(key)
        _add(path, tar, sample, member, extension, fields)
    check_end(path, tar)
    if sample is not None:
        yield sample


def _add(
    path: Path, tar: tarfile.TarFile, sample: _Sample, member: tarfile.TarInfo, extension: str, fields: Fields
) -> None:
    sample.extensions.append(extension)
    if fields.is_image(extension):
        if sample.image is not None:
            raise DataError(f"{path}: sample {sample.key} has two images, should have one")
        sample.image = member
    elif fields.is_label(extension) and (label := _label(path, tar, member, extension, fields)) is not None:
        if isinstance(label, tuple):
            sample.labels = label
            return
        if sample.label not in (None, label):
            raise DataError(f"{path}: sample {sample.key} has two labels, {sample.label} and {label}")
        sample.label = label


def _label(
    path: Path, tar: tarfile.TarFile, member: tarfile.TarInfo, extension: str, wanted: Fields
) -> int | tuple[int, ...] | None:
    if member.size > LABEL_FILE.limit:
        raise DataError(
            f"{path}: {member.name}: a label of {member.size:,} bytes, should be at most {LABEL_FILE}"
        )
    file = tar.extractfile(member)
    text = file.read() if file is not None else b""
    try:
        if not extension.endswith("json"):
            numbers = tuple(map(_integer, text.split() or [text]))
            return numbers[0] if len(numbers) == 1 else numbers
        values = json.loads(text)
        if not isinstance(values, dict):
            return None
        own = wanted.label.partition(":")[2]
        found = values.get(own) if own else values.get("label", values.get("cls", values.get("labels")))
        if isinstance(found, list):
            return tuple(found) if all(type(one) is int for one in found) else None
        return None if found is None else _integer(found)
    except (ValueError, TypeError, RecursionError):
        shown = text[:40].decode(errors="replace")
        raise DataError(f"{path}: {member.name} holds {shown!r}, should hold an integer label") from None


def _integer(value: object) -> int:
    """An integer from JSON or text.

    Raises ValueError for anything else, also where `int()` would accept it.
    """
    if type(value) is int:
        return value
    text = value.decode("ascii") if isinstance(value, bytes) else value
    if not (isinstance(text, str) and re.fullmatch(r"\s*-?[0-9]{1,18}\s*", text, re.ASCII)):
        raise ValueError(f"{text!r} is not an integer")
    return int(text)


def _row(path: Path, sample: _Sample) -> tuple[int, int, int, int]:
    labels = sample.labels if sample.label is None else (sample.label,)
    if sample.image is None or labels is None:
        found = ", ".join(sample.extensions)
        missing = (
            "an image (jpg, png, webp ...)" if sample.image is None else "a label (cls, or json with label)"
        )
        option = "--image-key" if sample.image is None else "--label-key"
        raise DataError(
            f"{path}: sample {sample.key} lacks {missing}; found: {found}; `vitctl data index {option}` "
            f"names another member"
        )
    if len(labels) > _MAX_LABELS:
        raise DataError(
            f"{path}: sample {sample.key} has {len(labels)} labels, should have at most {_MAX_LABELS}"
        )
    lowest = -1 if sample.label is not None else 0
    wrong = next((label for label in labels if not lowest <= label < 2**31), None)
    if wrong is not None:
        raise DataError(f"{path}: sample {sample.key} has label {wrong}, should be 0 or more, or -1 for none")
    header, data = sample.image.offset, sample.image.offset_data
    if data - header > MEMBER_HEADER.limit:
        raise DataError(f"{path}: {sample.image.name[:80]} has a header of {data - header} bytes")
    return header, data - header, sample.image.size, labels[0] if labels else -1


def _multiple_labels(samples: list[_Sample]) -> np.ndarray | None:
    if all(sample.label is not None for sample in samples):
        return None
    return pad_labels(
        [sample.labels or () if sample.label is None else (sample.label,) for sample in samples]
    )


def _check_member(path: Path, member: tarfile.TarInfo) -> None:
    name = member.name
    if leads_out(name):
        raise DataError(
            f"{path}: member {name!r} points outside the shard, should be a relative path without '..'"
        )
    if not member.isreg() or member.issparse():
        raise DataError(f"{path}: member {name!r} is a link, a device or sparse, should be a plain file")
    if member.size > IMAGE_FILE.limit:
        raise DataError(
            f"{path}: member {name!r} has {member.size} bytes, should have at most {IMAGE_FILE.limit}"
        )


def check_end(path: Path, tar: tarfile.TarFile) -> None:
    """Check that a tar file really ends where tarfile stopped reading.

    Python's tarfile treats a damaged header as the end of the archive, and would silently lose the rest.

    Raises:
        DataError: the file continues, or is truncated.
    """
    assert tar.fileobj is not None
    tar.fileobj.seek(tar.offset)
    if tar.fileobj.read(_BLOCK) != bytes(_BLOCK):
        after = f" (after {members[-1].name})" if (members := tar.getmembers()) else ""
        raise DataError(
            f"{path}: damaged or truncated at byte {tar.offset}{after}, should end there with a block "
            f"of zeros"
        )
