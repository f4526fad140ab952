"""UC Merced Land Use: aerial pictures of 21 uses of land, 100 of each."""

from pathlib import Path

from vitctl.data.datasets.readers.files import class_list, need
from vitctl.data.datasets.readers.fixed_classes import class_items, plain
from vitctl.data.writer.items import Originals

ARCHIVE = "UCMerced_LandUse.zip from http://weegee.vision.ucmerced.edu/datasets/landuse.html"
CLASS_NAMES = class_list("uc_merced")


def read(root: Path) -> dict[str, Originals]:
    """All images as one split, `train`.

    Args:
        root: holds `UCMerced_LandUse/Images/<class>/*.tif`.

    Raises:
        DataError: files or classes are missing.
    """
    folder = need(root, "UCMerced_LandUse/Images", "Images", archive=ARCHIVE)
    return {
        "train": Originals(
            class_items(folder, CLASS_NAMES, plain, suffixes=(".tif",)), CLASS_NAMES, "UC Merced"
        )
    }
