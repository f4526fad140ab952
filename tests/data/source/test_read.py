import gc
import multiprocessing
import os
import pickle
from collections.abc import Callable

import numpy as np
import pytest

from tests.data.conftest import contents
from vitctl.data.images.decode import BadSample, decode
from vitctl.data.shards.index import Index
from vitctl.data.source.read import Concat, ShardSource, Source, Subset, SyntheticSource
from vitctl.errors import DataError

MakeSplit = Callable[..., Index]


def test_shard_source__keys_labels_and_bytes_belong_together(
    make_split: MakeSplit, tiny_png: Callable[[int], bytes]
) -> None:
    found = contents(ShardSource(make_split(20)))
    assert [key for key, _, _ in found] != [f"k{number}" for number in range(20)]
    assert sorted(found) == sorted((f"k{number}", number % 3, tiny_png(number)) for number in range(20))


def test_shard_source__labels_of_some_samples(make_split: MakeSplit) -> None:
    source = ShardSource(make_split(20))
    some = np.array([19, 0, 7])
    assert source.labels(some).tolist() == source.labels()[some].tolist()
    assert source.labels(some).dtype == np.int64


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


@pytest.mark.parametrize("method", ["fork", "spawn"])
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
    monkeypatch.setattr("vitctl.data.source.read.max_open_shards", lambda _: 3)
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    source = ShardSource(make_split(20, max_samples=1))
    assert len(source.index.shards) == 20
    contents(source)
    assert len(os.listdir("/proc/self/fd")) - before <= 4  # the memory-mapped table is another
    del source
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


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


def test_subset__is_a_view_with_a_digest_of_its_own(make_split: MakeSplit) -> None:
    source = ShardSource(make_split(20))
    rows = np.array([3, 19, 3])
    subset = Subset(source, rows)
    everything = contents(source)
    assert contents(subset) == [everything[3], everything[19], everything[3]]
    assert subset.labels(np.array([1])).tolist() == [everything[19][1]]
    assert subset.location(1) == source.location(19)
    assert subset.class_names == source.class_names
    digests = {source.digest, subset.digest, Subset(source, rows[1:]).digest, Subset(source, rows[:2]).digest}
    assert len(digests) == 4


def test_concat__goes_from_part_to_part(make_split: MakeSplit) -> None:
    one, other = ShardSource(make_split(5)), ShardSource(make_split(9, "test"))
    both = Concat((one, other))
    assert contents(both) == contents(one) + contents(other)
    assert both.labels(np.array([13, 0])).tolist() == [int(other.labels()[8]), int(one.labels()[0])]
    assert both.location(5) == other.location(0)
    assert both.digest != Concat((other, one)).digest
    for sample in (-1, 14):
        with pytest.raises(IndexError):
            both.read(sample)


def test_concat__refuses_other_classes() -> None:
    with pytest.raises(DataError, match="different class names cannot be joined"):
        Concat((SyntheticSource(3, 2, 8), SyntheticSource(3, 4, 8)))


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


def test_synthetic_source__fits_in_the_protocol() -> None:
    source: Source = SyntheticSource(3, 2, 8)
    assert (source.key(2), source.location(2)) == ("2", "synthetic sample 2")
    assert source.digest != SyntheticSource(4, 2, 8).digest
