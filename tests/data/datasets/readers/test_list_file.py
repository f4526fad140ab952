"""Rules of single sets that their files cannot show, and the treatment of photographs of the retina."""

from collections import Counter

import numpy as np
import pytest

from tests.matrix import each
from vitctl.data.datasets.readers.list_file import (
    KITTI_SPLITS,
    clevr_label,
    eye_radius,
    sun397_split_numbers,
    treat_eye,
)


@each(
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


pytest.importorskip("scipy")


def eye(height: int, width: int, radius: int) -> np.ndarray:
    """A noisy bright disc on black, uint8 `[H, W, 3]`."""
    y, x = np.ogrid[:height, :width]
    disc = (y - height // 2) ** 2 + (x - width // 2) ** 2 <= radius**2
    noise = np.random.default_rng(0).integers(90, 160, (height, width, 3))
    return np.where(disc[:, :, None], noise, 0).astype(np.uint8)


def reference(image: np.ndarray) -> np.ndarray:
    """The recipe once more for an eye of the right radius: no scaling, the blur as a plain sum."""
    kernel = np.exp(-(np.arange(-30, 31) ** 2) / 200)
    kernel /= kernel.sum()
    padded = np.pad(image.astype(float), ((30, 30), (30, 30), (0, 0)), "reflect")
    tall = sum(weight * padded[i : i + image.shape[0]] for i, weight in enumerate(kernel))
    blurred = sum(weight * tall[:, i : i + image.shape[1]] for i, weight in enumerate(kernel))
    sharpened = np.clip(4.0 * image - 4.0 * np.round(blurred) + 128, 0, 255).astype(np.uint8)
    y, x = np.ogrid[: image.shape[0], : image.shape[1]]
    outside = (y - image.shape[0] // 2) ** 2 + (x - image.shape[1] // 2) ** 2 > 270**2
    sharpened[outside] = 128
    return sharpened[
        image.shape[0] // 2 - 270 : image.shape[0] // 2 + 270,
        image.shape[1] // 2 - 270 : image.shape[1] // 2 + 270,
    ]


def test_process__equals_the_recipe_written_out() -> None:
    image = eye(610, 640, 300)
    image[305, 620] = 0  # 600 bright pixels in the middle row are left
    assert eye_radius(image) == 300
    treated, wanted = treat_eye(image).astype(int), reference(image).astype(int)
    assert treated.shape == wanted.shape == (540, 540, 3)
    assert np.abs(treated - wanted).max() <= 4  # one level of the blur, where it lies on a half
    assert np.mean(treated != wanted) < 0.001
    assert treated[0, 0].tolist() == [128, 128, 128]
    assert treated.std() > 20


def test_process__a_narrow_photograph_stays_narrow() -> None:
    image = eye(400, 700, 300)
    image[200, 50] = 0
    assert treat_eye(image).shape == (400, 540, 3)


def test_eye_radius__of_a_black_picture_is_half_its_height() -> None:
    assert eye_radius(np.zeros((80, 100, 3), np.uint8)) == 40
    assert treat_eye(np.zeros((80, 100, 3), np.uint8)).shape == (540, 540, 3)
