import json
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitctl.data.catalog import open_split
from vitctl.data.exclusion import FILE, Without, open_shards, read_exclusion, write_exclusion
from vitctl.data.index import Index
from vitctl.data.read import ShardSource, Subset, SyntheticSource
from vitctl.errors import DataError

MakeSplit = Callable[..., Index]


@given(st.integers(1, 40), st.data())
def test_without__is_a_subset_of_the_others(num: int, data: st.DataObject) -> None:
    excluded = np.array(sorted(data.draw(st.sets(st.integers(0, num - 1), max_size=num - 1))), np.int64)
    whole = SyntheticSource(num, 3, 8)
    left, subset = Without(whole, excluded), Subset(whole, np.delete(np.arange(num), excluded))
    assert len(left) == len(subset)
    assert [left.key(n) for n in range(len(left))] == [subset.key(n) for n in range(len(subset))]
    assert left.labels().tolist() == left.labels(np.arange(len(left))).tolist() == subset.labels().tolist()
    with pytest.raises(IndexError):
        left.key(len(left))


def test_open_shards__a_list_beside_the_index_is_applied(make_split: MakeSplit) -> None:
    index = make_split(20)
    whole = ShardSource(index)
    assert type(open_shards(index.folder)) is ShardSource
    before = {path.name: path.read_bytes() for path in index.folder.iterdir()}
    assert write_exclusion(index, [3, 11], reason="in the test set") == 2
    source = open_shards(index.folder)
    assert len(source) == 18
    kept = [sample for sample in range(20) if sample not in (3, 11)]
    assert [source.key(n) for n in range(18)] == [whole.key(sample) for sample in kept]
    assert [source.read(n) for n in range(18)] == [whole.read(sample) for sample in kept]
    assert [source.place(n) for n in range(18)] == [whole.place(sample) for sample in kept]
    assert source.digest != whole.digest
    assert pickle.loads(pickle.dumps(source)).digest == source.digest  # as loader workers get it
    after = {path.name: path.read_bytes() for path in index.folder.iterdir()}
    fields = json.loads(after.pop(FILE))
    assert after == before
    assert fields["images"] == {whole.key(3): 3, whole.key(11): 11}
    assert fields["reason"] == "in the test set"
    digests = {source.digest}
    assert write_exclusion(index, [0, 3], reason="more") == 3
    digests.add(open_shards(index.folder).digest)
    assert read_exclusion(index).tolist() == [0, 3, 11]
    (index.folder / FILE).unlink()
    assert len({*digests, open_shards(index.folder).digest}) == 3


def test_open_split__counts_without_them(make_split: MakeSplit, tmp_path: Path) -> None:
    write_exclusion(make_split(20), [5], reason="")
    assert len(open_split("train", path=str(tmp_path))) == 19
    assert len(open_split("train[:10]", path=str(tmp_path))) == 10


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (b"{", "not JSON"),
        (b"[]", "should hold a list of images with the digest of their index"),
        ({"format": "other"}, "format is 'other', should be 'vitctl-excluded/1'"),
        ({"index": "0"}, "made for other shards than these; make it again with `vitctl data dedup`, or remove it"),
        ({"images": [3]}, "images should map keys to different numbers below 20, and not all of them"),
        ({"images": {"a": 20}}, "images should map keys"),
        ({"images": {"a": -1}}, "images should map keys"),
        ({"images": {"a": True}}, "images should map keys"),
        ({"images": {"a": 1, "b": 1}}, "images should map keys"),
        ({"images": {str(n): n for n in range(20)}}, "images should map keys"),
    ],
)
def test_read_exclusion__refuses(make_split: MakeSplit, change: bytes | dict[str, object], message: str) -> None:
    index = make_split(20)
    write_exclusion(index, [1], reason="")
    path = index.folder / FILE
    fields = json.loads(path.read_bytes())
    path.write_bytes(change if isinstance(change, bytes) else json.dumps(fields | change).encode())
    with pytest.raises(DataError, match=rf"{FILE}: .*{message}"):
        open_shards(index.folder)


def test_write_exclusion__leaves_something(make_split: MakeSplit) -> None:
    index = make_split(5)
    with pytest.raises(DataError, match="would leave none of 5 images; nothing was written"):
        write_exclusion(index, range(5), reason="")
    assert not (index.folder / FILE).exists()
