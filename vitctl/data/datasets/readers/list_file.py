"""Images listed with their classes: text lists, MATLAB, scenes, annotations, tables of grades.

`read_lists` reads the usual layout, one text list per split; the other readers know one data set each.
"""

import csv
import hashlib
import io
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vitctl.data.datasets.readers.original_files import (
    ASSETS,
    check_labels,
    class_labels,
    class_list,
    file_items,
    library,
    load_mat,
    need,
    numbered_labels,
    read_bytes,
    read_fields,
    read_lines,
)
from vitctl.data.images.decode import encode
from vitctl.data.writer.intake import Item, Originals
from vitctl.errors import DataError
from vitctl.system.files import parsing


def read_lists(
    root: Path,
    *,
    images: str,
    lists: Mapping[str, str],
    source: str,
    classes: str = "",
    suffix: str = "",
    column: int = 0,
) -> dict[str, Originals]:
    """Read a set with one text list per split; the first word of a line is the image's path, and the key.

    Args:
        images: path of the folder that the listed paths are relative to.
        lists: split name to the path of its list. Lines that begin with `#` are skipped.
        classes: name of a list of class names in `assets/`; default: the listed folders sorted by code point.
        column: position of the class number in a line, from 1; 0: the image's folder is its class.
    """
    folder = need(root, images)
    paths = {split: need(root, place) for split, place in lists.items()}
    rows = {split: read_fields(path, max(column, 1)) for split, path in paths.items()}
    rows = {split: [row for row in found if not row[0].startswith("#")] for split, found in rows.items()}
    names = {split: [row[0] + suffix for row in found] for split, found in rows.items()}
    folders = {split: [name.rpartition("/")[0] for name in found] for split, found in names.items()}
    class_names = class_list(classes) if classes else tuple(sorted(set().union(*folders.values())))
    splits = {}
    for split, path in paths.items():
        if column:
            labels = numbered_labels((row[column - 1] for row in rows[split]), len(class_names), path)
        else:
            labels = class_labels(folders[split], class_names, path)
        splits[split] = Originals(file_items(folder, names[split], labels), class_names, source)
    return splits


def read_birds(root: Path) -> dict[str, Originals]:
    """Read Caltech-UCSD Birds: four tables in `CUB_200_2011/` that share the numbers of the images.

    Keys are the names in the archive, `CUB_200_2011/images/001.Black_footed_Albatross/<file>`.
    """
    folder = need(root, "CUB_200_2011")
    classes, images, labels, is_train = (
        dict(row[:2] for row in read_fields(need(folder, f"{name}.txt"), 2))
        for name in ("classes", "images", "image_class_labels", "train_test_split")
    )
    if list(classes) != [str(number) for number in range(1, len(classes) + 1)]:
        raise DataError(folder / "classes.txt", "should number the classes from 1")
    for name, table in (("image_class_labels", labels), ("train_test_split", is_train)):
        if table.keys() != images.keys():
            raise DataError(f"{folder / name}.txt", "should number the same images as images.txt")
    splits = {}
    for split, word in (("train", "1"), ("test", "0")):
        numbers = [number for number, given in is_train.items() if given == word]
        names = [images[number] for number in numbers]
        keys = [f"CUB_200_2011/images/{name}" for name in names]
        where = folder / "image_class_labels.txt"
        wanted = numbered_labels((labels[number] for number in numbers), len(classes), where)
        items = file_items(folder / "images", names, wanted, keys)
        splits[split] = Originals(items, tuple(classes.values()), "CUB-200-2011")
    return splits


def read_flowers102(root: Path) -> dict[str, Originals]:
    """Read Oxford Flowers: `jpg/image_00001.jpg`, `imagelabels.mat` and `setid.mat`.

    The splits are as published: `trnid` trains, although some papers swap it with the larger `tstid`.
    """
    images, class_names = need(root, "jpg"), class_list("flowers102")
    path = need(root, "imagelabels.mat")
    labels = check_labels(load_mat(path, "labels")[0].astype(np.int64) - 1, len(class_names), path)
    path = need(root, "setid.mat")
    variables = {"train": "trnid", "validation": "valid", "test": "tstid"}
    splits = {}
    for split, numbers in zip(variables, load_mat(path, *variables.values()), strict=True):
        ids = np.atleast_1d(numbers).astype(np.int64)
        if ids.size and not 1 <= ids.min() <= ids.max() <= len(labels):
            raise DataError(
                path, f"image numbers run from {ids.min()} to {ids.max()}, should be 1 to {len(labels)}"
            )
        names = [f"image_{number:05d}.jpg" for number in ids]
        items = file_items(images, names, labels[ids - 1].tolist())
        splits[split] = Originals(items, class_names, "Oxford Flowers 102")
    return splits


def read_cars196(root: Path) -> dict[str, Originals]:
    """Read Stanford Cars, with keys such as `00001`.

    Files: `cars_train/`, `cars_test/`, `devkit/` and `cars_test_annos_withlabels.mat`.
    """
    annotations = {
        "train": ("devkit/cars_train_annos.mat", "cars_train_annos.mat"),
        "test": ("cars_test_annos_withlabels.mat", "devkit/cars_test_annos_withlabels.mat"),
    }
    path = need(root, "devkit/cars_meta.mat", "cars_meta.mat")
    class_names = tuple(str(name) for name in np.atleast_1d(load_mat(path, "class_names")[0]))
    splits = {}
    for split, places in annotations.items():
        images, path = need(root, f"cars_{split}"), need(root, *places)
        rows = np.atleast_1d(load_mat(path, "annotations")[0])
        if not {"class", "fname"} <= set(rows.dtype.names or ()):
            raise DataError(path, "annotations should have the fields class and fname")
        labels = check_labels(np.array([int(number) - 1 for number in rows["class"]]), len(class_names), path)
        names = [str(name) for name in rows["fname"]]
        keys = [name.rpartition(".")[0] for name in names]
        items = file_items(images, names, labels.tolist(), keys)
        splits[split] = Originals(items, class_names, "Stanford Cars")
    return splits


_SUN397_LISTS = {
    "train": "sun397_tfds_tr.txt",
    "validation": "sun397_tfds_va.txt",
    "test": "sun397_tfds_te.txt",
}
_SUN397_LIST_ARCHIVE = (
    "sun397_tfds_{tr,va,te}.txt, the three split lists in tensorflow_datasets/image_classification of the "
    "package tensorflow-datasets (`pip download --no-deps tensorflow-datasets` and unzip)"
)
_SUN397_PATHS_SHA256 = "ff5eec74118daf4eba10b0bae39a26a9c2ccd27464fd1cbdd74029241c38d1ca"
_SUN397_NUM_PATHS = 108_753
# The authors of the split could not decode it, so none of their lists has it.
_SUN397_LEFT_OUT = "/c/church/outdoor/sun_bhenjvsvrtumjuri.jpg"


def read_sun397(root: Path) -> dict[str, Originals]:
    """Read SUN397 in the random 70/10/20 split of TensorFlow Datasets; keys are like `/a/abbey/sun_xxx.jpg`.

    Images keep their bytes; the benchmark's copy shrank those of more than 120,000 pixels. Split lists in
    `root` take precedence over the packed split that comes with vitctl.
    """
    folder = need(root, "SUN397")
    class_names = tuple(sorted(set(read_lines(need(folder, "ClassName.txt")))))
    if any((root / name).exists() for name in _SUN397_LISTS.values()):
        paths = {
            split: need(root, name, archive=_SUN397_LIST_ARCHIVE) for split, name in _SUN397_LISTS.items()
        }
        lists = {split: (path, read_lines(path)) for split, path in paths.items()}
    else:
        images = [f"/{path.relative_to(folder).as_posix()}" for path in folder.rglob("sun_*.jpg")]
        lists = {split: (folder, keys) for split, keys in sun397_split(images).items()}
    splits = {}
    for split, (path, keys) in lists.items():
        labels = class_labels([key.rpartition("/")[0] for key in keys], class_names, path)
        items = file_items(folder, [key.removeprefix("/") for key in keys], labels, keys)
        splits[split] = Originals(items, class_names, "SUN397, TensorFlow Datasets split")
    return splits


def sun397_split(paths: Sequence[str]) -> dict[str, list[str]]:
    """Return the sorted paths of each split of SUN397, as in TensorFlow Datasets, given all its paths.

    Raises DataError if these are not the images of SUN397.
    """
    ordered = sorted(path for path in paths if path != _SUN397_LEFT_OUT)
    digest = hashlib.sha256("".join(f"{path}\n" for path in ordered).encode()).hexdigest()
    if digest != _SUN397_PATHS_SHA256:
        raise DataError(
            f"these {len(ordered):,} images are not the {_SUN397_NUM_PATHS:,} of SUN397, whose "
            "split depends on the position of each path in the complete list",
            fix=(
                "unpack SUN397.tar.gz again, or put sun397_tfds_tr.txt, _va.txt and _te.txt beside the images"
            ),
        )
    numbers = sun397_split_numbers()
    return {
        split: [path for path, number in zip(ordered, numbers, strict=True) if number == wanted]
        for wanted, split in enumerate(_SUN397_LISTS)
    }


def sun397_split_numbers() -> list[int]:
    """Return the split of each sorted path. Five base-3 digits are packed in a byte, the highest first."""
    packed = np.fromfile(ASSETS / "sun397_split.base3", np.uint8)
    digits = packed[:, None] // 3 ** np.arange(5)[::-1] % 3
    return [int(digit) for digit in digits.ravel()[:_SUN397_NUM_PATHS]]


_CLEVR_BORDERS = (8.0, 8.5, 9.0, 9.5, 10.0)
_CLEVR_CLASSES = {
    "count": tuple(f"{count} objects" for count in range(3, 11)),
    "distance": ("at most 8", *(f"{near:g} to {far:g}" for near, far in pairwise(_CLEVR_BORDERS)), "over 10"),
}


def read_clevr(root: Path, task: str) -> dict[str, Originals]:
    """Read CLEVR (`CLEVR_v1.0/`). Its test images have no scenes, so the benchmark tests on `validation`.

    `task`: `count` of objects, 3 to 10; or `distance` of the nearest from the camera, in six ranges.
    """
    folder, class_names = need(root, "CLEVR_v1.0"), _CLEVR_CLASSES[task]
    splits = {}
    for split, word in (("train", "train"), ("validation", "val")):
        path = need(folder, f"scenes/CLEVR_{word}_scenes.json")
        with parsing(path, DataError, "not a file of CLEVR scenes"):
            scenes = json.loads(read_bytes(path))["scenes"]
            names = [str(scene["image_filename"]) for scene in scenes]
            labels = np.array([clevr_label(scene["objects"], task) for scene in scenes])
        checked = check_labels(labels, len(class_names), path)
        items = file_items(folder / "images" / word, names, checked.tolist())
        splits[split] = Originals(items, class_names, f"CLEVR v1.0, {task}")
    return splits


def clevr_label(objects: list[dict[str, Any]], task: str) -> int:
    """Return the objects less 3, or the range of the smallest depth; a border belongs to the nearer range."""
    if task == "count":
        return len(objects) - 3
    nearest = np.float32(min(thing["pixel_coords"][2] for thing in objects))
    return int(np.searchsorted(_CLEVR_BORDERS, nearest, side="left"))


_KITTI_CLASSES = ("at most 8 m", "8 to 20 m", "over 20 m", "no vehicle")
_KITTI_BORDERS = (8.0, 20.0, 999.0)
_NO_VEHICLE = 1000.0
_VEHICLES = ("Car", "Van", "Truck")
# Drawn once by the benchmark from the 141 drives, day by day; all frames of a drive go to one split.
_KITTI_DRIVES = {
    "test": {
        "09_26": "0001 0011 0070 0087",
        "09_28": "0001 0070 0094 0102 0154 0167 0185 0199 0204",
        "10_03": "0047",
    },
    "validation": {
        "09_26": "0027 0035 0052 0057 0079 0084",
        "09_28": "0016 0021 0043 0138 0143 0146 0162 0165",
    },
}
KITTI_SPLITS = {
    f"2011_{day}_drive_{number}_sync": split
    for split, days in _KITTI_DRIVES.items()
    for day, numbers in days.items()
    for number in numbers.split()
}


def read_kitti(root: Path) -> dict[str, Originals]:
    """Read KITTI's labelled images, split by drive; keys are `000000.png`."""
    images, annotations = need(root, "training/image_2"), need(root, "training/label_2")
    names: dict[str, list[str]] = {"train": [], "validation": [], "test": []}
    for number, drive in enumerate(_kitti_drives(need(root, "devkit_object/mapping", "mapping"))):
        names[KITTI_SPLITS.get(drive, "train")].append(f"{number:06d}")
    splits = {}
    for split, found in names.items():
        labels = [_kitti_label(annotations / f"{name}.txt") for name in found]
        items = file_items(images, [f"{name}.png" for name in found], labels)
        splits[split] = Originals(items, _KITTI_CLASSES, "KITTI, distance of the nearest vehicle")
    return splits


def _kitti_drives(mapping: Path) -> list[str]:
    """Return the drive of image 0, 1, ...: their line numbers, from 1, in a list of date, drive and frame."""
    frames = read_fields(need(mapping, "train_mapping.txt"), 3)
    path = need(mapping, "train_rand.txt")
    try:
        lines = [int(number) for number in "".join(read_lines(path)).split(",")]
    except ValueError:
        raise DataError(path, "should be line numbers separated by commas") from None
    if not all(1 <= line <= len(frames) for line in lines):
        raise DataError(path, f"line numbers should be 1 to {len(frames)}")
    return [frames[line - 1][1] for line in lines]


def _kitti_label(path: Path) -> int:
    try:
        depths = [np.float32(row[13]) for row in read_fields(path, 15) if row[0] in _VEHICLES]
    except ValueError:
        raise DataError(path, "column 14 should be the distance in metres") from None
    return int(np.searchsorted(_KITTI_BORDERS, min(depths, default=_NO_VEHICLE), side="left"))


# Diabetic Retinopathy: photos of the retina in five grades, processed as in the benchmark's btgraham-300, by
# Ben Graham's method: equal radius, local contrast, a disc on grey.

_RETINOPATHY_CLASSES = ("no retinopathy", "mild", "moderate", "severe", "proliferative")
EYE_RADIUS = 300
_EYE_KEPT = 270  # the outer tenth of the radius is cut away
_EYE_GREY = 128
_EYE_QUALITY = 72


def read_retinopathy(root: Path) -> dict[str, Originals]:
    """Read the competition's images, processed when they are read; keys are names like `10_left`.

    Both `validation` and `test` come from the competition's test images, by the column Usage of the solution.
    """
    labels, solution = need(root, "trainLabels.csv"), need(root, "retinopathy_solution.csv")
    parts = {
        "train": (need(root, "train"), labels, ""),
        "validation": (need(root, "test"), solution, "Public"),
        "test": (need(root, "test"), solution, "Private"),
    }
    splits = {}
    for split, (folder, path, usage) in parts.items():
        rows = list(csv.DictReader(read_lines(path)))
        columns = ("image", "level", "Usage") if usage else ("image", "level")
        if not rows or any(row.get(name) is None for row in rows for name in columns):
            raise DataError(path, f"every row should have the columns {', '.join(columns)}")
        rows = [row for row in rows if not usage or row["Usage"] == usage]
        if not rows:
            raise DataError(path, f"no row has Usage {usage}")
        grades = numbered_labels((row["level"] for row in rows), len(_RETINOPATHY_CLASSES), path, first=0)
        keys = [row["image"] for row in rows]
        photographs = file_items(folder, [f"{key}.jpeg" for key in keys], grades, keys)
        treated = [Item(one.key, one.label, partial(_treated, one.read)) for one in photographs]
        splits[split] = Originals(treated, _RETINOPATHY_CLASSES, "Diabetic Retinopathy, btgraham-300")
    return splits


def _treated(photograph: Callable[[], bytes]) -> bytes:
    """Convert the bytes of a photograph to those that the benchmark stores, a JPEG of quality 72."""
    with Image.open(io.BytesIO(photograph())) as image:
        treated = treat_eye(np.asarray(image.convert("RGB")))
    return encode(Image.fromarray(treated), "JPEG", quality=_EYE_QUALITY)


def treat_eye(image: np.ndarray) -> np.ndarray:
    """Scale the eye to a radius of 300 pixels, subtract the local mean colour, and crop to a 270-pixel disc.

    uint8 `[H, W, 3]` becomes at most `[540, 540, 3]`, 128 outside the disc, within 4 levels of OpenCV's
    result.
    """
    scaled = _resize_eye(image, EYE_RADIUS / eye_radius(image))
    sharpened = _subtract_local_mean(scaled)
    height, width = scaled.shape[:2]
    y, x = np.ogrid[:height, :width]
    middle_y, middle_x = height // 2, width // 2
    disc = (y - middle_y) ** 2 + (x - middle_x) ** 2 <= _EYE_KEPT**2
    treated = np.where(disc[:, :, None], sharpened, np.uint8(_EYE_GREY))
    return treated[
        max(middle_y - _EYE_KEPT, 0) : middle_y + _EYE_KEPT,
        max(middle_x - _EYE_KEPT, 0) : middle_x + _EYE_KEPT,
    ]


def eye_radius(image: np.ndarray) -> float:
    """Return half the number of bright pixels in the middle row of `[H, W, 3]`; half the height if none."""
    line = image[image.shape[0] // 2].sum(axis=1, dtype=np.int64)
    radius = float((line > line.mean() / 10).sum()) / 2
    return radius if radius >= 1 else image.shape[0] / 2


def _subtract_local_mean(image: np.ndarray) -> np.ndarray:
    ndimage = library("scipy.ndimage")
    planes = [
        ndimage.gaussian_filter(image[:, :, c].astype(np.float32), 10, mode="mirror", truncate=3.0)
        for c in range(3)
    ]
    local_mean = np.rint(np.stack(planes, axis=2))  # to integer levels, as an 8-bit filter returns
    levels: np.ndarray = np.clip(4 * (image - local_mean) + _EYE_GREY, 0, 255)
    return levels.astype(np.uint8)


def _resize_eye(image: np.ndarray, scale: float) -> np.ndarray:
    """Resize bilinearly without antialiasing, with half-pixel centres."""
    rows, columns = (_neighbours(length, scale) for length in image.shape[:2])
    above, below = image[rows[0]].astype(np.float32), image[rows[1]]
    tall = above + (below - above) * rows[2][:, None, None]
    left, right = tall[:, columns[0]], tall[:, columns[1]]
    return np.asarray(np.rint(left + (right - left) * columns[2][None, :, None]), np.uint8)


def _neighbours(length: int, scale: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the old positions before and after each new one on an axis, and its fraction between them."""
    places = np.clip((np.arange(max(1, round(length * scale))) + 0.5) / scale - 0.5, 0, length - 1)
    before = np.floor(places).astype(np.int64)
    return before, np.minimum(before + 1, length - 1), (places - before).astype(np.float32)
