import hashlib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitctl.data.datasets.readers.arrays import encode_png
from vitctl.data.shards.index import Index
from vitctl.data.source.shard_source import ShardSource
from vitctl.data.source.splits import _of_each_class, md5_order, resolve, select
from vitctl.data.source.unsharded import SyntheticSource
from vitctl.data.writer.intake import Item
from vitctl.data.writer.write import write_split
from vitctl.errors import DataError

MakeSplit = Callable[..., Index]


def sha_of_names(names: list[str]) -> str:
    return hashlib.sha256("\n".join(sorted(names)).encode()).hexdigest()[:16]


def test_md5_order__cifar_as_published() -> None:
    order = md5_order(range(50_000), "train")
    assert order[:5].tolist() == [16399, 1680, 47917, 17307, 27051]
    assert order[45_000:45_005].tolist() == [13431, 9237, 17462, 32685, 9518]
    assert sha_of_names([f"train_{number:05d}" for number in order[:800]]) == "ac3a4b7f6d6c32f7"


def test_md5_order__small_norb_head() -> None:
    assert md5_order(range(24_300), "train")[:3].tolist() == [16399, 1680, 17307]


def test_md5_order__patch_camelyon_as_published() -> None:
    train = md5_order([f"train_{number}" for number in range(262_144)], "train")[:800]
    assert [f"train_{number}" for number in train[:3]] == ["train_251464", "train_132287", "train_133786"]
    assert sha_of_names([f"train_{number}" for number in train]) == "21eaea5228a490c0"
    validation = md5_order([f"valid_{number}" for number in range(32_768)], "validation")
    assert [f"valid_{number}" for number in validation[:3]] == ["valid_3270", "valid_10310", "valid_20603"]


def test_md5_order__clevr_as_published() -> None:
    names = [f"CLEVR_train_{number:06d}.png" for number in range(70_000)]
    order = md5_order(names, "train")
    assert [names[number][:-4] for number in order[:3]] == [
        "CLEVR_train_043876",
        "CLEVR_train_033421",
        "CLEVR_train_062025",
    ]
    assert sha_of_names([names[number] for number in order[:800]]) == "2755742128ae24c0"
    assert names[order[63_000]] == "CLEVR_train_035084.png"  # first of validation, train[90%:]


@pytest.mark.slow
def test_md5_order__dsprites_as_published() -> None:
    order = md5_order(range(737_280), "train")
    assert order[:3].tolist() == [16399, 634903, 206287]
    assert order[589_824 : 589_824 + 3].tolist() == [220697, 85843, 84902]
    assert sha_of_names([str(number) for number in order[:800]]) == "a28a98f0345bb70e"


@given(st.lists(st.text(max_size=8), unique=True, max_size=30))
def test_md5_order__is_a_permutation_whatever_the_storage_order(keys: list[str]) -> None:
    forwards, backwards = md5_order(keys, "train"), md5_order(keys[::-1], "train")
    assert sorted(forwards.tolist()) == list(range(len(keys)))
    if len({key.replace("\\", "/") for key in keys}) == len(keys):
        assert [keys[number] for number in forwards] == [keys[::-1][number] for number in backwards]


SIZES = {"train": 50_000, "validation": 1_020, "test": 10_000}


@pytest.mark.parametrize(
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
        ("dev", "there is no 'dev', should be one of: train, validation, test"),
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
    with pytest.raises(DataError, match=r"split 'train\[3:3\]' selects no samples"):
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
    index = write_split(items, tmp_path / "train", names, seed=3, source_text="", max_samples=5)
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


def test_shares_of_each_class__unlabelled_and_several_labels() -> None:
    table = np.array([[0, 1], [0, -1], [-1, -1], [-1, -1], [1, 0]])
    assert sorted(_of_each_class(np.arange(5), table, 0, 50).tolist()) == [0, 2, 4]


@pytest.mark.parametrize(
    "spec", ["train[:5 of each class]", "train[:101% of each class]", "train[: of each]"]
)
def test_select__refuses_shares_that_are_none(spec: str, sources: Mapping[str, ShardSource]) -> None:
    with pytest.raises(DataError):
        select(spec, sources)


def test_resolve__cannot_count_shares_of_each_class() -> None:
    with pytest.raises(DataError, match="depends on the classes"):
        resolve("train[:80% of each class]", SIZES)
