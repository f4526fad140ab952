"""One pass over an untrusted WebDataset shard: its samples, and their byte offsets."""

import hashlib
import json
import re
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from pydantic import ConfigDict, StrictStr

from vitctl.data.images.image_types import IMAGE_EXTENSIONS
from vitctl.data.shards.tar import check_end, open_tar, split_name, stored_names
from vitctl.errors import DataError
from vitctl.system.files import IMAGE_FILE, LABEL_FILE, MEMBER_HEADER, leads_out, open_regular

ROW = np.dtype([("header", "<u8"), ("data", "<u4"), ("size", "<u4"), ("label", "<i4")])
_LABEL_EXTENSIONS = ("cls", "json")
_MAX_LABELS = 256


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

    __pydantic_config__ = ConfigDict(extra="forbid")
    image: StrictStr = ""
    label: StrictStr = ""

    def is_image(self, extension: str) -> bool:
        """Whether members of this extension are images."""
        return extension == self.image.lower() if self.image else extension in IMAGE_EXTENSIONS

    def is_label(self, extension: str) -> bool:
        """Whether members of this extension are labels."""
        given = self.label.partition(":")[0].lower()
        return extension == given if self.label else extension in _LABEL_EXTENSIONS


@dataclass(frozen=True, eq=False)
class Scan:
    """The content of a shard.

    Args:
        rows: structured `[n]` of dtype `ROW`, in shard order; of several labels it holds the first.
        labels: int32 `[n, L]`, padded with -1; None when every sample has one label given as one number.
        sha256: of the file, in hex.
        class_names: embedded in the shard, in label order; empty where the shard has none.
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
        raise DataError(f"{path}: not a complete, uncompressed tar file ({error})") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None
    labels = None
    if any(sample.label is None for _, sample in samples):
        labels = pad_labels([_labels(sample) or () for _, sample in samples])
    return Scan(np.array([row for row, _ in samples], ROW), labels, digest, class_names)


def pad_labels(labels: Sequence[Sequence[int]], width: int = 1) -> np.ndarray:
    """Return lists of labels as one table: int32 `[n, L]`, padded with -1; L is the longest list, at least
    `width`.
    """
    table = np.full((len(labels), max([width, *map(len, labels)])), -1, np.int32)
    for row, values in enumerate(labels):
        table[row, : len(values)] = values
    return table


def _samples(path: Path, tar: tarfile.TarFile, fields: Fields) -> Iterator[_Sample]:
    sample: _Sample | None = None
    for member in tar:
        if member.isdir():
            continue
        _check_member(path, member)
        key, extension = split_name(member.name)
        if not key:
            continue
        if sample is not None and sample.key != key:
            yield sample
            sample = None
        sample = sample or _Sample(key)
        sample.extensions.append(extension)
        if fields.is_image(extension):
            if sample.image is not None:
                raise DataError(f"{path}: sample {key} has two images, should have one")
            sample.image = member
        elif fields.is_label(extension):
            label = _label(path, tar, member, extension, fields)
            if isinstance(label, tuple):
                sample.labels = label
            elif label is not None and sample.label not in (None, label):
                raise DataError(f"{path}: sample {key} has two labels, {sample.label} and {label}")
            elif label is not None:
                sample.label = label
    check_end(path, tar)
    if sample is not None:
        yield sample


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


def _label(
    path: Path, tar: tarfile.TarFile, member: tarfile.TarInfo, extension: str, fields: Fields
) -> int | tuple[int, ...] | None:
    """Return the label or the labels in a member, None where a JSON file has no such field."""
    if member.size > LABEL_FILE.limit:
        raise DataError(
            f"{path}: {member.name}: a label of {member.size:,} bytes, should be at most {LABEL_FILE}"
        )
    file = tar.extractfile(member)
    text = file.read() if file is not None else b""
    try:
        if not extension.endswith("json"):
            numbers = tuple(_integer(part.decode("ascii")) for part in text.split() or [b""])
            return numbers[0] if len(numbers) == 1 else numbers
        values = json.loads(text)
        if not isinstance(values, dict):
            return None
        name = fields.label.partition(":")[2]
        value = values.get(name) if name else values.get("label", values.get("cls", values.get("labels")))
        if isinstance(value, list):
            return tuple(value) if all(type(one) is int for one in value) else None
        return None if value is None else _integer(value)
    except (ValueError, TypeError, RecursionError):
        shown = text[:40].decode(errors="replace")
        raise DataError(f"{path}: {member.name} holds {shown!r}, should hold an integer label") from None


def _integer(value: object) -> int:
    """Return an integer from JSON or text.

    Raises ValueError for anything else, also where `int()` would accept it.
    """
    if type(value) is int:
        return value
    if not (isinstance(value, str) and re.fullmatch(r"\s*-?[0-9]{1,18}\s*", value, re.ASCII)):
        raise ValueError(f"{value!r} is not an integer")
    return int(value)


def _labels(sample: _Sample) -> tuple[int, ...] | None:
    return sample.labels if sample.label is None else (sample.label,)


def _row(path: Path, sample: _Sample) -> tuple[int, int, int, int]:
    """Return the row of a complete sample. Raises DataError where it lacks a member or has a wrong label."""
    labels, where = _labels(sample), f"{path}: sample {sample.key}"
    if sample.image is None or labels is None:
        missing, option = ("a label (cls, or json with label)", "--label-key")
        if sample.image is None:
            missing, option = ("an image (jpg, png, webp ...)", "--image-key")
        raise DataError(
            f"{where} lacks {missing}; found: {', '.join(sample.extensions)}; `vitctl data index {option}` "
            f"names another member"
        )
    if len(labels) > _MAX_LABELS:
        raise DataError(f"{where} has {len(labels)} labels, should have at most {_MAX_LABELS}")
    lowest = -1 if sample.label is not None else 0
    wrong = next((label for label in labels if not lowest <= label < 2**31), None)
    if wrong is not None:
        raise DataError(f"{where} has label {wrong}, should be 0 or more, or -1 for none")
    header, data = sample.image.offset, sample.image.offset_data
    if data - header > MEMBER_HEADER.limit:
        raise DataError(f"{path}: {sample.image.name[:80]} has a header of {data - header} bytes")
    return header, data - header, sample.image.size, labels[0] if labels else -1
