from pathlib import Path

import pytest

from tests.data.datasets.conftest import labels, plant
from vitctl.data.datasets.readers.sun397 import read
from vitctl.errors import DataError

CLASSES = ["/a/abbey", "/a/apartment_building/outdoor", *(f"/z/class_{number:03d}" for number in range(395))]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for word, name in (
        ("tr", "/a/abbey/sun_aa.jpg"),
        ("va", "/a/apartment_building/outdoor/sun_bb.jpg"),
        ("te", "/z/class_394/sun_cc.jpg"),
    ):
        plant(tmp_path / f"SUN397{name}", form="PNG" if word == "te" else "JPEG")
        (tmp_path / f"sun397_tfds_{word}.txt").write_text(name + "\n")
    (tmp_path / "SUN397/ClassName.txt").write_text("\n".join(CLASSES) + "\n")
    return tmp_path


def test_read__keys_keep_their_slash_and_classes_their_levels(root: Path) -> None:
    splits = read(root)
    assert {split: labels(originals) for split, originals in splits.items()} == {
        "train": {"/a/abbey/sun_aa.jpg": 0},
        "validation": {"/a/apartment_building/outdoor/sun_bb.jpg": 1},
        "test": {"/z/class_394/sun_cc.jpg": 396},
    }
    assert splits["train"].class_names == tuple(CLASSES)
    assert splits["test"].items[0].read().startswith(b"\x89PNG")


def test_read__names_what_is_wrong(root: Path) -> None:
    (root / "SUN397/a/abbey/sun_aa.jpg").unlink()
    with pytest.raises(DataError, match=r"1 of 1 listed images are missing, the first is a/abbey/sun_aa.jpg"):
        read(root)
    (root / "sun397_tfds_tr.txt").write_text("/a/abbeys/sun_aa.jpg\n")
    with pytest.raises(
        DataError, match=r"sun397_tfds_tr.txt: /a/abbeys/sun_aa.jpg is of none of the 397 classes"
    ):
        read(root)
    (root / "sun397_tfds_tr.txt").unlink()
    with pytest.raises(
        DataError, match=r"sun397_tfds_tr.txt is missing; unpack here: .* package tensorflow-datasets"
    ):
        read(root)
    (root / "SUN397/ClassName.txt").write_text("/a/abbey\n")
    with pytest.raises(DataError, match=r"ClassName.txt: 1 classes, should be 397"):
        read(root)
