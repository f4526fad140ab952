"""Index shards from any program, by several processes.

The scan of each shard is kept in a file until the index is written, so that an interrupted command resumes.
"""

import hashlib
import json
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from vitctl.data.shards.index import INDEX_FILE, Index, Shard, write_index
from vitctl.data.shards.tar import Fields, Scan, read_shard
from vitctl.errors import DataError
from vitctl.system import limits
from vitctl.system.address import without_queries
from vitctl.system.files import atomic_write, file_state, lock_alone, open_lock, parsing, read_json
from vitctl.system.pool import Done, Progress, counted, run_tasks
from vitctl.system.remote import Span, copy, is_remote, transfer
from vitctl.system.text import count_text, near_twins, one_line

_FEW = 20  # classes that few images may have
_PARTS, _ANY = ".index.partial", "*.npz"


def index_shards(
    places: Sequence[Path | str],
    out: Path | None = None,
    *,
    class_names: Sequence[str] | None = None,
    source: str = "",
    members: Fields = Fields(),
    workers: int = 0,
    progress: Progress | None = None,
    note: Callable[[str], None] = lambda _: None,
) -> Index:
    """Write `index.json` and `samples.npy` for WebDataset shards, made by any program.

    The files are the same for any number of workers, and after any interruption.

    Args:
        places: files or addresses of the shards of one split; their order becomes the storage order. A remote
            shard is read once and not stored.
        out: destination of the index, and of links to the files; None: the files' common folder, without
            links.
        class_names: in label order; None: the names embedded in the shards, else the class numbers.
        members: which members of a sample are its image and its label, if not by the default extensions.
        note: called with a line about members that belong to no sample.

    Raises:
        DataError: a shard is damaged or unsafe, or cannot be fetched, a sample lacks a field, a label has no
            class name, two shards share a name, `out` holds the index of other shards, or another process
            writes the same index.
    """
    texts = list(map(str, places))
    if out is not None:
        _check_same_shards(out, [text.rpartition("/")[2] for text in texts])
    if any(map(is_remote, texts)):
        texts, folder = _remote_shards(texts, out)
    else:
        paths = list(map(Path, texts))
        texts = list(map(str, _link_shards(paths, out) if out else paths))
        folders = {Path(text).parent for text in texts}
        if len(folders) != 1:
            raise DataError(f"{len(texts)} shards in {len(folders)} folders, should be in one")
        (folder,) = folders
    parts = folder / _PARTS
    parts.mkdir(exist_ok=True)
    job, count = _Job(parts, texts, members), counted(progress, len(texts))
    with open_lock(parts / "lock") as lock:
        lock_alone(lock.fileno(), folder, error=DataError)
        for left in parts.glob(".*.partial"):  # of a process that was killed
            left.unlink()
        try:
            scanned = run_tasks(job.scan, len(texts), workers=workers, done=count)
            named = class_names or _text_names(folder, scanned, members)
            index = write_index(
                folder,
                [shard for shard, *_ in scanned],
                (_load(part).named(named) for *_, part in scanned),
                width=max(width for _, width, *_ in scanned),
                class_names=class_names,
                source=source,
                members=members,
            )
            for twins in near_twins(named):
                note(f"classes {' and '.join(map(repr, twins))} are named nearly the same")
            if others := [name for *_, part in scanned for name in _load(part).others]:
                count_of = count_text(len(others), "file")
                note(f"{count_of} in the shards, of no sample, passed over, such as {one_line(others[0])}")
            for part in parts.glob(_ANY):
                part.unlink()
            return index
        finally:
            if not any(parts.glob(_ANY)):
                shutil.rmtree(parts, ignore_errors=True)


def _text_names(
    folder: Path, scanned: "Sequence[tuple[Shard, int, tuple[str, ...], Path]]", members: Fields
) -> list[str]:
    """Return the texts that are labels, sorted; empty if these are numbers."""
    names = sorted({name for _, _, texts, _ in scanned for name in texts})
    shown = f"texts such as {one_line(names[0][:40])!r}" if names else ""
    if names and (odd := [shard.name for shard, _, texts, _ in scanned if not texts and shard.num_samples]):
        raise DataError(
            folder, f"{odd[0]} has numbers as labels, other shards {shown}", "write them in one way"
        )
    num_samples = sum(shard.num_samples for shard, *_ in scanned)
    if not members.label and len(names) > max(_FEW, num_samples // 2):
        text = f"{len(names):,} {shown} for {count_text(num_samples, 'image')}: captions rather than classes"
        raise DataError(folder, text, "name the label, such as --columns label=class")
    return names


def _remote_shards(urls: Sequence[str], out: Path | None) -> tuple[list[str], Path]:
    """Return the addresses of shards, and the folder of their index, which is created."""
    if out is None:
        raise DataError(
            urls[0], "an index cannot be written there", "choose a local folder for it with --out FOLDER"
        )
    urls = without_queries(*urls, error=DataError)
    names = {url.rpartition("/")[2] for url in urls}
    if len(names) < len(urls):
        raise DataError(
            f"{count_text(len(urls), 'address', 'addresses')} with "
            f"{count_text(len(names), 'file name')}; each shard needs a different one"
        )
    out.mkdir(parents=True, exist_ok=True)
    return list(urls), out


@dataclass(frozen=True)
class _Job:
    """Scans shards, each once; scans are kept as files in `parts`."""

    parts: Path
    places: Sequence[str]
    members: Fields

    def scan(self, number: int, done: Done) -> tuple[Shard, int, tuple[str, ...], Path]:
        """Scan a shard, unless it is unchanged since an earlier scan.

        Returns its entry in the index, the width of its labels, these where they are texts, and the file that
        holds the scan.
        """
        place, first = self.places[number], Span(self.places[number], 0, 1)
        if url := place if is_remote(place) else "":
            transfer([first])
        state = (first.num_bytes or time.time_ns(), first.etag) if url else file_state(place)
        name = place.rpartition("/")[2]
        key = json.dumps([url or name, state, asdict(self.members)])
        part = self.parts / f"{hashlib.sha256(key.encode()).hexdigest()}.npz"
        try:
            scan = _load(part)
        except (DataError, OSError):  # missing, or damaged by a power failure
            scan = self._fetched(first) if url else read_shard(Path(place).resolve(), self.members, ends=True)
            _save(part, scan)
        done(1)
        shard = Shard(name, len(scan.rows), scan.num_bytes, scan.sha256, url)
        return shard, scan.width, scan.class_names if scan.is_text else (), part

    def _fetched(self, first: Span) -> Scan:
        """Fetch and scan a remote shard, whose first byte is already there."""
        version = first.etag, first.num_bytes
        with tempfile.NamedTemporaryFile(prefix=".shard.", suffix=".partial", dir=self.parts) as file:
            try:
                spans = copy(first.url, file, limits.SHARD, num_bytes=version[1])
                file.flush()
                if {(one.etag or version[0], one.num_bytes or version[1]) for one in spans} != {version}:
                    raise DataError(
                        first.url,
                        "changed while it was read, or has another ETag at every request",
                        "type the same line again, or copy it first",
                    )
                return read_shard(Path(file.name), self.members, ends=True)
            except DataError as error:
                raise DataError(str(error).replace(file.name, first.url)) from None


def _save(part: Path, scan: Scan) -> None:
    about = json.dumps([scan.num_bytes, scan.sha256, scan.class_names, scan.others, scan.is_text]).encode()
    names = np.frombuffer(scan.names, np.uint8)
    arrays = {"rows": scan.rows, "about": np.frombuffer(about, np.uint8), "names": names}
    if scan.labels is not None:
        arrays["labels"] = scan.labels
    with atomic_write(part, flushed=False) as aside, aside.open("wb") as file:
        np.savez_compressed(file, allow_pickle=False, **arrays)


def _load(part: Path) -> Scan:
    with parsing(part, DataError), np.load(part, allow_pickle=False) as arrays:
        num_bytes, sha256, names, others, is_text = json.loads(arrays["about"].tobytes())
        of_names = arrays["names"].tobytes(), tuple(names), tuple(others), is_text
        return Scan(arrays["rows"], arrays.get("labels"), sha256, num_bytes, *of_names)


def _check_same_shards(out: Path, names: Sequence[str]) -> None:
    """Refuse to replace the index of other shards."""
    path = out / INDEX_FILE
    if not path.exists():
        return
    fields = read_json(path, limits.INDEX, error=DataError)
    listed = fields.get("shards") if isinstance(fields, dict) else None
    shards = listed if isinstance(listed, list) else []
    others = {str(shard.get("name")) for shard in shards if isinstance(shard, dict)} - set(names)
    if others:
        raise DataError(
            path,
            f"is the index of other shards ({one_line(min(others))}) and would be replaced",
            "choose another folder with --out",
        )


def _link_shards(paths: Sequence[Path], out: Path) -> list[Path]:
    """Create symbolic links to shards in the folder of an index that is stored elsewhere."""
    names = Counter(path.name for path in paths)
    name, count = names.most_common(1)[0]
    if count > 1:
        raise DataError(
            f"{count_text(len(paths), 'shard')}, two of them called {name}",
            fix="give the shards of one split, each with a different name",
        )
    missing = []
    for path in paths:
        if not path.exists():
            raise DataError(path, "no such file")
        link = out / path.name
        if not link.exists() and not link.is_symlink():
            missing.append((link, path))
        elif not (link.exists() and link.samefile(path)):
            raise DataError(link, f"exists already and is not {path}", "choose another folder with --out")
    out.mkdir(parents=True, exist_ok=True)
    for link, path in missing:
        link.symlink_to(path.resolve())
    return [out / path.name for path in paths]
