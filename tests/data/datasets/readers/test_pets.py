from pathlib import Path

import pytest

from tests.data.datasets.conftest import labels, plant
from vitctl.data.datasets.readers.pets import read
from vitctl.data.images.decode import decode
from vitctl.errors import DataError


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """One picture is a PNG and one a GIF, although both are named `.jpg`."""
    for name, form, mode in (
        ("Abyssinian_1", "JPEG", "RGB"),
        ("beagle_2", "PNG", "RGBA"),
        ("Egyptian_Mau_3", "GIF", "P"),
    ):
        plant(tmp_path / f"images/{name}.jpg", 7, form=form, mode=mode)
    (tmp_path / "annotations").mkdir()
    (tmp_path / "annotations/trainval.txt").write_text(
        "#Image CLASS-ID SPECIES BREED ID\nAbyssinian_1 1 1 1\nbeagle_2 5 2 4\n"
    )
    (tmp_path / "annotations/test.txt").write_text("Egyptian_Mau_3 12 1 5\n")
    return tmp_path


def test_read__labels_are_the_second_column(root: Path) -> None:
    splits = read(root)
    assert labels(splits["train"]) == {"Abyssinian_1.jpg": 0, "beagle_2.jpg": 4}
    assert labels(splits["test"]) == {"Egyptian_Mau_3.jpg": 11}
    assert [splits["train"].class_names[label] for label in (0, 4, 11)] == [
        "Abyssinian",
        "beagle",
        "Egyptian_Mau",
    ]
    assert all(decode(item.read()).shape == (5, 6, 3) for split in splits.values() for item in split.items)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("beagle_2 38 2 4\n", "trainval.txt: 1 labels are out of range, the first is 37 of 37 classes"),
        ("beagle_2 five 2 4\n", "trainval.txt: the second column should be a class number, 1 to 37"),
        ("beagle_2\n", "trainval.txt: line 'beagle_2' should have at least 2 columns"),
        ("pug_9 26 2 1\n", "1 of 1 listed images are missing, the first is pug_9.jpg"),
    ],
)
def test_read__refuses_bad_lists(text: str, message: str, root: Path) -> None:
    (root / "annotations/trainval.txt").write_text(text)
    with pytest.raises(DataError, match=message):
        read(root)


def test_read__names_the_archives(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"images is missing; unpack here: images.tar.gz and annotations.tar.gz from http"
    ):
        read(tmp_path)
