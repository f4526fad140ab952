import io
from pathlib import Path

import pytest
from PIL import Image

from tests.data.datasets.conftest import labels, plant
from vitctl.data.datasets.readers.retinopathy import read
from vitctl.errors import DataError


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in ("train/10_left", "train/10_right", "test/1_left", "test/1_right", "test/2_left"):
        plant(tmp_path / f"{name}.jpeg", 200, size=(60, 40))
    (tmp_path / "trainLabels.csv").write_text("image,level\n10_left,0\n10_right,4\n")
    (tmp_path / "retinopathy_solution.csv").write_text(
        "image,level,Usage\n1_left,2,Public\n1_right,1,Private\n2_left,3,Private\n"
    )
    return tmp_path


def test_read__validation_is_public_and_test_is_private(root: Path) -> None:
    assert {split: labels(originals) for split, originals in read(root).items()} == {
        "train": {"10_left": 0, "10_right": 4},
        "validation": {"1_left": 2},
        "test": {"1_right": 1, "2_left": 3},
    }


def test_read__images_are_treated_when_they_are_read(root: Path) -> None:
    pytest.importorskip("scipy")
    with Image.open(io.BytesIO(read(root)["train"].items[0].read())) as image:
        assert (image.format, image.size) == ("JPEG", (540, 400))  # the red field is 60 wide: scaled by ten


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "trainLabels.csv",
            "image,level\n10_left,5\n",
            "1 labels are out of range, the first is 5 of 5 classes",
        ),
        ("trainLabels.csv", "image,level\n10_left,\n", "levels should be 0 to 4"),
        ("trainLabels.csv", "image,grade\n10_left,1\n", "every row should have the columns image, level$"),
        (
            "trainLabels.csv",
            "image,level\n11_left,1\n",
            "1 of 1 listed images are missing, the first is 11_left.jpeg",
        ),
        ("retinopathy_solution.csv", "image,level,Usage\n1_left,2,Public\n", "no row has Usage Private"),
    ],
)
def test_read__refuses(name: str, text: str, message: str, root: Path) -> None:
    (root / name).write_text(text)
    with pytest.raises(DataError, match=message):
        read(root)


def test_read__tells_where_the_solution_is(root: Path) -> None:
    (root / "retinopathy_solution.csv").unlink()
    with pytest.raises(
        DataError, match=r"retinopathy_solution.csv is missing; unpack here: .*/retinopathy_solution.csv$"
    ):
        read(root)
