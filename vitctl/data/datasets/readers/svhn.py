"""Street View House Numbers, cropped digits."""

from pathlib import Path

from vitctl.data.datasets.readers.files import check_labels, load_mat, need
from vitctl.data.datasets.readers.rows import pixel_rows
from vitctl.data.writer.items import Originals
from vitctl.errors import DataError

ARCHIVE = "train_32x32.mat and test_32x32.mat from http://ufldl.stanford.edu/housenumbers"
CLASS_NAMES = tuple("0123456789")


def read(root: Path) -> dict[str, Originals]:
    """Keys are row numbers; the digit 0 is class 10 in the files and class 0 here.

    Args:
        root: holds the two `.mat` files.

    Raises:
        DataError: files are missing or are not what their names say.
    """
    return {split: _split(need(root, f"{split}_32x32.mat", archive=ARCHIVE)) for split in ("train", "test")}


def _split(path: Path) -> Originals:
    pixels, digits = load_mat(path, "X", "y")
    if (
        pixels.ndim != 4
        or pixels.shape[:3] != (32, 32, 3)
        or pixels.shape[3] != digits.size
        or pixels.dtype != "uint8"
    ):
        raise DataError(
            f"{path}: X is {pixels.dtype} {pixels.shape} for {digits.size} labels, should be uint8 (32, "
            f"32, 3, N)"
        )
    labels = check_labels(digits.astype(int), 11, path) % 10
    return Originals(pixel_rows(pixels.transpose(3, 0, 1, 2), labels), CLASS_NAMES, "SVHN, cropped digits")
