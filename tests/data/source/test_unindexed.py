import errno
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import webdataset

from tests.data.conftest import contents
from vitctl.data.datasets.catalog import open_split
from vitctl.data.shards.index import Index, read_index
from vitctl.data.shards.make_index import index_shards
from vitctl.data.source.read import ShardSource
from vitctl.data.source.unindexed import INDEXED
from vitctl.errors import DataError

MakeSplit = Callable[..., Index]


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("VITCTL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def without_index(index: Index) -> tuple[Path, bytes, list[object]]:
    """A split as another program left it; the index that `data index` writes for it, and what is in it."""
    shards = [index.folder / shard.name for shard in index.shards]
    told, inside = index_shards(shards, source=INDEXED), contents(ShardSource(index))
    text = (told.folder / "index.json").read_bytes()
    for name in ("index.json", "samples.npy"):
        (index.folder / name).unlink()
    return index.folder, text, inside


@pytest.mark.parametrize("given", ["the set", "the split"])
def test_data__shards_without_an_index_are_indexed_once_and_that_is_said(
    make_split: MakeSplit, capsys: pytest.CaptureFixture[str], given: str
) -> None:
    folder, text, inside = without_index(make_split(20))
    make_split(4, "test")
    source = open_split("train", path=str(folder.parent if given == "the set" else folder))
    assert contents(source) == inside
    assert source.class_names == ("a", "b", "c")  # which the shards tell
    assert (folder / "index.json").read_bytes() == text
    assert sorted(path.name for path in folder.iterdir() if path.suffix != ".tar") == [
        "index.json",
        "samples.npy",
    ]
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1
    told = rf"{folder}: 3 shard\(s\) without an index, 0.1 MiB, are read once ... 20 images of 3 classes, \d+\.\d s\n"
    assert re.fullmatch(told, said.err)
    assert contents(open_split("train", path=str(folder.parent))) == inside
    assert capsys.readouterr().err == ""


def test_data__of_a_set_the_splits_that_lack_an_index_get_one(make_split: MakeSplit) -> None:
    folder, _, inside = without_index(make_split(9, "val"))
    make_split(4, "train"), without_index(make_split(4, "aside"))
    assert len(open_split("train", path=str(folder.parent))) == 4
    assert contents(open_split("val", path=str(folder.parent))) == inside
    assert not (folder.parent / "aside/index.json").exists()  # neither a usual name nor asked for
    assert len(open_split("aside[:2]", path=str(folder.parent))) == 2


ONE = "import sys; from vitctl.data.datasets.catalog import open_split; print(open_split('train', path=sys.argv[1]).digest)"


def test_data__of_processes_that_begin_at_once_one_indexes(make_split: MakeSplit) -> None:
    folder, _, _ = without_index(make_split(600, max_samples=200))
    command = [sys.executable, "-c", ONE, str(folder)]
    running = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(4)
    ]
    said = [process.communicate() for process in running]
    assert [process.returncode for process in running] == [0] * 4
    assert {out for out, _ in said} == {read_index(folder).digest + "\n"}
    assert sorted(err.count("are read once") for _, err in said) == [0, 0, 0, 1]
    assert not list(folder.glob(".*"))


def test_data__where_there_are_no_locks_all_write_the_same(
    make_split: MakeSplit, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    folder, text, _ = without_index(make_split(9))
    monkeypatch.setattr("vitctl.data.source.unindexed.fcntl.flock", no_locks)
    open_split("train", path=str(folder))
    assert (folder / "index.json").read_bytes() == text


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES])
def test_data__a_folder_that_cannot_be_written_says_what_to_type(
    make_split: MakeSplit, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    folder, _, _ = without_index(make_split(9))

    def refused(path: Path) -> None:
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr("vitctl.data.source.unindexed.open_lock", refused)
    wanted = rf"no index, and none can be written there \(.*\); type `vitctl data index {folder} --out FOLDER`, then --data FOLDER$"
    with pytest.raises(DataError, match=wanted):
        open_split("train", path=str(folder))


def test_data__a_list_is_indexed_in_the_cache_for_these_files_as_they_are(
    make_split: MakeSplit, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _, inside = without_index(make_split(20, max_samples=6))
    before = sorted(path.name for path in folder.iterdir())
    pattern = f"{folder}/shard-{{000000..000002}}.tar"
    for _ in range(2):
        assert contents(open_split("train", path=pattern)) == inside[:18]
    assert capsys.readouterr().err.count("3 shard(s) without an index") == 1
    assert contents(open_split("train", path=f"{folder}/shard-000002.tar")) == inside[12:18]
    assert sorted(path.name for path in folder.iterdir()) == before
    os.utime(folder / "shard-000001.tar", (1, 1))
    open_split("train", path=pattern)
    assert capsys.readouterr().err.count("3 shard(s) without an index") == 1
    assert len(list((cache / "splits").iterdir())) == 3


def test_data__splits_side_by_side_are_not_made_one(make_split: MakeSplit) -> None:
    """As in the usual WebDataset of ImageNet: imagenet1k-train-0000.tar beside imagenet1k-validation-00.tar."""
    folder, _, inside = without_index(make_split(20, max_samples=10))
    (folder / "shard-000000.tar").rename(folder / "imagenet1k-train-0000.tar")
    (folder / "shard-000001.tar").rename(folder / "imagenet1k-validation-00.tar")
    with pytest.raises(
        DataError,
        match=r"holds shards of several splits by their names \(train, validation\); give those of one",
    ):
        open_split("train", path=str(folder))
    assert contents(open_split("train", path=f"{folder}/imagenet1k-train-{{0000..0000}}.tar")) == inside[:10]


def test_data__a_damaged_shard_is_one_line_and_nothing_is_left(
    make_split: MakeSplit, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _, _ = without_index(make_split(20))
    shard = folder / "shard-000001.tar"
    shard.write_bytes(shard.read_bytes()[:3000])
    with pytest.raises(
        DataError, match=r"shard-000001.tar: .*; if these are not shards, make some: `vitctl data shards"
    ) as caught:
        open_split("train", path=str(folder))
    assert "\n" not in str(caught.value)
    assert sorted(path.name for path in folder.iterdir()) == [
        f"shard-{number:06d}.tar" for number in range(3)
    ]
    assert capsys.readouterr().err.endswith("are read once ... \n")


def test_data__shards_of_webdatasets_own_writer(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    with webdataset.ShardWriter(f"{tmp_path}/mine/%04d.tar", maxcount=5, verbose=0) as writer:
        for number in range(12):
            writer.write(
                {"__key__": f"n{number}", "jpg": np.full((9, 9, 3), 20 * number, np.uint8), "cls": number % 4}
            )
    source = open_split("mine", path=str(tmp_path / "mine"))
    assert source.class_names == ("0", "1", "2", "3")
    assert source.labels().tolist() == [number % 4 for number in range(12)]
    assert [source.key(number) for number in range(12)] == [f"n{number}" for number in range(12)]


def test_data__a_shard_that_came_after_the_index_is_refused_and_not_left_untrained(
    make_split: MakeSplit,
) -> None:
    folder, _, _ = without_index(make_split(20))
    assert len(open_split("train", path=str(folder.parent))) == 20
    first = sorted(folder.glob("*.tar"))[0]
    (folder / "later.tar").write_bytes(first.read_bytes())
    for path in (folder, folder.parent):
        with pytest.raises(
            DataError,
            match=r"1 shard\(s\) came after it was indexed \(such as later\.tar\); remove .*index\.json",
        ):
            open_split("train", path=str(path))
    (folder / "later.tar").unlink()
    assert len(open_split("train", path=str(folder.parent))) == 20
