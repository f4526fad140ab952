import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.datasets.conftest import labels, plant
from vitctl.data.datasets.readers.clevr import CLASS_NAMES, distance_label, read
from vitctl.data.images.decode import decode
from vitctl.errors import DataError


def scene(name: str, *depths: float) -> dict[str, Any]:
    return {
        "image_filename": name,
        "objects": [{"shape": "cube", "pixel_coords": [9, 8, depth]} for depth in depths],
    }


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "CLEVR_v1.0/scenes").mkdir(parents=True)
    for word in ("train", "val"):
        scenes = [
            scene(f"CLEVR_{word}_000000.png", 12.5, 8.0, 9.1),
            scene(f"CLEVR_{word}_000001.png", *range(11, 21)),
        ]
        (tmp_path / f"CLEVR_v1.0/scenes/CLEVR_{word}_scenes.json").write_text(
            json.dumps({"info": {}, "scenes": scenes})
        )
        for number in range(2):
            plant(
                tmp_path / f"CLEVR_v1.0/images/{word}/CLEVR_{word}_{number:06d}.png",
                number,
                form="PNG",
                mode="RGBA",
            )
    return tmp_path


def test_read__two_tasks_of_the_same_images(root: Path) -> None:
    count, distance = read(root, "count"), read(root, "distance")
    assert labels(count["train"]) == {"CLEVR_train_000000.png": 0, "CLEVR_train_000001.png": 7}
    assert labels(distance["validation"]) == {"CLEVR_val_000000.png": 0, "CLEVR_val_000001.png": 5}
    assert set(count) == {"train", "validation"}
    assert (len(count["train"].class_names), len(distance["train"].class_names)) == (8, 6)
    assert decode(count["train"].items[1].read())[0, 0].tolist() == [1, 0, 0]


@pytest.mark.parametrize(
    ("depth", "label"),
    [(0.1, 0), (8, 0), (8.01, 1), (8.5, 1), (9, 2), (9.5, 3), (9.51, 4), (10, 4), (10.01, 5), (99, 5)],
)
def test_distance_label__borders_belong_to_the_nearer_range(depth: float, label: int) -> None:
    assert distance_label([{"pixel_coords": [0, 0, 50]}, {"pixel_coords": [0, 0, depth]}]) == label
    thresholds = np.array([0, 8, 8.5, 9, 9.5, 10, 100])  # the benchmark's own: the last one below the depth
    assert np.flatnonzero(thresholds < depth).max() == label
    assert len(CLASS_NAMES["distance"]) == 6


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not a file of CLEVR scenes"),
        ('{"scenes": [{"image_filename": "x.png"}]}', "not a file of CLEVR scenes .*objects"),
        (
            json.dumps({"scenes": [scene("x.png", 1)]}),
            "1 labels are out of range, the first is -2 of 8 classes",
        ),
        (
            json.dumps({"scenes": [scene("x.png", 1, 2, 3)]}),
            "1 of 1 listed images are missing, the first is x.png",
        ),
    ],
)
def test_read__refuses(text: str, message: str, root: Path) -> None:
    (root / "CLEVR_v1.0/scenes/CLEVR_train_scenes.json").write_text(text)
    with pytest.raises(DataError, match=message):
        read(root, "count")


def test_read__names_the_archive(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"CLEVR_v1.0 is missing; unpack here: CLEVR_v1.0.zip from https"):
        read(tmp_path, "distance")
