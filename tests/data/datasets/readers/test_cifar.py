"""torchvision reads the release, and only files with the published digests (here: of the fixtures)."""

import pickle
from pathlib import Path

import numpy as np
import pytest

from vitctl.data.datasets.known_sets import DATA_SETS
from vitctl.data.images.decode import decode
from vitctl.errors import DataError

PIXELS = np.random.default_rng(0).integers(0, 256, (4, 3072), dtype=np.uint8)
# Folder, file and entry of the class names, entry of the labels, number of classes, and batches in order.
RELEASES = {
    "cifar10": (
        "cifar-10-batches-py",
        "batches.meta",
        "label_names",
        "labels",
        10,
        (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"),
    ),
    "cifar100": ("cifar-100-python", "meta", "fine_label_names", "fine_labels", 100, ("train", "test")),
}
PLANTED: dict[str, bytes] = {}


def plant_release(root: Path, name: str) -> Path:
    folder, meta, names, labels, num_classes, batches = RELEASES[name]
    (root / folder).mkdir()
    class_names = [f"class {number}" for number in range(num_classes)]
    entries = {"data": PIXELS, labels: [3, 1, 0, 9], "filenames": ["a.png"] * 4}
    (root / folder / meta).write_bytes(pickle.dumps({names: class_names}, protocol=2))
    for number, batch in enumerate(batches):
        given = entries | {"data": PIXELS + np.uint8(number)}
        (root / folder / batch).write_bytes(pickle.dumps(given, protocol=2))
    PLANTED.update({str(path): path.read_bytes() for path in (root / folder).iterdir()})
    return root / folder


def is_as_planted(path: str, _: str) -> bool:
    """In place of the digest of a file of the release."""
    return Path(path).is_file() and Path(path).read_bytes() == PLANTED[str(path)]


@pytest.mark.parametrize("name", RELEASES)
def test_read__planes_become_pictures_numbered_through_the_files(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", is_as_planted)
    plant_release(tmp_path, name)
    train = DATA_SETS[name].open(tmp_path)["train"]
    num_files = len(train.items) // 4
    wanted = (PIXELS[1] + np.uint8(num_files - 1)).reshape(3, 32, 32).transpose(1, 2, 0)
    np.testing.assert_array_equal(decode(train.items[-3].read()), wanted)
    assert train.class_names[9] == "class 9"


def test_read__other_files_than_the_release_are_not_unpickled(tmp_path: Path) -> None:
    folder = plant_release(tmp_path, "cifar10")
    with pytest.raises(DataError, match=f"^{folder}: files are missing or damaged; unpack "):
        DATA_SETS["cifar10"].open(tmp_path)
