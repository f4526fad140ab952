"""ImageNet ReaL: new labels for the validation images, with every class that is visible in them, or none."""

import re
from collections.abc import Iterable
from pathlib import Path

from vitctl.errors import DataError
from vitctl.system.files import read_json

URL = "https://raw.githubusercontent.com/google-research/reassessed-imagenet/master/real.json"
SHA256 = "d83e9bff374c631aae8439eb064c7019acc56e1b3bc3f56b8380c2a710b0220b"
NUM_IMAGES, NUM_CLASSES = 50_000, 1000
_NUMBER = re.compile(r"ILSVRC2012_val_(\d{8})(?!\d)")
_MAX_BYTES = 16 * 2**20


def read_real(path: Path) -> list[list[int]]:
    """The label sets of validation images 1, 2, ... 50,000; 3,163 of them are empty and are not scored.

    Raises:
        DataError: the file is not real.json.
    """
    if not path.is_file():
        raise DataError(
            f"{path}: ReaL labels are missing; get them with `vitctl data prepare imagenet_real`, or "
            f"from {URL}"
        )
    try:
        sets = read_json(path, _MAX_BYTES, error=DataError)
    except DataError:
        sets = None
    if not isinstance(sets, list) or len(sets) != NUM_IMAGES or not all(map(_is_set, sets)):
        raise DataError(
            f"{path}: should be a list of {NUM_IMAGES:,} lists of class numbers 0 to {NUM_CLASSES - 1}"
        )
    return sets


def label_sets(keys: Iterable[str], sets: list[list[int]]) -> list[list[int]]:
    """The label set of each image, found by the number in its name, in any order of images.

    Args:
        keys: such as `ILSVRC2012_val_00000293.JPEG`, perhaps within a folder.
        sets: as `read_real` gives them.

    Raises:
        DataError: a name has no such number, or two names have the same.
    """
    found: dict[int, str] = {}
    for key in keys:
        match = _NUMBER.search(key)
        if match is None or not 1 <= int(match[1]) <= len(sets):
            raise DataError(
                f"'{key}' is not an ImageNet validation file name (expected ILSVRC2012_val_00000001.JPEG); "
                f"ReaL labels need those names"
            )
        if int(match[1]) in found:
            raise DataError(f"'{key}' and '{found[int(match[1])]}' are the same ImageNet validation image")
        found[int(match[1])] = key
    return [sets[number - 1] for number in found]


def _is_set(labels: object) -> bool:
    return isinstance(labels, list) and all(
        isinstance(label, int) and not isinstance(label, bool) and 0 <= label < NUM_CLASSES
        for label in labels
    )
