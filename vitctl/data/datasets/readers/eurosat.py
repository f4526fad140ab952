"""EuroSAT, RGB: satellite pictures of land in 10 uses."""

from pathlib import Path

from vitctl.data.datasets.readers.files import class_list, need
from vitctl.data.datasets.readers.fixed_classes import class_items, doubled
from vitctl.data.writer.items import Originals

ARCHIVE = "EuroSAT_RGB.zip from https://zenodo.org/records/7711810, or the older EuroSAT.zip"
CLASS_NAMES = class_list("eurosat")


def read(root: Path) -> dict[str, Originals]:
    """All images as one split, `train`.

    Args:
        root: holds `EuroSAT_RGB/<Class>/*.jpg` or `2750/<Class>/*.jpg`.

    Raises:
        DataError: files or classes are missing.
    """
    folder = need(root, "EuroSAT_RGB", "2750", archive=ARCHIVE)
    return {"train": Originals(class_items(folder, CLASS_NAMES, doubled), CLASS_NAMES, "EuroSAT RGB")}
