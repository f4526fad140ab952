"""The table of data sets against what the sets' authors and the benchmark say."""

import math
import sys
from functools import partial

import pytest

from vitctl.data.datasets.catalog import find_data_set
from vitctl.data.datasets.originals import KNOWN, DataSet

TEST_ONLY = {"imagenet_v2", "objectnet"}


def test_known__every_set_once_and_every_alias_leads_to_one() -> None:
    aliases = [alias for row in KNOWN for alias in (row.name, *row.aliases)]
    assert len(aliases) == len(set(aliases)) > 45
    assert all(alias == alias.lower() for alias in aliases)
    assert all(find_data_set(alias) is row for row in KNOWN for alias in (row.name, *row.aliases))


def test_known__every_row_says_all_there_is_to_say() -> None:
    for row in KNOWN:
        assert row.read is not None and row.native and row.sizes, row.name
        assert set(row.sizes) <= {"train", "validation", "test"}
        assert "train" in row.sizes or row.name in TEST_ONLY
        assert (
            row.obtain.startswith(("Make them from ", "Make them: `vitctl data shards "))
            and "\n" not in row.obtain
        )


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


def head(row: DataSet) -> int:
    """Classes by the definition of the row's reader."""
    assert row.read is not None
    arguments = row.read.keywords if isinstance(row.read, partial) else {}
    reader = sys.modules[(row.read.func if isinstance(row.read, partial) else row.read).__module__]
    if "release" in arguments:
        return int(arguments["release"].num_classes)
    names = getattr(reader, "CLASS_NAMES", None)
    if names is None:
        return int(reader.NUM_CLASSES)
    return len(names[arguments["task"]] if "task" in arguments else names)


@pytest.mark.parametrize("row", KNOWN, ids=lambda row: row.name)
def test_known__the_head_is_as_large_as_the_readers_definition(row: DataSet) -> None:
    assert row.num_classes == head(row)
