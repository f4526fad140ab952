"""ImageNet-V2's folders are numbers, which sort by their value and not by their text."""

from pathlib import Path

import pytest

from tests.data.datasets.conftest import labels, plant, sizes
from vitctl.data.datasets.readers import imagenet_v2
from vitctl.errors import DataError


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for number in range(1000):
        folder = tmp_path / imagenet_v2.FOLDER / str(number)
        folder.mkdir(parents=True)
    for number in (2, 10, 999):
        plant(tmp_path / imagenet_v2.FOLDER / f"{number}/hash{number}.jpeg", number % 256)
    return tmp_path


def test_read__a_folder_is_its_number(root: Path) -> None:
    splits = imagenet_v2.read(root)
    assert sizes(splits) == {"test": 3}
    assert labels(splits["test"]) == {"2/hash2.jpeg": 2, "10/hash10.jpeg": 10, "999/hash999.jpeg": 999}
    assert splits["test"].class_names[::999] == ("n01440764", "n15075141")


def test_read__a_missing_class(root: Path) -> None:
    (root / imagenet_v2.FOLDER / "7").rmdir()
    with pytest.raises(DataError, match=r"should hold 1000 class folders; 1 missing: 7$"):
        imagenet_v2.read(root)
