"""Data sets with the names and numbers of VTAB's, and one small picture per class in place of all images.

Splits depend on names alone, so the 800, the 200 and the test images are chosen as on the original files.
"""

import hashlib
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from vitctl.data.datasets.catalog import find_data_set
from vitctl.data.datasets.readers.original_files import class_list
from vitctl.data.source.splits import select
from vitctl.data.source.views import Source

DSPRITES_TEST = 663_552  # where it begins in the shuffled whole
PART = (
    60  # test images of a set whose test split is a folder of its own, when not the whole of it is asked for
)


Key = Callable[[int], str]

_HUNDREDS = dict(zip(class_list("eurosat"), (30, 30, 30, 25, 25, 20, 25, 30, 25, 30), strict=True))
_EUROSAT = [f"{name}_{name}_{n}.jpg" for name, count in _HUNDREDS.items() for n in range(1, 100 * count + 1)]

_KEYS: dict[str, Key] = {
    "eurosat": _EUROSAT.__getitem__,
    "patch_camelyon": "train_{}".format,
    **dict.fromkeys(("clevr-count", "clevr-dist"), "CLEVR_train_{:06d}.png".format),
    **dict.fromkeys(
        ("cifar100", "svhn", "dsprites-loc", "dsprites-ori", "smallnorb-azim", "smallnorb-elev"), str
    ),
}


def picture(label: int) -> bytes:
    """A small JPEG whose colour tells the class."""
    colour = tuple(np.random.default_rng(label).integers(0, 256, 3).tolist())
    file = io.BytesIO()
    Image.new("RGB", (8, 8), colour).save(file, "JPEG")
    return file.getvalue()


@dataclass(frozen=True, eq=False)
class Names:
    """A split of which only the names are real. Labels go round the classes."""

    name: str
    size: int
    key_of: Key
    class_names: tuple[str, ...]
    pictures: Sequence[bytes]

    def __len__(self) -> int:
        return self.size

    @property
    def digest(self) -> str:
        return hashlib.sha256(f"{self.name} {len(self)} {self.key(len(self) - 1)}".encode()).hexdigest()

    @property
    def parts(self) -> tuple[Source, ...]:
        return ()

    def labels(self, samples: np.ndarray | None = None) -> np.ndarray:
        return np.asarray(np.arange(len(self)) if samples is None else samples, np.int64) % len(
            self.class_names
        )

    def key(self, sample: int) -> str:
        return self.key_of(sample)

    def location(self, sample: int) -> str:
        return f"{self.name} {sample}"

    def read(self, sample: int) -> bytes:
        return self.pictures[sample % len(self.pictures)]


class Catalog:
    """Stands in for `open_split`.

    With `whole_tests` False, test splits are cut to PART images where they end their folder.
    """

    def __init__(self, *, whole_tests: bool) -> None:
        self.whole_tests = whole_tests
        self.sets: dict[str, dict[str, Names]] = {}
        self.views: dict[tuple[str, str], Source] = {}

    def open_split(self, split: str, *, dataset: str, whole: bool, **_: object) -> Source:
        """As `vitctl.data.datasets.catalog.open_split`."""
        assert whole == self.whole_tests
        if dataset not in self.sets:
            self.sets[dataset] = dict(self._make(dataset))
        if split == f"train[{DSPRITES_TEST}:]" and not self.whole_tests:
            split = f"train[{DSPRITES_TEST}:{DSPRITES_TEST + PART}]"
        if (dataset, split) not in self.views:
            self.views[dataset, split] = select(split, self.sets[dataset])
        return self.views[dataset, split]

    def _make(self, dataset: str) -> Any:
        row = find_data_set(dataset)
        own_test = {"clevr-count": "validation", "clevr-dist": "validation"}.get(dataset, "test")
        cut = own_test if not self.whole_tests and not dataset.startswith("smallnorb") else ""
        classes = tuple(map(str, range(row.num_classes)))
        pictures = [picture(label) for label in range(row.num_classes)]
        for split, size in row.sizes.items():
            always = dataset.startswith("smallnorb") or split == "train"
            key = _KEYS.get(dataset, f"{dataset}/{{:06d}}.jpg".format) if always else f"{split}_{{}}".format
            yield split, Names(f"{dataset} {split}", PART if split == cut else size, key, classes, pictures)
