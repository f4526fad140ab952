"""CLEVR: rendered scenes of simple solids, asked how many there are or how near the nearest is."""

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np

from vitctl.data.datasets.readers.files import check_labels, file_items, need, read_bytes
from vitctl.data.writer.items import Originals
from vitctl.errors import DataError
from vitctl.system.parsing import parsing

ARCHIVE = "CLEVR_v1.0.zip from https://cs.stanford.edu/people/jcjohns/clevr"
SPLITS = {"train": "train", "validation": "val"}  # the images of CLEVR's own test split have no scenes
_BORDERS = (8.0, 8.5, 9.0, 9.5, 10.0)
CLASS_NAMES = {
    "count": tuple(f"{count} objects" for count in range(3, 11)),
    "distance": ("at most 8", *(f"{near:g} to {far:g}" for near, far in pairwise(_BORDERS)), "over 10"),
}


def read(root: Path, task: Literal["count", "distance"]) -> dict[str, Originals]:
    """The benchmark tests on `validation`.

    Args:
        root: holds `CLEVR_v1.0/images` and `CLEVR_v1.0/scenes`.
        task: `count` of objects, 3 to 10; or `distance` of the nearest from the camera, in six ranges.

    Raises:
        DataError: files are missing or malformed.
    """
    folder = need(root, "CLEVR_v1.0", archive=ARCHIVE)
    return {split: _split(folder, word, task) for split, word in SPLITS.items()}


def count_label(objects: list[dict[str, Any]]) -> int:
    """Objects less 3."""
    return len(objects) - 3


def distance_label(objects: list[dict[str, Any]]) -> int:
    """The range of the smallest depth; a border belongs to the nearer one."""
    nearest = np.float32(min(thing["pixel_coords"][2] for thing in objects))
    return int(np.searchsorted(_BORDERS, nearest, side="left"))


_LABEL: dict[str, Callable[[list[dict[str, Any]]], int]] = {"count": count_label, "distance": distance_label}


def _split(folder: Path, word: str, task: str) -> Originals:
    path = need(folder, f"scenes/CLEVR_{word}_scenes.json", archive=ARCHIVE)
    with parsing(path, DataError, "not a file of CLEVR scenes"):
        scenes = json.loads(read_bytes(path))["scenes"]
        names = [str(scene["image_filename"]) for scene in scenes]
        labels = np.array([_LABEL[task](scene["objects"]) for scene in scenes])
    checked = check_labels(labels, len(CLASS_NAMES[task]), path)
    items = file_items(folder / "images" / word, names, checked.tolist())
    return Originals(items, CLASS_NAMES[task], f"CLEVR v1.0, {task}")
