import errno
import json
import multiprocessing
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from tests.data.conftest import contents
from tests.data.server import Faults, serving
from tests.matrix import slow
from vitctl.data.datasets.catalog import open_split, original_splits
from vitctl.data.images.transforms import TrainTransform
from vitctl.data.loader.batches import train_batches
from vitctl.data.shards.index import Index
from vitctl.data.shards.indexing import index_shards
from vitctl.data.source.locate import INDEXED, expand, locate_all_splits, locate_splits
from vitctl.data.source.order import Order, SampleOrder, WindowedOrder
from vitctl.data.source.splits import write_exclusion
from vitctl.data.source.stores import ShardSource
from vitctl.data.source.views import Source
from vitctl.errors import DataError
from vitctl.system import remote
from vitctl.system.pool import run_each
from vitctl.system.process import START

MakeSplit = Callable[..., Index]
FAULTS = {"drop": 0.08, "503": 0.08, "429": 0.04, "short": 0.08, "short_range": 0.08}
GIB = 2**30


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(remote, "PAUSE_SECONDS", 0.001)
    monkeypatch.setenv("VITCTL_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("cache_bytes", [pytest.param(0, marks=pytest.mark.slow), GIB])
def test_remote_split__is_the_local_one_over_a_bad_line(make_split: MakeSplit, cache_bytes: int) -> None:
    local = ShardSource(make_split(40))
    faults = Faults(3, **FAULTS)
    with serving(local.index.folder.parent, faults) as url:
        source = open_split("train", path=url, cache_bytes=cache_bytes)
        assert contents(source) == contents(local)
        assert source.digest == local.digest
        assert source.location(0).startswith(f"{url}/train/shard-")
        itself = open_split("train", path=f"{url}/train/", cache_bytes=cache_bytes)
        assert contents(itself) == contents(local)
    assert sum(faults.done[name] for name in FAULTS) > 3


def epoch(source: Source, order: SampleOrder, num_workers: int) -> tuple[list[int], np.ndarray]:
    """Samples and pixels of the first 40 positions."""
    batches = train_batches(
        source,
        order,
        TrainTransform(8),
        seed=1,
        batch_size=8,
        micro_batch=8,
        rank=0,
        num_processes=1,
        first_step=0,
        num_workers=num_workers,
    )
    first = list(islice(batches, 5))
    assert not any(batch.bad for batch in first)
    samples = [sample for batch in first for sample in batch.samples.tolist()]
    return samples, np.concatenate([batch.images.numpy() for batch in first])


@pytest.mark.parametrize("num_workers", [2, *slow(0)])
@pytest.mark.parametrize(("order", "cache_bytes"), [(Order(40, 1), 0), (WindowedOrder(40, 1, 7, 2), GIB)])
def test_remote_split__an_epoch_is_exact_over_a_bad_line(
    make_split: MakeSplit, order: SampleOrder, cache_bytes: int, num_workers: int
) -> None:
    local = ShardSource(make_split(40))
    expected = epoch(local, order, 0)
    faults = Faults(5, **FAULTS)
    with serving(local.index.folder.parent, faults) as url:
        source = open_split("train", path=url, cache_bytes=cache_bytes)
        found = epoch(source, order, num_workers)
    assert sorted(found[0]) == list(range(40))
    assert found[0] == expected[0]
    assert np.array_equal(found[1], expected[1])
    if cache_bytes and num_workers == 0:
        got = [path for path, _ in faults.asked if path.endswith(".tar")]
        runs = [path for number, path in enumerate(got) if number == 0 or got[number - 1] != path]
        assert len(runs) == len(set(runs)) == 6  # each shard is read in one go, once


def test_remote_split__a_server_that_always_fails_stops_the_run_with_one_line(
    make_split: MakeSplit, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_split(40).folder
    faults = Faults(5)
    with serving(folder.parent, faults) as url:
        source = open_split("train", path=url)
        faults.shares = {"503": 1.0}
        monkeypatch.setattr(remote, "PATIENCE_SECONDS", 0.0)
        for num_workers in (0, 2):
            with pytest.raises(DataError, match=r"tar: the server answers 503 .*; gave up") as caught:
                epoch(source, Order(40, 1), num_workers)
            assert "\n" not in str(caught.value)
            assert str(caught.value).startswith(url)
        with pytest.raises(DataError, match=r"none: no such file|gave up"):
            open_split("train", path=f"{url}/none")
        faults.shares = {}
        with pytest.raises(DataError, match=r"neither index.json nor train/index.json there"):
            open_split("train", path=f"{url}/none")


def test_remote_split__a_lost_or_changed_shard_is_one_line(make_split: MakeSplit) -> None:
    folder = make_split(40).folder
    with serving(folder.parent, Faults()) as url:
        ranges, cached = (open_split("train", path=url, cache_bytes=size) for size in (0, GIB))
        (folder / "shard-000000.tar").unlink()
        with (folder / "shard-000001.tar").open("r+b") as file:
            file.write(b"\1")
        for source in (ranges, cached):
            with pytest.raises(DataError, match=r"shard-000000.tar: no such file on the server$"):
                source.read(0)
        with pytest.raises(DataError, match=r"shard-000001.tar: 20480 bytes with sha256 .*; index it again"):
            cached.read(8)


def test_index_addresses__indexes_the_shards_of_others(make_split: MakeSplit, tmp_path: Path) -> None:
    local = ShardSource(make_split(20))
    with serving(local.index.folder, Faults(2, **FAULTS)) as url:
        urls = expand(f"{url}/shard-{{000000..000002}}.tar")
        index = index_shards(urls, tmp_path / "index", class_names=("a", "b", "c"), source="theirs")
        assert sorted(os.listdir(tmp_path / "index")) == ["index.json", "names.bin", "samples.npy"]
        assert [shard.url for shard in index.shards] == urls
        for cache_bytes in (0, GIB):
            source = open_split("index", path=str(tmp_path / "index"), cache_bytes=cache_bytes)
            assert contents(source) == contents(local)
        with pytest.raises(DataError, match=r"1 file name; each shard needs a different one"):
            index_shards([urls[0], urls[0]], tmp_path / "twice")
        (local.index.folder / "odd.tar").write_bytes(b"no tar at all" * 100)
        with pytest.raises(DataError, match=rf"^{url}/odd.tar: not a complete, uncompressed tar file"):
            index_shards([f"{url}/odd.tar"], tmp_path / "odd")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"url": "file:///etc/passwd"}, "commands are never run"),
        ({"url": "pipe:cat /etc/passwd"}, "commands are never run"),
        ({"url": "../../x.tar"}, "commands are never run"),
        ({"url": "/etc/passwd"}, "commands are never run"),
        ({"url": "http://example.org/x.tar"}, "plain http"),
        ({"url": 7}, "shards should be a list"),
        ({"url": "https://example.org/x.tar", "sha256": "../../x"}, "shards should be a list"),
        ({"url": "https://example.org/x.tar", "name": "../x.tar"}, "shards should be a list"),
    ],
)
def test_read_index__refuses_addresses_that_point_outside(
    make_split: MakeSplit, changes: dict[str, object], message: str
) -> None:
    folder = make_split(20).folder
    fields = json.loads((folder / "index.json").read_text())
    fields["shards"][1] |= changes
    (folder / "index.json").write_text(json.dumps(fields))
    with pytest.raises(DataError, match=message):
        open_split("train", path=str(folder))


def test_locate_splits__some_shards_of_a_split(make_split: MakeSplit, tmp_path: Path) -> None:
    local = ShardSource(make_split(20))
    folder, everything = local.index.folder, contents(local)
    (tmp_path / "list.txt").write_text(
        f"# two of them\n{folder}/shard-000002.tar\n\n{folder}/shard-000000.tar\n"
    )
    with serving(folder.parent, Faults()) as url:
        for text, rows in {
            f"{folder}/shard-{{000000..000001}}.tar": [*range(14)],
            f"{folder}/shard-000001.tar": [*range(7, 14)],
            f"{folder}/shard-000002.tar,{folder}/shard-{{000000,000001}}.tar": [*range(14, 20), *range(14)],
            f"@{tmp_path}/list.txt": [*range(14, 20), *range(7)],
            f"{url}/train/shard-00000{{1..2}}.tar": [*range(7, 20)],
            f"{folder}/shard-*[12].tar": [*range(7, 20)],
        }.items():
            assert contents(open_split("train", path=text)) == [everything[row] for row in rows], text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{0..1}", "names 2 files in 1 folders, should be the .tar shards of one split"),
        ("a/x.tar,b/x.tar", "names 2 files in 2 folders"),
        ("nowhere/{0..1}.tar", r"no index.json beside these shards; .*data index 'nowhere/\{0..1\}.tar'"),
        ("nowhere/*.tar", r"nowhere/\*.tar: no file matches this pattern"),
        ("a{0}.tar", "should be a range such as"),
        ("a{0..9999999}.tar", "more than 1,000,000 names"),
        ("@nowhere.txt", "nowhere.txt: cannot be read"),
        ("pipe:rm -rf x", "commands are never run"),
        ("file:///etc", "commands are never run"),
        ("s4://bucket/x", "commands are never run"),
    ],
)
def test_locate_splits__refuses(text: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        locate_splits(text, "train")


def test_locate_splits__a_shard_that_the_index_lacks(make_split: MakeSplit) -> None:
    folder = make_split(20).folder
    shutil.copy(folder / "shard-000001.tar", folder / "more.tar")
    with pytest.raises(DataError, match=r"more.tar is not in the index \(1 shards are not\)"):
        open_split("train", path=f"{folder}/{{shard-000000,more}}.tar")


@pytest.mark.parametrize(
    "text",
    ["{08..11}{a,b}", "{00..127}", "x{3..0}y", "{1..10..3}", "x{a,,b}", r"a\{1,2}", "{é..,z}", "{0..0}"],
)
def test_expand__braces_are_those_of_the_shell(text: str) -> None:
    shell = subprocess.run(
        ["bash", "-c", f"printf '%s\n' {text.replace(chr(92), chr(92) * 2)}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert expand(text) == shell.stdout.splitlines()


@pytest.mark.parametrize(
    "text", ["{0..9999999}", "{0..99}{0..99}{0..1}", "{a,b}" * 20_000, "{x,y" + "{0..999}" * 9 + "}"]
)
def test_expand__too_many_names_are_refused_before_they_fill_the_memory(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vitctl.data.source.locate._MAX_NAMES", 10_000)
    began = time.process_time()
    with pytest.raises(DataError, match=r"more than 10,000 names|list the names in @FILE") as caught:
        expand(text)
    assert len(str(caught.value)) < 300 and "\n" not in str(caught.value)
    assert time.process_time() - began < 5


@pytest.mark.parametrize("text", ["{a,{b,c}}", "{a,b}}", "}{a,b}"])
def test_expand__braces_that_do_not_pair_up_are_refused(text: str) -> None:
    with pytest.raises(DataError, match="nested or unclosed braces; list the"):
        expand(text)


def test_locate_splits__images_left_out_stay_out_of_chosen_shards_too(make_split: MakeSplit) -> None:
    index = make_split(40, max_samples=10)
    write_exclusion(index, [3, 11, 12], reason="in the test set")
    names = [shard.name for shard in index.shards]
    place = locate_splits(f"{index.folder}/{names[1]},{index.folder}/{names[0]}", "train")
    chosen, whole = place[index.folder.name].open(0), ShardSource(index)
    kept = [sample for sample in (*range(10, 20), *range(10)) if sample not in (3, 11, 12)]
    assert [chosen.key(n) for n in range(len(chosen))] == [whole.key(sample) for sample in kept]


def asked_for(faults: Faults) -> list[str]:
    """The files that were asked for since the last call."""
    found = [path.rpartition("/")[2] for path, _ in faults.asked]
    faults.asked.clear()
    return found


def test_remote_index__is_renewed_by_every_command(
    make_split: MakeSplit, capfd: pytest.CaptureFixture[str]
) -> None:
    folder, faults = make_split(20).folder, Faults()
    with serving(folder.parent, faults) as url:
        assert len(open_split("train", path=f"{url}/train")) == 20
        assert asked_for(faults) == ["index.json", "samples.npy", "names.bin"]
        open_split("train[:50% of each class]", path=f"{url}/train")  # which reads every name
        open_split("train", path=f"{url}/train")
        assert asked_for(faults) == ["index.json", "index.json"]
        fields = json.loads((folder / "index.json").read_text())
        (folder / "index.json").write_text(json.dumps({**fields, "class_names": ["x", "y", "z"]}))
        assert open_split("train", path=f"{url}/train").class_names == ("x", "y", "z")
        assert asked_for(faults) == ["index.json", "samples.npy", "names.bin"]
    assert open_split("train", path=f"{url}/train").class_names == ("x", "y", "z")  # nobody answers any more
    with serving(folder.parent, Faults()) as url:
        open_split("train", path=url)
    assert len(open_split("train", path=url)) == 20  # a folder of splits too
    assert "the cached index is used" in capfd.readouterr().err


def test_remote_index__the_processes_of_a_machine_ask_once(
    make_split: MakeSplit, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = Faults()
    with serving(make_split(20).folder.parent, faults) as url:

        def opened(_: int) -> int:
            return len(open_split("train", path=f"{url}/train"))

        monkeypatch.setenv(START, "one command")
        assert run_each(opened, 4, 1, workers=4) == [20] * 4
        assert asked_for(faults) == ["index.json", "samples.npy", "names.bin"]
        monkeypatch.setenv(START, "the next")
        opened(0)
        assert asked_for(faults) == ["index.json"]


@pytest.mark.parametrize("name", ["index.json", "names.bin", "samples.npy"])
def test_remote_index__a_broken_copy_is_fetched_anew(
    make_split: MakeSplit, tmp_path: Path, name: str
) -> None:
    folder = make_split(20).folder
    with serving(folder.parent, Faults()) as url:
        open_split("train", path=f"{url}/train")
        (kept,) = (tmp_path / "cache" / "splits").glob(f"*/{name}")
        kept.write_bytes(kept.read_bytes()[:40])
        assert len(open_split("train", path=f"{url}/train")) == 20
        assert kept.read_bytes() == (folder / name).read_bytes()


def test_remote_index__a_split_that_was_missing_is_missing_offline(
    make_split: MakeSplit, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = make_split(20).folder
    with serving(folder.parent, Faults()) as url:
        online = set(locate_splits(url, "train"))
    began = time.monotonic()
    with remote.patient(60):
        assert set(locate_splits(url, "train")) == online == {"train"}
    assert time.monotonic() - began < 30
    assert "the cached index is used" in capfd.readouterr().err


def test_remote_index__without_its_table_is_an_error_and_no_missing_split(make_split: MakeSplit) -> None:
    folder = make_split(20).folder
    (folder / "names.bin").unlink()
    with (
        serving(folder.parent, Faults()) as url,
        pytest.raises(DataError, match=r"train/names\.bin: is not on the server, but index\.json names it"),
    ):
        open_split("train", path=url)


def without_index(index: Index) -> tuple[Path, bytes, list[object]]:
    """A split as another program left it; the index that `data index` writes for it, and what is in it."""
    shards = [index.folder / shard.name for shard in index.shards]
    told, inside = index_shards(shards, source=INDEXED), contents(ShardSource(index))
    text = (told.folder / "index.json").read_bytes()
    for name in ("index.json", "samples.npy", "names.bin"):
        (index.folder / name).unlink()
    return index.folder, text, inside


@pytest.mark.parametrize("given", ["the set", *slow("the split")])
def test_data__shards_without_an_index_are_indexed_once_and_that_is_said(
    make_split: MakeSplit, tmp_path: Path, capsys: pytest.CaptureFixture[str], given: str
) -> None:
    folder, text, inside = without_index(make_split(20))
    make_split(4, "test")
    source = open_split("train", path=str(folder.parent if given == "the set" else folder))
    assert contents(source) == inside
    assert source.class_names == ("a", "b", "c")  # which the shards tell
    (made,) = (tmp_path / "cache/splits").iterdir()
    assert (made / "index.json").read_bytes() == text
    assert {path.suffix for path in folder.iterdir()} == {".tar"}  # nothing is written beside them
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1
    told = (
        rf"{folder}: reading 3 shards without an index once, 0.1 MiB ... 20 images of 3 classes, "
        r"\d+\.\d s\n"
    )
    assert re.fullmatch(told, said.err)
    assert contents(open_split("train", path=str(folder.parent))) == inside
    assert capsys.readouterr().err == ""


@pytest.mark.slow
def test_data__of_a_set_the_splits_that_lack_an_index_get_one(make_split: MakeSplit) -> None:
    folder, _, inside = without_index(make_split(9, "val"))
    make_split(4, "train"), without_index(make_split(4, "aside"))
    assert len(open_split("train", path=str(folder.parent))) == 4
    assert contents(open_split("val", path=str(folder.parent))) == inside
    assert not (folder.parent / "aside/index.json").exists()  # neither a usual name nor asked for
    assert len(open_split("aside[:2]", path=str(folder.parent))) == 2


def test_data__of_processes_that_begin_at_once_one_indexes(
    make_split: MakeSplit, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder, text, _ = without_index(make_split(200, max_samples=100))
    fork = multiprocessing.get_context("fork")
    running = [
        fork.Process(target=open_split, args=("train",), kwargs={"path": str(folder)}) for _ in range(4)
    ]
    for process in running:
        process.start()
    for process in running:
        process.join(60)
    assert [process.exitcode for process in running] == [0] * 4
    (made,) = (tmp_path / "cache/splits").iterdir()
    assert (made / "index.json").read_bytes() == text
    assert capfd.readouterr().err.count("without an index once") == 1
    assert not [*folder.glob(".*"), *made.glob(".*")]


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES])
def test_data__a_cache_that_cannot_be_written_says_what_to_set(
    make_split: MakeSplit, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    folder, _, _ = without_index(make_split(9))

    def refused(path: Path) -> None:
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr("vitctl.data.source.locate.open_lock", refused)
    wanted = r"no index, and none can be written to .*cache/splits/.*; set VITCTL_CACHE to a folder"
    with pytest.raises(DataError, match=wanted):
        open_split("train", path=str(folder))


def test_data__a_list_is_indexed_in_the_cache_for_these_files_as_they_are(
    make_split: MakeSplit, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _, inside = without_index(make_split(20, max_samples=6))
    before = sorted(path.name for path in folder.iterdir())
    pattern = f"{folder}/shard-{{000000..000002}}.tar"
    for _ in range(2):
        assert contents(open_split("train", path=pattern)) == inside[:18]
    assert capsys.readouterr().err.count("3 shards without an index") == 1
    assert contents(open_split("train", path=f"{folder}/shard-000002.tar")) == inside[12:18]
    assert sorted(path.name for path in folder.iterdir()) == before
    os.utime(folder / "shard-000001.tar", (1, 1))
    open_split("train", path=pattern)
    assert capsys.readouterr().err.count("3 shards without an index") == 1
    assert len(list((tmp_path / "cache/splits").iterdir())) == 3


def test_data__splits_side_by_side_are_not_made_one(make_split: MakeSplit) -> None:
    """As in ImageNet's usual WebDataset: imagenet1k-train-0000.tar beside imagenet1k-validation-00.tar."""
    folder, _, inside = without_index(make_split(20, max_samples=10))
    (folder / "shard-000000.tar").rename(folder / "imagenet1k-train-0000.tar")
    (folder / "shard-000001.tar").rename(folder / "imagenet1k-validation-00.tar")
    with pytest.raises(DataError, match=r"holds shards of several splits, by their names \(train"):
        open_split("train", path=str(folder))
    assert contents(open_split("train", path=f"{folder}/imagenet1k-train-{{0000..0000}}.tar")) == inside[:10]


def test_data__a_damaged_shard_is_one_line_and_no_index_is_left(
    make_split: MakeSplit, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _, _ = without_index(make_split(20))
    shard = folder / "shard-000001.tar"
    shard.write_bytes(shard.read_bytes()[:3000])
    with pytest.raises(DataError, match=r"shard-000001.tar: .*; if it is an archive, unpack") as caught:
        open_split("train", path=str(folder))
    assert "\n" not in str(caught.value)
    left = {path.name for path in folder.iterdir()} - {".index.partial"}  # the shards that were read
    assert left == {f"shard-{number:06d}.tar" for number in range(3)}
    assert capsys.readouterr().err.endswith(" MiB ... \n")


def test_data__a_shard_that_came_later_is_indexed_or_refused_and_not_left_untrained(
    make_split: MakeSplit,
) -> None:
    folder, _, _ = without_index(make_split(20))
    assert len(open_split("train", path=str(folder.parent))) == 20
    first = sorted(folder.glob("*.tar"))[0]
    (folder / "later.tar").write_bytes(first.read_bytes())
    assert len(open_split("train", path=str(folder.parent))) > 20
    (folder / "later.tar").rename(folder.parent / "later.tar")
    index_shards(sorted(folder.glob("*.tar")), source=INDEXED)
    (folder.parent / "later.tar").rename(folder / "later.tar")
    for path in (folder, folder.parent):
        with pytest.raises(DataError, match=r"1 shard added after it was indexed \(such as"):
            open_split("train", path=str(path))


def test_above__one_of_several_folders_of_images_is_a_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("photos/cat/1.jpg", "photos/dog/1.png", "alone/cat/1.jpg", "alone/notes/a.txt"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    for path in ("photos/cat", f"{tmp_path}/photos/dog", "photos/cat/"):
        with pytest.raises(DataError, match=rf"holds no shards; did you mean {Path(path).parent}\?$"):
            locate_all_splits(path)
    for path in ("alone/cat", "alone/notes"):
        with pytest.raises(DataError, match="put its images into class folders"):
            locate_all_splits(path)
    with pytest.raises(DataError, match=r"1.jpg is not in a class folder, .*; did you mean photos\?$"):
        original_splits("photos/cat")
    monkeypatch.chdir("photos/cat")
    with pytest.raises(DataError, match=r"did you mean \.\.\?$"):
        locate_all_splits(".")
