"""ImageNet (ILSVRC 2012) as people have it: unpacked folders, Kaggle's tree, or the two tar files."""

import csv
import re
from dataclasses import replace
from pathlib import Path

from vitctl.data.datasets.readers.archives import archive_items
from vitctl.data.datasets.readers.files import class_list, file_items, need, read_lines
from vitctl.data.datasets.readers.fixed_classes import image_names
from vitctl.data.datasets.readers.packed_lists import imagenet_validation_labels
from vitctl.data.images.image_types import IMAGE_SUFFIXES
from vitctl.data.writer.items import Item, Originals
from vitctl.errors import DataError

ARCHIVE = "ILSVRC2012_img_train.tar and ILSVRC2012_img_val.tar from https://image-net.org, packed or unpacked, or Kaggle's ILSVRC/"
LABEL_ARCHIVE = "LOC_val_solution.csv of Kaggle, or a text file with the wnid of each validation image in the order of their names"
WNID_ARCHIVE = "LOC_synset_mapping.txt of Kaggle, or a text file whose lines begin with the 1,000 wnids"
NUM_CLASSES = 1000
_FIRST, _LAST = "n01440764", "n15075141"
_KAGGLE = "ILSVRC/Data/CLS-LOC"
_TRAIN_PLACES = ("train", f"{_KAGGLE}/train", "ILSVRC2012_img_train.tar")
_LABEL_LISTS = (
    "LOC_val_solution.csv",
    "imagenet_2012_validation_synset_labels.txt",
    "validation_synset_labels.txt",
)
_CLASS_LISTS = ("LOC_synset_mapping.txt", "synsets.txt")
_WNID = re.compile(r"n\d{8}")
_VALIDATION_PLACES = ("val", "validation", f"{_KAGGLE}/val", "ILSVRC2012_img_val.tar")


def read(root: Path) -> dict[str, Originals]:
    """The splits that are there; a class is the place of its wnid among the 1,000 in order, whatever is on
    disk.

    Keys are file names, as `n01440764_10026.JPEG` and `ILSVRC2012_val_00000001.JPEG`.

    Args:
        root: holds one of `train/<wnid>/`, `ILSVRC/Data/CLS-LOC/train/<wnid>/`, `ILSVRC2012_img_train.tar`,
            or of `val/<wnid>/`, `val/` flat, `ILSVRC/Data/CLS-LOC/val/`, `ILSVRC2012_img_val.tar`, or of
            both. Labels of flat images come from `LOC_val_solution.csv` or
            `[imagenet_2012_]validation_synset_labels.txt`, and where neither is there but all 50,000 images
            are, from the list that comes with vitctl; the wnids are taken from the folders of either split,
            the training tar, `LOC_synset_mapping.txt` or `synsets.txt`, or from all labels of the validation
            images.

    Raises:
        DataError: no images are there, or there are not 1,000 classes.
    """
    places = {
        split: next((root / name for name in names if (root / name).exists()), None)
        for split, names in (("train", _TRAIN_PLACES), ("validation", _VALIDATION_PLACES))
    }
    found = {split: _images(place) for split, place in places.items() if place is not None}
    if not found:
        raise DataError(
            f"{root}: {', '.join((*_TRAIN_PLACES, *_VALIDATION_PLACES))}: none is here; put here: {ARCHIVE}"
        )
    wnids = _wnids(root, found)
    return {split: _split(root, images, wnids) for split, images in found.items()}


def _images(place: Path) -> list[Item]:
    """All images of a split, keyed by `<wnid>/<file>` or, when they lie flat, by `<file>`.

    The labels come later.
    """
    if place.suffix == ".tar":
        packed = [item for item in archive_items(place) if Path(item.key).suffix.lower() in IMAGE_SUFFIXES]
        return [replace(item, key="/".join(_folder_and_name(item.key))) for item in packed]
    folders = sorted(path.name for path in place.iterdir() if path.is_dir() and not path.name.startswith("."))
    names = [f"{folder}/{file}" for folder in folders for file in image_names(place / folder, IMAGE_SUFFIXES)]
    names = names or image_names(place, IMAGE_SUFFIXES)
    return file_items(place, names, [-1] * len(names))


def _folder_and_name(key: str) -> list[str]:
    """`[wnid, file]`, or `[file]` where the folder is no wnid."""
    folder, _, rest = key.partition("/")
    return [*([folder] if _WNID.fullmatch(folder) else []), (rest or folder).rpartition("/")[2]]


def is_imagenet(folder: Path) -> bool:
    """Whether ImageNet's archives, or Kaggle's tree, lie in a folder."""
    return any(
        (folder / place).exists() for place in (*_TRAIN_PLACES, *_VALIDATION_PLACES) if "ILSVRC" in place
    )


def _wnids(root: Path, found: dict[str, list[Item]]) -> tuple[str, ...]:
    """The 1,000 wnids in order, from the first source that has them."""
    for images in found.values():
        wnids = {item.key.partition("/")[0] for item in images if "/" in item.key}
        if wnids:
            return _checked(wnids, str(root))
    if not any((root / name).is_file() for name in _CLASS_LISTS):
        listed = set(_label_list(root, next(iter(found.values()))).values())
        if len(listed) == NUM_CLASSES:
            return _checked(listed, str(root))
    path = need(root, *_CLASS_LISTS, archive=WNID_ARCHIVE)
    return _checked({line.split()[0] for line in read_lines(path)}, str(path))


def _checked(found: set[str], where: str) -> tuple[str, ...]:
    wnids = sorted(found)
    if len(wnids) != NUM_CLASSES or (wnids[0], wnids[-1]) != (_FIRST, _LAST):
        ends = f", {wnids[0]} to {wnids[-1]}" if wnids else ""
        raise DataError(
            f"{where}: {len(wnids):,} classes{ends}, should be {NUM_CLASSES:,} wnids, {_FIRST} to {_LAST}"
        )
    return tuple(wnids)


def _split(root: Path, images: list[Item], wnids: tuple[str, ...]) -> Originals:
    by_folder = [item.key.rpartition("/")[0] for item in images]
    names = [item.key.rpartition("/")[2] for item in images]
    own = by_folder if all(by_folder) else _listed_wnids(root, images)
    numbers = {wnid: label for label, wnid in enumerate(wnids)}
    unknown = next((wnid for wnid in own if wnid not in numbers), None)
    if unknown is not None:
        raise DataError(
            f"{root}: {unknown} is none of the {NUM_CLASSES} classes, should be a wnid such as {_FIRST}"
        )
    items = [
        replace(item, key=name, label=numbers[wnid])
        for name, wnid, item in zip(names, own, images, strict=True)
    ]
    return Originals(items, wnids, "ImageNet, ILSVRC 2012")


def _listed_wnids(root: Path, images: list[Item]) -> list[str]:
    """The wnid of every flat image."""
    listed = _label_list(root, images)
    absent = [item.key for item in images if Path(item.key).stem not in listed]
    if absent:
        path = need(root, *_LABEL_LISTS, archive=LABEL_ARCHIVE)
        num_lines = len(read_lines(path))
        raise DataError(
            f"{path}: {num_lines:,} lines, {len(absent):,} of {len(images):,} images have no label, first "
            f"{absent[0]}"
        )
    return [listed[Path(item.key).stem] for item in images]


def _label_list(root: Path, images: list[Item]) -> dict[str, str]:
    """Image name without suffix to wnid: from Kaggle's table by name, from a list in the order of the names,
    or, for all 50,000 validation images, from the list that comes with vitctl; else nothing."""
    path = next((root / name for name in _LABEL_LISTS if (root / name).is_file()), None)
    if path is None:
        return _known_labels({Path(item.key).stem for item in images})
    lines = read_lines(path)
    if path.suffix == ".csv":
        return {row["ImageId"]: row["PredictionString"].split()[0] for row in csv.DictReader(lines)}
    names = sorted(item.key.rpartition("/")[2] for item in images)
    return (
        dict(zip((Path(name).stem for name in names), lines, strict=True)) if len(lines) == len(names) else {}
    )


def _known_labels(names: set[str]) -> dict[str, str]:
    wnids = class_list("imagenet")
    known = {
        f"ILSVRC2012_val_{number:08d}": wnids[label]
        for number, label in enumerate(imagenet_validation_labels(), start=1)
    }
    return known if names == known.keys() else {}
