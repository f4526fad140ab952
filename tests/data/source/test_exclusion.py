import hashlib
import json
import pickle
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from tests.data.old_index import forget_tables
from vitctl.data.datasets.catalog import open_split
from vitctl.data.inspect.check_shards import unused_files
from vitctl.data.inspect.duplicates import compare
from vitctl.data.shards.index import Index
from vitctl.data.shards.make_index import index_shards
from vitctl.data.source.shard_source import ShardSource
from vitctl.data.source.splits import FILE, open_shards, read_exclusion, write_exclusion
from vitctl.data.writer.intake import Item
from vitctl.data.writer.write import write_split
from vitctl.errors import DataError

MakeSplit = Callable[..., Index]


def test_open_shards__a_list_beside_the_index_is_applied(make_split: MakeSplit) -> None:
    index = make_split(20)
    whole = ShardSource(index)
    assert open_shards(index.folder).digest == whole.digest
    before = {path.name: path.read_bytes() for path in index.folder.iterdir()}
    assert write_exclusion(index, [3, 11], reason="in the test set") == 2
    source = open_shards(index.folder)
    assert len(source) == 18
    kept = [sample for sample in range(20) if sample not in (3, 11)]
    assert [source.key(n) for n in range(18)] == [whole.key(sample) for sample in kept]
    assert [source.read(n) for n in range(18)] == [whole.read(sample) for sample in kept]
    assert [source.location(n) for n in range(18)] == [whole.location(sample) for sample in kept]
    assert source.digest != whole.digest
    assert pickle.loads(pickle.dumps(source)).digest == source.digest  # as loader workers get it
    after = {path.name: path.read_bytes() for path in index.folder.iterdir()}
    fields = json.loads(after.pop(FILE))
    assert after == before
    assert fields["images"] == [
        {
            "sample": n,
            "key": whole.key(n),
            "digest": hashlib.blake2b(whole.read(n), digest_size=16).hexdigest(),
        }
        for n in (3, 11)
    ]
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
        (b"[]", "should hold a list of images with the digest of their shards"),
        ({"format": "other"}, "format is 'other', should be 'vitctl-excluded/2'"),
        (
            {"shards": "0"},
            "made for other shards; make it again with `vitctl data dedup ... --apply`, or remove it",
        ),
        ({"rows": "0"}, "made for other shards"),
        ({"images": [{"sample": 2}]}, "made for other shards"),
        ({"images": [3]}, "images should be different numbers below 20, and not all of them"),
        ({"images": [{"sample": 20}]}, "images should be different numbers"),
        ({"images": [{"sample": -1}]}, "images should be different numbers"),
        ({"images": [{"sample": True}]}, "images should be different numbers"),
        ({"images": [{"sample": 1}] * 2}, "images should be different numbers"),
        ({"images": [{"sample": n} for n in range(20)]}, "images should be different numbers"),
    ],
)
def test_read_exclusion__refuses(
    make_split: MakeSplit, change: bytes | dict[str, object], message: str
) -> None:
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


def repeated_keys(folder: Path, tiny_png: Callable[[int], bytes]) -> Index:
    """Forty training images under twenty keys, each in two shards, as archives of others have them."""
    for number in range(2):
        items = [Item(f"{n:04d}", 0, partial(tiny_png, 100 * number + n)) for n in range(20)]
        write_split(items, folder / f"part{number}", ("a",), seed=0, source_text="", max_samples=20)
        (folder / "train").mkdir(exist_ok=True)
        shard = next((folder / f"part{number}").glob("*.tar"))
        shutil.copy(shard, folder / "train" / f"{number}.tar")
    return index_shards(sorted((folder / "train").glob("*.tar")), class_names=("a",))


def test_dedup__leaves_out_every_image_where_keys_repeat(
    tmp_path: Path, tiny_png: Callable[[int], bytes]
) -> None:
    index = repeated_keys(tmp_path, tiny_png)
    source = ShardSource(index)
    assert len({source.key(n) for n in range(40)}) == 20
    tests = [Item(f"t{n}", 0, partial(source.read, n)) for n in range(30)]
    write_split(tests, tmp_path / "test", ("a",), seed=0, source_text="")
    (found,) = compare(source, {"test": tmp_path / "test"}, max_bits=-1)
    assert write_exclusion(index, [match.sample for match in found.matches], reason="in the test set") == 30
    left = open_shards(index.folder)
    images = {hashlib.sha256(item.read()).digest() for item in tests}
    assert len(left) == 10
    assert not images & {hashlib.sha256(left.read(n)).digest() for n in range(len(left))}


def test_read_exclusion__survives_another_index_of_the_same_shards_alone(make_split: MakeSplit) -> None:
    index = make_split(20)
    write_exclusion(index, [3, 11], reason="")
    shards = [index.folder / shard.name for shard in index.shards]
    again = index_shards(shards, class_names=("x", "y", "z"), source="told anew")
    assert again.digest != index.digest
    assert read_exclusion(again).tolist() == [3, 11]
    with pytest.raises(DataError, match="made for other shards"):
        read_exclusion(index_shards(shards[::-1], class_names=("x", "y", "z")))
    again = index_shards(shards, class_names=("x", "y", "z"))
    rows = np.load(index.folder / "samples.npy")
    rows[[3, 4]] = rows[[4, 3]]
    np.save(index.folder / "samples.npy", rows)
    forget_tables(index.folder)
    with pytest.raises(DataError, match="made for other shards"):
        open_shards(index.folder)


def by_key(index: Index, samples: list[int]) -> None:
    """A list as the release before this wrote it."""
    source = ShardSource(index)
    fields = {"format": "vitctl-excluded/1", "index": index.index_sha256, "reason": ""}
    images = {source.key(sample): sample for sample in samples}
    (index.folder / FILE).write_text(json.dumps(fields | {"images": images}))


def test_read_exclusion__a_list_of_an_earlier_release(
    make_split: MakeSplit, tmp_path: Path, tiny_png: Callable[[int], bytes]
) -> None:
    index = make_split(20)
    by_key(index, [3, 11])
    assert read_exclusion(index).tolist() == [3, 11]
    assert write_exclusion(index, [4], reason="") == 3
    assert json.loads((index.folder / FILE).read_text())["format"] == "vitctl-excluded/2"
    repeated = repeated_keys(tmp_path / "more", tiny_png)
    by_key(repeated, list(range(40)))
    with pytest.raises(DataError, match="images may be missing; remove it and make it again"):
        read_exclusion(repeated)


def test_left_over__names_images_that_changed_since(make_split: MakeSplit) -> None:
    index = make_split(20)
    write_exclusion(index, [3], reason="")
    assert unused_files(index.folder)[0] == []
    row, shard = index.rows[3], Path(ShardSource(index).location(3))
    with shard.open("r+b") as file:
        file.seek(int(row["header"] + row["data"]) + 20)
        file.write(b"!")
    (problem,) = unused_files(index.folder)[0]
    assert "1 image(s) have other bytes than when they were left out" in problem
