"""Write shards with webdataset, and read untrusted tar archives within limits, in one pass.

Python's tarfile alone accepts negative sizes and names of gigabytes, and takes a damaged header for the end
of the archive.

Source: IEEE Std 1003.1-2017, pax; CVE-2025-8194 (negative sizes) and CVE-2024-6232 (quadratic time), both
still in the tarfile of older Pythons
"""

import hashlib
import io
import json
import re
import tarfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

import numpy as np
from pydantic import ConfigDict, StrictStr

from vitctl.data.images.image_types import IMAGE_EXTENSIONS, is_system_file
from vitctl.errors import DataError
from vitctl.system import limits
from vitctl.system.files import leads_out, open_regular
from vitctl.system.text import one_line, same_name

_MEMBER_HEADERS = (
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
    tarfile.XHDTYPE,
    tarfile.SOLARIS_XHDTYPE,
)
# tarfile raises this for a bad header after the first; typeshed lacks the name.
_HeaderError: type[tarfile.HeaderError] = tarfile.SubsequentHeaderError  # type: ignore[attr-defined]
_LONG_NUMBER = re.compile(rb"\d{100}")  # tarfile searches for the space behind it in quadratic time
_LENGTH = re.compile(rb"(\d{1,10}) ")
_NAMES = "class_names"
_WRITER = "vitctl"  # user of the members
_USER = slice(265, 297)  # of a header block


class _Header(tarfile.TarInfo):
    """A header block, which is refused before the data that it declares is read."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> "_Header":
        """Parse one block. Raises tarfile.HeaderError if a declared size exceeds its limit."""
        header = super().frombuf(buf, encoding, errors)
        if header.size < 0 or header.type == tarfile.GNUTYPE_SPARSE:
            raise _HeaderError("a member of negative size, or a sparse one")
        limit = limits.TAR_COMMENT if header.type == tarfile.XGLTYPE else limits.MEMBER_HEADER
        if header.type in (*_MEMBER_HEADERS, tarfile.XGLTYPE) and header.size > limit:
            raise _HeaderError(
                f"a name, header or comment of {header.size:,} bytes, should be at most {limit:,}"
            )
        return header

    def _proc_pax(self, archive: "BoundedTar") -> tarfile.TarInfo:
        """Check pax records before tarfile does, whose search takes quadratic time on malformed ones."""
        begin = archive.fileobj.tell()
        _check_records(archive.fileobj.read(self.size))
        archive.fileobj.seek(begin)
        member: tarfile.TarInfo = super()._proc_pax(archive)  # type: ignore[misc]
        return member


def _check_records(data: bytes) -> None:
    r"""Check that each record is `<length> <key>=<value>\n`, where the length counts the complete record."""
    if _LONG_NUMBER.search(data) or b"GNU.sparse" in data:
        raise _HeaderError("a sparse member, or a number of 100 digits in its header")
    at = 0
    while (length := _LENGTH.match(data, at)) is not None:
        end = at + int(length[1])
        if end > len(data) or data[end - 1 : end] != b"\n" or data.find(b"=", length.end(), end) < 0:
            break
        at = end
    if data[at:].strip(b"\0"):
        raise _HeaderError("a damaged extended header")


class BoundedTar(tarfile.TarFile):
    """An uncompressed tar file, member by member. Only the last header is kept, so memory stays constant."""

    tarinfo = _Header
    firstmember: tarfile.TarInfo | None  # attributes of the base class that its type stubs lack
    members: list[Any]

    def next(self) -> tarfile.TarInfo | None:
        """Return the next member, None at the end. Raises tarfile.ReadError for damaged or huge headers."""
        if self.firstmember is not None:
            return super().next()
        before = self.offset
        try:
            member = super().next()
        except (RecursionError, ValueError, OverflowError, MemoryError) as error:
            raise tarfile.ReadError(
                f"the header at byte {before} cannot be read ({type(error).__name__})"
            ) from None
        if member is not None and (member.size < 0 or self.offset <= before):
            raise tarfile.ReadError(f"the size of the member at byte {before} points back to an earlier byte")
        if sum(len(key) + len(value) for key, value in self.pax_headers.items()) > limits.TAR_COMMENT:
            raise tarfile.ReadError(f"comments of more bytes in total than {limits.TAR_COMMENT:,}")
        del self.members[:-1]
        return member

    def __iter__(self) -> Iterator[tarfile.TarInfo]:
        while (member := self.next()) is not None:
            yield member


def open_tar(file: IO[bytes]) -> BoundedTar:
    """Open an uncompressed tar file at the current position of `file`. Raises tarfile.TarError."""
    return BoundedTar.open(fileobj=file, mode="r:")


def check_end(path: Path, tar: tarfile.TarFile) -> None:
    """Raise DataError if a tar file continues, or is truncated, where tarfile stopped reading."""
    assert tar.fileobj is not None
    tar.fileobj.seek(tar.offset)
    if tar.fileobj.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
        after = f" (after {members[-1].name})" if (members := tar.getmembers()) else ""
        raise DataError(
            path, f"damaged or truncated at byte {tar.offset}{after}, should end there with a block of zeros"
        )


def member_name(header: bytes) -> str:
    """Return the name in one member's header blocks; empty if they are not a header.

    The md5 order of a split needs the names of all samples, so the common single block is parsed without
    tarfile, which takes five times as long.
    """
    if len(header) == tarfile.BLOCKSIZE:
        prefix = header[345:500].rstrip(b"\0") if header[257:263] == b"ustar\0" else b""
        name = b"/".join(filter(None, (prefix, header[:100].rstrip(b"\0"))))
        return name.decode("utf-8", "surrogateescape")
    try:
        with open_tar(io.BytesIO(header)) as tar:
            member = tar.next()
    except (tarfile.TarError, OSError):
        return ""
    return member.name if member else ""


def stored_key(header: bytes) -> str:
    """Return the key of a member's sample, from the member's header blocks; empty if they are not a header.

    Only vitctl's shards escape keys.
    """
    key, _ = split_name(member_name(header))
    is_ours = header[-tarfile.BLOCKSIZE :][_USER].rstrip(b"\0") == _WRITER.encode()
    return unescape_key(key) if is_ours else key


def split_name(name: str) -> tuple[str, str]:
    """Split a member name into key and extension, at the first dot of its base name.

    Both are empty if the member belongs to no sample. Same rule as webdataset's `base_plus_ext`, which is not
    used: importing it imports torch, and its time is quadratic in the length of a name, seconds for the
    longest name allowed. It also reads `._a.jpg`, a macOS metadata file, as a sample.
    """
    folder, slash, base = name.rpartition("/")
    stem, dot, extension = base.partition(".")
    if not dot or not (stem or slash) or base.startswith("._"):
        return "", ""
    return folder + slash + stem, extension.lower()


def escape_key(key: str) -> str:
    """Escape the dots of a key: in a shard the first dot of the base name ends the key."""
    return key.replace("%", "%25").replace(".", "%2E")


def unescape_key(key: str) -> str:
    return key.replace("%2E", ".").replace("%25", "%")


class ShardWriter:
    """Writes one shard with `webdataset.TarWriter`.

    Leaving the context finishes the archive, even after an error, when the file is discarded; only then are
    `num_bytes` and `sha256` set.

    Args:
        file: empty, open for writing; it stays open.
        class_names: in label order; embedded before the first sample, see `stored_names`. Empty: not
            embedded.
    """

    def __init__(self, file: IO[bytes], class_names: Sequence[str] = ()) -> None:
        from webdataset import TarWriter  # it imports torch, which reading shards does not need

        self._stream = _Hashing(file)
        self._writer = TarWriter(
            self._stream, user=_WRITER, group=_WRITER, mtime=0, encoder=False, format="PAX_FORMAT"
        )
        self._tar: tarfile.TarFile = self._writer.tarstream
        if class_names:
            self._stream.write(names_header(class_names))
            self._tar.offset = self._stream.num_bytes

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # An archive left open would write its end when it is garbage-collected, into a file that is closed by
        # then.
        with suppress(OSError) if kind else nullcontext():
            self._writer.close()
        self.num_bytes, self.sha256 = self._stream.num_bytes, self._stream.digest.hexdigest()

    def write(self, key: str, members: Mapping[str, bytes]) -> dict[str, tuple[int, int]]:
        """Add one sample.

        Returns:
            extension to the byte offsets of the member's header and content.
        """
        offsets = {}
        # One at a time: the offset after each gives the length of its header.
        for extension, content in sorted(members.items()):
            header = self._tar.offset
            self._writer.write({"__key__": key, extension: content})
            num_blocks = -(-len(content) // tarfile.BLOCKSIZE)
            offsets[extension] = header, self._tar.offset - num_blocks * tarfile.BLOCKSIZE
        self._tar.members.clear()  # type: ignore[attr-defined] # otherwise it keeps every header in memory
        return offsets


class _Hashing:
    def __init__(self, file: IO[bytes]) -> None:
        self._file, self.digest, self.num_bytes = file, hashlib.sha256(), 0

    def write(self, data: bytes) -> None:
        self._file.write(data)
        self.digest.update(data)
        self.num_bytes += len(data)


def names_header(class_names: Sequence[str]) -> bytes:
    """Return class names as an archive comment, a global POSIX tar header that no program reads as a sample.

    Source: IEEE Std 1003.1-2017, pax, "pax Extended Header"
    """
    return tarfile.TarInfo.create_pax_global_header({"comment": json.dumps({_NAMES: list(class_names)})})


def stored_names(tar: tarfile.TarFile) -> tuple[str, ...]:
    """Return the class names in an archive's comment; empty if it has none.

    The first member must have been read.
    """
    try:
        names = json.loads(tar.pax_headers.get("comment", ""))[_NAMES]
    except (ValueError, RecursionError, LookupError, TypeError):
        return ()
    if not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        return ()
    return tuple(map(same_name, names))


# One pass over an untrusted WebDataset shard: its samples, and their byte offsets

ROW = np.dtype([("header", "<u8"), ("data", "<u4"), ("size", "<u4"), ("label", "<i4")])
LABEL_EXTENSIONS = ("cls", "json", "cls.txt", "txt")
_JSON_LABELS = ("label", "cls", "labels")  # numbers, or a text
_JSON_TEXTS = ("class", "class_name", "label_name", "category", "caption")
_MAX_LABELS = 256
# Marks of a missing label, in numbers and in other programs' tables.
NO_LABEL = ("-1", "nan", "na", "n/a", "#n/a", "<na>", "nil", "none", "null", "?", "unlabeled", "unlabelled")
_NAMED = "write the number or the name of each class, or say where it is with --columns label=FIELD"
_NUMBER = re.compile(rb"\s*-?[0-9]+\s*")
_NUMBERS = re.compile(rb"[\s0-9-]*")


@dataclass
class _Sample:
    key: str
    image: tarfile.TarInfo | None = None
    label: int | None = None
    labels: tuple[int, ...] | None = None
    texts: dict[str, str] = field(default_factory=dict)  # that may be the label, by member or field
    extensions: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Fields:
    """The members of a sample that hold image and label, where the default extensions do not apply.

    Args:
        image: extension of the image, e.g. `input.jpg`; empty: any image extension.
        label: extension of the label, e.g. `target.cls`, one number or several, or a class name; for a JSON
            file with its field, e.g. `meta.json:category`; empty: `cls`, `cls.txt` or `txt`, or `json` with
            `label`, `cls`, `labels`, `class`, `class_name`, `label_name`, `category` or `caption`.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")
    image: StrictStr = ""
    label: StrictStr = ""

    def is_image(self, extension: str) -> bool:
        return extension == self.image.lower() if self.image else extension in IMAGE_EXTENSIONS

    def is_label(self, extension: str) -> bool:
        given = self.label.partition(":")[0].lower()
        return extension == given if self.label else extension in LABEL_EXTENSIONS


@dataclass(frozen=True, eq=False)
class Scan:
    """The content of a shard.

    Args:
        rows: structured `[n]` of dtype `ROW`, in shard order; holds only the first of several labels.
        labels: int32 `[n, L]`, padded with -1; None if every sample has one label given as one number.
        sha256: of the file, in hex.
        class_names: embedded in the shard, in label order; empty if there are none.
        others: names of the members that belong to no sample.
        is_text: the labels are texts, numbered as `class_names`, which are sorted and of this shard alone.
        names: keys of the samples, each with a zero byte behind it, see `joined`.
    """

    rows: np.ndarray
    labels: np.ndarray | None
    sha256: str
    num_bytes: int
    names: bytes
    class_names: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    is_text: bool = False

    def named(self, names: Sequence[str]) -> "Scan":
        """Return this with texts numbered as in `names`. Raises DataError if one is not there."""
        if not self.is_text:
            return self
        numbers = {name: number for number, name in enumerate(names)}
        if missing := [name for name in self.class_names if name not in numbers]:
            raise DataError(f"the label {missing[0]!r} is none of the {len(names)} class names")
        new = np.array([*(numbers[name] for name in self.class_names), -1])
        rows = self.rows.copy()
        rows["label"] = new[rows["label"]]
        return replace(self, rows=rows, class_names=tuple(names), is_text=False)

    @property
    def width(self) -> int:
        """Most labels of a sample; 0 if each has one, given as one number."""
        return 0 if self.labels is None else self.labels.shape[1]


def read_shard(path: Path, fields: Fields = Fields(), *, ends: bool = False) -> Scan:
    """Read every header and label of one shard; image bytes are hashed, not decoded.

    Members other than images (`IMAGE_EXTENSIONS`) and labels are ignored. Labels are `cls`, one number or
    several separated by spaces, or `json` with one `label` or `cls`, or a list of `labels`. A single label
    takes precedence over a list. Where a sample has no number, a text is its label, see `Fields`. A label
    may come before or after its image.

    Args:
        path: an uncompressed tar file, members grouped by sample.
        ends: refuse data behind the end of the archive, which a known digest also rules out.

    Raises:
        DataError: the tar is damaged or compressed, a member is unsafe or too large, a sample lacks a field.
    """
    others = list[str]()
    try:
        with open_regular(path, error=DataError) as file:
            with open_tar(file) as tar:
                found = [*_samples(path, tar, fields, others)]
                names = _number_texts(path, found)
                if names and not fields.label:
                    _check_one_meaning(path, found)
                samples = [(_row(path, sample), sample) for sample in found]
                class_names = names or stored_names(tar)
            if ends:
                _check_nothing_follows(path, file, tar.offset)
            file.seek(0)
            digest, num_bytes = hashlib.file_digest(file, "sha256").hexdigest(), file.tell()
    except tarfile.TarError as error:
        raise DataError(path, f"not a complete, uncompressed tar file ({error})") from None
    except OSError as error:
        raise DataError(path, f"cannot be read ({error.strerror})") from None
    labels = None
    if any(sample.label is None for _, sample in samples):
        labels = pad_labels([_labels(sample) or () for _, sample in samples])
    rows = np.array([row for row, _ in samples], ROW)
    # As `stored_key` returns them: only our keys are escaped.
    keys = joined(
        unescape_key(sample.key) if sample.image and sample.image.uname == _WRITER else sample.key
        for _, sample in samples
    )
    return Scan(rows, labels, digest, num_bytes, keys, class_names, tuple(others), bool(names))


def joined(keys: Iterable[str]) -> bytes:
    """Return keys with a zero byte behind each, which no name in a tar file has."""
    return "".join(f"{key}\0" for key in keys).encode(errors="surrogateescape")


def _number_texts(path: Path, samples: Sequence[_Sample]) -> tuple[str, ...]:
    """Set the labels of samples that have texts for them, and return the texts in label order."""
    texts = [sample.texts if _labels(sample) is None else {} for sample in samples]
    names = sorted({text for found in texts for text in found.values()})
    numbers = {name: number for number, name in enumerate(names)}
    if missing := [name for name in names if name.lower() in NO_LABEL]:
        text = f"has the label {missing[0]!r}, which is named like a missing one"
        raise DataError(path, text, "leave out samples without a label, or rename the class")
    for sample, found in zip(samples, texts, strict=True):
        if len({*found.values()}) > 1:
            shown = ", ".join(f"{name} {one_line(text[:40])!r}" for name, text in found.items())
            fix = f"name the label, such as --columns label={next(iter(found))}"
            raise DataError(f"{path}: sample {sample.key}", f"has several texts: {shown}", fix)
        if found:
            sample.label = numbers[next(iter(found.values()))]
        elif names and _labels(sample) not in (None, (-1,)):
            text = f"has a number as its label, and others texts such as {one_line(names[0][:40])!r}"
            raise DataError(f"{path}: sample {sample.key}", text, "write all of them in one way")
    return tuple(names)


def _check_one_meaning(path: Path, samples: Sequence[_Sample]) -> None:
    """Raise DataError if the folders of the images may be their classes as well as the texts beside them."""
    folders = {sample.key.rpartition("/")[0] for sample in samples if sample.texts.keys() == {"txt"}}
    if len(folders) > 1:
        raise DataError(
            path,
            "has a .txt file beside each image and several folders, and both may be the classes",
            "--columns label=txt takes the texts; leave the .txt files out to take the folders",
        )


def _check_nothing_follows(path: Path, file: IO[bytes], end: int) -> None:
    """Refuse a file that continues behind its archive: readers would silently ignore the rest."""
    file.seek(end)
    while rest := file.read(2**20):
        if rest.strip(b"\0"):
            raise DataError(
                path,
                f"the archive ends at byte {end}, and other data follow, such as a second archive",
                "give each archive as a shard of its own",
            )


def padded(labels: np.ndarray, width: int) -> np.ndarray:
    """Return labels `[n]` or `[n, l]` as `[n, width]`, padded with -1."""
    labels = labels[:, None] if labels.ndim == 1 else labels
    return np.pad(labels, ((0, 0), (0, width - labels.shape[1])), constant_values=-1)


def pad_labels(labels: Sequence[Sequence[int]]) -> np.ndarray:
    """Return lists of labels as one table: int32 `[n, L]`, padded with -1; L is at least 1."""
    table = np.full((len(labels), max([1, *map(len, labels)])), -1, np.int32)
    for row, values in enumerate(labels):
        table[row, : len(values)] = values
    return table


def _samples(path: Path, tar: tarfile.TarFile, fields: Fields, others: list[str]) -> Iterator[_Sample]:
    sample: _Sample | None = None
    for member in tar:
        if member.isdir():
            continue
        _check_member(path, member)
        key, extension = split_name(member.name)
        if not key or is_system_file(member.name.rpartition("/")[2]):
            others.append(member.name)
            continue
        if sample is not None and sample.key != key:
            yield sample
            sample = None
        sample = sample or _Sample(key)
        sample.extensions.append(extension)
        if fields.is_image(extension):
            if sample.image is not None:
                raise DataError(path, f"sample {key} has two images, should have one")
            sample.image = member
        elif fields.is_label(extension):
            label = _label(path, tar, member, extension, fields)
            if isinstance(label, dict):
                sample.texts |= label
            elif isinstance(label, tuple):
                sample.labels = label
            elif label is not None and sample.label not in (None, label):
                raise DataError(path, f"sample {key} has two labels, {sample.label} and {label}")
            elif label is not None:
                sample.label = label
    check_end(path, tar)
    if sample is not None:
        yield sample


def _check_member(path: Path, member: tarfile.TarInfo) -> None:
    name = member.name
    if leads_out(name):
        raise DataError(
            path, f"member {name!r} points outside the shard, should be a relative path without '..'"
        )
    if not member.isreg() or member.issparse():
        raise DataError(path, f"member {name!r} is a link, a device or sparse, should be a plain file")
    if member.size > limits.IMAGE_FILE:
        raise DataError(
            path, f"member {name!r} has {member.size} bytes, should have at most {limits.IMAGE_FILE}"
        )


def _label(
    path: Path, tar: tarfile.TarFile, member: tarfile.TarInfo, extension: str, fields: Fields
) -> int | tuple[int, ...] | dict[str, str] | None:
    """Return the label or labels in a member, or texts that may be it by name; None if it has none."""
    is_optional = extension == "txt" and not fields.label
    if is_optional and member.size > limits.LABEL_FILE:
        return None
    if member.size > limits.LABEL_FILE:
        raise DataError(
            path, f"{member.name}: a label of {member.size:,} bytes, should be at most {limits.LABEL_FILE:,}"
        )
    file = tar.extractfile(member)
    text = file.read() if file is not None else b""
    try:
        if not extension.endswith("json"):
            if not _NUMBERS.fullmatch(text):
                with suppress(UnicodeDecodeError) if is_optional else nullcontext():
                    if given := _class_text(text.decode("utf-8-sig")):
                        return {extension: given}
            if is_optional and not _NUMBER.fullmatch(text):
                return None
            numbers = tuple(_integer(part.decode("ascii")) for part in text.split() or [b""])
            return numbers[0] if len(numbers) == 1 else numbers
        values = json.loads(text)
        if not isinstance(values, dict):
            return None
        name = fields.label.partition(":")[2]
        usual = (name,) if name else _JSON_LABELS + _JSON_TEXTS
        taken = [one for one in usual if one not in _JSON_TEXTS or name or type(values.get(one)) is int]
        value = next((values[one] for one in taken if values.get(one) is not None), None)
        if value is None or _class_text(value):
            return {one: given for one in usual if (given := _class_text(values.get(one)))} or None
        if isinstance(value, list):
            return tuple(value) if all(type(one) is int for one in value) else None
        return None if value is None else _integer(value)
    except (ValueError, TypeError, RecursionError):
        shown = text[:40].decode(errors="replace")
        raise DataError(
            path, f"{member.name} holds {shown!r}, should hold an integer label or a class name", _NAMED
        ) from None


def _class_text(value: object) -> str:
    """Return a text that may name a class: it has a letter; else "". ValueError: it has hidden characters."""
    text = " ".join(value.split()) if isinstance(value, str) else ""
    if not text.isprintable():
        raise ValueError(text)
    return same_name(text) if any(map(str.isalpha, text)) else ""


def _integer(value: object) -> int:
    """Parse an integer from JSON or text. Raises ValueError for anything else that `int()` might accept."""
    if type(value) is int:
        return value
    if not (isinstance(value, str) and re.fullmatch(r"\s*-?[0-9]{1,18}\s*", value, re.ASCII)):
        raise ValueError(f"{value!r} is not an integer")
    return int(value)


def _labels(sample: _Sample) -> tuple[int, ...] | None:
    return sample.labels if sample.label is None else (sample.label,)


def _row(path: Path, sample: _Sample) -> tuple[int, int, int, int]:
    """Return the row of a complete sample. Raises DataError for a missing member or an invalid label."""
    labels, where = _labels(sample), f"{path}: sample {sample.key}"
    if sample.image is None or labels is None:
        missing, option = ("a label (cls, or json with label)", "--label-key")
        if sample.image is None:
            missing, option = ("an image (jpg, png, webp ...)", "--image-key")
        raise DataError(
            f"{where} lacks {missing}; found: {', '.join(sample.extensions)}",
            fix=f"`vitctl data index {option}` names another member",
        )
    if len(labels) > _MAX_LABELS:
        raise DataError(f"{where} has {len(labels)} labels, should have at most {_MAX_LABELS}")
    lowest = -1 if sample.label is not None else 0
    wrong = next((label for label in labels if not lowest <= label < 2**31), None)
    if wrong is not None:
        raise DataError(f"{where} has label {wrong}, should be 0 or more, or -1 for none")
    header, data = sample.image.offset, sample.image.offset_data
    if data - header > limits.MEMBER_HEADER:
        raise DataError(
            path,
            f"{sample.image.name[:80]} has a header of {data - header} bytes, should have at most "
            f"{limits.MEMBER_HEADER:,}",
        )
    return header, data - header, sample.image.size, labels[0] if labels else -1
