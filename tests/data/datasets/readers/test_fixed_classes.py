"""The sets that are one folder per class: their keys, their labels, and what they refuse."""

from pathlib import Path
from typing import NamedTuple

import pytest

from tests.data.datasets.conftest import labels, plant
from vitctl.data.datasets.originals import Read
from vitctl.data.datasets.readers import colorectal, eurosat, resisc45, uc_merced
from vitctl.data.source.splits import md5_order
from vitctl.errors import DataError


class Tree(NamedTuple):
    """A set of class folders: where it lies, and what the first file of the second class is called and
    becomes.
    """

    read: Read
    folder: str
    folders: tuple[str, ...]
    file: str
    key: str


TREES = {
    "eurosat": Tree(eurosat.read, "2750", eurosat.CLASS_NAMES, "Forest_1.jpg", "Forest_Forest_1.jpg"),
    "resisc45": Tree(
        resisc45.read, "NWPU-RESISC45", resisc45.CLASS_NAMES, "airport_001.jpg", "airport_airport_001.jpg"
    ),
    "uc_merced": Tree(
        uc_merced.read, "UCMerced_LandUse/Images", uc_merced.CLASS_NAMES, "airplane00.tif", "airplane00.tif"
    ),
    "colorectal": Tree(
        colorectal.read,
        "Kather_texture_2016_image_tiles_5000",
        colorectal.FOLDERS,
        "10_CRC.tif",
        "stroma/10_CRC.tif",
    ),
}


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_read__keys_labels_and_bytes(tree: Tree, tmp_path: Path) -> None:
    for name in tree.folders:
        (tmp_path / tree.folder / name).mkdir(parents=True)
    path = tmp_path / tree.folder / tree.folders[1] / tree.file
    data = plant(path, 9, form="TIFF" if path.suffix == ".tif" else "JPEG")
    (path.parent / "Thumbs.db").write_bytes(b"no image")
    splits = tree.read(tmp_path)
    assert set(splits) == {"train"}
    assert len(splits["train"].class_names) == len(tree.folders)
    assert labels(splits["train"]) == {tree.key: 1}
    assert splits["train"].items[0].read() == data


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_read__names_missing_and_unknown_classes(tree: Tree, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"is missing; unpack here: .*from http"):
        tree.read(tmp_path)
    for name in (*tree.folders[1:], "zebra", ".hidden"):
        (tmp_path / tree.folder / name).mkdir(parents=True)
    message = (
        f"should hold {len(tree.folders)} class folders; 1 missing: {tree.folders[0]}; 1 unknown: zebra$"
    )
    with pytest.raises(DataError, match=message):
        tree.read(tmp_path)


def test_eurosat__the_newer_archive_is_read_too(tmp_path: Path) -> None:
    for name in eurosat.CLASS_NAMES:
        plant(tmp_path / f"EuroSAT_RGB/{name}/{name}_1.jpg")
    assert labels(eurosat.read(tmp_path)["train"])["SeaLake_SeaLake_1.jpg"] == 9


def test_eurosat__first_of_the_benchmark_as_published() -> None:
    """The order needs no pixels: names and the counts of the classes give it."""
    thousands = dict(zip(eurosat.CLASS_NAMES, (3, 3, 3, 2.5, 2.5, 2, 2.5, 3, 2.5, 3), strict=True))
    keys = [
        f"{name}_{name}_{n}.jpg" for name, count in thousands.items() for n in range(1, int(1000 * count) + 1)
    ]
    assert len(keys) == 27_000
    order = md5_order(keys, "train")
    assert [keys[n].partition("_")[2] for n in order[:3]] == [
        "Forest_687.jpg",
        "Residential_188.jpg",
        "HerbaceousVegetation_1056.jpg",
    ]
    assert [keys[n].partition("_")[2] for n in order[16_200:16_203]] == [
        "SeaLake_804.jpg",
        "Forest_1554.jpg",
        "River_2237.jpg",
    ]
