from pathlib import Path

import numpy as np
import pytest

from tests.data.datasets.conftest import labels, plant, sizes
from vitctl.data.datasets.readers import caltech101
from vitctl.errors import DataError


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three images of each class, of which two train."""
    monkeypatch.setattr(caltech101, "TRAIN_PER_CLASS", 2)
    for name in caltech101.FOLDERS:
        for number in (3, 1, 2):
            plant(tmp_path / f"101_ObjectCategories/{name}/image_{number:04d}.jpg", number, mode="L")
    (tmp_path / "101_ObjectCategories/BACKGROUND_Google/tmp").write_bytes(b"stray")
    return tmp_path


def test_read__labels_follow_lower_case_names(root: Path) -> None:
    splits = caltech101.read(root)
    assert sizes(splits) == {"train": 2 * 102, "test": 102}
    everything = labels(splits["train"]) | labels(splits["test"])
    assert len(everything) == 3 * 102
    wanted = {
        "accordion": 0,
        "BACKGROUND_Google": 4,
        "Faces": 37,
        "Faces_easy": 38,
        "Leopards": 57,
        "Motorbikes": 66,
    }
    assert {name: everything[f"{name}/image_0001.jpg"] for name in wanted} == wanted
    assert splits["train"].source == "Caltech101, split caltech101(vitctl-v1)"


def test_read__draws_from_sorted_listings(root: Path) -> None:
    train = labels(caltech101.read(root)["train"])
    generator = np.random.RandomState(1234)
    files = ["image_0001.jpg", "image_0002.jpg", "image_0003.jpg"]
    first, second = (set(generator.choice(files, 2, replace=False)) for _ in range(2))
    assert {key for key in train if key.startswith("BACKGROUND_Google/")} == {
        f"BACKGROUND_Google/{name}" for name in first
    }
    assert {key for key in train if key.startswith("Faces/")} == {f"Faces/{name}" for name in second}


def test_read__refuses_too_few_images_and_other_classes(root: Path) -> None:
    (root / "101_ObjectCategories/ant/image_0001.jpg").unlink()
    with pytest.raises(DataError, match="ant: 2 images, should be more than 2"):
        caltech101.read(root)
    (root / "101_ObjectCategories/Faces").rename(root / "101_ObjectCategories/faces")
    with pytest.raises(DataError, match="102 class folders; 1 missing: Faces; 1 unknown: faces"):
        caltech101.read(root)
