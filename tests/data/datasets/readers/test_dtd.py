from pathlib import Path

import pytest

from tests.data.datasets.conftest import labels, plant
from vitctl.data.datasets.readers.dtd import read
from vitctl.errors import DataError


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "dtd/labels").mkdir(parents=True)
    for number, word in enumerate(("train", "val", "test")):
        names = [f"banded/banded_{number:04d}.jpg", f"polka-dotted/polka-dotted_{number:04d}.jpg"]
        for name in names:
            plant(tmp_path / "dtd/images" / name, number)
        (tmp_path / f"dtd/labels/{word}1.txt").write_text("\n".join(names) + "\n")
        (tmp_path / f"dtd/labels/{word}2.txt").write_text("another partition\n")
    return tmp_path


def test_read__the_first_partition(root: Path) -> None:
    splits = read(root)
    assert {split: labels(originals) for split, originals in splits.items()} == {
        "train": {"banded/banded_0000.jpg": 0, "polka-dotted/polka-dotted_0000.jpg": 30},
        "validation": {"banded/banded_0001.jpg": 0, "polka-dotted/polka-dotted_0001.jpg": 30},
        "test": {"banded/banded_0002.jpg": 0, "polka-dotted/polka-dotted_0002.jpg": 30},
    }
    assert splits["train"].items[0].read() == (root / "dtd/images/banded/banded_0000.jpg").read_bytes()


def test_read__refuses_unknown_classes_and_missing_images(root: Path) -> None:
    (root / "dtd/labels/val1.txt").write_text("furry/furry_0001.jpg\n")
    with pytest.raises(DataError, match=r"val1.txt: furry/furry_0001.jpg is of none of the 47 classes"):
        read(root)
    (root / "dtd/images/banded/banded_0000.jpg").unlink()
    with pytest.raises(
        DataError, match=r"images: 1 of 2 listed images are missing, the first is banded/banded_0000.jpg"
    ):
        read(root)
    with pytest.raises(DataError, match=r"dtd is missing; unpack here: dtd-r1.0.1.tar.gz"):
        read(root / "dtd")
