"""ObjectNet in its own layout: four mapping files, PNG with a red frame."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.data.datasets.conftest import labels, sizes
from vitctl.data.datasets.readers import objectnet
from vitctl.data.datasets.readers.files import class_list
from vitctl.errors import DataError

WNIDS = class_list("imagenet")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """113 shared classes, the first of them two of ImageNet's, and one that ImageNet lacks."""
    mappings = tmp_path / "objectnet-1.0/mappings"
    mappings.mkdir(parents=True)
    new_of_old = np.random.default_rng(0).permutation(1000).tolist()
    (mappings / "imagenet_to_label_2012_v2").write_text(
        "".join(f"thing {new}, its kin\n" for new in new_of_old)
    )
    old_of_new = {str(new): old for old, new in enumerate(new_of_old)}
    (mappings / "pytorch_to_imagenet_2012_id.json").write_text(json.dumps(old_of_new))
    shared = {f"Object {n:03d}": f"thing {n}, its kin" for n in range(113)}
    shared["Object 000"] = "thing 530, its kin; thing 409, its kin"
    (mappings / "objectnet_to_imagenet_1k.json").write_text(json.dumps(shared))
    folders = {f"object_{n:03d}": f"Object {n:03d}" for n in range(113)} | {"air_freshener": "Air freshener"}
    (mappings / "folder_to_objectnet_label.json").write_text(json.dumps(folders))
    for number, folder in enumerate(folders):
        framed = np.full((9, 10, 3), (255, 0, 0), np.uint8)
        framed[2:-2, 2:-2] = (0, number, 0)
        place = tmp_path / f"objectnet-1.0/images/{folder}/abc{number}.png"
        place.parent.mkdir(parents=True)
        Image.fromarray(framed).save(place)
    return tmp_path


def test_read__only_the_shared_classes_named_after_imagenets(root: Path) -> None:
    splits = objectnet.read(root)
    assert sizes(splits) == {"test": 113}
    names = splits["test"].class_names
    assert names[0] == f"Object 000 ({WNIDS[409]} {WNIDS[530]})"
    assert names[7] == f"Object 007 ({WNIDS[7]})"
    assert labels(splits["test"])["object_112/abc112.png"] == 112
    assert objectnet.imagenet_classes(names[0]) == [WNIDS[409], WNIDS[530]]
    assert objectnet.imagenet_classes(WNIDS[3]) == objectnet.imagenet_classes("Object (odd)") == []


def test_read__the_red_frame_is_gone(root: Path, tmp_path: Path) -> None:
    item = next(item for item in objectnet.read(root)["test"].items if item.label == 5)
    (tmp_path / "x.png").write_bytes(item.read())
    with Image.open(tmp_path / "x.png") as image:
        pixels = np.asarray(image)
    assert pixels.shape == (5, 6, 3)
    assert pixels.reshape(-1, 3).tolist() == [[0, 5, 0]] * 30


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("folder_to_objectnet_label.json", "[]", "label.json: should be a JSON table$"),
        (
            "objectnet_to_imagenet_1k.json",
            '{"Object 001": "thing 1, its kin"}',
            "1 classes are shared .*, should be 113$",
        ),
        (
            "objectnet_to_imagenet_1k.json",
            '{"Object 001": "unheard of"}',
            r"do not fit together \(KeyError: 'unheard of'\)$",
        ),
    ],
)
def test_read__bad_mappings(root: Path, name: str, text: str, message: str) -> None:
    (root / "objectnet-1.0/mappings" / name).write_text(text)
    with pytest.raises(DataError, match=message):
        objectnet.read(root)
