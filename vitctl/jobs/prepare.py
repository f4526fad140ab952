"""Prepare a known data set: download it where that is allowed, process its images if needed, write shards."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from vitctl.data.datasets.catalog import find_data_set, originals_of, read_originals, write_data_set
from vitctl.data.datasets.known_sets import DataSet
from vitctl.data.datasets.readers.imagenet import REAL_SHA256, REAL_URL
from vitctl.data.datasets.readers.original_files import Archive, is_unpacked, unpack
from vitctl.data.datasets.readers.table import read_parquet
from vitctl.data.datasets.vtab import VTAB, VtabTask
from vitctl.data.datasets.vtab_images import COMMUNITY_LIST, read_community
from vitctl.data.shards.index import INDEX_FILE, find_splits
from vitctl.data.source.stores import open_index
from vitctl.data.writer.intake import Originals
from vitctl.data.writer.shard_writer import write_originals
from vitctl.errors import CheckpointError, DataError
from vitctl.jobs.evaluate import REAL_PLACE
from vitctl.models.weights.download import fetch

_DOWNLOADS = ".downloads"

# (activity, done, total); total is 0 if unknown.
Progress = Callable[[str, int, int], None]
Fetch = Callable[..., Path]


def prepare_data_set(
    name: str,
    root: Path,
    *,
    source: Path | None = None,
    download: bool = True,
    allow_partial: bool = False,
    workers: int = 0,
    progress: Progress = lambda _what, _done, _total: None,
    get: Fetch = fetch,
) -> dict[str, int]:
    """Write the shards of a known data set to ROOT/NAME. Existing splits are left unchanged.

    Images that need processing, such as those of Retinopathy, are processed once: the shards hold the result.

    Args:
        name: a name or an alias.
        root: folder of known data sets; downloaded originals go to ROOT/originals/NAME.
        source: folder of the original files; or one in the community's VTAB-1k layout, or with Hugging Face's
            parquet files, which the index then records.
        download: download missing originals that need no account.
        allow_partial: write splits that lack some of their images; the index then records it.
        workers: processes that write and process images; 0: this one.
        progress: called while files are downloaded and images written.
        get: function that downloads a file.

    Returns:
        the number of images of every split.

    Raises:
        DataError: files are missing; the message says what to do by hand.
    """
    row = find_data_set(name)
    out = root / row.name
    if row.make is not None:
        write_data_set(row, out)
        return _sizes(out)
    folder = source or originals_of(row, root)
    if source is None and download and not _is_complete(row, out):
        _download(row, root, folder, progress, get)
    if not _is_complete(row, out):
        for split, originals in _open(row, folder, allow_partial=allow_partial).items():
            if not (out / split / INDEX_FILE).exists():
                shown = partial(progress, f"writing {row.name}/{split}")
                write_originals(originals, out, split, workers=workers, progress=shown)
    return _sizes(out)


def prepare_real(root: Path, progress: Progress, get: Fetch = fetch) -> Path:
    """Download ImageNet's ReaL labels to the path that `evaluate --labels real` reads. Return the path."""
    place = root / REAL_PLACE
    if not place.exists():
        _fetch(Archive(REAL_URL, f"sha256:{REAL_SHA256}", packed=True), root, place.parent, progress, get)
    return place


def is_present(task: VtabTask, root: Path, source: Path | None) -> bool:
    """Return whether a task's shards or original files are present, so that it needs no download."""
    row = find_data_set(task.data_set)
    places = [source / task.community] if source else [root / row.name, originals_of(row, root)]
    return any(place.is_dir() and any(place.iterdir()) for place in places)


def _is_complete(row: DataSet, out: Path) -> bool:
    splits = set(find_splits(out)) if out.is_dir() else set()
    return splits >= set(row.sizes) or "train800" in splits


def _sizes(out: Path) -> dict[str, int]:
    return {split: open_index(place).num_samples for split, place in find_splits(out).items()}


def _download(row: DataSet, root: Path, folder: Path, progress: Progress, get: Fetch) -> None:
    """Download and unpack what is missing; if a set cannot be downloaded, its reader says what to do."""
    for archive in row.downloads:
        if is_unpacked(archive, folder):
            continue
        try:
            _fetch(archive, root, folder, progress, get)
        except CheckpointError as error:
            raise DataError(
                f"{error}; or download and unpack {archive.name} yourself, then add --from FOLDER"
            ) from None


def _fetch(archive: Archive, root: Path, folder: Path, progress: Progress, get: Fetch) -> None:
    def show(done: int, total: int | None) -> None:
        progress(f"downloading {archive.name}", done, total or archive.num_bytes)

    path = get(archive.url, progress=show, cache=root / "originals" / _DOWNLOADS)
    progress(f"unpacking {archive.name}", 0, 0)
    unpack(archive, path, folder)


def _open(row: DataSet, folder: Path, *, allow_partial: bool) -> dict[str, Originals]:
    """Return the splits of the original files, or of a copy in a known layout."""
    task = next((task for task in VTAB if task.data_set == row.name), None)
    if task is not None:
        for copy in (folder, folder.parent):
            if (copy / task.community / COMMUNITY_LIST).is_file():
                splits = read_community(task, copy)
                return {split: splits[split] for split in ("train800", "val200", "test")}
    tables = sorted([*folder.glob("*.parquet"), *folder.glob("data/*.parquet")]) if folder.is_dir() else []
    if tables:
        return _checked(row, read_parquet(tables), folder, allow_partial=allow_partial)
    try:
        return _labelled(row, read_originals(row.name, folder, allow_partial=allow_partial))
    except DataError as error:
        by_hand = (
            ""
            if row.downloads
            else f"; this set cannot be downloaded automatically: put the files into {folder}"
        )
        raise DataError(f"{error}{by_hand}") from None


def _checked(
    row: DataSet, splits: dict[str, Originals], folder: Path, *, allow_partial: bool
) -> dict[str, Originals]:
    """Check classes and number of images of parquet files; keys may differ from the originals'."""
    kept = {split: originals for split, originals in splits.items() if split in row.sizes}
    wrong = [
        f"{split} has {len(o.items):,} images of {len(o.class_names):,} classes, should have "
        f"{row.sizes[split]:,} of {row.num_classes:,}"
        for split, o in kept.items()
        if len(o.class_names) != row.num_classes or (len(o.items) != row.sizes[split] and not allow_partial)
    ]
    if wrong or not kept:
        raise DataError(folder, f"not {row.name} in parquet: {'; '.join(wrong) or 'has none of its splits'}")
    source = f"{row.name}, Hugging Face parquet copy"
    return _labelled(row, {split: replace(o, source=source) for split, o in kept.items()})


def _labelled(row: DataSet, splits: dict[str, Originals]) -> dict[str, Originals]:
    """Record in the source text, which every result repeats, that a split lacks images."""
    return {
        split: replace(o, source=f"{o.source} (partial: {len(o.items):,} of {row.sizes[split]:,} images)")
        if len(o.items) != row.sizes[split]
        else o
        for split, o in splits.items()
    }
