"""Where the images of a task are found, and what is said of copies."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.data.conftest import store
from tests.data.datasets.conftest import labels, plant, sizes
from vitctl.data.datasets.readers.arrays import encode_png
from vitctl.data.datasets.readers.shapes import SHAPES
from vitctl.data.datasets.vtab import MINI, VTAB
from vitctl.data.datasets.vtab_images import (
    COMMUNITY_SIZES,
    COMMUNITY_SOURCE,
    num_test,
    open_task,
    read_community_lists,
)
from vitctl.data.shards.index import read_index
from vitctl.data.source.splits import md5_order, write_exclusion
from vitctl.data.source.views import source_text
from vitctl.data.writer.intake import Item
from vitctl.errors import DataError

BY_NAME = {task.name: task for task in VTAB + MINI}
KITTI = BY_NAME["kitti-dist"]


PNG = encode_png(np.zeros((2, 2, 3), np.uint8))


def write(folder: Path, keys: Sequence[str], num_classes: int = 4, text: str = "KITTI") -> None:
    items = [Item(key, number % num_classes, lambda: PNG) for number, key in enumerate(keys)]
    store(items, folder, tuple(map(str, range(num_classes))), source_text=text)


def kitti(root: Path, test: int = 711) -> None:
    """Shards of KITTI's numbers with names of our own."""
    for split, size in {"train": 6_347, "validation": 423, "test": test}.items():
        write(root / "kitti-dist" / split, [f"{split}_{number}.png" for number in range(size)])


def lists(root: Path, test: int = 711) -> None:
    """The community's folder of KITTI."""
    for split, size in {"train800": 800, "val200": 200, "train800val200": 1000, "test": test}.items():
        lines = []
        for number in range(size):
            name = f"images/{split}/{number:06d}.jpg"
            plant(root / "kitti" / name, number % 256)
            lines.append(f"{name} {number % 4}\n")
        (root / f"kitti/{split}.txt").write_text("".join(lines))


@pytest.mark.slow
def test_open_task__shards_of_the_originals_in_the_order_of_their_names(tmp_path: Path) -> None:
    kitti(tmp_path)
    data = open_task(KITTI, tmp_path, scratch=None)
    names = [f"train_{number}.png" for number in range(6_347)]
    assert [data.train800.key(n) for n in range(800)] == [names[n] for n in md5_order(names, "train")[:800]]
    assert (len(data.val200), len(data.train), len(data.test)) == (200, 1000, 711)
    assert [data.train.key(n) for n in (0, 799, 800, 999)] == [
        data.train800.key(0), data.train800.key(799), data.val200.key(0), data.val200.key(199)
    ]  # fmt: skip
    assert dict(data.names) == {
        "train800": "train[:800]",
        "val200": "validation[:200]",
        "test": "test",
        "train": "train[:800]+validation[:200]",
    }
    assert data.source == "KITTI"
    assert data.proven is False
    assert data.copy == "other training images than the benchmark's, by the digest of their names"


@pytest.mark.slow
def test_open_task__a_part_of_a_set_is_refused_or_labelled(tmp_path: Path) -> None:
    kitti(tmp_path, test=30)
    with pytest.raises(DataError, match="30 images of 4 classes, kitti-dist has 711 of 4"):
        open_task(KITTI, tmp_path, scratch=None)
    data = open_task(KITTI, tmp_path, scratch=None, allow_partial=True)
    assert data.copy.startswith("partial: 30 of 711 test images; other training images")


@pytest.mark.slow
def test_open_task__the_communitys_folder_is_labelled(tmp_path: Path) -> None:
    lists(tmp_path)
    scratch = tmp_path / "scratch"
    data = open_task(KITTI, tmp_path, scratch=scratch)
    assert (len(data.train800), len(data.val200), len(data.train), len(data.test)) == (800, 200, 1000, 711)
    assert data.copy == "the community's copy: JPEG again, not the original bytes"
    assert data.proven is None
    assert data.source == source_text(data.train) == COMMUNITY_SOURCE
    assert data.names["train"] == "train800+val200"
    by_key = {data.test.key(n): int(label) for n, label in enumerate(data.test.labels())}
    assert by_key["images/test/000006.jpg"] == 6 % 4
    written = {path: path.stat().st_mtime_ns for path in scratch.rglob("*.tar")}
    assert written
    assert open_task(KITTI, tmp_path, scratch=scratch).test.digest == data.test.digest
    assert {path: path.stat().st_mtime_ns for path in scratch.rglob("*.tar")} == written  # once


def test_open_task__shards_of_the_communitys_splits(tmp_path: Path) -> None:
    for split, size in {"train800": 800, "val200": 200, "test": 700}.items():
        write(tmp_path / "kitti-dist" / split, [f"{split}_{n}" for n in range(size)], text=COMMUNITY_SOURCE)
    with pytest.raises(DataError, match="kitti-dist is incomplete: test has 700 images"):
        open_task(KITTI, tmp_path, scratch=None)
    data = open_task(KITTI, tmp_path, scratch=None, allow_partial=True)
    assert "community's copy" in data.copy
    assert "partial: 700 of 711 test images" in data.copy


def test_open_task__a_copy_is_named_also_behind_an_exclusion_list(tmp_path: Path) -> None:
    """Images that were left out put another view over the split; what its index says must still be heard."""
    for split, size in {"train800": 800, "val200": 200, "test": 712}.items():
        folder = tmp_path / "kitti-dist" / split
        write(folder, [f"{split}_{n}" for n in range(size)], text="KITTI, Hugging Face parquet copy")
    write_exclusion(read_index(tmp_path / "kitti-dist" / "test"), [5], reason="a near-duplicate")
    data = open_task(KITTI, tmp_path, scratch=None, allow_partial=True)
    assert len(data.test) == 711
    assert data.source == "KITTI, Hugging Face parquet copy"
    assert "Hugging Face parquet copy" in data.copy


@pytest.mark.slow
def test_open_task__sets_that_come_with_vitctl_are_written_and_whole(tmp_path: Path) -> None:
    data = open_task(BY_NAME["shapes-shape"], tmp_path / "none", scratch=tmp_path)
    assert data.test.class_names == SHAPES
    assert (data.copy, data.proven, len(data.test)) == ("", None, num_test(data.task))
    chosen = {data.train.key(n) for n in range(1000)}
    assert len(chosen) == 1000


def test_open_task__nothing_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"kitti-dist: expected shards with split 'train\[:800\]'"):
        open_task(KITTI, tmp_path, scratch=tmp_path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Lists of the true lengths; every image is one file under another name."""
    plant(tmp_path / "images/picture.jpg", 8)
    for split, size in (*COMMUNITY_SIZES.items(), ("test", 3)):
        (tmp_path / f"images/{split}").mkdir()
        for number in range(size):
            (tmp_path / f"images/{split}/{number:06d}.jpg").hardlink_to(tmp_path / "images/picture.jpg")
        lines = [f"images/{split}/{number:06d}.jpg {number % 4}" for number in range(size)]
        (tmp_path / f"{split}.txt").write_text("\n".join(lines) + "\n")
    return tmp_path


def test_read__lists_and_their_lengths(folder: Path) -> None:
    splits = read_community_lists(folder, 4, {3, 4})
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
        ("test", "images/test/000000.jpg 4\n" * 3, "3 labels are out of range, the first is 4 of 4 classes"),
        ("test", "images/test/000009.jpg 1\n" * 3, "3 of 3 listed images are missing, the first is"),
        ("test", "/etc/passwd 1\n" * 3, "'/etc/passwd' is outside this folder"),
        ("test", "images/../../x.jpg 1\n" * 3, "is outside this folder"),
        ("test", "images/test/000000.jpg -1\n" * 3, "out of range, the first is -1"),
        ("test", "images/test/000000.jpg x\n" * 3, "should have a class number, 0 to 3"),
        ("test", "images/test/000000.jpg\n" * 3, "should be like images/test/000000.jpg 7"),
    ],
)
def test_read__refuses(name: str, text: str, message: str, folder: Path) -> None:
    (folder / f"{name}.txt").write_text(text)
    with pytest.raises(DataError, match=message):
        read_community_lists(folder, 4, {3, 4})


def test_read__a_missing_list(folder: Path) -> None:
    (folder / "val200.txt").unlink()
    with pytest.raises(DataError, match=r"val200.txt is missing; unpack here: vtab-1k.zip"):
        read_community_lists(folder, 4, {3})
