"""Data sets that torchvision knows, with the keys by which TensorFlow Datasets orders them.

Sets that are files give the original bytes; sets that are arrays give PNG, which loses nothing. torchvision
compares the MD5 of the CIFAR files with the published one before it unpickles them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from vitctl.data.datasets.readers.png import encode_png
from vitctl.data.writer.items import Item, Originals
from vitctl.errors import DataError


@dataclass(frozen=True)
class Family:
    """How one torchvision class is asked for its splits, and what its samples are.

    Args:
        splits: our split name to the arguments of the class.
        items: makes the samples of an opened set.
        class_names: reads them off an opened set.
    """

    splits: Mapping[str, Mapping[str, Any]]
    items: Callable[[Any], list[Item]]
    class_names: Callable[[Any], list[str]]


def read_torchvision(name: str, root: Path, *, download: bool) -> dict[str, Originals]:
    """The splits of a torchvision data set.

    Args:
        name: such as CIFAR10; see `FAMILIES`.
        root: where torchvision keeps, or shall put, its files.
        download: fetch what is missing.

    Raises:
        DataError: the set is unknown, or its files are missing or damaged.
    """
    import torchvision.datasets

    if name not in FAMILIES:
        raise DataError(f"torchvision:{name} is unknown, should be one of: {', '.join(FAMILIES)}")
    family = FAMILIES[name]
    splits = {}
    for split, arguments in family.splits.items():
        try:
            opened = getattr(torchvision.datasets, name)(root, download=download, **arguments)
        except Exception as error:  # its readers raise whatever damaged files make them trip over
            reason = " ".join(str(error).split())
            raise DataError(
                f"torchvision:{name}: cannot be read from {root} ({reason}); or try --download"
            ) from None
        splits[split] = Originals(
            family.items(opened), tuple(family.class_names(opened)), f"torchvision {name}"
        )
    return splits


def _array_items(arrays: np.ndarray, labels: list[int]) -> list[Item]:
    """Keys are the numbers in file order."""
    return [
        Item(str(number), int(label), partial(encode_png, image))
        for number, (image, label) in enumerate(zip(arrays, labels, strict=True))
    ]


def _file_items(paths: list[Path], labels: list[int], key: Callable[[Path], str]) -> list[Item]:
    return [
        Item(key(Path(path)), int(label), Path(path).read_bytes)
        for path, label in zip(paths, labels, strict=True)
    ]


def _file_name(path: Path) -> str:
    return path.name


def _folder_and_name(path: Path) -> str:
    return f"{path.parent.name}/{path.name}"


def _doubled_label(path: Path) -> str:
    return f"{path.parent.name}_{path.name}"


def _classes(opened: Any) -> list[str]:
    return [str(name) for name in opened.classes]


_TRAIN_TEST = {"train": {"train": True}, "test": {"train": False}}
_THREE = {"train": {"split": "train"}, "validation": {"split": "val"}, "test": {"split": "test"}}
_CIFAR = Family(_TRAIN_TEST, lambda opened: _array_items(opened.data, opened.targets), _classes)

FAMILIES = {
    "CIFAR10": _CIFAR,
    "CIFAR100": _CIFAR,
    "SVHN": Family(
        {"train": {"split": "train"}, "test": {"split": "test"}},
        lambda opened: _array_items(opened.data.transpose(0, 2, 3, 1), opened.labels),
        lambda _: list("0123456789"),
    ),
    "OxfordIIITPet": Family(
        {"train": {"split": "trainval"}, "test": {"split": "test"}},
        lambda opened: _file_items(opened._images, opened._labels, _file_name),
        _classes,
    ),
    "Flowers102": Family(
        _THREE,
        lambda opened: _file_items(opened._image_files, opened._labels, _file_name),
        lambda opened: _classes(opened) if hasattr(opened, "classes") else [str(n) for n in range(1, 103)],
    ),
    "DTD": Family(
        _THREE, lambda opened: _file_items(opened._image_files, opened._labels, _folder_and_name), _classes
    ),
    "EuroSAT": Family(
        {"train": {}},
        lambda opened: _file_items(
            [p for p, _ in opened.samples], [t for _, t in opened.samples], _doubled_label
        ),
        _classes,
    ),
}
