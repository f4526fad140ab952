"""SUN397: 397 scenes, in the random 70/10/20 split of TensorFlow Datasets."""

from pathlib import Path

from vitctl.data.datasets.files import file_items, need, read_lines
from vitctl.data.shards import Originals
from vitctl.errors import DataError

ARCHIVE = "SUN397.tar.gz from https://vision.princeton.edu/projects/2010/SUN"
LIST_ARCHIVE = (
    "sun397_tfds_{tr,va,te}.txt, the three split lists in tensorflow_datasets/image_classification of the package "
    "tensorflow-datasets (`pip download --no-deps tensorflow-datasets` and unzip)"
)
LISTS = {"train": "sun397_tfds_tr.txt", "validation": "sun397_tfds_va.txt", "test": "sun397_tfds_te.txt"}
NUM_CLASSES = 397


def read(root: Path) -> dict[str, Originals]:
    """The three splits; keys begin with a slash, `/a/abbey/sun_xxx.jpg`.

    Images keep their bytes; the benchmark's copy shrank those of more than 120,000 pixels.

    Args:
        root: holds `SUN397/ClassName.txt`, the tree of images, and the three split lists beside it.

    Raises:
        DataError: files are missing, or the classes are not the 397.
    """
    folder = need(root, "SUN397", archive=ARCHIVE)
    path = need(folder, "ClassName.txt", archive=ARCHIVE)
    classes = tuple(sorted(read_lines(path)))
    if len(set(classes)) != NUM_CLASSES:
        raise DataError(f"{path}: {len(set(classes))} classes, should be {NUM_CLASSES}")
    return {split: _split(folder, need(root, name, archive=LIST_ARCHIVE), classes) for split, name in LISTS.items()}


def _split(folder: Path, path: Path, classes: tuple[str, ...]) -> Originals:
    keys = read_lines(path)
    numbers = {name: label for label, name in enumerate(classes)}
    unknown = next((key for key in keys if key.rpartition("/")[0] not in numbers), None)
    if unknown is not None:
        raise DataError(
            f"{path}: {unknown} is of none of the {NUM_CLASSES} classes; lines should be like /a/abbey/sun_x.jpg"
        )
    labels = [numbers[key.rpartition("/")[0]] for key in keys]
    names = [key.removeprefix("/") for key in keys]
    return Originals(file_items(folder, names, labels, keys), classes, "SUN397, TensorFlow Datasets split")
