"""Finds data sets by name, and opens splits by name or location."""

from collections.abc import Mapping
from pathlib import Path

from vitctl.data.datasets.known_sets import DATA_SETS, DataSet
from vitctl.data.datasets.vtab import in_vtab1k
from vitctl.data.shards.index import find_splits
from vitctl.data.source.locate import locate_splits, no_index_message
from vitctl.data.source.splits import resolve, select
from vitctl.data.source.unsharded import SyntheticSource
from vitctl.data.source.views import Source, split_sources
from vitctl.data.writer.intake import Originals
from vitctl.data.writer.write import write_originals
from vitctl.errors import DataError, explaining
from vitctl.system.files import parsing
from vitctl.system.pool import default_workers
from vitctl.system.text import did_you_mean, nearest, typed_command

_ENOUGH_FOR_WORKERS = 2_000  # images; fewer are written sooner than processes have started


def find_data_set(name: str) -> DataSet:
    """Return the row of a name or an alias. Raises DataError, with the nearest names, if there is none."""
    by_name = {alias: row for row in DATA_SETS.values() for alias in (row.name, *row.aliases)}
    if name.lower() in by_name:
        return by_name[name.lower()]
    starts = [row for row in DATA_SETS if row.startswith(name.lower())] if name else []
    close = nearest(name.lower(), by_name)
    near = starts[:3] or list(dict.fromkeys(by_name[alias].name for alias in close))
    hint = f"{did_you_mean(near)} " if near else ""
    raise DataError(
        f"no data set is called '{name}'; {hint}known: {', '.join(DATA_SETS)}; for your own images use "
        f"--data FOLDER"
    )


def known_size(dataset: str, split: str) -> tuple[int, int] | None:
    """Return (images of a split expression, classes) for planning; None if they depend on the data."""
    row = find_data_set(dataset)
    try:
        return sum(part.stop - part.start for part in resolve(split, row.sizes)), row.num_classes
    except DataError:
        return None


def read_originals(name: str, root: Path, *, allow_partial: bool = False) -> dict[str, Originals]:
    """Open the original files of a known data set, to be written by `write_originals`.

    Args:
        name: a name or an alias.
        root: folder of the files.
        allow_partial: accept splits that lack some of their images.

    Raises:
        DataError: the set has no original files, or they are missing, damaged or of another number.
    """
    row = find_data_set(name)
    with parsing(f"{root}: {row.name}", DataError):
        splits = row.open(root)
    wrong = [
        f"{split} has {len(originals.items):,} images, should have {row.sizes[split]:,}"
        for split, originals in splits.items()
        if len(originals.items) != row.sizes[split]
    ]
    if wrong and not allow_partial:
        raise DataError(f"{root}: not the whole of {row.name}: {'; '.join(wrong)}")
    return splits


@explaining()
def open_split(
    split: str,
    *,
    path: str | Path = "",
    dataset: str = "",
    root: str = "data",
    scratch: Path | None = None,
    cache_bytes: int = 0,
    whole: bool = True,
) -> Source:
    """Open the images of a split, by number.

    Example:
        from vitctl import open_split

        source = open_split("train[80%:]", path="data/mine")
        len(source), source.class_names
        labels = source.labels()  # int64 [n]; [n, L] padded with -1 where images may have several
        first = source.read(0)  # the encoded image, as bytes; source.key(0) is its name

    Args:
        split: an expression such as "train", "train[:98%]", "train[:800]+validation[:200]".
        path: folder of shards, or what else `locate_splits` understands; takes precedence over `dataset`.
        dataset: a known name, looked for as `root/name`.
        root: folder of known data sets.
        scratch: where sets that come with vitctl are written when `root` has none.
        cache_bytes: bound of the cache of remote shards; 0 reads single images.
        whole: refuse splits of a known set that lack some of its images.

    Returns:
        the samples, numbered from 0: `len`, `class_names`, `labels`, `key` and `read`. It travels to other
            processes by pickling.

    Raises:
        DataError: in one line what is missing, and how to get it.
    """
    path = str(path)
    folder = path or str(_folder(split, dataset, root, scratch))
    splits = locate_splits(folder, split, makes_index=bool(path))
    if path and not splits:
        raise DataError(no_index_message(path, split))
    if dataset and not path and "train800" in splits:
        split = in_vtab1k(split, find_data_set(dataset).name)
    try:
        sources = {name: place.open(cache_bytes) for name, place in splits.items() if name in split}
        chosen = select(split, sources)
    except DataError as error:
        if any(name in split for name in splits):
            raise
        raise DataError(f"{folder}: has no split '{split}'; found: {', '.join(splits) or 'none'}") from error
    if dataset and not path and whole:
        _check_against_table(find_data_set(dataset), sources, Path(folder))
    return chosen


def write_data_set(row: DataSet, out: Path) -> None:
    """Write the splits of a set that comes with vitctl; those that an earlier, killed process finished stay."""
    assert row.make is not None
    workers = default_workers() if sum(row.sizes.values()) >= _ENOUGH_FOR_WORKERS else 0
    if not find_splits(out).keys() >= row.sizes.keys():
        for split in row.sizes:
            write_originals(row.make(split), out, split, workers=workers)


def synthetic(num_images: int, *, dataset: str, image_size: int) -> Source:
    """Return generated noise images with as many classes as a known data set; 1,000 if none is named."""
    return SyntheticSource(num_images, find_data_set(dataset).num_classes if dataset else 1000, image_size)


def _folder(split: str, dataset: str, root: str, scratch: Path | None) -> Path:
    if not dataset:
        raise DataError(
            "no data was given; use --data FOLDER (shards made by `vitctl data shards`) or --dataset NAME"
        )
    row = find_data_set(dataset)
    folder = Path(root) / row.name
    if row.make is not None and scratch is not None and not find_splits(folder):
        write_data_set(row, scratch / row.name)
        return scratch / row.name
    if message := missing_shards(row, root, split):
        command = typed_command("vitctl COMMAND")
        again = (
            "the same line with --data SHARDS for --dataset"
            if "--dataset" in command
            else f"`{command} --data SHARDS`"
        )
        raise DataError(
            f"{message} Other images: `vitctl data shards PHOTOS SHARDS`, then {again}. "
            f"--dry-run and pretrain's --synthetic need no data"
        )
    return folder


def missing_shards(row: DataSet, root: str, split: str) -> str:
    """Return a message that a known data set has no shards below `root`, and how to make them; "" if it has."""
    folder = Path(root) / row.name
    if find_splits(folder):
        return ""
    obtain = row.obtain.replace("ROOT", root).replace("NAME", row.name)
    if "data prepare" in obtain:
        obtain += f" It downloads what it may; files that you have go into {originals_of(row, Path(root))}/."
    wanted = f"expected shards with split '{split}' and {row.num_classes:,} classes in {folder}"
    return f"{row.name}: {wanted}, found none. {obtain}"


def originals_of(row: DataSet, root: Path) -> Path:
    """Return the folder of a set's original files."""
    return root / "originals" / (row.family or row.name)


def _check_against_table(row: DataSet, sources: Mapping[str, Source], folder: Path) -> None:
    sizes = row.sizes if "train" in find_splits(folder) else {"train800": 800, "val200": 200}
    for name, source in sources.items():
        stored = sum(split.index.num_samples for split in split_sources(source))  # excluded images count
        wanted = sizes.get(name)
        if len(source.class_names) != row.num_classes or (wanted is not None and stored != wanted):
            raise DataError(
                f"{folder / name}: {stored:,} images of {len(source.class_names):,} classes, "
                f"{row.name} has {wanted or '?':,} of {row.num_classes:,}; if it is another data set give it with --data "
                f"{folder}"
            )
