"""Detects the format of original files, and opens them with the matching reader."""

from collections.abc import Callable
from pathlib import Path

from vitctl.data.writer.items import Originals
from vitctl.errors import DataError
from vitctl.system.parsing import parsing

_TORCHVISION, _KNOWN = "torchvision:", "known:"


def open_originals(source: str, *, download: bool = False, root: Path | None = None) -> dict[str, Originals]:
    """Open the original files of a data set, to be written by `write_split`.

    Args:
        source: a folder or a plain `.tar` of class folders or of a tar per class, a `.csv` or `.tsv` table,
            `torchvision:NAME`, `known:NAME` (a set of the catalog, from its original files below `root`), a
            folder with ImageNet's archives or Kaggle's tree, a `.parquet` file or a folder of them, or a
            folder of shards.
        download: `torchvision:` only: fetch what is missing.
        root: folder of the files of `torchvision:` (`torchvision_data` when not given) and `known:`.

    Returns:
        split name to its images.

    Raises:
        DataError: the source is of none of these kinds, or its reader found it wrong.
    """
    with parsing(source, DataError):
        return _open(source, download=download, root=root)


def _open(source: str, *, download: bool, root: Path | None) -> dict[str, Originals]:
    from vitctl.data.datasets.catalog import read_originals
    from vitctl.data.datasets.readers.class_folder import read_class_tar
    from vitctl.data.datasets.readers.parquet import read_parquet
    from vitctl.data.datasets.readers.table import read_table
    from vitctl.data.datasets.readers.torchvision_sets import read_torchvision

    path = Path(source)
    if source.startswith(_TORCHVISION):
        return read_torchvision(
            source.removeprefix(_TORCHVISION), root or Path("torchvision_data"), download=download
        )
    if source.startswith(_KNOWN):
        return read_originals(source.removeprefix(_KNOWN), root or Path(source.removeprefix(_KNOWN)))
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
    from vitctl.data.datasets.readers import imagenet
    from vitctl.data.datasets.readers.class_folder import read_class_folder
    from vitctl.data.datasets.readers.parquet import read_parquet
    from vitctl.data.datasets.readers.shard_folder import read_shard_folder
    from vitctl.data.shards.index import find_splits

    if imagenet.is_imagenet(folder):
        return imagenet.read(folder)
    if find_splits(folder):
        return read_shard_folder(folder)
    if tables := [*folder.glob("*.parquet"), *folder.glob("data/*.parquet")]:
        return read_parquet(tables)
    return read_class_folder(folder)
