import csv
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from scipy.fft import dctn

from tests.conftest import SHARED
from tests.data.conftest import encoded, store
from tests.matrix import slow
from vitctl.data.datasets.readers.arrays import encode_png
from vitctl.data.images.decode import BadSample
from vitctl.data.inspect.duplicates import (
    ImageHashes,
    Match,
    compare,
    compare_within,
    describe,
    find_matches,
    hash_images,
    near_pairs,
    perceptual_hash,
    sides_of,
    write_report,
)
from vitctl.data.shards.index import Index
from vitctl.data.source.splits import DIGEST
from vitctl.data.source.stores import ShardSource, SyntheticSource
from vitctl.data.writer.intake import Item
from vitctl.data.writer.shard_writer import write_split

WORDS = st.integers(0, 2**64 - 1)
PHOTOS = SHARED / "imagenet-500.tar"


def smooth(seed: int, size: tuple[int, int] = (80, 60)) -> Image.Image:
    noise = np.random.default_rng(seed).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    return Image.fromarray(noise).resize(size, Image.Resampling.BICUBIC)


def distance(a: bytes, b: bytes) -> int:
    hashes = [perceptual_hash(data) for data in (a, b)]
    assert None not in hashes
    return bin(hashes[0] ^ hashes[1]).count("1")  # type: ignore[operator]


def test_perceptual_hash__is_the_signs_of_the_lowest_frequencies() -> None:
    """Against scipy's cosine transform, at the size where nothing is resized."""
    grey = np.random.default_rng(3).integers(0, 256, (32, 32), dtype=np.uint8)
    table = dctn(grey.astype(float), norm="ortho")
    places = sorted(
        ((row, column) for row in range(32) for column in range(32)), key=lambda at: (sum(at), at)
    )[1:65]
    values = np.array([table[at] for at in places])
    bits = "".join("1" if value > np.median(values) else "0" for value in values)
    assert perceptual_hash(encode_png(grey)) == int(bits, 2)
    assert bits.count("1") == 32


def test_perceptual_hash__of_nothing_there_is_none() -> None:
    assert perceptual_hash(b"text") is None
    assert perceptual_hash(encode_png(np.full((40, 40), 77, np.uint8))) is None
    assert perceptual_hash(encoded(smooth(0))[:200]) is None


@pytest.mark.parametrize("seed", range(5))
def test_perceptual_hash__survives_size_and_quality_and_tells_pictures_apart(seed: int) -> None:
    original = encoded(smooth(seed))
    for other in (smooth(seed, (160, 120)), smooth(seed, (40, 40)), smooth(seed).point(lambda v: v * 3 // 4)):
        assert distance(original, encoded(other, "JPEG", quality=60)) <= 6
    assert distance(original, encoded(smooth(seed + 100))) >= 16


class Damaged(SyntheticSource):
    """Its second image cannot be read, its third is no image."""

    def read(self, sample: int) -> bytes:
        if sample == 1:
            raise BadSample("unreadable")
        return b"text" if sample == 2 else super().read(sample)


@pytest.mark.parametrize("workers", [0, 2])
def test_fingerprints__of_good_and_bad_images_in_order(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitctl.data.inspect.duplicates._IMAGES_PER_TASK", 3)
    counted: list[int] = []
    source = Damaged(10, 3, 32)
    found = hash_images(source, workers=workers, done=counted.append)
    assert found.has_perceptual.tolist() == [True, False, False, *[True] * 7]
    assert found.perceptual.tolist() == [
        perceptual_hash(source.read(n)) if n not in (1, 2) else 0 for n in range(10)
    ]
    assert len(set(found.digests.tolist())) == 10
    if workers:
        assert sum(counted) == 10
    bare = hash_images(source, perceptual=False)
    assert bare.digests.tolist() == found.digests.tolist() and not bare.has_perceptual.any()


def flipped(word: int, bits: list[int]) -> int:
    for bit in bits:
        word ^= 1 << bit
    return word


@settings(max_examples=60, deadline=None)
@given(st.lists(WORDS, min_size=1, max_size=6), st.data(), st.sampled_from([0, 1, 3, 4, 6, 8]))
def test_near_pairs__are_all_there_are(words: list[int], data: st.DataObject, max_bits: int) -> None:
    """Against every pair one by one; the second list holds neighbours of the first, near and far."""
    flips = st.lists(st.integers(0, 63), max_size=12, unique=True)
    others = [flipped(data.draw(st.sampled_from(words)), data.draw(flips)) for _ in range(8)]
    a, b = np.array(words, np.uint64), np.array(others, np.uint64)
    wanted = [
        (i, j, (x ^ y).bit_count())
        for i, x in enumerate(words)
        for j, y in enumerate(others)
        if (x ^ y).bit_count() <= max_bits
    ]
    assert list(zip(*(column.tolist() for column in near_pairs(a, b, max_bits)), strict=True)) == wanted


@pytest.mark.parametrize("max_bits", [12, 15])
def test_near_pairs__worst_case_is_bits_spread_over_all_chunks(max_bits: int) -> None:
    spread = [16 * (n % 4) + n // 4 for n in range(max_bits)]
    words = np.random.default_rng(0).integers(0, 2**64, 30, dtype=np.uint64)
    others = np.array([flipped(int(word), spread) for word in words], np.uint64)
    rows, columns, bits = near_pairs(words, others, max_bits)
    found = set(zip(rows.tolist(), columns.tolist(), bits.tolist(), strict=True))
    assert {(n, n, max_bits) for n in range(30)} <= found


def test_near_pairs__of_many_alike_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitctl.data.inspect.duplicates._MAX_CANDIDATES", 7)
    a, b = np.full(10, 5, np.uint64), np.full(4, 5, np.uint64)
    rows, columns, bits = near_pairs(a, b, 2)
    assert sorted(zip(rows.tolist(), columns.tolist(), strict=True)) == [
        (i, j) for i in range(10) for j in range(4)
    ]
    assert not bits.any()
    assert all(len(column) == 0 for column in near_pairs(a[:0], b, 2))
    assert all(len(column) == 0 for column in near_pairs(a, b[:0], 2))
    with pytest.raises(ValueError, match="max_bits is 16, should be 0 to 15"):
        near_pairs(a, b, 16)


def test_near_pairs__ten_billion_pairs_take_seconds() -> None:
    rng = np.random.default_rng(0)
    a, b = (rng.integers(0, 2**64, 100_000, dtype=np.uint64) for _ in range(2))
    b[77] = a[99_999] ^ np.uint64(0b111)
    began = time.process_time()
    rows, columns, bits = near_pairs(a, b, 3)
    assert time.process_time() - began < 5
    assert (rows.tolist(), columns.tolist(), bits.tolist()) == ([99_999], [77], [3])


def prints(digests: list[bytes], looks: list[int], seen: list[bool]) -> ImageHashes:
    return ImageHashes(np.array(digests, DIGEST), np.array(looks, np.uint64), np.array(seen, bool))


def test_find_matches__the_nearest_and_exact_before_near() -> None:
    own = prints([b"a", b"b", b"c", b"d", b"e"], [0, 0, 0xFF, 2**63, 0], [True, True, True, True, False])
    others = prints([b"x", b"b", b"y"], [0b11, 0xFFFF0000, 0b1], [True, True, True])
    assert find_matches(own, others, max_bits=2) == [
        Match(0, 2, 1, False),
        Match(1, 1, 0, True),
        Match(3, 2, 2, False),
    ]
    assert find_matches(own, others, max_bits=-1) == [Match(1, 1, 0, True)]


def photo(seed: int, *, size: tuple[int, int] = (96, 72), quality: int = 95) -> bytes:
    """The same picture for the same seed, in any size and quality."""
    noise = np.random.default_rng(seed).integers(0, 256, (9, 12, 3), dtype=np.uint8)
    image = Image.fromarray(noise).resize((96, 72), Image.Resampling.BICUBIC).resize(size)
    return encoded(image, "JPEG", quality=quality)


def plant(root: Path) -> tuple[ShardSource, dict[str, Path]]:
    """Thirty training images; a test set with one of them as it is, two of them changed, and seven others."""
    train = [Item(f"train{n}", n % 2, partial(photo, n)) for n in range(30)]
    test = [Item(f"test{n}", 0, partial(photo, 100 + n)) for n in range(7)]
    test += [
        Item("same", 1, partial(photo, 4)),
        Item("small", 1, partial(photo, 11, size=(48, 36))),
        Item("bad", 1, partial(photo, 20, quality=40)),
    ]
    index = store(train, root / "data/train", ("a", "b"), max_samples=8)
    store(test, root / "data/test", ("a", "b"), seed=1)
    return ShardSource(index), {"test": root / "data/test"}


@pytest.mark.parametrize("workers", [2, *slow(0)])
def test_compare__finds_what_was_planted_and_nothing_else(tmp_path: Path, workers: int) -> None:
    own, tests = plant(tmp_path)
    (found,) = compare(own, tests, max_bits=6, workers=workers)
    pairs = {
        own.key(match.sample): (found.source.key(match.other), match.is_exact) for match in found.matches
    }
    assert pairs == {"train4": ("same", True), "train11": ("small", False), "train20": ("bad", False)}
    assert found.num_exact == 1
    (exact,) = compare(own, tests, max_bits=-1, workers=workers)
    assert [own.key(match.sample) for match in exact.matches] == ["train4"]


def test_write_report__a_table_and_the_pairs_on_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, tests = plant(tmp_path)
    found = compare(own, tests, max_bits=6)
    monkeypatch.setattr("vitctl.data.inspect.duplicates._PAIRS_ON_A_PAGE", 2)
    files = write_report(found, tmp_path / "report")
    assert [file.name for file in files] == ["matches.csv", "pairs_000.png", "pairs_001.png"]
    assert sorted(tmp_path.joinpath("report").iterdir()) == files
    with files[0].open(newline="") as file:
        rows = {row["key"]: row for row in csv.DictReader(file)}
    assert {key: (row["other_set"], row["other_key"], row["kind"]) for key, row in rows.items()} == {
        "train4": ("test", "same", "exact"),
        "train11": ("test", "small", "near"),
        "train20": ("test", "bad", "near"),
    }
    assert rows["train4"]["bits"] == "0" and int(rows["train11"]["bits"]) <= 6
    for page in files[1:]:
        with Image.open(page) as opened:
            assert opened.format == "PNG"


def test_compare_within__each_pair_once_and_across_sides(tmp_path: Path) -> None:
    one = [Item("a", 0, partial(photo, 1)), Item("b", 1, partial(photo, 1)), Item("c", 0, partial(photo, 2))]
    two = [Item("d", 1, partial(photo, 2, quality=40)), Item("e", 0, partial(photo, 3))]
    sides = {
        name: ShardSource(store(items, tmp_path / name, ("x", "y")))
        for name, items in (("one", one), ("two", two))
    }
    found = {
        (one.own_name, one.name): [
            (
                {one.own.key(match.sample), one.source.key(match.other)},
                match.is_exact,
                one.has_other_label(match),
            )
            for match in one.matches
        ]
        for one in compare_within(sides, max_bits=6)
    }
    assert found == {
        ("one", "two"): [({"c", "d"}, False, True)],
        ("one", "one"): [({"a", "b"}, True, True)],
        ("two", "two"): [],
    }
    assert [len(one.matches) for one in compare_within(sides, max_bits=-1)] == [0, 1, 0]


def test_describe__numbers_and_a_pair_with_different_labels(tmp_path: Path) -> None:
    pictures = {"cat/a": 1, "cat/b": 2, "dog/c": 3, "dog/d": 2, "dog/e": 1}
    names = ("cat", "dog")
    items = [
        Item(key, names.index(key[:3]), partial(encoded, smooth(seed, (80, 60 + 20 * (key == "dog/e")))))
        for key, seed in pictures.items()
    ]
    source = ShardSource(_written(tmp_path, items, names))
    (found,) = compare_within({"train": source}, max_bits=6)
    line = describe(found)
    assert line.startswith("train: 1 identical and 1 near-duplicate image, 2 with different labels, such as ")
    assert "(cat)" in line and "(dog)" in line
    late = compare_within({"train": source}, max_bits=6, until=time.monotonic() - 1)
    assert late[0].matches == ()


def test_sides_of__one_split_is_divided_as_training_divides_it(tmp_path: Path) -> None:
    items = [Item(f"{n:02d}", n % 2, partial(encoded, smooth(n))) for n in range(20)]
    source = ShardSource(_written(tmp_path, items, ("cat", "dog")))
    sides = sides_of({"photos": source})
    assert {name: len(side) for name, side in sides.items()} == {
        "photos[:80% of each class]": 16,
        "photos[80%: of each class]": 4,
    }
    assert sides_of({"train": source, "test": source}) == {"train": source, "test": source}
    few = ShardSource(_written(tmp_path / "few", items[:1], ("cat", "dog")))
    assert sides_of({"train": few}) == {"train": few}


def _written(folder: Path, items: list[Item], names: tuple[str, ...]) -> Index:
    return write_split(items, folder / "train", names, seed=0, source_text="noise")
