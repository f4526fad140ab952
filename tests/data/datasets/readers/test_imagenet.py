"""ImageNet in each of its shapes on disk, ImageNet-21k, and ReaL labels against their published numbers."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import SHARED
from tests.data.datasets.conftest import labels, plant, tar_of
from vitctl.data.datasets.catalog import open_originals
from vitctl.data.datasets.known_sets import DATA_SETS
from vitctl.data.datasets.readers.imagenet import (
    REAL_IMAGES,
    REAL_SHA256,
    by_validation_number,
    imagenet_validation_labels,
    read_imagenet,
    read_real,
)
from vitctl.data.datasets.readers.original_files import class_list
from vitctl.engine.metrics import count_hits, padded_sets
from vitctl.errors import DataError

WNIDS = class_list("imagenet")
FIRST, LAST = WNIDS[0], WNIDS[-1]
VALIDATION = ["ILSVRC2012_val_00000001.JPEG", "ILSVRC2012_val_00000002.JPEG"]


def plant_folders(root: Path, names: list[str]) -> None:
    for wnid in WNIDS:
        (root / wnid).mkdir(parents=True)
    for name in names:
        plant(root / name)


def test_read__folders_of_both_splits(tmp_path: Path) -> None:
    plant_folders(tmp_path / "train", [f"{LAST}/{LAST}_7.JPEG", f"{FIRST}/{FIRST}_3.JPEG"])
    plant_folders(tmp_path / "val", [f"{LAST}/{VALIDATION[0]}"])
    with pytest.raises(DataError, match="2 class folders, should be 1,000; unpack it again"):
        read_imagenet(tmp_path)
    for wnid in WNIDS:
        plant(tmp_path / f"train/{wnid}/{wnid}_1.JPEG")
    splits = read_imagenet(tmp_path)
    assert labels(splits["validation"]) == {VALIDATION[0]: 999}
    train = labels(splits["train"])
    assert len(train) == 1002
    assert (train[f"{LAST}_7.JPEG"], train[f"{FIRST}_3.JPEG"], train[f"{WNIDS[5]}_1.JPEG"]) == (999, 0, 5)
    assert splits["train"].class_names == tuple(WNIDS)


@pytest.mark.slow
def test_read__tar_files_stay_packed(tmp_path: Path) -> None:
    """A tar of a tar per class, one PNG named JPEG, and a tar of flat validation images."""
    images = {
        wnid: plant(tmp_path / "image", n % 250, form="PNG" if n == 5 else "JPEG")
        for n, wnid in enumerate(WNIDS)
    }
    inner = {f"{wnid}.tar": tar_of({f"{wnid}_1.JPEG": data}) for wnid, data in images.items()}
    (tmp_path / "ILSVRC2012_img_train.tar").write_bytes(tar_of(inner))
    flat = {f"./{name}": images[WNIDS[3 + n]] for n, name in enumerate(VALIDATION)}
    (tmp_path / "ILSVRC2012_img_val.tar").write_bytes(tar_of(flat))
    splits = open_originals(str(tmp_path))
    assert labels(splits["train"]) == {f"{wnid}_1.JPEG": label for label, wnid in enumerate(WNIDS)}
    assert all(item.read() == images[WNIDS[item.label]] for item in splits["train"].items)
    assert labels(splits["validation"]) == {VALIDATION[0]: 65, VALIDATION[1]: 970}
    assert splits["validation"].items[1].read() == images[WNIDS[4]]


def test_read__refuses(tmp_path: Path) -> None:
    for name in (*VALIDATION, "cat.JPEG"):
        plant(tmp_path / "val" / name)
    with pytest.raises(DataError, match=r"'cat.JPEG' is not an ImageNet validation file name"):
        read_imagenet(tmp_path)
    (tmp_path / "val/cat.JPEG").unlink()
    assert labels(read_imagenet(tmp_path)["validation"]) == {VALIDATION[0]: 65, VALIDATION[1]: 970}
    (tmp_path / "ILSVRC2012_img_train.tar").write_bytes(b"<html>" * 200)
    with pytest.raises(DataError, match="not a complete, uncompressed tar file"):
        read_imagenet(tmp_path)
    (tmp_path / "ILSVRC2012_img_train.tar").write_bytes(tar_of({"n01440764.tar": b"no tar at all" * 99}))
    with pytest.raises(DataError, match="damaged or truncated at byte 512"):
        read_imagenet(tmp_path)


def test_imagenet_validation_labels__fifty_of_each_class() -> None:
    labels = imagenet_validation_labels()
    assert labels[:5].tolist() == [65, 970, 230, 809, 516]
    assert np.bincount(labels).tolist() == [50] * 1000


SYNSETS = class_list("imagenet21k")
FIRST_21K, THIRD_21K, LAST_21K = SYNSETS[0], SYNSETS[2], SYNSETS[-1]
EXPECTED_21K = {f"{FIRST_21K}_4.JPEG": 0, f"{THIRD_21K}_9.JPEG": 2, f"{LAST_21K}_1.JPEG": 21_842}


def file_of(wnid: str) -> str:
    return next(key for key in EXPECTED_21K if key.startswith(wnid))


@pytest.mark.parametrize("inside", ["", "fall11/"])
def test_imagenet21k__one_archive_of_archives(tmp_path: Path, inside: str) -> None:
    picture = plant(tmp_path / "any.jpg", 7)
    synsets = {
        f"{inside}{wnid}.tar": tar_of({file_of(wnid): picture}) for wnid in (LAST_21K, FIRST_21K, THIRD_21K)
    }
    (tmp_path / "fall11_whole.tar").write_bytes(tar_of(synsets))
    splits = DATA_SETS["imagenet21k"].open(tmp_path)
    assert labels(splits["train"]) == EXPECTED_21K
    assert splits["train"].class_names == SYNSETS
    assert {item.read() for item in splits["train"].items} == {picture}


def test_imagenet21k__folders_and_archives_side_by_side(tmp_path: Path) -> None:
    pictures = {
        file_of(FIRST_21K): plant(tmp_path / FIRST_21K / file_of(FIRST_21K), 1),
        file_of(LAST_21K): plant(tmp_path / LAST_21K / file_of(LAST_21K), 2),
    }
    pictures[file_of(THIRD_21K)] = picture = plant(tmp_path / "elsewhere" / "any.jpg", 3)
    (tmp_path / "elsewhere" / "any.jpg").unlink()
    (tmp_path / "elsewhere").rmdir()
    (tmp_path / f"{THIRD_21K}.tar").write_bytes(tar_of({file_of(THIRD_21K): picture}))
    (tmp_path / FIRST_21K / "notes.txt").write_text("no image")
    splits = DATA_SETS["imagenet21k"].open(tmp_path)
    assert labels(splits["train"]) == EXPECTED_21K
    assert {item.key: item.read() for item in splits["train"].items} == pictures


def test_imagenet21k__a_class_that_is_none(tmp_path: Path) -> None:
    plant(tmp_path / "n00000000" / "n00000000_1.JPEG")
    plant(tmp_path / FIRST_21K / file_of(FIRST_21K))
    with pytest.raises(DataError, match=r"n00000000 is not one of the 21,843 classes, such as n00004475$"):
        DATA_SETS["imagenet21k"].open(tmp_path)


REAL = SHARED / "real.json"
published = pytest.mark.skipif(not REAL.exists(), reason="real.json is not here")


@published
def test_read_real__the_published_file() -> None:
    assert hashlib.sha256(REAL.read_bytes()).hexdigest() == REAL_SHA256
    sets = read_real(REAL)
    assert sum(map(len, sets)) == 57_553
    assert sum(map(bool, sets)) == 46_837


@published
def test_real__the_original_labels_are_right_in_90_percent() -> None:
    """The figure that the authors of ReaL give; it ties the packed labels to the file."""
    best = np.repeat(imagenet_validation_labels()[:, None], 5, axis=1)
    hits = count_hits(best, padded_sets(read_real(REAL)))
    assert (hits.correct, hits.total) == (42_164, 46_837)
    assert round(100 * hits.accuracy, 2) == 90.02


def write(path: Path, sets: object) -> Path:
    path.write_text(json.dumps(sets))
    return path


def test_label_sets__go_by_name_and_not_by_order() -> None:
    sets = [[number % 1000] for number in range(REAL_IMAGES)]
    keys = [
        "n01440764/ILSVRC2012_val_00000293.JPEG",
        "ILSVRC2012_val_00000001",
        "ILSVRC2012_val_00050000_n01.JPEG",
    ]
    assert by_validation_number(keys, sets) == [[292], [0], [999]]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["cat.jpg"], "'cat.jpg' is not an ImageNet validation file name"),
        (["ILSVRC2012_val_00000000.JPEG"], "is not an ImageNet validation file name"),
        (["ILSVRC2012_val_00050001.JPEG"], "is not an ImageNet validation file name"),
        (["a/ILSVRC2012_val_00000002.JPEG", "b/ILSVRC2012_val_00000002.JPEG"], "are the same ImageNet"),
    ],
)
def test_label_sets__refuses(keys: list[str], message: str) -> None:
    with pytest.raises(DataError, match=message):
        by_validation_number(keys, [[0]] * REAL_IMAGES)


@pytest.mark.parametrize(
    "sets", [{}, [[1]], [[1]] * 49_999 + [[1000]], [[1]] * 49_999 + [[True]], [1] * 50_000]
)
def test_read_real__refuses_what_is_something_else(sets: object, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"real.json: should be a list of 50,000 lists of class numbers 0"):
        read_real(write(tmp_path / "real.json", sets))


def test_read_real__says_how_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="ReaL labels are missing; get them with `vitctl data prepare"):
        read_real(tmp_path / "real.json")
