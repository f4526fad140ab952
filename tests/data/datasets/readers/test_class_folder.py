from pathlib import Path

import numpy as np
import pytest

from tests.data.datasets.conftest import tar_of
from vitctl.data.datasets.known_sets import DATA_SETS
from vitctl.data.datasets.readers.class_folder import arrange, read_class_folder, read_class_tar
from vitctl.data.datasets.readers.original_files import class_list
from vitctl.data.writer.intake import Item, Originals
from vitctl.errors import DataError

CIFAR = Path(__file__).parents[5] / "shared/data/cifar10-jpeg.tar"


def plant(folder: Path, names: list[str]) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(name.encode())
    return folder


def summary(splits: dict[str, Originals]) -> dict[str, list[tuple[str, str, bytes]]]:
    return {
        split: [(item.key, originals.class_names[item.label], item.read()) for item in originals.items]
        for split, originals in splits.items()
    }


CLASSES = [
    "b/2.jpg",
    "b/1.PNG",
    "B/x.webp",
    "a/a.b.jpg",
    "a/deep/er/3.jpeg",
    "é/1.jpg",
    "b/notes.txt",
    "b/.hidden.jpg",
]


def test_class_folder__classes_by_code_point(tmp_path: Path) -> None:
    splits = read_class_folder(plant(tmp_path, CLASSES))
    assert splits["train"].class_names == ("B", "a", "b", "é")
    assert splits["train"].source == str(tmp_path)
    expected = ["B/x.webp", "a/a.b.jpg", "a/deep/er/3.jpeg", "b/1.PNG", "b/2.jpg", "é/1.jpg"]
    assert summary(splits) == {"train": [(name, name.split("/")[0], name.encode()) for name in expected]}


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([], "no images found, should hold <class>/<image> or train/<class>/<image>"),
        (["cat/1.jpg", "2.jpg"], "2.jpg is not in a class folder, should be <class>/2.jpg"),
        (["train/cat/1.jpg", "test/2.jpg"], "2.jpg is not in a class folder"),
    ],
)
def test_class_folder__refuses(tmp_path: Path, names: list[str], message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_class_folder(plant(tmp_path, names))
    with pytest.raises(DataError, match=message):
        arrange([Item(name, -1, bytes) for name in names], "memory")


def test_class_tar__refuses_what_is_unsafe_or_no_tar(tmp_path: Path) -> None:
    (tmp_path / "s.tar").write_bytes(tar_of({"../cat/1.jpg": b"x"}))
    with pytest.raises(DataError, match=r"'../cat/1.jpg' points outside the archive"):
        read_class_tar(tmp_path / "s.tar")
    (tmp_path / "t.tar").write_bytes(b"text")
    with pytest.raises(DataError, match="not a complete, uncompressed tar file"):
        read_class_tar(tmp_path / "t.tar")


def test_caltech101__draws_thirty_of_each_class_from_sorted_listings(tmp_path: Path) -> None:
    capitals = ("BACKGROUND_Google", "Faces", "Faces_easy", "Leopards", "Motorbikes")
    spelled = {name.lower(): name for name in capitals}
    folders = [spelled.get(name, name) for name in class_list("caltech101")]
    plant(tmp_path, ["one.jpg"])
    files = [f"image_{number:04d}.jpg" for number in range(1, 33)]
    for name in folders:
        (tmp_path / "101_ObjectCategories" / name).mkdir(parents=True)
        for file in files[::-1]:
            (tmp_path / "101_ObjectCategories" / name / file).hardlink_to(tmp_path / "one.jpg")
    (tmp_path / "101_ObjectCategories/BACKGROUND_Google/tmp").write_bytes(b"stray")
    splits = DATA_SETS["caltech101"].open(tmp_path)
    train, test = ({item.key: item.label for item in splits[split].items} for split in ("train", "test"))
    assert (len(train), len(test), len(train | test)) == (102 * 30, 102 * 2, 102 * 32)
    assert {key: label for key, label in (train | test).items() if key.endswith("0001.jpg")} == {
        f"{name}/image_0001.jpg": label for label, name in enumerate(folders)
    }
    generator = np.random.RandomState(1234)
    for name in sorted(folders)[:3]:
        drawn = {f"{name}/{file}" for file in generator.choice(files, 30, replace=False)}
        assert {key for key in train if key.startswith(f"{name}/")} == drawn
    assert splits["train"].source == "Caltech101, split caltech101(vitctl-v1)"
    for file in files[:2]:
        (tmp_path / "101_ObjectCategories/ant" / file).unlink()
    with pytest.raises(DataError, match="ant: 30 images, should be more than 30"):
        DATA_SETS["caltech101"].open(tmp_path)
    (tmp_path / "101_ObjectCategories/Faces").rename(tmp_path / "101_ObjectCategories/faces")
    with pytest.raises(DataError, match="102 class folders; 1 missing: Faces; 1 unknown: faces"):
        DATA_SETS["caltech101"].open(tmp_path)
