"""What was converted from a user's data: shards of photographs beside the runs; in the cache what archives
hold, and the index of shards of other programs.

Shards are addressed by their content: names, classes, and the bytes of each image. A file whose state changed
is read again, and converted again only if its content did.
"""

import hashlib
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import PIL

from vitctl.data.datasets.catalog import listed_files
from vitctl.data.datasets.readers.original_files import read_record
from vitctl.data.shards.index import INDEX_FILE
from vitctl.data.writer.intake import Item, Known, Originals, read_item
from vitctl.errors import DataError
from vitctl.system import limits
from vitctl.system.files import cache_folder, file_state, read_json, write_json
from vitctl.system.pool import default_workers, run_each

RECORD = "photographs.json"  # in a folder of shards, written last: what they were made of
LOOKED = "looked.json"  # beside it: what the check found of each image, by the digest of its bytes
SHARDS = "shards"  # folder beside the runs
_BY = f"1, Pillow {PIL.__version__}"  # who looked; the number rises when `check_image` changes
_MOST_STATES, _IMAGES_PER_TASK, _ENOUGH_FOR_WORKERS = 20, 64, 2_000


def fingerprint(path: str, columns: str = "") -> str:
    """Return a digest of the names and states of the files of a folder or a table, or of an archive; no image
    is read.
    """
    files = listed_files(Path(path), columns) or [Path(path)] * os.path.isfile(path)
    files = files or [Path(folder, name) for folder, _, names in os.walk(path) for name in names]
    states = sorted((os.path.relpath(file, path), file_state(file)) for file in files)
    return hashlib.sha256((repr(states) + columns).encode("utf-8", "surrogateescape")).hexdigest()


def shards_folder(path: str, runs: Path, splits: Mapping[str, Originals]) -> tuple[Path, dict[str, Known]]:
    """Return the folder beside the runs for the shards of photographs, which are read; and, by split, what
    the check of an earlier conversion of the same path found of the images that it had.
    """
    digest, known, found = hashlib.sha256(), dict[str, Known](), _looked(path, runs)
    for split, originals in splits.items():
        contents = _contents(originals.items)
        told = [(item.key, item.label, one) for item, one in zip(originals.items, contents, strict=True)]
        digest.update(repr((split, originals.class_names, told)).encode("utf-8", "surrogateescape"))
        known[split] = Known(contents, found)
    return runs / SHARDS / f"{Path(path).resolve().name}-{digest.hexdigest()[:12]}", known


def _contents(items: Sequence[Item]) -> list[str]:
    """Return a digest of the bytes of each image."""

    def content(number: int) -> str:
        try:
            return hashlib.sha256(read_item(items[number])).hexdigest()
        except DataError as error:
            return f"unreadable: {error}"

    workers = default_workers() if len(items) >= _ENOUGH_FOR_WORKERS else 0
    return run_each(content, len(items), _IMAGES_PER_TASK, workers=workers)


def find_shards(state: str, *runs: Path) -> Path | None:
    """Return the first shards that were made of photographs in a state, see `fingerprint`, beside runs."""
    for record in (one for place in runs for one in sorted((place / SHARDS).glob(f"*/{RECORD}"))):
        if state in read_record(record).get("states", ()):
            with suppress(OSError):
                os.utime(record)
            return record.parent
    return None


def _looked(path: str, runs: Path) -> dict[str, tuple[str, bytes]]:
    """Return what the newest conversion of a path found of its images, unless by another decoder."""
    made = [one for one in list_converted(runs) if one.made_of == str(Path(path).resolve())]
    made = [one for one in made if one.folder.parent == runs / SHARDS]
    with suppress(DataError, IndexError, TypeError, KeyError, ValueError, AttributeError):
        found = read_json(made[0].folder / LOOKED, limits.INDEX, error=DataError)
        if found["by"] == _BY:
            return {content: (said, bytes.fromhex(pixels)) for content, (said, pixels) in found["of"].items()}
    return {}


def keep_looked(folder: Path, known: Mapping[str, Known]) -> None:
    """Write down what the check found of each image, for the next conversion."""
    rows = {
        content: (one.found[content][0], one.found[content][1].hex())
        for one in known.values()
        for content in one.contents
        if content in one.found
    }
    write_json(folder / LOOKED, {"by": _BY, "of": rows})


def keep_record(folder: Path, path: str, state: str) -> None:
    """Write down what shards were made of."""
    states = [*read_record(folder / RECORD).get("states", ()), state][-_MOST_STATES:]
    write_json(folder / RECORD, {"made_of": str(Path(path).resolve()), "states": states})


def made_of(shards: str) -> str:
    """Return the path of the user's data that a folder of shards was made of."""
    made = str(read_record(Path(shards) / RECORD).get("made_of", shards))
    return os.path.relpath(made) if Path(made).is_relative_to(Path.cwd()) else made


@dataclass(frozen=True)
class Converted:
    """Something that was converted.

    Args:
        folder: of it.
        made_of: path of the user's data.
        when: it was used last, in seconds since 1970.
    """

    folder: Path
    made_of: str
    when: float


def list_converted(runs: Path) -> list[Converted]:
    """Return what was converted beside the runs and in the cache, what was used last first."""
    found = []
    records = [one / RECORD for one in (runs / SHARDS).glob("*/")]
    for record in (*records, *(cache_folder() / "unpacked").glob("*.json")):
        folder = record.parent if record.name == RECORD else record.with_suffix("")
        when = record if record.exists() else folder
        found.append(Converted(folder, str(read_record(record).get("made_of", "?")), when.stat().st_mtime))
    found += [
        Converted(index.parent, str(link.readlink().parent), index.stat().st_mtime)
        for index in (cache_folder() / "splits").glob(f"*/{INDEX_FILE}")
        if (link := next((one for one in index.parent.iterdir() if one.is_symlink()), None))
    ]
    return sorted(found, key=lambda one: one.when, reverse=True)


def is_current(one: Converted) -> bool:
    """Return whether what shards were made of is still as it was, so that they can be made again."""
    return fingerprint(one.made_of) in read_record(one.folder / RECORD).get("states", ())


def delete(one: Converted) -> None:
    """Remove it, its record last."""
    shutil.rmtree(one.folder, ignore_errors=True)
    one.folder.with_suffix(".json").unlink(missing_ok=True)
