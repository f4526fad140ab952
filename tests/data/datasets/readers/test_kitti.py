from pathlib import Path

import pytest

from tests.data.datasets.conftest import labels, plant
from vitctl.data.datasets.readers.kitti import TEST_DRIVES, VALIDATION_DRIVES, read, split_of_drive
from vitctl.errors import DataError

DRIVES = (
    "2011_09_26_drive_0005_sync",
    "2011_09_26_drive_0001_sync",
    "2011_09_28_drive_0016_sync",
    "2011_10_03_drive_0047_sync",
)


def thing(kind: str, depth: float) -> str:
    return f"{kind} 0.00 0 -1.57 614.24 181.78 727.31 284.77 1.57 1.73 4.15 1.00 1.75 {depth} -1.62"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Image n was line RAND[n] of the frames, of which there is one for each drive."""
    scenes = (
        [thing("Car", 8.0), thing("Van", 30.0), thing("DontCare", -1000.0)],
        [thing("Pedestrian", 3.0), thing("Truck", 8.01)],
        [thing("Car", 20.5)],
        [thing("Cyclist", 5.0), thing("Tram", 6.0)],
    )
    for number, lines in enumerate(scenes):
        plant(tmp_path / f"training/image_2/{number:06d}.png", number, form="PNG")
        (tmp_path / "training/label_2").mkdir(exist_ok=True)
        (tmp_path / f"training/label_2/{number:06d}.txt").write_text("\n".join(lines) + "\n")
    mapping = tmp_path / "devkit_object/mapping"
    mapping.mkdir(parents=True)
    mapping.joinpath("train_rand.txt").write_text("3,1,4,2")
    mapping.joinpath("train_mapping.txt").write_text(
        "".join(f"{drive[:10]} {drive} 0000000001\n" for drive in DRIVES)
    )
    return tmp_path


def test_read__labels_and_the_split_by_drive(root: Path) -> None:
    splits = read(root)
    assert {split: labels(originals) for split, originals in splits.items()} == {
        "train": {"000001.png": 1},
        "validation": {"000000.png": 0},
        "test": {"000002.png": 2, "000003.png": 3},
    }
    assert splits["train"].items[0].read() == (root / "training/image_2/000001.png").read_bytes()


def test_drives__fourteen_and_fourteen_apart() -> None:
    assert len(TEST_DRIVES) == len(VALIDATION_DRIVES) == 14
    assert not TEST_DRIVES & VALIDATION_DRIVES
    assert [split_of_drive(drive) for drive in DRIVES] == ["train", "test", "validation", "test"]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("devkit_object/mapping/train_rand.txt", "3,1,4,5", "line numbers should be 1 to 4"),
        ("devkit_object/mapping/train_rand.txt", "3 1 4", "should be line numbers with commas between"),
        ("devkit_object/mapping/train_mapping.txt", "2011_09_26 drive\n", "should have at least 3 columns"),
        ("training/label_2/000002.txt", "Car 0.00 0", "should have at least 15 columns"),
        (
            "training/label_2/000002.txt",
            thing("Car", 1).replace(" 1 ", " near "),
            "column 14 should be the distance in metres",
        ),
    ],
)
def test_read__refuses(name: str, text: str, message: str, root: Path) -> None:
    (root / name).write_text(text)
    with pytest.raises(DataError, match=message):
        read(root)


def test_read__names_what_is_missing(root: Path) -> None:
    (root / "training/image_2/000003.png").unlink()
    with pytest.raises(DataError, match=r"1 of 2 listed images are missing, the first is 000003.png"):
        read(root)
    (root / "devkit_object").rename(root / "devkit")
    with pytest.raises(
        DataError, match=r"devkit_object/mapping or mapping is missing; unpack here: data_object_image_2.zip"
    ):
        read(root)
