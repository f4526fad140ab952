import pickle
from pathlib import Path

import numpy as np
import pytest
import torchvision.datasets
from PIL import Image

from vitctl.data.datasets.readers.torchvision_sets import FAMILIES, read_torchvision
from vitctl.data.images.decode import decode
from vitctl.errors import DataError


def plant_image(path: Path, number: int) -> bytes:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (6, 5), (number, 0, 0)).save(path)
    return path.read_bytes()


def test_families__are_known_to_torchvision() -> None:
    assert len(FAMILIES) == 7
    assert all(hasattr(torchvision.datasets, name) for name in FAMILIES)


def test_cifar10__arrays_become_lossless_png(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = np.random.default_rng(0).integers(0, 256, (4, 3072), dtype=np.uint8)
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    for name in ("one", "two"):
        (folder / name).write_bytes(pickle.dumps({"data": data, "labels": [3, 1, 0, 2]}))
    (folder / "meta").write_bytes(pickle.dumps({"label_names": list("wxyz")}))
    monkeypatch.setattr(torchvision.datasets.CIFAR10, "train_list", [["one", None], ["two", None]])
    monkeypatch.setattr(torchvision.datasets.CIFAR10, "test_list", [["one", None]])
    meta = {"filename": "meta", "key": "label_names", "md5": None}
    monkeypatch.setattr(torchvision.datasets.CIFAR10, "meta", meta)
    splits = read_torchvision("CIFAR10", tmp_path, download=False)
    assert {split: len(found.items) for split, found in splits.items()} == {"train": 8, "test": 4}
    assert splits["train"].class_names == tuple("wxyz")
    items = splits["train"].items
    assert [(item.key, item.label) for item in items[:5]] == [
        ("0", 3),
        ("1", 1),
        ("2", 0),
        ("3", 2),
        ("4", 3),
    ]
    np.testing.assert_array_equal(decode(items[5].read()), data[1].reshape(3, 32, 32).transpose(1, 2, 0))


def test_pets__files_keep_their_bytes_and_names(tmp_path: Path) -> None:
    base = tmp_path / "oxford-iiit-pet"
    images = {
        name: plant_image(base / f"images/{name}.jpg", number)
        for number, name in enumerate(("Abyssinian_1", "pug_2"))
    }
    (base / "annotations").mkdir()
    for split in ("trainval", "test"):
        (base / f"annotations/{split}.txt").write_text("Abyssinian_1 1 1 1\npug_2 2 2 1\n")
    splits = read_torchvision("OxfordIIITPet", tmp_path, download=False)
    assert set(splits) == {"train", "test"}
    assert splits["train"].class_names == ("Abyssinian", "Pug")
    found = [(item.key, item.label, item.read()) for item in splits["train"].items]
    assert found == [("Abyssinian_1.jpg", 0, images["Abyssinian_1"]), ("pug_2.jpg", 1, images["pug_2"])]


def test_dtd__keys_carry_their_folder(tmp_path: Path) -> None:
    base = tmp_path / "dtd/dtd"
    plant_image(base / "images/banded/banded_0002.jpg", 1)
    (base / "labels").mkdir()
    for split in ("train", "val", "test"):
        (base / f"labels/{split}1.txt").write_text("banded/banded_0002.jpg\n")
    splits = read_torchvision("DTD", tmp_path, download=False)
    assert set(splits) == {"train", "validation", "test"}
    assert [item.key for item in splits["validation"].items] == ["banded/banded_0002.jpg"]


def test_eurosat__keys_double_the_label(tmp_path: Path) -> None:
    for name in ("AnnualCrop", "Forest"):
        plant_image(tmp_path / f"eurosat/2750/{name}/{name}_1.jpg", 2)
    splits = read_torchvision("EuroSAT", tmp_path, download=False)
    keys = [item.key for item in splits["train"].items]
    assert keys == ["AnnualCrop_AnnualCrop_1.jpg", "Forest_Forest_1.jpg"]


def test_torchvision__refuses_the_unknown_and_the_missing(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="torchvision:MNOST is unknown, should be one of: CIFAR10, "):
        read_torchvision("MNOST", tmp_path, download=False)
    for name in FAMILIES:
        with pytest.raises(
            DataError, match=rf"torchvision:{name}: cannot be read from .*; or try --download"
        ) as caught:
            read_torchvision(name, tmp_path, download=False)
        assert "\n" not in str(caught.value)
