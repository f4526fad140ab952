"""Split expressions, and images excluded by a list beside the index."""

import hashlib
import json
import pickle
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data.conftest import store
from tests.data.noted_tables import note_tables
from tests.matrix import each
from vitctl.data.datasets.catalog import open_split
from vitctl.data.datasets.readers.arrays import encode_png
from vitctl.data.shards.index import Index
from vitctl.data.shards.indexing import index_shards
from vitctl.data.source.splits import (
    FILE,
    _of_each_class,
    group_names,
    md5_order,
    open_shards,
    read_exclusion,
    resolve,
    select,
    write_exclusion,
)
from vitctl.data.source.stores import ShardSource, SyntheticSource, open_index
from vitctl.data.source.views import Source
from vitctl.data.writer.intake import Item
from vitctl.data.writer.shard_writer import write_split
from vitctl.errors import DataError

MakeSplit = Callable[..., Index]


def test_md5_order__small_norb_head() -> None:
    assert md5_order(range(24_300), "train")[:3].tolist() == [16399, 1680, 17307]


@given(st.lists(st.text(max_size=8), unique=True, max_size=30))
def test_md5_order__is_a_permutation_whatever_the_storage_order(keys: list[str]) -> None:
    forwards, backwards = md5_order(keys, "train"), md5_order(keys[::-1], "train")
    assert sorted(forwards.tolist()) == list(range(len(keys)))
    if len({key.replace("\\", "/") for key in keys}) == len(keys):
        assert [keys[number] for number in forwards] == [keys[::-1][number] for number in backwards]


SIZES = {"train": 50_000, "validation": 1_020, "test": 10_000}


@each(
    ("spec", "parts"),
    [
        ("train", [("train", 0, 50_000)]),
        ("train[:98%]", [("train", 0, 49_000)]),
        ("train[98%:]", [("train", 49_000, 50_000)]),
        ("train[-2%:]", [("train", 49_000, 50_000)]),
        ("train[:800]+validation[:200]", [("train", 0, 800), ("validation", 0, 200)]),
        ("train[:800] + test[50%:]", [("train", 0, 800), ("test", 5_000, 10_000)]),
        ("validation[:]", [("validation", 0, 1_020)]),
        ("validation[:33%]", [("validation", 0, 337)]),
        ("test[10:5]", [("test", 10, 10)]),
    ],
)
def test_resolve__gives_ranges(spec: str, parts: list[tuple[str, int, int]]) -> None:
    assert [part[:3] for part in resolve(spec, SIZES)] == parts


def test_resolve__percentages_of_imagenet_as_published() -> None:
    assert resolve("train[:99%]", {"train": 1_281_167})[0][:3] == ("train", 0, 1_268_355)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("dev", "the data: has no split 'dev'; found: train, validation, test"),
        ("train[:98", "should look like train"),
        ("train[0.5:]", "should look like train"),
        ("", "should look like train"),
        ("train+", "should look like train"),
        ("train[:50001]", "50001 is more than its 50000 samples"),
        ("train[-101%:]", "-101% is more than its 50000 samples"),
    ],
)
def test_resolve__refuses(spec: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        resolve(spec, SIZES)


@pytest.fixture
def sources(make_split: MakeSplit) -> Mapping[str, ShardSource]:
    return {name: ShardSource(make_split(size, name)) for name, size in (("train", 20), ("validation", 9))}


def test_select__whole_split_keeps_its_storage_order(sources: Mapping[str, ShardSource]) -> None:
    assert select("train", sources) is sources["train"]


def test_select__parts_are_counted_by_key(sources: Mapping[str, ShardSource]) -> None:
    numbers = [f"k{number}" for number in range(20)]
    expected = [numbers[number] for number in md5_order(numbers, "train")]
    head, tail = select("train[:8]", sources), select("train[8:]", sources)
    assert [head.key(sample) for sample in range(8)] == expected[:8]
    assert [tail.key(sample) for sample in range(12)] == expected[8:]


def test_select__joins_parts(sources: Mapping[str, ShardSource]) -> None:
    both, train = select("train[:3]+validation[:2]", sources), select("train[:3]", sources)
    assert len(both) == 5
    assert both.read(2) == train.read(2)
    assert both.read(3) == select("validation[:2]", sources).read(0)
    assert both.labels(np.arange(3)).tolist() == train.labels().tolist()


def test_select__refuses_nothing() -> None:
    with pytest.raises(DataError, match=r"split 'train\[3:3\]' selects none of the 9 images"):
        select("train[3:3]", {"train": SyntheticSource(9, 3, 8)})


def by_class(number_of: tuple[int, ...], spec: str, tmp_path: Path) -> tuple[list[int], list[str]]:
    """Images of each class in a split expression over a split of so many images of each class, and their
    keys.
    """
    items = [
        Item(f"{label}/{n}", label, partial(encode_png, np.zeros((2, 2), np.uint8)))
        for label, count in enumerate(number_of)
        for n in range(count)
    ]
    names = [str(label) for label in range(len(number_of))]
    index = store(items, tmp_path / "train", names, seed=3, max_samples=5)
    chosen = select(spec, {"train": ShardSource(index)})
    return (
        np.bincount(chosen.labels(), minlength=len(number_of)).tolist(),
        [chosen.key(n) for n in range(len(chosen))],
    )


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("train[:80% of each class]", [1, 1, 2, 4, 8, 32]),
        ("train[80%: of each class]", [0, 1, 1, 1, 2, 8]),
        ("train[-20%: of each class]", [0, 1, 1, 1, 2, 8]),
        ("train[60%:80% of each class]", [0, 0, 0, 1, 2, 8]),
        ("train[: of each class]", [1, 2, 3, 5, 10, 40]),
    ],
)
def test_select__shares_of_each_class(spec: str, expected: list[int], tmp_path: Path) -> None:
    sizes = (1, 2, 3, 5, 10, 40)
    found, keys = by_class(sizes, spec, tmp_path)
    assert found == expected
    # By the rule itself: of each class, those that come first in the order of the MD5 of split and key.
    ordered = [f"{label}/{n}" for label, count in enumerate(sizes) for n in range(count)]
    ordered.sort(key=lambda key: hashlib.md5(b"train" + key.encode()).digest())
    begin = {"train[:8": 0, "train[80": -1, "train[-2": -1}.get(spec[:8])
    if begin is not None:
        wanted = set()
        for label, count in enumerate(expected):
            own = [key for key in ordered if key.startswith(f"{label}/")]
            wanted |= set(own[:count] if begin == 0 else own[len(own) - count :])
        assert keys == [key for key in ordered if key in wanted]


@given(st.lists(st.integers(1, 12), min_size=1, max_size=6), st.integers(1, 99))
def test_shares_of_each_class__are_a_partition(counts: list[int], percent: int) -> None:
    labels = np.repeat(np.arange(len(counts)), counts)
    order = np.random.default_rng(percent).permutation(len(labels))
    first, rest = _of_each_class(order, labels, 0, percent), _of_each_class(order, labels, percent, 100)
    assert sorted([*first.tolist(), *rest.tolist()]) == list(range(len(labels)))
    for label, count in enumerate(counts):
        assert min((labels[first] == label).sum(), (labels[rest] == label).sum()) >= (1 if count > 1 else 0)


Groups = list[tuple[int, list[int]]]  # of one class each: the class, and the sizes of its groups


def grouped(groups: Groups, tmp_path: Path, seed: int = 1) -> ShardSource:
    """Bursts named like `1/b7_03.png`; the names of the groups say nothing of their sizes."""
    items, number = [], 0
    for label, sizes in groups:
        for size in sizes:
            number += 1
            items += [Item(f"{label}/b{number}_{n:02d}.png", label, lambda: PIXEL) for n in range(size)]
    write_split(items, tmp_path / "train", ("a", "b", "c"), seed=seed, source_text="bursts")
    return ShardSource(open_index(tmp_path / "train"))


PIXEL = encode_png(np.zeros((1, 1, 3), np.uint8))
BURST = r"^\d/(b\d+)_"
BURSTS: Groups = [(0, [3, 9, 4, 1, 1, 7, 2, 5, 5, 6, 8, 2, 3]), (1, [40, 9, 11]), (2, [30, 4])]


def keys(source: Source) -> list[str]:
    return [source.key(number) for number in range(len(source))]


def test_group_by__no_group_is_on_both_sides_and_shares_are_nearest(tmp_path: Path) -> None:
    source = {"train": grouped(BURSTS, tmp_path)}
    total, before = len(source["train"]), set[str]()
    for percent in (20, 50, 60, 80, 90):
        sides = [f"train[:{percent}% of each class]", f"train[{percent}%: of each class]"]
        left, right = (keys(select(spec, source, group_by=BURST)) for spec in sides)
        assert len(left) + len(right) == total and not set(left) & set(right)
        assert not {key.split("_")[0] for key in left} & {key.split("_")[0] for key in right}
        assert before <= set(left)  # so that the parts of any two expressions fit together
        before = set(left)
        for label, sizes in BURSTS:
            share = sum(key.startswith(f"{label}/") for key in left)
            # The worst case of a cut is half the largest group; groups above a tenth lie in order of size.
            assert abs(share - percent * sum(sizes) / 100) <= max(sizes) / 2 or len(sizes) < 4
    left = keys(select("train[:80% of each class]", source, group_by=BURST))
    assert [sum(key.startswith(f"{label}/") for key in left) for label in (1, 2)] == [51, 30]  # 40 + 11, 30


@pytest.mark.parametrize(
    ("name", "between"), [("a.csv", ";"), ("a.csv", "\t"), ("a.tsv", ","), ("a.TSV", "\t")]
)
def test_group_by__a_table_is_split_as_its_header_is(tmp_path: Path, name: str, between: str) -> None:
    source = grouped([(0, [2, 2])], tmp_path)
    rows = [("path", "label", "group"), *((key, "x,y;z", key[:4]) for key in keys(source))]
    text = "".join(between.join(f'"{cell}"' for cell in row) + "\n" for row in rows)
    (tmp_path / name).write_text("\ufeff" + text)
    assert group_names(source, f"{tmp_path / name}:group") == [key[:4] for key in keys(source)]


def test_group_by__does_not_depend_on_the_order_of_the_images(tmp_path: Path) -> None:
    spec = "train[60%:80% of each class]"
    sides = [
        select(spec, {"train": grouped(BURSTS, tmp_path / str(seed), seed)}, group_by=BURST)
        for seed in (1, 2)
    ]
    assert keys(sides[0]) == keys(sides[1])


def test_group_by__a_group_of_several_classes_counts_for_the_rarest(tmp_path: Path) -> None:
    """Patients with images of two classes, as the column of a table; every class is on both sides."""
    rng = np.random.default_rng(0)
    items, lines = [], ["path,patient"]
    for number in range(600):
        patient, label = int(rng.integers(60)), int(rng.random() < 0.15)
        items.append(Item(f"{label}/{number:03d}.png", label, lambda: PIXEL))
        lines.append(f"{label}/{number:03d}.png,{patient}")
    write_split(items, tmp_path / "train", ("a", "b"), seed=1, source_text="patients")
    table = tmp_path / "patients.csv"
    table.write_text("\n".join(lines))
    column = f"{table}:patient"
    patients = dict(line.split(",") for line in lines[1:])
    sides = [
        open_split(f"train{part}", path=tmp_path, group_by=column)
        for part in ("[:80% of each class]", "[80%: of each class]")
    ]
    assert not {patients[key] for key in keys(sides[0])} & {patients[key] for key in keys(sides[1])}
    for label in (0, 1):
        counts = [int((side.labels() == label).sum()) for side in sides]
        assert 0.7 <= counts[0] / sum(counts) <= 0.9
    plain = open_split("train[80%:]", path=tmp_path, group_by=column)
    assert 110 <= len(plain) <= 130
    table.write_text("\n".join(lines[:-1]))
    with pytest.raises(DataError, match="1 of 600 images are not in the column 'path'"):
        open_split("train[80%:]", path=tmp_path, group_by=column)
    with pytest.raises(DataError, match="with the columns path and visit"):
        open_split("train[80%:]", path=tmp_path, group_by=f"{table}:visit")


@pytest.mark.parametrize(("pattern", "said"), [("x(y)?z", "no two images"), ("b", "one group for all")])
def test_group_by__a_pattern_that_finds_no_groups(pattern: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"{said}.*image names look like "):
        select("train[80%:]", {"train": grouped(BURSTS, tmp_path)}, group_by=pattern)


def test_shares_of_each_class__unlabelled_and_several_labels() -> None:
    table = np.array([[0, 1], [0, -1], [-1, -1], [-1, -1], [1, 0]])
    assert sorted(_of_each_class(np.arange(5), table, 0, 50).tolist()) == [0, 2, 4]


@pytest.mark.parametrize(
    "spec", ["train[:5 of each class]", "train[:101% of each class]", "train[: of each]"]
)
def test_select__refuses_shares_that_are_none(spec: str, sources: Mapping[str, ShardSource]) -> None:
    with pytest.raises(DataError):
        select(spec, sources)


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
        (b"[]", "format is None"),
        ({"format": "other"}, "format is 'other', should be 'vitctl-excluded/2'"),
        ({"shards": "0"}, "made for other shards; make it again with `vitctl data dedup ..."),
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
    note_tables(index.folder)
    with pytest.raises(DataError, match="made for other shards"):
        open_shards(index.folder)
