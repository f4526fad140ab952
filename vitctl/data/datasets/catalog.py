"""Look up data sets: known ones by name, original files by their format, shards by name or location."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from vitctl.data.datasets.known_sets import DATA_SETS, DataSet
from vitctl.data.datasets.readers.arrays import read_pairs
from vitctl.data.datasets.readers.class_folder import (
    is_class_tar,
    read_class_folder,
    read_class_tar,
    sort_files,
    tables_in,
)
from vitctl.data.datasets.readers.imagenet import is_imagenet, read_imagenet
from vitctl.data.datasets.readers.original_files import as_given, read_archive, unpacked
from vitctl.data.datasets.readers.table import (
    FOLDERS,
    lists_any,
    lists_images,
    names_an_image,
    plain_folder,
    read_parquet,
    read_split_tables,
    read_table,
    say_once,
)
from vitctl.data.datasets.vtab import (
    in_vtab1k,
)
from vitctl.data.shards.index import find_splits
from vitctl.data.source.locate import check_one_kind, locate_splits, no_index, tars, with_split
from vitctl.data.source.splits import ROLES, TABLES, resolve, select
from vitctl.data.source.stores import ShardSource, SyntheticSource, open_index
from vitctl.data.source.views import Source, split_sources
from vitctl.data.writer.intake import Item, OriginalImages, Originals
from vitctl.data.writer.shard_writer import write_originals
from vitctl.errors import DataError, explaining
from vitctl.system.files import leads_out, parsing
from vitctl.system.pool import default_workers
from vitctl.system.text import did_you_mean, nearest, one_line, typed_command

_ENOUGH_FOR_WORKERS = 2_000  # images; fewer are written sooner than processes have started


def find_data_set(name: str) -> DataSet:
    """Return the data set with a name or alias. Raises DataError with the nearest names if there is none."""
    by_name = {alias: row for row in DATA_SETS.values() for alias in (row.name, *row.aliases)}
    if name.lower() in by_name:
        return by_name[name.lower()]
    starts = [row for row in DATA_SETS if row.startswith(name.lower())] if name else []
    close = nearest(name.lower(), by_name)
    near = starts[:3] or list(dict.fromkeys(by_name[alias].name for alias in close))
    hint = f"{did_you_mean(near)} " if near else ""
    raise DataError(
        f"no data set is called '{name}'",
        fix=f"{hint}known: {', '.join(DATA_SETS)}; for your own images use --data FOLDER",
    )


def known_size(dataset: str, split: str) -> tuple[int, int] | None:
    """Return (images of a split expression, classes) for planning; None if they depend on the data."""
    row = find_data_set(dataset)
    try:
        return sum(part.stop - part.start for part in resolve(split, row.sizes)), row.num_classes
    except DataError:
        return None


def read_originals(name: str, root: Path, *, allow_partial: bool = False) -> dict[str, Originals]:
    """Open the original files of a known data set; `allow_partial` accepts splits that lack images."""
    row = find_data_set(name)
    with parsing(f"{root}: {row.name}", DataError):
        splits = row.open(root)
    wrong = [
        f"{split} has {len(originals.items):,} images, should have {row.sizes[split]:,}"
        for split, originals in splits.items()
        if len(originals.items) != row.sizes[split]
    ]
    if wrong and not allow_partial:
        raise DataError(root, f"{row.name} is incomplete: {'; '.join(wrong)}")
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
    group_by: str = "",
    counted_only: bool = False,
    columns: str = "",
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
        path: what --data takes: shards, see `locate_splits`, or photographs, see `open_originals`, which are
            read where they are; takes precedence over `dataset`.
        dataset: a known name, looked for as `root/name`.
        root: folder of known data sets.
        scratch: where sets that come with vitctl are written if `root` has none.
        cache_bytes: size limit of the cache of remote shards; 0 reads single images.
        whole: refuse splits of a known set that lack some of its images.
        group_by: keep images that belong together on one side of a split, see `group_names`.
        counted_only: see `select`.
        columns: names those of a table, `image=FILE,label=CLASS`, or the label of samples in shards without
            an index, `label=caption`, where they are not recognised.

    Returns:
        the samples, numbered from 0: `len`, `class_names`, `labels`, `key` and `read`. They can be pickled
            for other processes.

    Raises:
        DataError: one line that says what is missing and how to get it.
    """
    path = str(path)
    if is_photographs(path):
        return select(split, original_splits(path, columns), path, group_by)
    folder = path or str(_folder(split, dataset, root, scratch))
    splits = locate_splits(folder, split, makes_index=bool(path), columns=columns)
    if path and not splits:
        raise no_index(path, split)
    if dataset and not path and "train800" in splits:
        split = in_vtab1k(split, find_data_set(dataset).name)
    try:
        sources = {name: place.open(cache_bytes) for name, place in splits.items() if name in split}
        chosen = select(split, sources, folder, group_by, counted_only=counted_only)
    except DataError as error:
        if any(name in split for name in splits):
            raise
        raise DataError(folder, f"has no split '{split}'; found: {', '.join(splits) or 'none'}") from error
    if dataset and not path and whole:
        _check_against_table(find_data_set(dataset), sources, Path(folder))
    return chosen


def write_data_set(row: DataSet, out: Path) -> None:
    """Write the splits of a set that comes with vitctl. Finished splits of a killed process are kept."""
    assert row.make is not None
    workers = default_workers() if sum(row.sizes.values()) >= _ENOUGH_FOR_WORKERS else 0
    if not find_splits(out).keys() >= row.sizes.keys():
        for split in row.sizes:
            write_originals(row.make(split), out, split, workers=workers)


def synthetic(num_images: int, *, dataset: str, image_size: int) -> Source:
    """Return generated noise images with as many classes as a known data set; 1,000 without a name."""
    return SyntheticSource(num_images, find_data_set(dataset).num_classes if dataset else 1000, image_size)


def _folder(split: str, dataset: str, root: str, scratch: Path | None) -> Path:
    if not dataset:
        raise no_data()
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
        without = ". --dry-run and --synthetic need no data" * command.startswith("vitctl pretrain")
        raise DataError(
            f"{message} Other images", f"`vitctl data shards PHOTOS SHARDS`, then {again}{without}"
        )
    return folder


def no_data() -> DataError:
    return DataError(
        "no data was given", fix="use --data FOLDER (shards made by `vitctl data shards`) or --dataset NAME"
    )


def missing_shards(row: DataSet, root: str, split: str) -> str:
    """Return a message on how to make a known data set's shards, if `root` lacks them; "" otherwise."""
    folder = Path(root) / row.name
    if find_splits(folder):
        return ""
    obtain = row.obtain.replace("ROOT", root).replace("NAME", row.name)
    if "data prepare" in obtain:
        obtain += f" It downloads what it may; files that you have go into {originals_of(row, Path(root))}/."
    wanted = f"expected shards with split '{split}' and {row.num_classes:,} classes in {folder}"
    return f"{row.name}: {wanted}, found none. {obtain}"


def originals_of(row: DataSet, root: Path) -> Path:
    return root / "originals" / (row.family or row.name)


def _check_against_table(row: DataSet, sources: Mapping[str, Source], folder: Path) -> None:
    sizes = row.sizes if "train" in find_splits(folder) else {"train800": 800, "val200": 200}
    for name, source in sources.items():
        stored = sum(split.index.num_samples for split in split_sources(source))  # excluded images count
        wanted = sizes.get(name)
        if len(source.class_names) != row.num_classes or (wanted is not None and stored != wanted):
            raise DataError(
                folder / name,
                f"{stored:,} images of {len(source.class_names):,} classes, {row.name} has "
                f"{wanted or '?':,} of {row.num_classes:,}",
                f"if it is another data set give it with --data {folder}",
            )


_PACKED = (".zip", ".gz", ".tgz", ".bz2", ".xz", ".txz")
# Readers of original files by suffix. To support another format, add a row here, and a function from its path
# and --columns to its splits in `readers/`.
FILES: dict[str, Callable[[Path, str], dict[str, Originals]]] = {
    ".tar": lambda path, columns: _open_tar(path, columns),
    **dict.fromkeys(TABLES, read_table),
    **dict.fromkeys((".npz", ".npy"), lambda path, columns: read_pairs(_without(columns, path))),
    ".parquet": lambda path, columns: read_parquet([path], columns),
    **dict.fromkeys(_PACKED, lambda path, columns: _open_packed(path, columns)),
}
_KNOWN = "known:"


def open_originals(source: str, *, root: Path | None = None, columns: str = "") -> dict[str, Originals]:
    """Open the original files of a data set, to be written by `write_originals`.

    Args:
        source: a folder or a plain `.tar` of class folders or of a tar per class, a `.csv` or `.tsv` table,
            `known:NAME` (a set of the catalog, from its original files below `root`), a folder with
            ImageNet's archives or Kaggle's tree, a `.parquet` file or a folder of them, or one of shards.
        root: folder of the files of `known:` (default NAME).
        columns: see `open_split`.

    Raises:
        DataError: the source is none of these, or its reader refuses it.
    """
    path = _in_archive(Path(source))
    with _naming_archives(), parsing(source, DataError):
        if source.startswith(_KNOWN):
            name = source.removeprefix(_KNOWN)
            return read_originals(name, root or Path(name))
        if path.is_dir():
            return _open_folder(path, columns)
        if not path.is_file():
            raise DataError(source, "no such file or folder", did_you_mean(with_split(source)[:1]))
        read = FILES.get(path.suffix.lower())
        if read is None:
            raise DataError(
                source,
                "should be class folders, an archive of them, a table (.csv, .jsonl, .parquet) or arrays",
                "unpack other archives first",
            )
        return read(path, columns)


def is_photographs(path: str) -> bool:
    """Return whether a path has images that are no shards: a local folder with class folders or with a table,
    a table, or an archive of one of these.
    """
    place = _in_archive(Path(path))
    if path and place.is_file():
        suffix = place.suffix.lower()
        return suffix in FILES and (suffix != ".tar" or is_class_tar(place))
    if not path or not place.is_dir() or find_splits(place) or next(tars(place), None):
        return False
    tables = (*TABLES, ".parquet")
    return any(
        (one.is_dir() and one.name[0] != ".") or one.suffix.lower() in tables for one in place.iterdir()
    )


def _in_archive(path: Path) -> Path:
    """Return the unpacked file or folder for a path such as `photos.zip/train.csv`; another as it is."""
    for above in path.parents if not path.exists() else ():
        if above.is_file() and above.suffix.lower() in (".tar", *_PACKED):
            return unpacked(above) / path.relative_to(above)
    return path


def original_splits(path: str, columns: str = "") -> dict[str, Source]:
    """Open photographs as the splits that their shards will have, in another order; nothing is decoded.

    Raises DataError.
    """
    opened = open_originals(path, columns=columns)
    return {name: OriginalImages(name, originals) for name, originals in opened.items()}


@contextmanager
def _naming_archives() -> Iterator[None]:
    """Let errors name archives in place of the folders that they were unpacked to."""
    try:
        yield
    except DataError as error:
        said = [as_given(text) for text in (error.where, error.what, error.fix)]
        raise type(error)(*said) from None


def _without(columns: str, path: Path) -> Path:
    if columns:
        raise DataError(f"--columns {columns}", f"{path} has no table", "leave it out")
    return path


def _open_tar(path: Path, columns: str) -> dict[str, Originals]:
    """Open a plain tar. It stays packed, unless a table in it lists its images."""
    names = [name for name, *_ in read_archive(path).files]
    return _open_packed(path, columns) if tables_in(names) else read_class_tar(_without(columns, path))


@_naming_archives()
def listed_files(path: Path, columns: str = "") -> list[Path]:
    """Return the table at or in a path, followed by the images that it lists; empty without a table."""
    path = _in_archive(path)
    table = path if lists_images(path, columns) else table_of(path, columns) if path.is_dir() else None
    if table is None:
        return []
    items = [item for originals in read_table(table, columns).values() for item in originals.items]
    return [table, *(table.parent / item.key for item in items)]


def _open_packed(path: Path, columns: str) -> dict[str, Originals]:
    """Open an archive like a folder of the same content, and name it in place of that."""
    splits = _open_folder(unpacked(path), columns)
    for item in (item for originals in splits.values() for item in originals.items if leads_out(item.key)):
        raise DataError(path, f"its table lists {one_line(item.key)}, which is outside the archive")
    return {
        split: replace(
            originals,
            source=str(path),
            doubts=tuple(one._replace(text=as_given(one.text)) for one in originals.doubts),
        )
        for split, originals in splits.items()
    }


def _open_folder(folder: Path, columns: str) -> dict[str, Originals]:
    if is_imagenet(folder):
        return read_imagenet(folder)
    if splits := find_splits(folder):
        return {split: _read_shards(place) for split, place in splits.items()}
    if tables := [*folder.glob("*.parquet"), *folder.glob("data/*.parquet")]:
        if images := sort_files(folder)[0]:
            raise DataError(
                folder,
                f"holds {tables[0].name} and images such as {one_line(images[0])}",
                "give the table, or move it away",
            )
        return read_parquet(tables, columns)
    if tar := next(tars(folder), None):
        check_one_kind(folder, tar)
    if tar and not sort_files(folder)[0]:
        return {split: _read_shards(place.folder) for split, place in locate_splits(str(folder), "").items()}
    return read_listed(folder, columns) or read_class_folder(_without(columns, folder))


def read_listed(folder: Path, columns: str = "") -> dict[str, Originals]:
    """Read a folder of images with a table, or with one in the folder of each split; {} where there is none.

    Raises DataError.
    """
    if table := table_of(folder, columns):
        return read_table(table, columns)
    inside = {
        one.name: table
        for one in sorted(folder.iterdir())
        if one.name.lower() in ROLES and one.is_dir()
        if (table := table_of(one, columns))
    }
    return read_split_tables(inside, columns) if inside else {}


def table_of(folder: Path, columns: str = "") -> Path | None:
    """Return the table that lists a folder's images; None if none. Raises DataError if it is ambiguous."""
    held = sorted(folder.iterdir())
    listed = [one for one in held if one.suffix.lower() in TABLES]
    tables = [one for one in listed if lists_images(one, columns)]
    known = (*ROLES, *FOLDERS, *(plain_folder(one.stem) for one in listed))
    classes = [
        one.name
        for one in held
        if one.is_dir() and plain_folder(one.name) not in known and one.name[0] != "."
    ]
    if (
        not tables
        and not classes
        and len(listed) == 1
        and not any(one.is_dir() for one in folder.glob("*/*"))
    ):
        return listed[0]  # whose reader says what is wrong with it
    if not tables and classes and (odd := [one for one in listed if names_an_image(one)]):
        raise DataError(
            odd[0],
            "its columns are not those of images, and it is beside class folders",
            "move it away to use the folders, or name its columns with --columns image=COLUMN,label=COLUMN",
        )
    if not tables:
        return None
    if len(tables) > 1:
        of_images = [one for one in tables if lists_any(one, columns)]
        if len(of_images) == 1:
            others = " and ".join(one.name for one in tables if one not in of_images)
            say_once(f"{of_images[0]}: taken; {others} lists none of the images beside it")
            return of_images[0]
        names = " and ".join(one.name for one in tables)
        likely = [one for one in tables if not one.name.lower().startswith(("sample", "submission", "test"))]
        likely.sort(key=lambda one: "train" not in one.name.lower())
        fix = f"give one of them{f', such as {likely[0]}' if likely else ''}"
        raise DataError(folder, f"holds the tables {names}", fix)
    if len(classes) > 1 and not columns:
        text = f"holds the table {tables[0].name} and folders such as {one_line(min(classes))}"
        raise DataError(
            folder, text, f"give {tables[0]}, or leave the table out to use the folders as classes"
        )
    return tables[0]


def _read_shards(place: Path) -> Originals:
    """Read a split of shards to write it again; images, keys, labels and class names stay unchanged."""
    source = ShardSource(open_index(place))
    sizes, labels = source.index.rows["size"].tolist(), source.labels().tolist()
    given = [tuple(one for one in own if one >= 0) if isinstance(own, list) else own for own in labels]
    items = [
        Item(key, label, partial(source.read, sample), size)
        for sample, (key, size, label) in enumerate(zip(source.keys(), sizes, given, strict=True))
    ]
    return Originals(items, source.class_names, source.index.source)
