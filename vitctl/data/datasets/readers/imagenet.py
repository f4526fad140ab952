"""ImageNet (ILSVRC 2012), ImageNet-21k, ImageNet-C and ObjectNet in their usual layouts: folders, tar files.

ImageNet ReaL: new labels for the validation images, with every class that is visible in them, or none.
"""

import io
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from PIL import Image

from vitctl.data.datasets.readers.arrays import encode_png
from vitctl.data.datasets.readers.original_files import (
    ASSETS,
    MissingOriginalsError,
    archive_items,
    class_labels,
    class_list,
    file_items,
    image_names,
    need,
    read_bytes,
    read_lines,
)
from vitctl.data.images.image_types import IMAGE_SUFFIXES
from vitctl.data.writer.intake import Item, Originals
from vitctl.errors import DataError
from vitctl.system.files import leads_out, parse_json, parsing, read_json

_IN_WNID = re.compile(r"n\d{8}/")
Value = TypeVar("Value")
_KAGGLE = "ILSVRC/Data/CLS-LOC"
_PLACES = {
    "train": ("train", f"{_KAGGLE}/train", "ILSVRC2012_img_train.tar"),
    "validation": ("val", "validation", f"{_KAGGLE}/val", "ILSVRC2012_img_val.tar"),
}
_ALL_PLACES = tuple(place for places in _PLACES.values() for place in places)


def is_imagenet(folder: Path) -> bool:
    """Return whether ImageNet's archives, or Kaggle's tree, are in a folder."""
    return any((folder / place).exists() for place in _ALL_PLACES if "ILSVRC" in place)


def read_imagenet(root: Path) -> dict[str, Originals]:
    """Read the available splits. The class number is the rank of its wnid among the 1,000, sorted.

    Keys are file names, as `n01440764_10026.JPEG` and `ILSVRC2012_val_00000001.JPEG`.

    Args:
        root: holds one of `train/<wnid>/`, `ILSVRC/Data/CLS-LOC/train/<wnid>/`, `ILSVRC2012_img_train.tar`,
            or of `val/<wnid>/`, `val/` flat, `ILSVRC/Data/CLS-LOC/val/`, `ILSVRC2012_img_val.tar`, or of
            both. Flat validation images are labelled by their numbers, with the list that comes with vitctl.
    """
    images = {}
    for split, names in _PLACES.items():
        place = next((root / name for name in names if (root / name).exists()), None)
        if place is not None:
            images[split] = _images(place)
    if not images:
        raise MissingOriginalsError(root, f"{', '.join(_ALL_PLACES)}: none is here")
    wnids = class_list("imagenet")
    folders = [{item.key.partition("/")[0] for item in found if "/" in item.key} for found in images.values()]
    most = max(folders, key=len)
    if most and len(most) < len(wnids):
        raise DataError(root, f"{len(most):,} class folders, should be {len(wnids):,}", "unpack it again")
    splits = {}
    for split, found in images.items():
        given = [item.key.rpartition("/")[0] for item in found]
        if not all(given):
            given = by_validation_number((item.key for item in found), validation_wnids())
        splits[split] = _of_wnids(found, given, wnids, root, "ImageNet, ILSVRC 2012")
    return splits


def _images(place: Path) -> list[Item]:
    """Return a split's images without labels, keyed by `<wnid>/<file>` or, if they lie flat, by `<file>`."""
    if place.suffix == ".tar":
        packed = [item for item in archive_items(place) if Path(item.key).suffix.lower() in IMAGE_SUFFIXES]
        return [
            item if _IN_WNID.match(item.key) else replace(item, key=Path(item.key).name) for item in packed
        ]
    folders = sorted(path.name for path in place.iterdir() if path.is_dir() and not path.name.startswith("."))
    names = [f"{folder}/{file}" for folder in folders for file in image_names(place / folder, IMAGE_SUFFIXES)]
    names = names or image_names(place, IMAGE_SUFFIXES)
    return file_items(place, names, [-1] * len(names))


def _of_wnids(
    images: Sequence[Item], given: Sequence[str], wnids: tuple[str, ...], root: Path, source: str
) -> Originals:
    """Return images labelled by their given wnids, keyed by file name."""
    labels = class_labels(given, wnids, root)
    items = [
        replace(item, key=item.key.rpartition("/")[2], label=label)
        for item, label in zip(images, labels, strict=True)
    ]
    return Originals(items, wnids, source)


def validation_wnids() -> list[str]:
    """Return the wnids of ILSVRC2012_val_00000001.JPEG to 00050000."""
    wnids = class_list("imagenet")
    return [wnids[label] for label in imagenet_validation_labels().tolist()]


def imagenet_validation_labels() -> np.ndarray:
    """Return the labels of ILSVRC2012_val_00000001.JPEG to 00050000, in sorted wnids: int64 `[50000]`."""
    bits = np.unpackbits(np.fromfile(ASSETS / "imagenet_validation_labels.u10", np.uint8)).reshape(-1, 10)
    return bits @ (1 << np.arange(10, dtype=np.int64)[::-1])


_21K_ARCHIVES = ("fall11_whole.tar", "winter21_whole.tar")


def read_imagenet21k(root: Path) -> dict[str, Originals]:
    """Read ImageNet-21k; the class number is the index of its wnid in the 21,843 of the authors' heads.

    Two of the classes have no image in the release of fall 2011, and 2,676 or more in that of winter 2021.
    Keys are file names, as `n01440764_10026.JPEG`.

    Args:
        root: holds `fall11_whole.tar`, `winter21_whole.tar`, or `<wnid>.tar` and `<wnid>/` side by side.
    """
    whole = next((root / name for name in _21K_ARCHIVES if (root / name).is_file()), None)
    items = archive_items(whole) if whole else []
    items = items or _synsets_side_by_side(root)
    if not items:
        raise MissingOriginalsError(root, f"{', '.join(_21K_ARCHIVES)}, <wnid>.tar or <wnid>/: none is here")
    wnids = [item.key.split("/")[-2:][0] for item in items]  # a folder around the synsets does not matter
    return {"train": _of_wnids(items, wnids, class_list("imagenet21k"), root, "ImageNet-21k")}


def _synsets_side_by_side(root: Path) -> list[Item]:
    items: list[Item] = []
    for place in sorted(root.glob("*")):
        if place.is_dir() and not place.name.startswith("."):
            names = [f"{place.name}/{name}" for name in image_names(place, IMAGE_SUFFIXES)]
            items += file_items(root, names, [-1] * len(names))
        elif place.suffix == ".tar":
            packed = archive_items(place)
            items += [replace(item, key=f"{place.stem}/{Path(item.key).name}") for item in packed]
    return items


# Corruptions of ImageNet-C: the archive of each, and AlexNet's error, averaged over the five severities, by
# which the mean corruption error is normalised; the last four are not part of that mean.
CORRUPTIONS: dict[str, tuple[str, float | None]] = {
    "gaussian_noise": ("noise", 0.886428),
    "shot_noise": ("noise", 0.894468),
    "impulse_noise": ("noise", 0.922640),
    "defocus_blur": ("blur", 0.819880),
    "glass_blur": ("blur", 0.826268),
    "motion_blur": ("blur", 0.785948),
    "zoom_blur": ("blur", 0.798360),
    "snow": ("weather", 0.866816),
    "frost": ("weather", 0.826572),
    "fog": ("weather", 0.819324),
    "brightness": ("weather", 0.564592),
    "contrast": ("digital", 0.853204),
    "elastic_transform": ("digital", 0.646056),
    "pixelate": ("digital", 0.717840),
    "jpeg_compression": ("digital", 0.606500),
    "speckle_noise": ("extra", None),
    "gaussian_blur": ("extra", None),
    "spatter": ("extra", None),
    "saturate": ("extra", None),
}


def read_imagenet_c(root: Path) -> dict[str, Originals]:
    """Read the available corruptions of ImageNet-C, one split each, with all five severities.

    Keys begin with the severity, as `5/n01440764/ILSVRC2012_val_00000293.JPEG`.

    Args:
        root: holds `<corruption>/<severity>/<wnid>/`, optionally within a folder named after the archive.
    """
    wnids, splits = class_list("imagenet"), dict[str, Originals]()
    for name, (archive, _) in CORRUPTIONS.items():
        folder = next((place for place in (root / name, root / archive / name) if place.is_dir()), None)
        if folder is None:
            continue
        names = sorted(path.relative_to(folder).as_posix() for path in folder.glob("[1-5]/*/*.JPEG"))
        labels = class_labels([file.split("/")[1] for file in names], wnids, folder)
        items = file_items(folder, names, labels)
        splits[name] = Originals(items, wnids, f"ImageNet-C, {name}, severities 1 to 5")
    if not splits:
        raise MissingOriginalsError(root, f"{', '.join(CORRUPTIONS)}: none is here")
    return splits


def is_part_of_imagenet(names: Sequence[str], num_outputs: int) -> bool:
    """Return whether classes are a proper subset of ImageNet's wnids, and the head has 1,000 outputs."""
    wnids = class_list("imagenet")
    return num_outputs == len(wnids) and set(names) < set(wnids)


_OBJECTNET_CLASSES = 113
_OBJECTNET_FRAME = 2  # the frame of one red pixel, and its smear
_OBJECTNET_NAME = re.compile(r".* \((n\d{8}(?: n\d{8})*)\)")


def read_objectnet(root: Path) -> dict[str, Originals]:
    """Read the images of ObjectNet's classes shared with ImageNet as `test`, without their red frame.

    A class is named after its object and the ImageNet classes that count as correct: `Alarm clock (n02708093
    n03196217)`.

    Args:
        root: holds `objectnet-1.0/images/<folder>/*.png` and `objectnet-1.0/mappings/`.
    """
    folder = need(root, "objectnet-1.0")
    names = _objectnet_names(need(folder, "mappings"))
    items = []
    for label, name in enumerate(names):
        place = need(folder, f"images/{name}")
        files = image_names(place, (".png",))
        items += [Item(f"{name}/{file}", label, partial(_unframed, place / file)) for file in files]
    source = "ObjectNet, the classes of ImageNet, red frame cut off"
    return {"test": Originals(items, tuple(names.values()), source)}


def imagenet_classes(class_name: str) -> list[str]:
    """Return the correct wnids for a class named as in `read_objectnet`; empty for other names."""
    match = _OBJECTNET_NAME.fullmatch(class_name)
    return match[1].split() if match else []


def _objectnet_names(mappings: Path) -> dict[str, str]:
    """Map image folders to class names, in order of the folders."""
    folder_names = _json(mappings / "folder_to_objectnet_label.json")
    to_imagenet = _json(mappings / "objectnet_to_imagenet_1k.json")
    old_numbers = _json(mappings / "pytorch_to_imagenet_2012_id.json")
    words = read_lines(mappings / "imagenet_to_label_2012_v2")
    wnids = class_list("imagenet")
    names = {}
    with parsing(mappings, DataError, "the mappings do not match"):
        by_words = {words[old]: wnids[int(new)] for new, old in old_numbers.items()}
        for folder, name in sorted(folder_names.items()):
            if name in to_imagenet:
                shared = sorted(by_words[imagenet] for imagenet in to_imagenet[name].split("; "))
                names[folder] = f"{name} ({' '.join(shared)})"
    if len(names) != _OBJECTNET_CLASSES:
        raise DataError(
            mappings, f"{len(names)} classes are shared with ImageNet, should be {_OBJECTNET_CLASSES}"
        )
    if outside := next((folder for folder in names if leads_out(folder)), None):
        raise DataError(mappings, f"the folder {outside!r} is outside the folder of the images")
    return names


def _json(path: Path) -> dict[str, Any]:
    table = parse_json(read_bytes(path), path, error=DataError)
    if not isinstance(table, dict):
        raise DataError(path, "should be a JSON table")
    return table


def _unframed(path: Path) -> bytes:
    with parsing(path, DataError), Image.open(io.BytesIO(read_bytes(path))) as image:
        pixels = np.asarray(image.convert("RGB"))
    inner = slice(_OBJECTNET_FRAME, -_OBJECTNET_FRAME)
    return encode_png(np.ascontiguousarray(pixels[inner, inner]))


REAL_URL = "https://raw.githubusercontent.com/google-research/reassessed-imagenet/master/real.json"
REAL_SHA256 = "d83e9bff374c631aae8439eb064c7019acc56e1b3bc3f56b8380c2a710b0220b"
REAL_IMAGES, REAL_CLASSES = 50_000, 1000
_VALIDATION_NUMBER = re.compile(r"ILSVRC2012_val_(\d{8})(?!\d)")
_MAX_REAL_BYTES = 16 * 2**20


def read_real(path: Path) -> list[list[int]]:
    """Read the label sets of validation images 1 to 50,000; 3,163 of them are empty and not scored."""
    if not path.is_file():
        raise DataError(
            path,
            "ReaL labels are missing",
            f"get them with `vitctl data prepare imagenet_real`, or from {REAL_URL}",
        )
    try:
        sets = read_json(path, _MAX_REAL_BYTES, error=DataError)
    except DataError:
        sets = None
    if not isinstance(sets, list) or len(sets) != REAL_IMAGES or not all(map(_is_label_set, sets)):
        raise DataError(
            path, f"should be a list of {REAL_IMAGES:,} lists of class numbers 0 to {REAL_CLASSES - 1}"
        )
    return sets


def by_validation_number(keys: Iterable[str], values: Sequence[Value]) -> list[Value]:
    """Return the value of each validation image, by the number in its name.

    Args:
        keys: such as `ILSVRC2012_val_00000293.JPEG`, optionally within a folder; in any order.
        values: of images 1 to 50,000.

    Raises DataError if a name has no such number, or two names have the same.
    """
    found: dict[int, str] = {}
    for key in keys:
        match = _VALIDATION_NUMBER.search(key)
        if match is None or not 1 <= int(match[1]) <= len(values):
            raise DataError(
                f"'{key}' is not an ImageNet validation file name (expected ILSVRC2012_val_00000001.JPEG); "
                f"labels go by those names"
            )
        if int(match[1]) in found:
            raise DataError(f"'{key}' and '{found[int(match[1])]}' are the same ImageNet validation image")
        found[int(match[1])] = key
    return [values[number - 1] for number in found]


def _is_label_set(labels: object) -> bool:
    return isinstance(labels, list) and all(
        isinstance(label, int) and not isinstance(label, bool) and 0 <= label < REAL_CLASSES
        for label in labels
    )
