"""Rules of single sets that their files cannot show, against what was published."""

from collections import Counter

import numpy as np
import pytest

from vitctl.data.datasets.readers.list_file import KITTI_SPLITS, clevr_label, sun397_split_numbers


@pytest.mark.parametrize(
    ("depth", "label"),
    [(0.1, 0), (8, 0), (8.01, 1), (8.5, 1), (9, 2), (9.5, 3), (9.51, 4), (10, 4), (10.01, 5), (99, 5)],
)
def test_clevr__borders_of_distances_belong_to_the_nearer_range(depth: float, label: int) -> None:
    objects = [{"pixel_coords": [0, 0, 50 + depth]}, {"pixel_coords": [0, 0, depth]}]
    assert clevr_label(objects, "distance") == label
    thresholds = np.array([0, 8, 8.5, 9, 9.5, 10, 100])  # the benchmark's: the last one below the depth
    assert np.flatnonzero(thresholds < depth).max() == label


def test_kitti__fourteen_drives_for_each_scored_split() -> None:
    assert Counter(KITTI_SPLITS.values()) == {"test": 14, "validation": 14}


def test_sun397__the_sizes_of_the_splits() -> None:
    assert np.bincount(sun397_split_numbers()).tolist() == [76_128, 10_875, 21_750]
