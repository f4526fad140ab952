"""Colorectal histology (Kather, 2016): tiles of 8 tissues, 625 of each."""

from pathlib import Path

from vitctl.data.datasets.readers.files import need
from vitctl.data.datasets.readers.fixed_classes import class_items
from vitctl.data.writer.items import Originals

ARCHIVE = "Kather_texture_2016_image_tiles_5000.zip from https://zenodo.org/records/53169"
CLASS_NAMES = ("tumor", "stroma", "complex", "lympho", "debris", "mucosa", "adipose", "empty")
FOLDERS = tuple(f"{number:02d}_{name.upper()}" for number, name in enumerate(CLASS_NAMES, 1))


def read(root: Path) -> dict[str, Originals]:
    """All tiles as one split, `train`; keys are `tumor/<file>`.

    Args:
        root: holds `Kather_texture_2016_image_tiles_5000/01_TUMOR/*.tif` and its seven neighbours.

    Raises:
        DataError: files or classes are missing.
    """
    folder = need(root, "Kather_texture_2016_image_tiles_5000", archive=ARCHIVE)
    return {
        "train": Originals(class_items(folder, FOLDERS, _key, suffixes=(".tif",)), CLASS_NAMES, "Kather 2016")
    }


def _key(folder: str, name: str) -> str:
    return f"{folder[3:].lower()}/{name}"
