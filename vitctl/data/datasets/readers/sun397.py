"""SUN397: 397 scenes, in the random 70/10/20 split of TensorFlow Datasets."""

from pathlib import Path

from vitctl.data.datasets.readers.files import file_items, need, read_lines
from vitctl.data.datasets.readers.packed_lists import sun397_split
from vitctl.data.writer.items import Originals
from vitctl.errors import DataError

ARCHIVE = "SUN397.tar.gz from https://vision.princeton.edu/projects/2010/SUN"
LIST_ARCHIVE = (
    "sun397_tfds_{tr,va,te}.txt, the three split lists in tensorflow_datasets/image_classification of the "
    "package "
    "tensorflow-datasets (`pip download --no-deps tensorflow-datasets` and unzip)"
)
LISTS = {"train": "sun397_tfds_tr.txt", "validation": "sun397_tfds_va.txt", "test": "sun397_tfds_te.txt"}
NUM_CLASSES = 397


def read(root: Path) -> dict[str, Originals]:
    """The three splits; keys begin with a slash, `/a/abbey/sun_xxx.jpg`.

    Images keep their bytes; the benchmark's copy shrank those of more than 120,000 pixels.

    Args:
        root: holds `SUN397/ClassName.txt` and the tree of images; the split lists, when they lie beside it,
            go before the packed split that comes with vitctl.

    Raises:
        DataError: files are missing, or the classes are not the 397.
    """
    folder = need(root, "SUN397", archive=ARCHIVE)
    path = need(folder, "ClassName.txt", archive=ARCHIVE)
    classes = tuple(sorted(read_lines(path)))
    if len(set(classes)) != NUM_CLASSES:
        raise DataError(f"{path}: {len(set(classes))} classes, should be {NUM_CLASSES}")
    numbers = {name: label for label, name in enumerate(classes)}
    lists = {
        split: (root / name, read_lines(root / name))
        for split, name in LISTS.items()
        if (root / name).exists()
    }
    if lists:
        for name in LISTS.values():
            need(root, name, archive=LIST_ARCHIVE)
    else:
        lists = {split: (folder, keys) for split, keys in sun397_split(_images(folder)).items()}
    return {split: _split(folder, path, keys, numbers) for split, (path, keys) in lists.items()}


def _images(folder: Path) -> list[str]:
    return [f"/{path.relative_to(folder).as_posix()}" for path in folder.rglob("sun_*.jpg")]


def _split(folder: Path, path: Path, keys: list[str], numbers: dict[str, int]) -> Originals:
    unknown = next((key for key in keys if key.rpartition("/")[0] not in numbers), None)
    if unknown is not None:
        raise DataError(
            f"{path}: {unknown} is of none of the {NUM_CLASSES} classes; lines should be like "
            f"/a/abbey/sun_x.jpg"
        )
    labels = [numbers[key.rpartition("/")[0]] for key in keys]
    names = [key.removeprefix("/") for key in keys]
    return Originals(
        file_items(folder, names, labels, keys), tuple(numbers), "SUN397, TensorFlow Datasets split"
    )
