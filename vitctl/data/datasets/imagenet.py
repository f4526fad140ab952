"""ImageNet (ILSVRC 2012) as people have it: unpacked folders, Kaggle's tree, or the two tar files."""

import csv
import tarfile
from functools import partial
from pathlib import Path, PurePosixPath

from vitctl.data.datasets.files import file_items, need, read_lines, read_part
from vitctl.data.datasets.fixed_classes import image_names
from vitctl.data.shards import Item, Originals
from vitctl.errors import DataError

ARCHIVE = "ILSVRC2012_img_train.tar and ILSVRC2012_img_val.tar from https://image-net.org, packed or unpacked, or Kaggle's ILSVRC/"
LABEL_ARCHIVE = (
    "LOC_val_solution.csv of Kaggle, or a text file with the wnid of each validation image in the order of their names"
)
WNID_ARCHIVE = "LOC_synset_mapping.txt of Kaggle, or a text file whose lines begin with the 1,000 wnids"
NUM_CLASSES = 1000
_FIRST, _LAST = "n01440764", "n15075141"
_SUFFIXES = (".jpeg", ".jpg", ".png")
_KAGGLE = "ILSVRC/Data/CLS-LOC"
_TRAIN_PLACES = ("train", f"{_KAGGLE}/train", "ILSVRC2012_img_train.tar")
_VALIDATION_PLACES = ("val", "validation", f"{_KAGGLE}/val", "ILSVRC2012_img_val.tar")


def read(root: Path) -> dict[str, Originals]:
    """The splits that are there; a class is the place of its wnid among the 1,000 in order, whatever is on disk.

    Keys are file names, as `n01440764_10026.JPEG` and `ILSVRC2012_val_00000001.JPEG`.

    Args:
        root: holds one of `train/<wnid>/`, `ILSVRC/Data/CLS-LOC/train/<wnid>/`, `ILSVRC2012_img_train.tar`, or of
            `val/<wnid>/`, `val/` flat, `ILSVRC/Data/CLS-LOC/val/`, `ILSVRC2012_img_val.tar`, or of both.
            Flat images need `LOC_val_solution.csv` or `validation_synset_labels.txt`; the wnids are taken from the
            folders of either split, the training tar, `LOC_synset_mapping.txt` or `synsets.txt`.

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
    """All images of a split, keyed by `<wnid>/<file>` or, when they lie flat, by `<file>`. The labels come later."""
    if place.suffix == ".tar":
        return _tar_images(place)
    folders = sorted(path.name for path in place.iterdir() if path.is_dir() and not path.name.startswith("."))
    names = [f"{folder}/{file}" for folder in folders for file in image_names(place / folder, _SUFFIXES)]
    names = names or image_names(place, _SUFFIXES)
    return file_items(place, names, [-1] * len(names))


def _tar_images(path: Path) -> list[Item]:
    """The images in a tar file, and in the tar files in it, one per class; they stay packed."""
    images = []
    try:
        with tarfile.open(path, "r:") as outer:
            for member in filter(tarfile.TarInfo.isreg, outer):
                place = PurePosixPath(member.name)
                if place.suffix.lower() in _SUFFIXES:
                    images.append(_packed(path, place.name, member.offset_data, member.size))
                elif place.suffix == ".tar":
                    with tarfile.open(fileobj=outer.extractfile(member), mode="r:") as inner:
                        for image in filter(tarfile.TarInfo.isreg, inner):
                            name = f"{place.stem}/{PurePosixPath(image.name).name}"
                            images.append(_packed(path, name, member.offset_data + image.offset_data, image.size))
    except (tarfile.TarError, OSError) as error:
        raise DataError(f"{path}: not a whole tar file of images or of class tars ({error})") from None
    return images


def _packed(path: Path, name: str, offset: int, size: int) -> Item:
    return Item(name, -1, partial(read_part, path, offset, size))


def _wnids(root: Path, found: dict[str, list[Item]]) -> tuple[str, ...]:
    """The 1,000 wnids in order, from the first source that has them."""
    for images in found.values():
        wnids = {item.key.partition("/")[0] for item in images if "/" in item.key}
        if wnids:
            return _checked(wnids, str(root))
    path = need(root, "LOC_synset_mapping.txt", "synsets.txt", archive=WNID_ARCHIVE)
    return _checked({line.split()[0] for line in read_lines(path)}, str(path))


def _checked(found: set[str], where: str) -> tuple[str, ...]:
    wnids = sorted(found)
    if len(wnids) != NUM_CLASSES or (wnids[0], wnids[-1]) != (_FIRST, _LAST):
        ends = f", {wnids[0]} to {wnids[-1]}" if wnids else ""
        raise DataError(f"{where}: {len(wnids):,} classes{ends}, should be {NUM_CLASSES:,} wnids, {_FIRST} to {_LAST}")
    return tuple(wnids)


def _split(root: Path, images: list[Item], wnids: tuple[str, ...]) -> Originals:
    by_folder = [item.key.rpartition("/")[0] for item in images]
    names = [item.key.rpartition("/")[2] for item in images]
    own = by_folder if all(by_folder) else _listed_wnids(root, names)
    numbers = {wnid: label for label, wnid in enumerate(wnids)}
    unknown = next((wnid for wnid in own if wnid not in numbers), None)
    if unknown is not None:
        raise DataError(f"{root}: {unknown} is none of the {NUM_CLASSES} classes")
    items = [Item(name, numbers[wnid], item.read) for name, wnid, item in zip(names, own, images, strict=True)]
    return Originals(items, wnids, "ImageNet, ILSVRC 2012")


def _listed_wnids(root: Path, names: list[str]) -> list[str]:
    """The wnid of every flat image, from Kaggle's table by name or from a list in the order of the names."""
    path = need(root, "LOC_val_solution.csv", "validation_synset_labels.txt", archive=LABEL_ARCHIVE)
    lines = read_lines(path)
    if path.suffix == ".csv":
        listed = {row["ImageId"]: row["PredictionString"].split()[0] for row in csv.DictReader(lines)}
    else:
        listed = (
            dict(zip((Path(name).stem for name in sorted(names)), lines, strict=False))
            if len(lines) == len(names)
            else {}
        )
    absent = [name for name in names if Path(name).stem not in listed]
    if absent:
        raise DataError(
            f"{path}: {len(lines):,} lines, {len(absent):,} of {len(names):,} images have no label, first {absent[0]}"
        )
    return [listed[Path(name).stem] for name in names]
