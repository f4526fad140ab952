from pathlib import Path

import pytest

from tests.data.datasets.conftest import example, labels, plant, record
from vitctl.data.datasets.readers.dmlab import read
from vitctl.errors import DataError


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two files train; each image has a colour of its own."""
    for number, name in enumerate(
        (
            "train.tfrecord-00001-of-00002",
            "train.tfrecord-00000-of-00002",
            "validation.tfrecord-00000-of-00001",
            "test.tfrecord-00000-of-00001",
        )
    ):
        written = b""
        for label in (number, 5):
            image = plant(tmp_path / "image.jpg", 40 * number + label)
            written += record(
                example({"image": image, "filename": f"video_{number}_{label}.jpg".encode(), "label": label})
            )
        (tmp_path / f"dmlab-{name}").write_bytes(written)
    return tmp_path


def test_read__all_files_of_a_split(root: Path) -> None:
    splits = read(root)
    assert labels(splits["train"]) == {
        "video_1_1.jpg": 1,
        "video_1_5.jpg": 5,
        "video_0_0.jpg": 0,
        "video_0_5.jpg": 5,
    }
    assert list(labels(splits["validation"])) == ["video_2_2.jpg", "video_2_5.jpg"]
    assert list(labels(splits["test"])) == ["video_3_3.jpg", "video_3_5.jpg"]
    assert splits["train"].items[2].read() == plant(root / "image.jpg", 0)
    assert splits["test"].items[1].read() == plant(root / "image.jpg", 125)


def test_read__refuses(root: Path) -> None:
    path = root / "dmlab-test.tfrecord-00000-of-00001"
    path.write_bytes(record(example({"image": b"", "filename": b"a", "label": 6})))
    with pytest.raises(DataError, match="1 labels are out of range, the first is 6 of 6 classes"):
        read(root)
    path.write_bytes(record(example({"image": b"", "filename": b"a"})))
    with pytest.raises(DataError, match="an example has 0 values of 'label', should have one"):
        read(root)
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(DataError, match="ends within the record"):
        read(root)
    path.unlink()
    with pytest.raises(
        DataError, match=r"dmlab-test.tfrecord\* is missing; unpack here: dmlab.tar.gz from https"
    ):
        read(root)
