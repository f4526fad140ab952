"""ObjectNet: household objects in odd places, 113 of its classes being also ImageNet's. For testing only."""

import io
import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vitctl.data.datasets.readers.files import class_list, need, read_bytes, read_lines
from vitctl.data.datasets.readers.fixed_classes import image_names
from vitctl.data.datasets.readers.png import encode_png
from vitctl.data.writer.items import Item, Originals
from vitctl.errors import DataError
from vitctl.system.files import parse_json
from vitctl.system.parsing import parsing

ARCHIVE = "objectnet-1.0.zip from https://objectnet.dev (its password stands there; it must not be used for training)"
NUM_CLASSES = 113
_BORDER = 2  # the frame of one red pixel, and its smear
_CLASS_NAME = re.compile(r".* \((n\d{8}(?: n\d{8})*)\)")


def read(root: Path) -> dict[str, Originals]:
    """The images of the classes shared with ImageNet as `test`, without their red frame.

    A class is named after its object and the ImageNet classes that count as right: `Alarm clock (n02708093
    n03196217)`.

    Args:
        root: holds `objectnet-1.0/images/<folder>/*.png` and `objectnet-1.0/mappings/`.

    Raises:
        DataError: files are missing, or the mappings are not ObjectNet's.
    """
    folder = need(root, "objectnet-1.0", archive=ARCHIVE)
    folders, classes = _classes(need(folder, "mappings", archive=ARCHIVE))
    items = []
    for label, name in enumerate(folders):
        place = need(folder, f"images/{name}", archive=ARCHIVE)
        items += [
            Item(f"{name}/{file}", label, partial(_unframed, place / file))
            for file in image_names(place, (".png",))
        ]
    return {"test": Originals(items, classes, "ObjectNet, the classes of ImageNet, red frame cut off")}


def imagenet_classes(class_name: str) -> list[str]:
    """The wnids that are right for a class as `read` names it; none for another data set's."""
    match = _CLASS_NAME.fullmatch(class_name)
    return match[1].split() if match else []


def _classes(mappings: Path) -> tuple[list[str], tuple[str, ...]]:
    """Folders and class names, in order of the folders."""
    folder_names = _json(mappings / "folder_to_objectnet_label.json")
    to_imagenet = _json(mappings / "objectnet_to_imagenet_1k.json")
    old_numbers = _json(mappings / "pytorch_to_imagenet_2012_id.json")
    names = read_lines(mappings / "imagenet_to_label_2012_v2")
    wnids = class_list("imagenet")
    try:
        by_name = {names[old]: wnids[int(new)] for new, old in old_numbers.items()}
        rows = {
            folder: f"{name} ({' '.join(sorted(by_name[imagenet] for imagenet in to_imagenet[name].split('; ')))})"
            for folder, name in sorted(folder_names.items())
            if name in to_imagenet
        }
    except (KeyError, IndexError, ValueError, TypeError, AttributeError) as error:
        raise DataError(
            f"{mappings}: the mappings do not fit together ({type(error).__name__}: {error})"
        ) from None
    if len(rows) != NUM_CLASSES:
        raise DataError(f"{mappings}: {len(rows)} classes are shared with ImageNet, should be {NUM_CLASSES}")
    return list(rows), tuple(rows.values())


def _json(path: Path) -> dict[str, Any]:
    held = parse_json(read_bytes(path), path, error=DataError)
    if not isinstance(held, dict):
        raise DataError(f"{path}: should be a JSON table")
    return held


def _unframed(path: Path) -> bytes:
    with parsing(path, DataError), Image.open(io.BytesIO(read_bytes(path))) as image:
        pixels = np.asarray(image.convert("RGB"))
    return encode_png(np.ascontiguousarray(pixels[_BORDER:-_BORDER, _BORDER:-_BORDER]))
