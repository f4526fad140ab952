import io
import json
import tarfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from webdataset.tariterators import group_by_keys, tar_file_expander

from tests.data.conftest import CLASSES, encoded, make_items, picture, several, store
from tests.matrix import slow
from vitctl.data.images.decode import Reencode
from vitctl.data.shards.indexing import index_shards
from vitctl.data.source.stores import ShardSource
from vitctl.data.writer.intake import Item, Originals
from vitctl.data.writer.shard_writer import write_originals, write_split
from vitctl.errors import DataError


def tree(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_write_split__same_items_and_seed_give_the_same_bytes(tmp_path: Path) -> None:
    for name, seed in (("one", 3), ("two", 3), ("three", 4)):
        store(make_items(20), tmp_path / name, seed=seed, max_samples=6)
    assert len(tree(tmp_path / "one")) == 4 + 3
    assert tree(tmp_path / "one") == tree(tmp_path / "two")
    assert tree(tmp_path / "one") != tree(tmp_path / "three")


def test_write_split__webdataset_reads_what_we_write(tmp_path: Path) -> None:
    names = ["plain", "a.b", "../up", "x/y.z/w", "100%", "%2E", "é ü", "x" * 120, "d" * 90 + "/" + "f" * 90]
    items = [Item(name, label % 3, lambda label=label: picture(label)) for label, name in enumerate(names)]
    index = store(items, tmp_path / "train")
    source = ShardSource(index)
    assert sorted(source.key(sample) for sample in range(len(source))) == sorted(names)
    with (tmp_path / "train/shard-000000.tar").open("rb") as file:
        theirs = list(group_by_keys(tar_file_expander([{"url": file.name, "stream": file}])))
    ours = [source.read(sample) for sample in range(len(source))]
    assert [sample["png"] for sample in theirs] == ours
    assert [int(sample["cls"]) for sample in theirs] == source.labels().tolist()


@pytest.mark.parametrize("max_bytes", [12_000, 16_000, 10**9])
def test_write_split__shards_keep_within_their_bytes(tmp_path: Path, max_bytes: int) -> None:
    index = store(make_items(20), tmp_path / "train", max_bytes=max_bytes)
    assert (len(index.shards) > 1) == (max_bytes < 10**9)
    content = [
        shard.num_samples * 4 * 512 + 1024 for shard in index.shards
    ]  # header and one block for each member
    assert max(content) <= max_bytes
    assert sum(shard.num_samples for shard in index.shards) == 20


def test_write_split__one_sample_larger_than_a_shard_gets_its_own(tmp_path: Path) -> None:
    index = store(make_items(3), tmp_path / "train", max_bytes=1)
    assert [shard.num_samples for shard in index.shards] == [1, 1, 1]


def test_write_split__bytes_decide_the_extension_and_stay(tmp_path: Path) -> None:
    inks = encoded(Image.new("CMYK", (5, 5)), "JPEG")
    items = [Item("png.jpg", 0, lambda: picture(1)), Item("cmyk.png", 1, lambda: inks)]
    index = store(items, tmp_path / "train")
    with tarfile.open(tmp_path / "train/shard-000000.tar") as tar:
        assert {name for name in tar.getnames() if not name.endswith("cls")} == {
            "png%2Ejpg.png",
            "cmyk%2Epng.jpg",
        }
    source = ShardSource(index)
    assert {source.key(sample): source.read(sample) for sample in range(2)} == {
        "png.jpg": picture(1),
        "cmyk.png": inks,
    }


def fail() -> bytes:
    raise KeyboardInterrupt


@pytest.mark.parametrize("stop", [KeyboardInterrupt, DataError])
def test_write_split__half_done_is_not_there_and_goes_on(tmp_path: Path, stop: type[BaseException]) -> None:
    """Nothing at OUT; the shards that were finished are taken over by the next run, untouched, and not read
    again.
    """
    read: list[str] = []

    def item(number: int, last: Callable[[], bytes]) -> Item:
        def get() -> bytes:
            read.append(f"k{number}")
            return last() if number == 7 else picture(number)

        return Item(f"k{number}", number % 3, get, len(picture(number)))

    def text() -> bytes:
        return b"text".ljust(len(picture(7)))

    wanted = store(make_items(10), tmp_path / "wanted", max_samples=2)
    items = [item(number, fail if stop is KeyboardInterrupt else text) for number in range(10)]
    with pytest.raises(stop):
        store(items, tmp_path / "train", max_samples=2)
    finished = {path: path.stat().st_mtime_ns for path in (tmp_path / ".train.partial").glob("*.tar")}
    assert 0 < len(finished) < 5
    assert not (tmp_path / "train").exists()
    read.clear()
    notes: list[str] = []
    items = [item(number, lambda: picture(7)) for number in range(10)]
    index = store(items, tmp_path / "train", max_samples=2, note=notes.append)
    assert notes == [f"continuing: {len(finished)} of 5 shards are finished already"]
    assert len(read) == 10 - 2 * len(finished)
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "train").glob("*.tar")}.items() >= {
        path.name: time for path, time in finished.items()
    }.items()
    assert tree(tmp_path / "train") == tree(tmp_path / "wanted")
    assert index.digest == wanted.digest
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train", "wanted"]


@pytest.mark.parametrize("change", ["key", "label", "size", "seed", "classes", "max_samples", "source_text"])
def test_write_split__a_changed_plan_starts_again_and_says_so(tmp_path: Path, change: str) -> None:
    def items(*, changed: bool = False, stop: bool = False) -> list[Item]:
        made = [replace(item, size=len(item.read())) for item in make_items(10)]
        if changed and change == "key":
            made[3] = replace(made[3], key="other")
        if changed and change == "label":
            made[3] = replace(made[3], label=2)
        if changed and change == "size":
            made[3] = replace(made[3], read=lambda: picture(40), size=len(picture(40)))
        return [replace(item, read=fail) if stop and item.key == "k7" else item for item in made]

    usual = {"seed": 0, "source_text": "", "max_samples": 2}
    other = {"seed": 5, "source_text": "new", "max_samples": 3}
    with pytest.raises(KeyboardInterrupt):
        write_split(items(stop=True), tmp_path / "train", CLASSES, **usual)  # type: ignore[arg-type]
    names = (*CLASSES, "d") if change == "classes" else CLASSES
    options = usual | ({change: other[change]} if change in other else {})
    notes: list[str] = []
    write_split(items(changed=True), tmp_path / "train", names, **options, note=notes.append)
    assert len(notes) == 1 and notes[0].startswith(
        "starting again: the images or the options are not those of the"
    )
    write_split(items(changed=True), tmp_path / "wanted", names, **options)  # type: ignore[arg-type]
    assert tree(tmp_path / "train") == tree(tmp_path / "wanted")


def test_write_split__a_damaged_finished_shard_is_written_again(tmp_path: Path) -> None:
    items = [replace(item, size=len(item.read())) for item in make_items(10)]
    stopped = [replace(item, read=fail) if item.key == "k7" else item for item in items]
    with pytest.raises(KeyboardInterrupt):
        store(stopped, tmp_path / "train", max_samples=2)
    first = tmp_path / ".train.partial/shard-000000.tar"
    first.write_bytes(first.read_bytes()[:1500])
    store(items, tmp_path / "train", max_samples=2)
    store(items, tmp_path / "wanted", max_samples=2)
    assert tree(tmp_path / "train") == tree(tmp_path / "wanted")


@pytest.mark.parametrize("make", [make_items, several])
def test_write_split__what_is_there_whole_stays_and_anything_else_is_refused(
    tmp_path: Path, make: Callable[[int], list[Item]]
) -> None:
    """So that a run of several splits goes on behind those that are finished."""
    first = store(make(8), tmp_path / "train", max_samples=3)
    before = {path: path.stat().st_mtime_ns for path in first.folder.iterdir()}
    notes: list[str] = []
    again = store(make(8), tmp_path / "train", max_samples=3, note=notes.append, workers=2)
    assert notes == ["is there already, whole; nothing was written"]
    assert again == first
    for items, names, options in (
        (make(9), CLASSES, {}),
        ([replace(item, key=item.key + "x") for item in make(8)], CLASSES, {}),
        ([replace(item, label=1) for item in make(8)], CLASSES, {}),
        ([replace(item, read=lambda: picture(50)) for item in make(8)], CLASSES, {}),
        (make(8), (*CLASSES, "d"), {}),
        (make(8), CLASSES, {"seed": 1}),
        (make(8), CLASSES, {"max_samples": 4}),
        (make(8), CLASSES, {"source_text": "other"}),
    ):
        arguments: dict[str, Any] = {"seed": 0, "source_text": "", "max_samples": 3, **options}
        with pytest.raises(DataError, match="train: exists already with other images or options; remove"):
            write_split(items, tmp_path / "train", names, **arguments)
    assert {path: path.stat().st_mtime_ns for path in first.folder.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["train"]


def test_write_split__two_writers_do_not_share_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vitctl.system.files._LOCK_SECONDS", 0)

    def again() -> bytes:
        with pytest.raises(DataError, match="train: is being written by another process; wait for it or"):
            store(make_items(1), tmp_path / "train")
        return picture(1)

    store([Item("a", 0, again)], tmp_path / "train")
    assert sorted(tree(tmp_path / "train")) == ["index.json", "names.bin", "samples.npy", "shard-000000.tar"]


@pytest.mark.parametrize("sized", [True, *slow(False)])
def test_write_split__any_number_of_processes_gives_the_same_bytes(tmp_path: Path, sized: bool) -> None:
    items = [replace(item, size=len(item.read()) if sized else None) for item in make_items(300)]
    for workers in (0, 1, 3):
        calls: list[tuple[int, int]] = []
        store(
            items,
            tmp_path / str(workers),
            seed=2,
            max_samples=40,
            workers=workers,
            progress=lambda *call: calls.append(call),  # noqa: B023 - called before the next turn
        )
        assert calls[-1] == (300, 300) if sized else (600, 600)
    assert len(tree(tmp_path / "0")) == 8 + 3
    assert tree(tmp_path / "0") == tree(tmp_path / "1") == tree(tmp_path / "3")


@pytest.mark.parametrize("workers", [0, 3, *slow(1)])
def test_write_split__an_image_of_unknown_size_is_made_once(tmp_path: Path, workers: int) -> None:
    made = tmp_path / "made"

    def make(number: int) -> bytes:
        with made.open("a") as file:  # of whichever process
            file.write(f"{number}\n")
        return picture(number)

    items = [Item(str(number), number % 3, partial(make, number)) for number in range(300)]
    store(items, tmp_path / "train", workers=workers)
    assert sorted(map(int, made.read_text().split())) == list(range(300))


def test_write_split__a_size_that_is_not_true_is_refused(tmp_path: Path) -> None:
    items = [Item("a", 0, lambda: picture(1), 5)]
    with pytest.raises(
        DataError, match=rf"a: changed while shards were written: 5 bytes, now {len(picture(1))}"
    ):
        store(items, tmp_path / "train", workers=2)


def photo(side: int, mode: str = "RGB", **options: Any) -> bytes:
    noise = np.random.default_rng(side).integers(0, 256, (side // 2, side, 3), dtype=np.uint8)
    return encoded(Image.fromarray(noise).convert(mode), "JPEG", quality=95, **options)


def test_write_split__makes_large_photographs_smaller_and_no_others(tmp_path: Path) -> None:
    files = {
        "small": photo(60),
        "large": photo(90),
        "grey": photo(100, "L"),
        "inks": photo(92, "CMYK"),
        "png": picture(50),
    }
    items = [Item(key, 0, lambda data=data: data, len(data)) for key, data in files.items()]
    index = store(items, tmp_path / "train", source_text="here", reencode=Reencode(max_side=60))
    assert index.source.startswith("here; JPEG longer than 60 pixels shrunk to that, quality 90, Pillow ")
    source = ShardSource(index)
    found = {source.key(sample): source.read(sample) for sample in range(len(source))}
    assert {key for key in files if found[key] == files[key]} == {"small", "png"}
    opened = {key: Image.open(io.BytesIO(data)) for key, data in found.items()}
    assert {key: (image.mode, image.size) for key, image in opened.items() if key != "png"} == {
        "small": ("RGB", (60, 30)),
        "large": ("RGB", (60, 30)),
        "grey": ("L", (60, 30)),
        "inks": ("RGB", (60, 30)),
    }


def test_reencode__quality_alone_compresses_again_where_that_helps() -> None:
    again = Reencode(quality=30)
    exif = Image.Exif()
    exif[0x0112] = 6  # orientation
    large, small = photo(90, exif=exif), again(photo(60))
    assert len(again(large)) < len(large) and Image.open(io.BytesIO(again(large))).size == (90, 45)
    assert Image.open(io.BytesIO(again(large))).info["exif"] == Image.open(io.BytesIO(large)).info["exif"]
    assert Reencode(quality=90)(small) == small


def interval_of(data: bytes) -> int:
    at = data.find(b"\xff\xdd")
    return int.from_bytes(data[at + 4 : at + 6]) if at > 0 else 0


def test_reencode__compressed_again_it_has_restart_markers() -> None:
    for mode, size, interval in (("RGB", 640, 4), ("RGB", 560, 5), ("RGB", 368, 23), ("L", 320, 4)):
        assert interval_of(Reencode(max_side=size)(photo(700, mode))) == interval


def test_reencode__a_missing_end_marker_does_not_matter() -> None:
    """Training reads such images too."""
    whole = photo(640)
    assert Reencode(max_side=256)(whole[:-2]) == Reencode(max_side=256)(whole)
    assert Reencode(max_side=700)(whole[:-2]) == whole[:-2]


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([], "no images to write"),
        ([Item("a", 0, bytes), Item("a", 1, bytes)], "two images have the key 'a', should be unique"),
        ([Item("a", 3, bytes)], "a: label 3 has no name, 3 class names were given"),
        ([Item("a", -2, bytes)], "a: label -2 has no name"),
        ([Item("a/b", 0, lambda: b"#!/bin/sh")], "a/b: not an image: begins with 23 21 2f"),
    ],
)
def test_write_split__refuses(tmp_path: Path, items: list[Item], message: str) -> None:
    with pytest.raises(DataError, match=message):
        store(items, tmp_path / "train")


def test_write_split__refuses_to_overwrite(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    (tmp_path / "train/precious").touch()
    with pytest.raises(DataError, match="train: exists already, should be a new folder"):
        store(make_items(1), tmp_path / "train")
    assert (tmp_path / "train/precious").exists()


def test_write_split__keeps_unlabelled_items(tmp_path: Path) -> None:
    index = store([Item("a", -1, lambda: picture(1))], tmp_path / "predict")
    assert ShardSource(index).labels().tolist() == [-1]


def test_write_split__several_labels(tmp_path: Path) -> None:
    index = store(several(8), tmp_path / "train", max_samples=3)
    source = ShardSource(index)
    labels = source.labels()
    assert (labels.dtype, labels.shape) == (np.int64, (8, 3))
    rows = {source.key(sample): row for sample, row in enumerate(labels.tolist())}
    assert [rows[f"k{n}"] for n in range(4)] == [[0, -1, -1], [2, 0, -1], [-1, -1, -1], [1, 2, 0]]
    assert source.labels(np.array([5, 2])).tolist() == labels[[5, 2]].tolist()
    assert index.rows["label"].tolist() == labels[:, 0].tolist()
    again = index_shards([index.folder / shard.name for shard in index.shards], class_names=CLASSES)
    assert ShardSource(again).labels().tolist() == labels.tolist()
    with (index.folder / "shard-000000.tar").open("rb") as file:
        theirs = list(group_by_keys(tar_file_expander([{"url": file.name, "stream": file}])))
    assert [json.loads(sample["json"])["labels"] for sample in theirs] == [
        [label for label in row if label >= 0] for row in labels[:3].tolist()
    ]


_UP = [f"{'../' * depth}UP{end}" for depth in range(1, 9) for end in ("", "/x")]
_HOSTILE = [
    *_UP, *(name.replace("/", "\\") for name in _UP), "ABS", "ABS/deeper", "", ".", "..", "...", "./a", "a/",
    "a/b", "a/../../b",
    "/", "//", "\\", "a\0b", "a\nb", "a\x1bb", "\u202eb", "\udcff", ".hidden", ".train.partial", "-rf",
    "--out", " ", " a", "a ",
    "x" * 241, "é" * 130, "~/../x", "\t",
]  # fmt: skip


def test_no_split_name_leaves_the_folder(tmp_path: Path) -> None:
    out = tmp_path / "a" / "b" / "c" / "out"
    out.mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))
    assert len(_HOSTILE) >= 50
    for name in _HOSTILE:
        split = name.replace("ABS", str(tmp_path / "ABS"))
        with pytest.raises(DataError) as caught:
            write_originals(Originals(make_items(2), CLASSES, "table.csv"), out, split)
        assert str(caught.value).startswith("table.csv: ") and str(caught.value).isprintable()
    assert sorted(tmp_path.rglob("*")) == before
