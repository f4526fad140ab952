"""ReaL labels: the published file against its published numbers, and files that are something else."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import SHARED
from vitctl.data.datasets.readers.imagenet import imagenet_validation_labels
from vitctl.data.source.imagenet_real import NUM_IMAGES, SHA256, label_sets, read_real
from vitctl.engine.metrics import count_hits, padded_sets
from vitctl.errors import DataError

REAL = SHARED / "real.json"
published = pytest.mark.skipif(not REAL.exists(), reason="real.json is not here")


@published
def test_read_real__the_published_file() -> None:
    assert hashlib.sha256(REAL.read_bytes()).hexdigest() == SHA256
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


@published
def test_real__scores_46837_images_whatever_is_answered() -> None:
    sets = padded_sets(read_real(REAL))
    best = np.random.default_rng(0).integers(0, 1000, (NUM_IMAGES, 5))
    hits = count_hits(best, sets)
    assert hits.total == 46_837
    assert hits.correct == sum(
        int(answer) in labels[labels >= 0] for answer, labels in zip(best[:, 0], sets, strict=True)
    )
    always_right = np.repeat(sets[:, :1], 5, axis=1)
    assert count_hits(always_right, sets).correct == 46_837


def write(path: Path, sets: object) -> Path:
    path.write_text(json.dumps(sets))
    return path


def test_label_sets__go_by_name_and_not_by_order() -> None:
    sets = [[number % 1000] for number in range(NUM_IMAGES)]
    keys = [
        "n01440764/ILSVRC2012_val_00000293.JPEG",
        "ILSVRC2012_val_00000001",
        "ILSVRC2012_val_00050000_n01.JPEG",
    ]
    assert label_sets(keys, sets) == [[292], [0], [999]]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["cat.jpg"], "'cat.jpg' is not an ImageNet validation file name"),
        (["ILSVRC2012_val_00000000.JPEG"], "is not an ImageNet validation file name"),
        (["ILSVRC2012_val_00050001.JPEG"], "is not an ImageNet validation file name"),
        (
            ["a/ILSVRC2012_val_00000002.JPEG", "b/ILSVRC2012_val_00000002.JPEG"],
            "are the same ImageNet validation image$",
        ),
    ],
)
def test_label_sets__refuses(keys: list[str], message: str) -> None:
    with pytest.raises(DataError, match=message):
        label_sets(keys, [[0]] * NUM_IMAGES)


@pytest.mark.parametrize(
    "sets", [{}, [[1]], [[1]] * 49_999 + [[1000]], [[1]] * 49_999 + [[True]], [1] * 50_000]
)
def test_read_real__refuses_what_is_something_else(sets: object, tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"real.json: should be a list of 50,000 lists of class numbers 0 to 999$"
    ):
        read_real(write(tmp_path / "real.json", sets))


def test_read_real__says_how_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match="ReaL labels are missing; get them with `vitctl data prepare imagenet_real`"
    ):
        read_real(tmp_path / "real.json")
