"""Oxford Flowers: 102 flowers of Britain."""

from pathlib import Path

import numpy as np

from vitctl.data.datasets.readers.files import check_labels, class_list, file_items, load_mat, need
from vitctl.data.writer.items import Originals
from vitctl.errors import DataError

ARCHIVE = (
    "102flowers.tgz, imagelabels.mat and setid.mat from https://www.robots.ox.ac.uk/~vgg/data/flowers/102"
)
CLASS_NAMES = class_list("flowers102")
VARIABLES = {"train": "trnid", "validation": "valid", "test": "tstid"}


def read(root: Path) -> dict[str, Originals]:
    """The splits as published: `trnid` trains, although some papers swap it with the larger `tstid`.

    Args:
        root: holds `jpg/image_00001.jpg`, `imagelabels.mat` and `setid.mat`.

    Raises:
        DataError: files are missing or are not what their names say.
    """
    images = need(root, "jpg", archive=ARCHIVE)
    path = need(root, "imagelabels.mat", archive=ARCHIVE)
    labels = check_labels(load_mat(path, "labels")[0].astype(np.int64) - 1, len(CLASS_NAMES), path)
    path = need(root, "setid.mat", archive=ARCHIVE)
    sets = dict(zip(VARIABLES, load_mat(path, *VARIABLES.values()), strict=True))
    return {
        split: _split(images, np.atleast_1d(ids).astype(np.int64), labels, path)
        for split, ids in sets.items()
    }


def _split(images: Path, ids: np.ndarray, labels: np.ndarray, path: Path) -> Originals:
    if ids.size and not 1 <= ids.min() <= ids.max() <= len(labels):
        raise DataError(
            f"{path}: image numbers run from {ids.min()} to {ids.max()}, should be 1 to {len(labels)}"
        )
    names = [f"image_{number:05d}.jpg" for number in ids]
    return Originals(file_items(images, names, labels[ids - 1].tolist()), CLASS_NAMES, "Oxford Flowers 102")
