"""NWPU-RESISC45: aerial pictures of 45 scenes, 700 of each."""

from pathlib import Path

from vitctl.data.datasets.readers.files import class_list, need
from vitctl.data.datasets.readers.fixed_classes import class_items, doubled
from vitctl.data.writer.items import Originals

ARCHIVE = "NWPU-RESISC45.rar from https://gcheng-nwpu.github.io, unpacked with unrar or 7z"
CLASS_NAMES = class_list("resisc45")


def read(root: Path) -> dict[str, Originals]:
    """All images as one split, `train`.

    Copies on the Hugging Face hub come in splits of their own, which are not those of VTAB.

    Args:
        root: holds `NWPU-RESISC45/<class>/*.jpg`.

    Raises:
        DataError: files or classes are missing.
    """
    folder = need(root, "NWPU-RESISC45", archive=ARCHIVE)
    return {"train": Originals(class_items(folder, CLASS_NAMES, doubled), CLASS_NAMES, "NWPU-RESISC45")}
