import io
import tarfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from webdataset.tariterators import group_by_keys, tar_file_expander

from vitctl.data.datasets.png import encode_png
from vitctl.data.read import ShardSource
from vitctl.data.shards import Item, image_extension, write_split
from vitctl.errors import DataError

CLASSES = ("a", "b", "c")


def picture(number: int) -> bytes:
    return encode_png(np.full((4, 4 + number), 5 * number, np.uint8))


def make_items(num: int) -> list[Item]:
    return [Item(f"k{number}", number % 3, lambda number=number: picture(number)) for number in range(num)]  # type: ignore


def tree(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_write_split__same_items_and_seed_give_the_same_bytes(tmp_path: Path) -> None:
    for name, seed in (("one", 3), ("two", 3), ("three", 4)):
        write_split(make_items(20), tmp_path / name, CLASSES, seed=seed, source_text="", max_samples=6)
    assert len(tree(tmp_path / "one")) == 4 + 2
    assert tree(tmp_path / "one") == tree(tmp_path / "two")
    assert tree(tmp_path / "one") != tree(tmp_path / "three")


def test_write_split__webdataset_reads_what_we_write(tmp_path: Path) -> None:
    names = ["plain", "a.b", "../up", "x/y.z/w", "100%", "%2E", "é ü", "x" * 120, "d" * 90 + "/" + "f" * 90]
    items = [Item(name, label % 3, lambda label=label: picture(label)) for label, name in enumerate(names)]  # type: ignore
    index = write_split(items, tmp_path / "train", CLASSES, seed=0, source_text="")
    source = ShardSource(index)
    assert sorted(source.key(sample) for sample in range(len(source))) == sorted(names)
    with (tmp_path / "train/shard-000000.tar").open("rb") as file:
        theirs = list(group_by_keys(tar_file_expander([{"url": file.name, "stream": file}])))
    ours = [source.read(sample) for sample in range(len(source))]
    assert [sample["png"] for sample in theirs] == ours
    assert [int(sample["cls"]) for sample in theirs] == source.labels().tolist()


@pytest.mark.parametrize("max_bytes", [12_000, 16_000, 10**9])
def test_write_split__shards_keep_within_their_bytes(tmp_path: Path, max_bytes: int) -> None:
    index = write_split(make_items(20), tmp_path / "train", CLASSES, seed=0, source_text="", max_bytes=max_bytes)
    assert (len(index.shards) > 1) == (max_bytes < 10**9)
    content = [shard.num_samples * 4 * 512 + 1024 for shard in index.shards]  # header and one block for each member
    assert max(content) <= max_bytes
    assert sum(shard.num_samples for shard in index.shards) == 20


def test_write_split__one_sample_larger_than_a_shard_gets_its_own(tmp_path: Path) -> None:
    index = write_split(make_items(3), tmp_path / "train", CLASSES, seed=0, source_text="", max_bytes=1)
    assert [shard.num_samples for shard in index.shards] == [1, 1, 1]


def test_write_split__bytes_decide_the_extension_and_stay(tmp_path: Path) -> None:
    file = io.BytesIO()
    Image.new("CMYK", (5, 5)).save(file, "JPEG")
    items = [Item("png.jpg", 0, lambda: picture(1)), Item("cmyk.png", 1, file.getvalue)]
    index = write_split(items, tmp_path / "train", CLASSES, seed=0, source_text="")
    with tarfile.open(tmp_path / "train/shard-000000.tar") as tar:
        assert {name for name in tar.getnames() if not name.endswith("cls")} == {"png%2Ejpg.png", "cmyk%2Epng.jpg"}
    source = ShardSource(index)
    assert {source.key(sample): source.read(sample) for sample in range(2)} == {
        "png.jpg": picture(1),
        "cmyk.png": file.getvalue(),
    }


def test_write_split__tells_its_progress(tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    write_split(
        make_items(4),
        tmp_path / "train",
        CLASSES,
        seed=0,
        source_text="",
        progress=lambda done, total: calls.append((done, total)),
    )
    assert calls == [(1, 4), (2, 4), (3, 4), (4, 4)]


def fail() -> bytes:
    raise KeyboardInterrupt


@pytest.mark.parametrize("stop", [KeyboardInterrupt, DataError])
def test_write_split__leaves_nothing_half_done(tmp_path: Path, stop: type[BaseException]) -> None:
    items = [*make_items(9), Item("last", 0, fail if stop is KeyboardInterrupt else lambda: b"text")]
    with pytest.raises(stop):
        write_split(items, tmp_path / "train", CLASSES, seed=0, source_text="", max_samples=2)
    assert list(tmp_path.iterdir()) == []


def test_write_split__replaces_what_a_killed_run_left(tmp_path: Path) -> None:
    (tmp_path / ".train.partial").mkdir()
    (tmp_path / ".train.partial/shard-000099.tar").write_bytes(b"old")
    write_split(make_items(4), tmp_path / "train", CLASSES, seed=0, source_text="")
    assert [path.name for path in tmp_path.iterdir()] == ["train"]
    assert sorted(tree(tmp_path / "train")) == ["index.json", "samples.npy", "shard-000000.tar"]


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([], "no images to write"),
        ([Item("a", 0, bytes), Item("a", 1, bytes)], "two images have the key 'a', should be unique"),
        ([Item("a", 3, bytes)], "a: label 3 has no name, 3 class names were given"),
        ([Item("a", -2, bytes)], "a: label -2 has no name"),
        ([Item("a/b", 0, lambda: b"#!/bin/sh")], r"a/b: not a JPEG, PNG, .* \(begins with 23 21 2f"),
    ],
)
def test_write_split__refuses(tmp_path: Path, items: list[Item], message: str) -> None:
    with pytest.raises(DataError, match=message):
        write_split(items, tmp_path / "train", CLASSES, seed=0, source_text="")


def test_write_split__refuses_to_overwrite(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    (tmp_path / "train/precious").touch()
    with pytest.raises(DataError, match="train: exists already, should be a new folder"):
        write_split(make_items(1), tmp_path / "train", CLASSES, seed=0, source_text="")
    assert (tmp_path / "train/precious").exists()


@pytest.mark.parametrize(
    ("kind", "extension"),
    [("JPEG", "jpg"), ("PNG", "png"), ("WEBP", "webp"), ("GIF", "gif"), ("BMP", "bmp"), ("TIFF", "tif")],
)
def test_image_extension__knows_the_formats_we_decode(kind: str, extension: str) -> None:
    file = io.BytesIO()
    Image.new("RGB", (3, 3)).save(file, kind)
    assert image_extension(file.getvalue()) == extension


@given(st.binary(max_size=20))
def test_image_extension__never_fails(data: bytes) -> None:
    assert image_extension(data) in {None, "jpg", "png", "webp", "gif", "bmp", "tif"}


def test_write_split__keeps_unlabelled_items(tmp_path: Path) -> None:
    index = write_split([Item("a", -1, lambda: picture(1))], tmp_path / "predict", CLASSES, seed=0, source_text="")
    assert ShardSource(index).labels().tolist() == [-1]
