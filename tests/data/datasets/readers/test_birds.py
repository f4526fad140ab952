from pathlib import Path

import pytest

from tests.data.datasets.conftest import labels, plant
from vitctl.data.datasets.readers.birds import read
from vitctl.errors import DataError

NAMES = (
    "001.Black_footed_Albatross/a.jpg",
    "200.Common_Yellowthroat/b.jpg",
    "001.Black_footed_Albatross/c.jpg",
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    tables = {
        "classes": [f"{number} {number:03d}.Bird_{number}" for number in range(1, 201)],
        "images": [f"{number} {name}" for number, name in enumerate(NAMES, 1)],
        "image_class_labels": ["1 1", "2 200", "3 1"],
        "train_test_split": ["1 0", "2 1", "3 1"],
    }
    for name in NAMES:
        plant(tmp_path / "CUB_200_2011/images" / name)
    for name, lines in tables.items():
        (tmp_path / f"CUB_200_2011/{name}.txt").write_text("\n".join(lines) + "\n")
    return tmp_path


def test_read__keys_are_names_in_the_archive(root: Path) -> None:
    splits = read(root)
    assert labels(splits["train"]) == {
        f"CUB_200_2011/images/{NAMES[1]}": 199,
        f"CUB_200_2011/images/{NAMES[2]}": 0,
    }
    assert labels(splits["test"]) == {f"CUB_200_2011/images/{NAMES[0]}": 0}
    assert splits["train"].class_names[199] == "200.Bird_200"
    assert splits["test"].items[0].read() == (root / "CUB_200_2011/images" / NAMES[0]).read_bytes()


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("classes", "1 a\n2 b\n", "classes.txt: should number 200 classes from 1"),
        ("train_test_split", "1 0\n", "train_test_split.txt: should number the same images as images.txt"),
        (
            "image_class_labels",
            "1 1\n2 201\n3 1\n",
            "1 labels are out of range, the first is 200 of 200 classes",
        ),
        ("image_class_labels", "1 1\n2 x\n3 1\n", "the second column should be a class number, 1 to 200"),
        ("images", "1 a.jpg\n2\n3 c.jpg\n", "images.txt: line '2' should have at least 2 columns"),
    ],
)
def test_read__refuses(name: str, text: str, message: str, root: Path) -> None:
    (root / f"CUB_200_2011/{name}.txt").write_text(text)
    with pytest.raises(DataError, match=message):
        read(root)


def test_read__names_the_archive(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"CUB_200_2011 is missing; unpack here: CUB_200_2011.tgz from https"):
        read(tmp_path)
