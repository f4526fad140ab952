import numpy as np
import pytest

from vitctl.data.datasets import digits
from vitctl.data.decode import decode


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
        small = picture[::4, ::4, 0]
        np.testing.assert_array_equal(picture, small.repeat(4, 0).repeat(4, 1)[:, :, None].repeat(3, 2))
        np.testing.assert_array_equal(np.round(small.astype(float) * 16 / 255), scans[number].reshape(8, 8))
        assert item.label == targets[number]


def test_digits__unknown_split() -> None:
    with pytest.raises(KeyError):
        digits.items("validation")
