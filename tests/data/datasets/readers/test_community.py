from pathlib import Path

import pytest

from tests.data.datasets.conftest import labels, plant, sizes
from vitctl.data.datasets.readers.community import SIZES, read
from vitctl.errors import DataError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Lists of the true lengths; every image is one file under another name."""
    plant(tmp_path / "images/picture.jpg", 8)
    for split, size in (*SIZES.items(), ("test", 3)):
        (tmp_path / f"images/{split}").mkdir()
        for number in range(size):
            (tmp_path / f"images/{split}/{number:06d}.jpg").hardlink_to(tmp_path / "images/picture.jpg")
        lines = [f"images/{split}/{number:06d}.jpg {number % 4}" for number in range(size)]
        (tmp_path / f"{split}.txt").write_text("\n".join(lines) + "\n")
    return tmp_path


def test_read__lists_and_their_lengths(folder: Path) -> None:
    splits = read(folder, 4, {3, 4})
    assert sizes(splits) == {"train800": 800, "val200": 200, "train800val200": 1000, "test": 3}
    assert labels(splits["test"]) == {f"images/test/00000{number}.jpg": number for number in range(3)}
    assert splits["test"].class_names == ("0", "1", "2", "3")
    assert splits["val200"].items[7].read() == (folder / "images/picture.jpg").read_bytes()
    assert "not the original bytes" in splits["test"].source


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("test", "images/test/000000.jpg 1\n", r"test.txt: 1 images, should be 3 or 4$"),
        ("train800", "images/test/000000.jpg 1\n", r"train800.txt: 1 images, should be 800$"),
        ("test", "images/test/000000.jpg 4\n", "1 labels are out of range, the first is 4 of 4 classes"),
        (
            "test",
            "images/test/000009.jpg 1\n",
            "1 of 1 listed images are missing, the first is images/test/000009.jpg",
        ),
        ("test", "/etc/passwd 1\n", "line '/etc/passwd 1' should be like images/test/000000.jpg 7"),
        ("test", "images/../../x.jpg 1\n", "should be like images/test/000000.jpg 7"),
        ("test", "images/test/000000.jpg -1\n", "should be like"),
        ("test", "images/test/000000.jpg\n", "should be like"),
    ],
)
def test_read__refuses(name: str, text: str, message: str, folder: Path) -> None:
    (folder / f"{name}.txt").write_text(text)
    with pytest.raises(DataError, match=message):
        read(folder, 4, {3, 4})


def test_read__a_missing_list(folder: Path) -> None:
    (folder / "val200.txt").unlink()
    with pytest.raises(DataError, match=r"val200.txt is missing; unpack here: vtab-1k.zip"):
        read(folder, 4, {3})
