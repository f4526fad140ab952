"""Detects the format of original files, and opens them with the matching reader."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from vitctl.data.datasets.catalog import find_data_set, read_originals
from vitctl.data.datasets.readers.class_folder import read_class_folder, read_class_tar
from vitctl.data.datasets.readers.imagenet import is_imagenet, read_imagenet
from vitctl.data.datasets.readers.table import read_parquet, read_table
from vitctl.data.shards.index import find_splits
from vitctl.data.source.shard_source import ShardSource, open_index
from vitctl.data.writer.intake import Item, Originals
from vitctl.errors import DataError
from vitctl.system.files import parsing

_TORCHVISION, _KNOWN = "torchvision:", "known:"
_Arguments = tuple[dict[str, object], ...]
# Sets of torchvision: the known set, the folder that torchvision keeps it in, and the arguments for its splits.
_TRAIN_TEST: _Arguments = ({"train": True}, {"train": False})
_SPLITS: _Arguments = ({"split": "train"}, {"split": "val"}, {"split": "test"})
TORCHVISION_SETS: dict[str, tuple[str, str, _Arguments]] = {
    "CIFAR10": ("cifar10", "", _TRAIN_TEST),
    "CIFAR100": ("cifar100", "", _TRAIN_TEST),
    "SVHN": ("svhn", "", ({"split": "train"}, {"split": "test"})),
    "OxfordIIITPet": ("pets", "oxford-iiit-pet", ({"split": "trainval"}, {"split": "test"})),
    "Flowers102": ("flowers102", "flowers-102", _SPLITS),
    "DTD": ("dtd", "dtd", _SPLITS),
    "EuroSAT": ("eurosat", "eurosat", ({},)),
}


def open_originals(source: str, *, download: bool = False, root: Path | None = None) -> dict[str, Originals]:
    """Open the original files of a data set, to be written by `write_originals`.

    Args:
        source: a folder or a plain `.tar` of class folders or of a tar per class, a `.csv` or `.tsv` table,
            `torchvision:NAME`, `known:NAME` (a set of the catalog, from its original files below `root`), a
            folder with ImageNet's archives or Kaggle's tree, a `.parquet` file or a folder of them, or a
            folder of shards.
        download: `torchvision:` only: download what is missing.
        root: folder of the files of `torchvision:` (`torchvision_data` if not given) and `known:`.

    Returns:
        split name to its images.

    Raises:
        DataError: the source is none of these, or its reader refuses it.
    """
    with parsing(source, DataError):
        return _open(source, download=download, root=root)


def _open(source: str, *, download: bool, root: Path | None) -> dict[str, Originals]:
    path = Path(source)
    if source.startswith(_TORCHVISION):
        name = source.removeprefix(_TORCHVISION)
        return read_torchvision(name, root or Path("torchvision_data"), download=download)
    if source.startswith(_KNOWN):
        name = source.removeprefix(_KNOWN)
        return read_originals(name, root or Path(name))
    if path.is_dir():
        return _open_folder(path)
    if not path.is_file():
        raise DataError(f"{source}: no such file or folder")
    readers: dict[str, Callable[[Path], dict[str, Originals]]] = {
        ".tar": read_class_tar,
        ".csv": read_table,
        ".tsv": read_table,
        ".parquet": lambda path: read_parquet([path]),
    }
    if path.suffix.lower() not in readers:
        raise DataError(
            f"{source}: should be a folder of class folders, a .tar of them, a .csv or .tsv table, or "
            f".parquet"
        )
    return readers[path.suffix.lower()](path)


def _open_folder(folder: Path) -> dict[str, Originals]:
    if is_imagenet(folder):
        return read_imagenet(folder)
    if splits := find_splits(folder):
        return {split: _read_shards(place) for split, place in splits.items()}
    if tables := [*folder.glob("*.parquet"), *folder.glob("data/*.parquet")]:
        return read_parquet(tables)
    return read_class_folder(folder)


def _read_shards(place: Path) -> Originals:
    """Read a split of shards, to be written again; images, keys, labels and class names stay as they are."""
    source = ShardSource(open_index(place))
    items = []
    for sample, (size, label) in enumerate(
        zip(source.index.rows["size"].tolist(), source.labels().tolist(), strict=True)
    ):
        given = tuple(one for one in label if one >= 0) if isinstance(label, list) else label
        items.append(Item(source.key(sample), given, partial(source.read, sample), size))
    return Originals(items, source.class_names, source.index.source)


def read_torchvision(name: str, root: Path, *, download: bool) -> dict[str, Originals]:
    """Read the splits of a torchvision data set: torchvision checks its files, the known set's reader reads them.

    Args:
        name: such as CIFAR10; see `TORCHVISION_SETS`.
        root: where torchvision keeps, or shall put, its files.
        download: download what is missing.

    Raises:
        DataError: the set is unknown, or its files are missing or damaged.
    """
    import torchvision.datasets

    if name not in TORCHVISION_SETS:
        raise DataError(f"torchvision:{name} is unknown, should be one of: {', '.join(TORCHVISION_SETS)}")
    known, folder, arguments = TORCHVISION_SETS[name]
    try:
        for given in arguments:
            opened = getattr(torchvision.datasets, name)(root, download=download, **given)
        splits = find_data_set(known).open(root / folder)
    except Exception as error:  # torchvision raises whatever damaged files make it trip over
        reason = " ".join(str(error).split())
        raise DataError(
            f"torchvision:{name}: cannot be read from {root} ({reason}); or try --download"
        ) from None
    # torchvision spells the breeds of the pets differently.
    spelled, source = tuple(getattr(opened, "classes", ())), f"torchvision {name}"
    return {
        split: replace(
            originals,
            class_names=spelled if len(spelled) == len(originals.class_names) else originals.class_names,
            source=source,
        )
        for split, originals in splits.items()
    }
