import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torchvision.datasets

from tests.data.datasets.conftest import plant
from vitctl.data.datasets.catalog import TORCHVISION_SETS, open_originals, read_torchvision
from vitctl.data.datasets.readers.arrays import encode_png
from vitctl.data.datasets.readers.original_files import class_list
from vitctl.data.shards.index import Index
from vitctl.data.source.stores import ShardSource
from vitctl.data.writer.write import write_split
from vitctl.errors import DataError


def test_open_originals__picks_the_reader(tmp_path: Path) -> None:
    image = tmp_path / "tree/cat/1.png"
    image.parent.mkdir(parents=True)
    image.write_bytes(encode_png(np.zeros((2, 2), np.uint8)))
    with tarfile.open(tmp_path / "tree.tar", "w") as tar:
        tar.add(image, "cat/1.png")
    (tmp_path / "tree.csv").write_text("path,label\ntree/cat/1.png,cat\n")
    (tmp_path / "tree.tsv").write_text("path\tlabel\ntree/cat/1.png\tcat\n")
    for name in ("tree", "tree.tar", "tree.csv", "tree.tsv"):
        (split,) = open_originals(str(tmp_path / name)).values()
        assert [(item.label, item.read()) for item in split.items] == [(0, image.read_bytes())]
        assert split.class_names == ("cat",)


def test_open_originals__refuses(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="none: no such file or folder"):
        open_originals(str(tmp_path / "none"))
    (tmp_path / "a.zip").touch()
    with pytest.raises(DataError, match=r"a.zip: should be a folder of class folders, a .tar of them"):
        open_originals(str(tmp_path / "a.zip"))
    with pytest.raises(DataError, match="torchvision:nothing is unknown"):
        open_originals("torchvision:nothing", root=tmp_path)


def test_open_originals__new_shards_hold_the_same_samples(make_split: Callable[..., Index]) -> None:
    old = make_split(20)
    make_split(5, "test")
    splits = open_originals(str(old.folder.parent))
    assert {split: len(originals.items) for split, originals in splits.items()} == {"train": 20, "test": 5}
    originals = splits["train"]
    new = write_split(
        originals.items,
        old.folder.parent / "new",
        originals.class_names,
        seed=9,
        source_text="",
        max_samples=4,
    )

    def samples(index: Index) -> dict[str, tuple[int, bytes]]:
        source = ShardSource(index)
        return {source.key(n): (int(source.labels()[n]), source.read(n)) for n in range(len(source))}

    assert len(new.shards) == 5 != len(old.shards)
    assert samples(new) == samples(old)
    assert list(samples(new)) != list(samples(old))
    assert new.class_names == old.class_names


def test_torchvision__sets_are_known_to_it() -> None:
    assert len(TORCHVISION_SETS) == 7
    assert all(hasattr(torchvision.datasets, name) for name in TORCHVISION_SETS)


def test_torchvision__pets_keep_its_spelling(tmp_path: Path) -> None:
    base, breeds = tmp_path / "oxford-iiit-pet", class_list("pets")
    (base / "annotations").mkdir(parents=True)
    for split in ("trainval", "test"):
        lines = [f"{breed}_{len(split)} {number} 1 1\n" for number, breed in enumerate(breeds, 1)]
        (base / f"annotations/{split}.txt").write_text("".join(lines))
        images = [plant(base / f"images/{breed}_{len(split)}.jpg", n) for n, breed in enumerate(breeds)]
    splits = read_torchvision("OxfordIIITPet", tmp_path, download=False)
    assert set(splits) == {"train", "test"}
    assert splits["train"].class_names[:2] == ("Abyssinian", "American Bulldog")
    assert splits["train"].source == "torchvision OxfordIIITPet"
    assert [(item.key, item.label, item.read()) for item in splits["test"].items] == [
        (f"{breed}_4.jpg", number, images[number]) for number, breed in enumerate(breeds)
    ]


def test_torchvision__folders_are_where_it_keeps_them(tmp_path: Path) -> None:
    names = [f"{texture}/{texture}_0001.jpg" for texture in class_list("dtd")]
    for name in names:
        plant(tmp_path / "dtd/dtd/images" / name)
    (tmp_path / "dtd/dtd/labels").mkdir()
    for split in ("train", "val", "test"):
        (tmp_path / f"dtd/dtd/labels/{split}1.txt").write_text("\n".join(names))
    for use in class_list("eurosat"):
        plant(tmp_path / f"eurosat/2750/{use}/{use}_1.jpg")
    dtd = read_torchvision("DTD", tmp_path, download=False)
    assert set(dtd) == {"train", "validation", "test"}
    assert [item.key for item in dtd["validation"].items] == names
    eurosat = read_torchvision("EuroSAT", tmp_path, download=False)["train"]
    assert [item.key for item in eurosat.items][:2] == ["AnnualCrop_AnnualCrop_1.jpg", "Forest_Forest_1.jpg"]


def test_torchvision__refuses_the_unknown_and_the_missing(tmp_path: Path) -> None:
    for name in TORCHVISION_SETS:
        with pytest.raises(
            DataError, match=rf"torchvision:{name}: cannot be read from .*; or try --download"
        ) as caught:
            read_torchvision(name, tmp_path, download=False)
        assert "\n" not in str(caught.value)
