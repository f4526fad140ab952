"""The table of data sets against what the sets' authors and the benchmark say."""

import math

import pytest

from vitctl.data.catalog import find_data_set
from vitctl.data.datasets import (
    birds,
    caltech101,
    cars196,
    cifar,
    clevr,
    colorectal,
    dmlab,
    dsprites,
    dtd,
    eurosat,
    flowers102,
    imagenet,
    kitti,
    patch_camelyon,
    pets,
    resisc45,
    retinopathy,
    smallnorb,
    sun397,
    svhn,
    uc_merced,
)
from vitctl.data.known import KNOWN


def test_known__every_set_once_and_every_alias_leads_to_one() -> None:
    aliases = [alias for row in KNOWN for alias in (row.name, *row.aliases)]
    assert len(aliases) == len(set(aliases)) > 45
    assert all(alias == alias.lower() for alias in aliases)
    assert all(find_data_set(alias) is row for row in KNOWN for alias in (row.name, *row.aliases))


def test_known__every_row_says_all_there_is_to_say() -> None:
    for row in KNOWN:
        assert row.read is not None and row.native and row.sizes, row.name
        assert "train" in row.sizes and set(row.sizes) <= {"train", "validation", "test"}
        assert row.obtain.startswith(("Make them from ", "Make them: `vitctl data shards ")) and "\n" not in row.obtain


@pytest.mark.parametrize(
    ("name", "num_images"),
    [
        ("caltech101", 8_677 + 467),
        ("dtd", 47 * 120),
        ("flowers102", 8_189),
        ("pets", 7_349),
        ("sun397", 108_753),
        ("resisc45", 45 * 700),
        ("kitti-dist", 7_481),
        ("dsprites-ori", math.prod((3, 6, 40, 32, 32))),
        ("smallnorb-azim", 2 * 5 * 5 * 9 * 18 * 6),
        ("uc_merced", 21 * 100),
        ("colorectal", 8 * 625),
        ("patch_camelyon", 2**18 + 2**16),
    ],
)
def test_known__sizes_add_up(name: str, num_images: int) -> None:
    assert sum(find_data_set(name).sizes.values()) == num_images


HEADS = {
    "cifar10": cifar.CIFAR10.num_classes,
    "cifar100": cifar.CIFAR100.num_classes,
    "sun397": sun397.NUM_CLASSES,
    "cars196": cars196.NUM_CLASSES,
    "birds": birds.NUM_CLASSES,
    "imagenet": imagenet.NUM_CLASSES,
    "clevr-count": len(clevr.CLASS_NAMES["count"]),
    "clevr-dist": len(clevr.CLASS_NAMES["distance"]),
    "dsprites-loc": len(dsprites.CLASS_NAMES["location"]),
    "dsprites-ori": len(dsprites.CLASS_NAMES["orientation"]),
    "smallnorb-azim": len(smallnorb.CLASS_NAMES["azimuth"]),
    "smallnorb-elev": len(smallnorb.CLASS_NAMES["elevation"]),
    "caltech101": len(caltech101.CLASS_NAMES),
    "colorectal": len(colorectal.CLASS_NAMES),
    "dmlab": len(dmlab.CLASS_NAMES),
    "dtd": len(dtd.CLASS_NAMES),
    "eurosat": len(eurosat.CLASS_NAMES),
    "flowers102": len(flowers102.CLASS_NAMES),
    "kitti-dist": len(kitti.CLASS_NAMES),
    "patch_camelyon": len(patch_camelyon.CLASS_NAMES),
    "pets": len(pets.CLASS_NAMES),
    "resisc45": len(resisc45.CLASS_NAMES),
    "retinopathy": len(retinopathy.CLASS_NAMES),
    "svhn": len(svhn.CLASS_NAMES),
    "uc_merced": len(uc_merced.CLASS_NAMES),
}


def test_known__the_head_is_as_large_as_the_readers_definition() -> None:
    assert {row.name: row.num_classes for row in KNOWN} == HEADS
