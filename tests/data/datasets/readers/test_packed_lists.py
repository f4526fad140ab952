"""Packed facts against what is published about them."""

import hashlib
import re
from pathlib import Path

import numpy as np
import pytest

from tests.data.datasets.conftest import plant
from vitctl.data.datasets.readers import imagenet
from vitctl.data.datasets.readers.files import ASSETS
from vitctl.data.datasets.readers.packed_lists import (
    _sun397_numbers,
    imagenet_validation_labels,
    sun397_split,
)
from vitctl.errors import DataError


def test_imagenet_validation_labels__fifty_of_each_class() -> None:
    labels = imagenet_validation_labels()
    assert labels[:5].tolist() == [65, 970, 230, 809, 516]
    assert np.bincount(labels).tolist() == [50] * 1000


def test_imagenet__flat_validation_images_need_no_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 1,000 images in the part of all 50,000: they must be whole, or a list is asked for."""
    labels = np.random.default_rng(0).permutation(1000)
    monkeypatch.setattr(imagenet, "imagenet_validation_labels", lambda: labels)
    picture = plant(tmp_path / "one.jpg")
    (tmp_path / "val").mkdir()
    for number in range(1, 1001):
        (tmp_path / f"val/ILSVRC2012_val_{number:08d}.JPEG").hardlink_to(tmp_path / "one.jpg")
    images = imagenet.read(tmp_path)["validation"].items
    assert [item.label for item in images] == labels.tolist()
    assert images[0].read() == picture
    (tmp_path / "val/ILSVRC2012_val_00000007.JPEG").unlink()
    with pytest.raises(DataError, match=r"LOC_synset_mapping.txt or synsets.txt is missing"):
        imagenet.read(tmp_path)


def test_sun397__the_sizes_of_the_splits() -> None:
    assert np.bincount(_sun397_numbers()).tolist() == [76_128, 10_875, 21_750]


def test_sun397_split__refuses_other_images() -> None:
    with pytest.raises(
        DataError, match=r"these 1 images are not the 108,753 of SUN397, .* unpack SUN397.tar.gz again"
    ):
        sun397_split(["/a/abbey/sun_aaalbzqrimafwbiv.jpg"])


def test_assets__every_one_has_the_digest_of_its_readme() -> None:
    rows = re.findall(
        r"^\| (\S+\.\w+) \|.*\| ([0-9a-f]{16}) \|$", (ASSETS / "README.md").read_text(), re.MULTILINE
    )
    assert {name for name, _ in rows} == {path.name for path in ASSETS.iterdir()} - {"README.md"}
    for name, digest in rows:
        assert hashlib.sha256((ASSETS / name).read_bytes()).hexdigest().startswith(digest), name
