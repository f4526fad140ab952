"""The index of a split, stored next to its shards: `index.json`, `samples.npy` and `names.bin`.

A *split folder* holds shards and these files; a *data set folder* holds split folders. The
index holds the URLs of shards that are stored elsewhere, and a complete split folder may be remote. Opening a
split takes constant time: the same for a thousand samples and for three hundred million.

An index is untrusted: it is fully validated before use, and its URLs may only name files to read.
"""

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path
from tokenize import TokenError
from typing import IO, Annotated, Any

import numpy as np
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StrictInt, StrictStr, ValidationError

from vitctl.data.shards.tar import ROW, Fields, Scan, padded
from vitctl.errors import DataError
from vitctl.system import limits
from vitctl.system.address import without_queries
from vitctl.system.files import (
    atomic_write,
    error_text,
    file_state,
    if_offered,
    open_regular,
    parse_json,
    read_bytes,
    write_text,
)
from vitctl.system.process import is_main_process
from vitctl.system.remote import check_address
from vitctl.system.text import breaks_line, escaped_json, one_line, same_name

FORMAT = "vitctl-index/1"
INDEX_FILE, SAMPLES, LABELS, NAMES = "index.json", "samples.npy", "labels.npy", "names.bin"
# Tables up to this many bytes are verified when a split is opened; larger ones during the run, like shards.
VERIFIED_ON_OPEN = 64 * 2**20
_TABLE_HEADER_BYTES = 2**16
_CACHED_DIGESTS = 64
_SHA256 = "^[0-9a-f]{64}$"
_MAX_INT = 2**53  # the largest integer that every JSON parser reads exactly
_MAX_LABELS = 10**6
# Surrogates are allowed where they stand for a byte that is not UTF-8.
_NOT_A_FILE_NAME = re.compile(r"^\.{0,2}$|[\0/\ud800-\udc7f\udd00-\udfff]")
_USUAL_SPLITS = ("train", "validation", "test")
_SHOWN_PROBLEMS = 5


def _file_name(name: str) -> str:
    if _NOT_A_FILE_NAME.search(name) or breaks_line(name):
        raise ValueError("not the name of a file beside the index")
    return name


_Count = Annotated[StrictInt, Field(ge=0, le=_MAX_INT)]


@dataclass(frozen=True)
class Shard:
    """One tar file of a split.

    `sha256` is in hex; `url` is set if the shard is not in the folder of the index.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")
    name: Annotated[StrictStr, Field(max_length=255), AfterValidator(_file_name)]
    num_samples: _Count
    num_bytes: _Count
    sha256: Annotated[StrictStr, Field(pattern=_SHA256)]
    url: Annotated[StrictStr, Field(max_length=4096)] = ""


class _Table(BaseModel, extra="forbid"):
    num_bytes: _Count
    sha256: Annotated[StrictStr, Field(pattern=_SHA256)]


@dataclass(frozen=True)
class LabelCounts:
    """Counts of a split's images without a label, and with a label outside the classes."""

    __pydantic_config__ = ConfigDict(extra="forbid")
    missing: _Count
    outside: _Count


class _Content(BaseModel):
    class_names: list[StrictStr] = Field(min_length=1)
    source: StrictStr
    num_samples: Annotated[_Count, Field(ge=1)]
    shards: list[Shard] = Field(min_length=1)
    members: Fields = Fields()
    max_labels: Annotated[StrictInt, Field(ge=1, le=_MAX_LABELS)] | None = None
    tables: dict[str, _Table]
    labels: LabelCounts


def _table_shapes(num_samples: int, width: int | None) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    """Return shape and dtype of each table by file name; `width` is set if samples may have many labels."""
    shapes: dict[str, tuple[tuple[int, ...], np.dtype]] = {SAMPLES: ((num_samples,), ROW)}
    if width:
        shapes[LABELS] = (num_samples, width), np.dtype("<i4")
    return shapes


_SHOULD = {
    "class_names": "class_names should be a list of names",
    "source": "source should be a string",
    "num_samples": "num_samples should be a whole number above 0",
    "shards": "shards should be a list of {name, num_samples, num_bytes, sha256}, each beside the index",
    "members": "members should name the extensions of image and label",
    "max_labels": f"max_labels should be a whole number from 1 to {_MAX_LABELS:,}",
    "tables": "tables should hold num_bytes and sha256 of",
    "labels": "labels should count those missing and those outside",
}


@dataclass(frozen=True)
class Index:
    """An opened split.

    Args:
        class_names: in label order.
        num_samples: over all shards.
        source: provenance of the images, as text.
        rows: one `ROW` per sample in shard order, `[num_samples]`, memory-mapped.
        base: address of a remote split folder, of which `folder` holds only the index; empty for a local
            split.
        labels: int32 `[num_samples, L]`, padded with -1, memory-mapped; None unless samples may have several.
        members: which members of a sample are its image and its label.
        tables: num_bytes and sha256 of `samples.npy`, `labels.npy` and `names.bin` by name, as in
            `index.json`.
        label_counts: as in `index.json`.
        names_as_stored: the class names in `index.json`, if they are not in NFC.
    """

    folder: Path
    shards: tuple[Shard, ...]
    class_names: tuple[str, ...]
    num_samples: int
    source: str
    rows: np.ndarray = field(repr=False, compare=False)
    tables: Mapping[str, _Table] = field(compare=False)
    label_counts: LabelCounts = field(compare=False)
    labels: np.ndarray | None = field(default=None, repr=False, compare=False)
    base: str = ""
    members: Fields = field(default_factory=Fields)
    names_as_stored: tuple[str, ...] = ()

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the content: the bytes of every shard and table, the class names, and the members used.

        Location and provenance are not part of it, nor names, which the shards have too.
        """
        names = (SAMPLES,) if self.labels is None else (SAMPLES, LABELS)
        content = {
            "classes": self.names_as_stored or self.class_names,
            "members": asdict(self.members),
            "shards": [[shard.num_samples, shard.num_bytes, shard.sha256] for shard in self.shards],
            "tables": [self.tables[name].sha256 for name in names],
        }
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    def address(self, shard: int) -> str:
        """Return the path or URL of a shard."""
        chosen = self.shards[shard]
        return chosen.url or f"{self.base or self.folder}/{chosen.name}"

    @cached_property
    def _name_ends(self) -> np.ndarray:
        """The end of each sample's key in `names.bin`, int64 `[num_samples]`."""
        ends = np.flatnonzero(np.fromfile(self.folder / NAMES, np.uint8) == 0)
        if len(ends) != self.num_samples:
            path = self.folder / NAMES
            raise DataError(path, f"has {len(ends)} names, should have {self.num_samples}", "index it again")
        return ends

    def names(self, start: int = 0, stop: int | None = None) -> list[str]:
        """Return the keys of some samples in a row, or of all, from `names.bin`."""
        ends = self._name_ends[start:stop]
        if not len(ends):
            return []
        begin = int(self._name_ends[start - 1]) + 1 if start else 0
        with open(self.folder / NAMES, "rb") as file:
            file.seek(begin)
            text = file.read(int(ends[-1]) - begin)
        return text.decode(errors="surrogateescape").split("\0")

    @cached_property
    def is_remote(self) -> bool:
        """Return whether any shard is remote."""
        return bool(self.base) or any(shard.url for shard in self.shards)


def read_index(folder: Path, base: str = "") -> Index:
    """Open a split, and check that its index is valid and every local shard exists with its full size.

    Tables of up to 64 MiB are verified against their digests; larger ones during the run (see
    verification.py). `base` is the address of the shards if they are not in `folder`.

    Raises:
        DataError: one line with the first five problems, and the number of others.
    """
    path = folder / INDEX_FILE
    try:
        text = read_bytes(path, limits.INDEX, error=DataError)
    except DataError as error:
        raise DataError(f"{error}; should be an index of shards") from None
    fields = parse_json(text, path, error=DataError)
    if not isinstance(fields, dict) or fields.get("format") != FORMAT:
        format_name = fields.get("format") if isinstance(fields, dict) else None
        raise DataError(path, f"format is {format_name!r}, should be {FORMAT!r}")
    content, problems = _validated(fields)
    shards: list[Shard] = []
    if content is not None:
        shards, problems = _checked_addresses(content.shards, base)
        problems += [] if base else size_problems(folder, shards)
        shapes = _table_shapes(content.num_samples, content.max_labels)
        for name, recorded in content.tables.items():
            problems += _table_problems(folder / name, recorded, *shapes.get(name, ()))
    if content is None or problems:
        more = f"; and {len(problems) - _SHOWN_PROBLEMS} more" if len(problems) > _SHOWN_PROBLEMS else ""
        raise DataError(path, f"{'; '.join(problems[:_SHOWN_PROBLEMS])}{more}")
    stored, names = tuple(content.class_names), tuple(map(same_name, content.class_names))
    is_same = stored == names or len({*names}) < len(names)  # names that differ only in form stay apart
    return Index(
        folder=folder,
        shards=tuple(shards),
        class_names=stored if is_same else names,
        names_as_stored=() if is_same else stored,
        num_samples=content.num_samples,
        source=content.source,
        rows=_mapped(folder / SAMPLES),
        labels=None if content.max_labels is None else _mapped(folder / LABELS),
        base=base,
        members=content.members,
        tables=content.tables,
        label_counts=content.labels,
    )


def find_splits(folder: Path) -> dict[str, Path]:
    """Map the split names of a data set folder to split folders, `train` first; empty if there is no index.

    A split folder is its only split.
    """
    if (folder / INDEX_FILE).is_file():
        return {folder.resolve().name: folder}
    return in_usual_order({path.parent.name: path.parent for path in folder.glob(f"*/{INDEX_FILE}")})


def in_usual_order(splits: Mapping[str, Path]) -> dict[str, Path]:
    """Return the folders of splits by name, `train` first."""
    ordered = dict.fromkeys(_USUAL_SPLITS) | dict(sorted(splits.items()))
    return {name: folder for name, folder in ordered.items() if folder is not None}


def table_limits(text: bytes) -> dict[str, int]:
    """Return the names of an index's files other than `index.json`, with an upper limit on each size.

    If `text`, the content of `index.json`, is invalid, opening the index will report the problem.
    """
    try:
        fields = parse_json(text, INDEX_FILE, error=DataError)
        row = max(ROW.itemsize, 4 * int(fields.get("max_labels", 1)))
        count = int(fields["num_samples"])
        limit = _TABLE_HEADER_BYTES + count * row
        found = dict.fromkeys((SAMPLES, LABELS) if "max_labels" in fields else (SAMPLES,), limit)
        return found | {NAMES: count * limits.MEMBER_HEADER}
    except (DataError, ValueError, TypeError, KeyError, AttributeError, OverflowError):
        return {SAMPLES: _TABLE_HEADER_BYTES}


def table_sha256(path: Path) -> str:
    """Return the SHA-256 of a file, cached in this process until the file changes."""
    return _hashed(str(path), *file_state(path))


@lru_cache(_CACHED_DIGESTS)
def _hashed(path: str, *_: int) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _validated(fields: dict[str, Any]) -> tuple[_Content | None, list[str]]:
    """Return the content of `index.json`, or None and a message for each invalid field."""
    tables = [SAMPLES, NAMES, *([LABELS] if "max_labels" in fields else [])]
    again = "write the index again with `vitctl data index`"
    should = {**_SHOULD, "tables": f"{_SHOULD['tables']} {' and '.join(sorted(tables))}: {again}"}
    try:
        content = _Content.model_validate(fields)
    except ValidationError as error:
        wrong = {problem["loc"][0] for problem in error.errors(include_input=False, include_url=False)}
        return None, [text for name, text in should.items() if name in wrong]
    total = sum(shard.num_samples for shard in content.shards)
    checks = (
        (content.num_samples != total, f"num_samples is {content.num_samples}, the shards sum to {total}"),
        (content.tables.keys() != {*tables}, should["tables"]),
    )
    problems = [text for is_there, text in checks if is_there]
    return None if problems else content, problems


def _checked_addresses(shards: list[Shard], base: str) -> tuple[list[Shard], list[str]]:
    """Return the shards with URLs stripped of their queries, and the problems with these."""
    if not base and not any(shard.url for shard in shards):
        return shards, []
    try:
        urls = without_queries(*(shard.url for shard in shards), error=DataError, over=False)
    except DataError as error:
        return shards, [str(error)]
    problems = []
    for shard, url in zip(shards, urls, strict=True):
        try:
            if base or url:
                check_address(url or f"{base}/{shard.name}")
        except DataError as error:
            problems.append(str(error))
    return [replace(shard, url=url) for shard, url in zip(shards, urls, strict=True)], problems


def size_problems(folder: Path, shards: Sequence[Shard]) -> list[str]:
    """Return a line for each local shard that is missing or differs in size from the index.

    Only rank 0 looks: 512 processes would ask a file server 50 million times.
    """
    problems = []
    for shard in shards if is_main_process() else ():
        if shard.url:
            continue
        try:
            # A Path for each of many shards would take seconds.
            num_bytes = os.stat(f"{folder}/{shard.name}").st_size
        except (OSError, ValueError):
            problems.append(f"{one_line(shard.name)} is missing")
            continue
        if num_bytes != shard.num_bytes:
            problems.append(f"{one_line(shard.name)} has {num_bytes} bytes, should have {shard.num_bytes}")
    return problems


def _table_problems(
    path: Path, recorded: _Table, shape: tuple[int, ...] = (), dtype: np.dtype | None = None
) -> list[str]:
    """Return the problems of a table; `names.bin` has no shape."""
    try:
        if dtype is not None:
            rows = _mapped(path)
            if rows.dtype != dtype or rows.shape != shape:
                held, wanted = rows.dtype.names or rows.dtype, dtype.names or dtype
                return [f"{path.name} holds {rows.shape} rows of {held}, should hold {shape} of {wanted}"]
        num_bytes = path.stat().st_size
        if num_bytes != recorded.num_bytes:
            return [f"{path.name} has {num_bytes} bytes, should have {recorded.num_bytes}"]
        if num_bytes > VERIFIED_ON_OPEN:
            return []
        sha256 = table_sha256(path)
    except FileNotFoundError:
        return [f"{path.name} is missing"]
    except DataError as error:
        return [f"{path.name} cannot be read ({error})"]
    except Exception as error:  # NumPy raises many types for a damaged header
        return [f"{path.name} cannot be read ({error_text(error)})"]
    if sha256 == recorded.sha256:
        return []
    return [
        f"{path.name} changed since its index was written (sha256 {sha256[:12]}..., should be "
        f"{recorded.sha256[:12]}...); "
        "copy the split again, or write its index again with `vitctl data index`"
    ]


class _Mapped(np.memmap):
    """A memory-mapped table.

    Reading beyond the end of a truncated file kills the process (SIGBUS), so the size is checked first.
    """

    def __getitem__(self, key: Any) -> Any:
        """Index like any array. Raises DataError if the file was truncated."""
        held = getattr(self, "_mmap", None)
        if held is not None and held.size() < len(held):
            raise DataError(
                self.filename,
                f"was truncated from {len(held)} to {held.size()} bytes while in use",
                "index the shards again",
            )
        return super().__getitem__(key)


def _mapped(path: Path) -> np.ndarray:
    """Memory-map an .npy file, so that opening takes the same time for any number of samples.

    Raises DataError, OSError or ValueError if the file is not a table.
    """
    os.stat(path)
    open_regular(path, error=DataError).close()
    table: np.ndarray | None = None
    try:
        with if_offered():
            table = np.load(path, mmap_mode="r", allow_pickle=False)
        if table is None:  # a disk that cannot map files
            table = np.load(path, allow_pickle=False)
    except (SyntaxError, TokenError, TypeError, OverflowError, RecursionError) as error:  # in its header
        raise ValueError(f"a damaged header: {error}") from None
    return table.view(_Mapped) if isinstance(table, np.memmap) else table


# Writing an index


def write_index(
    folder: Path,
    shards: Sequence[Shard],
    scans: Iterable[Scan],
    *,
    width: int,
    class_names: Sequence[str] | None = None,
    source: str = "",
    members: Fields = Fields(),
) -> Index:
    """Write `index.json`, `samples.npy`, `names.bin`, and `labels.npy` if samples have several labels.

    Args:
        shards: in storage order.
        scans: of the shards, consumed one at a time.
        width: most labels of a sample, see `Scan.width`.
        class_names, source, members: as for `index_shards`.

    Raises:
        DataError: there are no samples, or a label has no class name.
    """
    num_samples = sum(shard.num_samples for shard in shards)
    if not num_samples:
        raise DataError(folder, "the shards hold no samples")
    shapes = _table_shapes(num_samples, width)
    highest, missing, embedded = -1, 0, set[tuple[str, ...]]()
    with ExitStack() as opened:
        files = {name: opened.enter_context(_new_table(folder / name, *shapes[name])) for name in shapes}
        aside = opened.enter_context(atomic_write(folder / NAMES))
        files[NAMES] = opened.enter_context(aside.open("wb"))
        for scan in scans:
            labels = scan.rows["label"] if scan.labels is None else scan.labels
            files[SAMPLES].write(scan.rows.tobytes())
            files[NAMES].write(scan.names)
            if width:
                files[LABELS].write(padded(labels, width).astype("<i4").tobytes())
            highest = max(highest, int(labels.max(initial=-1)))
            missing += int((~has_label(labels)).sum())
            embedded.add(scan.class_names)
        names = _class_names(folder, highest, embedded, class_names)
    fields: dict[str, Any] = {
        "format": FORMAT,
        "class_names": names,
        "num_samples": num_samples,
        "shards": [{key: value for key, value in asdict(shard).items() if value != ""} for shard in shards],
        "source": source,
        **({} if members == Fields() else {"members": asdict(members)}),
        "tables": {
            name: {"num_bytes": (folder / name).stat().st_size, "sha256": table_sha256(folder / name)}
            for name in (*shapes, NAMES)
        },
        **({"max_labels": width} if width else {}),
        "labels": {"missing": missing, "outside": 0},  # a scan refuses others
    }
    text = escaped_json(json.dumps(fields, indent=1, ensure_ascii=False))
    write_text(folder / INDEX_FILE, text + "\n")
    return read_index(folder)


@contextmanager
def _new_table(path: Path, shape: tuple[int, ...], dtype: np.dtype) -> Iterator[IO[bytes]]:
    """Write a table atomically: yields a file for the rows, with its header already written."""
    with atomic_write(path) as aside, aside.open("wb") as file:
        header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(file, header)
        yield file


def wrong_labels(labels: np.ndarray, num_classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Return which samples have no label, and which have one outside the classes: bool `[n]` each.

    A label is 0 to K - 1, or -1 for none. Missing labels come last.

    Args:
        labels: `[n]` or `[n, L]`.
        num_classes: K.
    """
    rows = labels.reshape(len(labels), -1)
    outside = ((rows >= num_classes) | (rows < -1)).any(axis=1)
    outside |= ((rows[:, :-1] < 0) & (rows[:, 1:] >= 0)).any(axis=1)
    return ~has_label(labels), np.asarray(outside)


def has_label(labels: np.ndarray) -> np.ndarray:
    """Return which samples have a label: bool `[n]` for labels `[n]` or `[n, L]`."""
    return np.asarray(labels >= 0 if labels.ndim == 1 else (labels >= 0).any(axis=1))


def _class_names(
    folder: Path, highest: int, embedded: set[tuple[str, ...]], names: Sequence[str] | None
) -> list[str]:
    """Return the given class names, else those embedded in the shards, else the class numbers."""
    needed = max(highest + 1, 1)
    if names is None and len(embedded) > 1:
        raise DataError(
            folder,
            f"the shards hold {len(embedded)} different lists of class names",
            "give one with --classes",
        )
    if names is None:
        names = embedded.pop() or None
    if names is None and needed > limits.CLASSES:
        raise DataError(
            folder, f"label {needed - 1} of classes without names, should be below {limits.CLASSES:,}"
        )
    names = [str(label) for label in range(needed)] if names is None else list(map(same_name, names))
    if needed > len(names):
        raise DataError(folder, f"label {needed - 1} has no name, {len(names)} class names were given")
    if len(set(names)) < len(names):
        raise DataError(folder, f"class name {Counter(names).most_common(1)[0][0]!r} occurs twice")
    return names
