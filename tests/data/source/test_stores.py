"""Stored samples: in shards, and generated noise."""

import gc
import multiprocessing
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.conftest import contents, damage
from tests.matrix import slow
from vitctl.data.images.decode import BadSample, decode
from vitctl.data.shards.index import NAMES, Index, read_index
from vitctl.data.source import stores as shard_source
from vitctl.data.source.splits import select
from vitctl.data.source.stores import ShardSource, SyntheticSource, open_index
from vitctl.data.source.views import Source, concat, keys_of, subset
from vitctl.errors import DataError

MakeSplit = Callable[..., Index]


def test_shard_source__keys_labels_and_bytes_belong_together(
    make_split: MakeSplit, tiny_png: Callable[[int], bytes]
) -> None:
    found = contents(ShardSource(make_split(20)))
    assert [key for key, _, _ in found] != [f"k{number}" for number in range(20)]
    assert sorted(found) == sorted((f"k{number}", number % 3, tiny_png(number)) for number in range(20))


@pytest.mark.parametrize("sample", [-1, 20])
def test_shard_source__knows_its_bounds(make_split: MakeSplit, sample: int) -> None:
    with pytest.raises(IndexError):
        ShardSource(make_split(20)).location(sample)


def test_shard_source__pickles_small_and_notices_a_new_index(make_split: MakeSplit) -> None:
    source = ShardSource(make_split(20))
    source.read(0)
    data = pickle.dumps(source)
    assert len(data) < 1000
    assert contents(pickle.loads(data)) == contents(source)
    path = source.index.folder / "index.json"
    path.write_text(path.read_text().replace('"a"', '"another"'))
    with pytest.raises(DataError, match="its index changed while it was in use"):
        pickle.loads(data)


def _send_contents(source: Source, answers: "multiprocessing.Queue[object]") -> None:
    answers.put(contents(source))


@pytest.mark.parametrize("method", ["fork", *slow("spawn")])
def test_shard_source__works_in_other_processes(make_split: MakeSplit, method: str) -> None:
    source = ShardSource(make_split(9))
    expected = contents(source)
    context = multiprocessing.get_context(method)
    answers = context.Queue()
    workers = [context.Process(target=_send_contents, args=(source, answers)) for _ in range(2)]
    for worker in workers:
        worker.start()
    assert [answers.get(timeout=60) for _ in workers] == [expected, expected]
    for worker in workers:
        worker.join()


def test_shard_source__keeps_few_files_open(make_split: MakeSplit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitctl.data.source.stores.max_open_shards", lambda _: 3)
    source = ShardSource(make_split(20, max_samples=1))
    folder = source.index.folder
    assert len(source.index.shards) == 20
    contents(source)
    # Only files of this folder: a descriptor of another test may close in between.
    assert 0 < _open_files(folder) <= 4  # the memory-mapped table is another
    del source
    gc.collect()
    assert _open_files(folder) == 0


def _open_files(folder: Path) -> int:
    links = (link for link in Path("/proc/self/fd").iterdir() if link.is_symlink())
    return sum(os.readlink(link).startswith(f"{folder.resolve()}/") for link in links)


def test_shard_source__lost_and_cut_shards_are_bad_samples(make_split: MakeSplit) -> None:
    source = ShardSource(make_split(20))
    os.truncate(source.index.folder / "shard-000000.tar", 600)
    (source.index.folder / "shard-000001.tar").unlink()
    for sample, message in ((0, "shard-000000.tar ends before byte"), (7, "shard-000001.tar: No such file")):
        with pytest.raises(BadSample, match=message) as caught:
            source.read(sample)
        assert caught.value.reason == "unreadable"


def test_shard_source__zeros_have_no_key(make_split: MakeSplit) -> None:
    source = ShardSource(make_split(20))
    path = source.index.folder / "shard-000000.tar"
    path.write_bytes(bytes(path.stat().st_size))
    with pytest.raises(BadSample, match="has no header at byte"):
        source.key(0)


def test_open_index__is_read_again_only_if_a_file_changed(
    make_split: MakeSplit, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def counted(*args: Any) -> Index:
        calls.append(args)
        return read_index(*args)

    monkeypatch.setattr(shard_source, "read_index", counted)
    folder = make_split(20).folder
    assert open_index(folder) is open_index(folder)
    pickle.loads(pickle.dumps(ShardSource(open_index(folder))))
    assert len(calls) == 1
    damage(folder / "samples.npy")  # with the same size and mtime
    with pytest.raises(DataError, match=r"samples\.npy"):
        open_index(folder)
    damage(folder / "samples.npy")
    assert len(open_index(folder).shards) == 3
    os.truncate(folder / "shard-000001.tar", 600)
    with pytest.raises(DataError, match=r"shard-000001\.tar has 600 bytes"):
        open_index(folder)


def test_open_index__of_the_processes_of_a_run_rank_0_checks_the_sizes(
    make_split: MakeSplit, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_split(20).folder
    os.truncate(folder / "shard-000001.tar", 600)
    monkeypatch.setenv("RANK", "1")
    source = ShardSource(open_index(folder))
    with pytest.raises(BadSample, match=r"shard-000001\.tar ends before byte"):
        source.read(13)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(DataError, match=r"shard-000001\.tar has 600 bytes"):
        open_index(folder)


def test_synthetic_source__is_pure_and_learnable() -> None:
    source = SyntheticSource(40, 4, 24)
    pictures = [decode(source.read(sample)) for sample in range(40)]
    assert {picture.shape for picture in pictures} == {(24, 24, 3)}
    assert source.read(7) == SyntheticSource(100, 4, 24).read(7)
    assert len({picture.tobytes() for picture in pictures}) == 40
    labels = source.labels()
    assert np.bincount(labels).tolist() == [10] * 4
    means = np.array([picture.mean((0, 1)) for picture in pictures])
    centres = np.array([means[:20][labels[:20] == label].mean(0) for label in range(4)])
    nearest = ((means[20:, None] - centres) ** 2).sum(2).argmin(1)
    assert (nearest == labels[20:]).mean() > 0.9
    protocol: Source = source
    assert (protocol.key(2), protocol.location(2)) == ("2", "synthetic sample 2")
    assert source.digest != SyntheticSource(41, 4, 24).digest


def test_keys__of_an_index_open_no_shard_and_order_as_before(make_split: MakeSplit) -> None:
    """Any text that a tar file can name."""
    names = ["a/b.c", "ä", "a\udcff", "x%2Ey", "p.q/r", "0", "a b", "z" * 200, "n01440764/n01440764_10026"]
    index = make_split(len(names), keys=names)
    source = ShardSource(index)
    assert sorted(source.keys()) == sorted(names)
    assert source.keys() == [source.key(sample) for sample in range(len(names))]
    assert index.names(2, 5) == source.keys()[2:5] and index.names(4, 4) == []
    both = concat([source, subset(source, np.array([5, 0, 5]))])
    assert keys_of(both) == [both.key(sample) for sample in range(len(both))]
    for shard in index.shards:
        (index.folder / shard.name).unlink()
    assert len(select("train[:50%]", {"train": ShardSource(index)})) > 0  # no shard was opened


def test_keys__a_table_of_other_names_is_refused(make_split: MakeSplit) -> None:
    index = make_split(6)
    file = index.folder / NAMES
    file.write_bytes(file.read_bytes().replace(b"k1", b"k9"))
    with pytest.raises(DataError, match=r"names\.bin changed since its index was written"):
        read_index(index.folder)
    file.write_bytes(b"k0\0k1\0")
    with pytest.raises(DataError, match=r"names\.bin has 6 bytes, should have 18"):
        read_index(index.folder)
    with pytest.raises(DataError, match=r"has 2 names, should have 6"):
        index.names()
