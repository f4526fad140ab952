"""What the user names as the source of a data set, and the reader that understands it."""

from pathlib import Path

from vitctl.data.shards import Originals
from vitctl.errors import DataError

_TORCHVISION = "torchvision:"


def open_originals(source: str, *, download: bool = False, root: Path | None = None) -> dict[str, Originals]:
    """Open the original files of a data set, to be written by `write_split`.

    Args:
        source: a folder or a plain `.tar` of class folders, a `.csv` or `.tsv` table, or `torchvision:NAME`.
        download: `torchvision:` only: fetch what is missing.
        root: `torchvision:` only: folder of its files; `torchvision_data` when not given.

    Returns:
        split name to its images.

    Raises:
        DataError: the source is of none of these kinds, or its reader found it wrong.
    """
    from vitctl.data.datasets.class_folder import read_class_folder, read_class_tar
    from vitctl.data.datasets.table import read_table
    from vitctl.data.datasets.torchvision_sets import read_torchvision

    path = Path(source)
    if source.startswith(_TORCHVISION):
        return read_torchvision(source.removeprefix(_TORCHVISION), root or Path("torchvision_data"), download=download)
    if path.is_dir():
        return read_class_folder(path)
    if not path.is_file():
        raise DataError(f"{source}: no such file or folder")
    readers = {".tar": read_class_tar, ".csv": read_table, ".tsv": read_table}
    if path.suffix.lower() not in readers:
        raise DataError(f"{source}: should be a folder of class folders, a .tar of them, a .csv or .tsv table")
    return readers[path.suffix.lower()](path)
