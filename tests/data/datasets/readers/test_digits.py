import numpy as np
import pytest

from vitctl.data.datasets.readers import digits
from vitctl.data.images.decode import decode


def test_digits__splits_are_the_whole_set_once() -> None:
    splits = {split: digits.items(split) for split in ("train", "test")}
    assert {split: len(items) for split, items in splits.items()} == digits.SIZES
    keys = [item.key for items in splits.values() for item in items]
    assert sorted(keys) == [f"digit_{number:04d}" for number in range(1797)]
    assert {item.label for items in splits.values() for item in items} == set(range(len(digits.CLASS_NAMES)))


def test_digits__pictures_are_the_scans() -> None:
    from sklearn.datasets import load_digits

    scans, targets = load_digits(return_X_y=True)
    for item in digits.items("test")[:20]:
        number = int(item.key[-4:])
        picture = decode(item.read())
        assert picture.shape == (32, 32, 3)
        np.testing.assert_array_equal(picture, picture[:, :, :1].repeat(3, 2))
        blocks = picture[:, :, 0].reshape(8, 4, 8, 4).mean(axis=(1, 3))
        scan = scans[number].reshape(8, 8) * 255 / 16
        assert np.corrcoef(blocks.ravel(), scan.ravel())[0, 1] > 0.98
        assert item.label == targets[number]


def test_digits__unknown_split() -> None:
    with pytest.raises(KeyError):
        digits.items("validation")
