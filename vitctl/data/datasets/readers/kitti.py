"""KITTI: street scenes, asked how near the nearest vehicle is."""

from pathlib import Path

import numpy as np

from vitctl.data.datasets.readers.files import file_items, need, read_fields, read_lines
from vitctl.data.writer.items import Originals
from vitctl.errors import DataError

ARCHIVE = (
    "data_object_image_2.zip, data_object_label_2.zip and, in devkit_object/, devkit_object.zip "
    "from https://www.cvlibs.net/datasets/kitti/eval_object.php"
)
CLASS_NAMES = ("at most 8 m", "8 to 20 m", "over 20 m", "no vehicle")
_VEHICLES = ("Car", "Van", "Truck")
_BORDERS = (8.0, 20.0, 999.0)
_NO_VEHICLE = 1000.0


def _drives(**numbers: str) -> frozenset[str]:
    return frozenset(
        f"2011_{day[1:]}_drive_{number}_sync" for day, listed in numbers.items() for number in listed.split()
    )


# Drawn once by the benchmark from the 141 drives; all frames of a drive go to one split.
TEST_DRIVES = _drives(
    _09_26="0001 0011 0070 0087", _09_28="0001 0070 0094 0102 0154 0167 0185 0199 0204", _10_03="0047"
)
VALIDATION_DRIVES = _drives(
    _09_26="0027 0035 0052 0057 0079 0084", _09_28="0016 0021 0043 0138 0143 0146 0162 0165"
)


def read(root: Path) -> dict[str, Originals]:
    """The labelled images, split by the drive they were taken on; keys are `000000.png`.

    Args:
        root: holds `training/image_2`, `training/label_2` and `devkit_object/mapping`.

    Raises:
        DataError: files are missing or malformed.
    """
    images = need(root, "training/image_2", archive=ARCHIVE)
    annotations = need(root, "training/label_2", archive=ARCHIVE)
    splits: dict[str, list[str]] = {"train": [], "validation": [], "test": []}
    for number, drive in enumerate(
        _drive_of_images(need(root, "devkit_object/mapping", "mapping", archive=ARCHIVE))
    ):
        splits[split_of_drive(drive)].append(f"{number:06d}")
    return {
        split: Originals(
            file_items(
                images,
                [f"{name}.png" for name in names],
                [_label(annotations / f"{name}.txt") for name in names],
            ),
            CLASS_NAMES,
            "KITTI, distance of the nearest vehicle",
        )
        for split, names in splits.items()
    }


def split_of_drive(drive: str) -> str:
    """Name of the split that has the frames of a drive such as `2011_09_26_drive_0001_sync`."""
    return "test" if drive in TEST_DRIVES else "validation" if drive in VALIDATION_DRIVES else "train"


def _drive_of_images(mapping: Path) -> list[str]:
    """The drive of image 0, 1, ...: their line numbers, from 1, in a list of date, drive and frame."""
    frames = read_fields(need(mapping, "train_mapping.txt", archive=ARCHIVE), 3)
    path = need(mapping, "train_rand.txt", archive=ARCHIVE)
    try:
        lines = [int(number) for number in "".join(read_lines(path)).split(",")]
    except ValueError:
        raise DataError(f"{path}: should be line numbers with commas between") from None
    if not all(1 <= line <= len(frames) for line in lines):
        raise DataError(f"{path}: line numbers should be 1 to {len(frames)}")
    return [frames[line - 1][1] for line in lines]


def _label(path: Path) -> int:
    try:
        depths = [np.float32(row[13]) for row in read_fields(path, 15) if row[0] in _VEHICLES]
    except ValueError:
        raise DataError(f"{path}: column 14 should be the distance in metres") from None
    return int(np.searchsorted(_BORDERS, min(depths, default=_NO_VEHICLE), side="left"))
