import csv
import io
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vitctl.data.inspect.dedup import compare, compare_within, write_report
from vitctl.data.source.shard_source import ShardSource
from vitctl.data.writer.items import Item
from vitctl.data.writer.write import write_split


def photo(seed: int, *, size: tuple[int, int] = (96, 72), quality: int = 95) -> bytes:
    """The same picture for the same seed, in any size and quality."""
    noise = np.random.default_rng(seed).integers(0, 256, (9, 12, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).resize((96, 72), Image.Resampling.BICUBIC).resize(size).save(
        file, "JPEG", quality=quality
    )
    return file.getvalue()


def plant(root: Path) -> tuple[ShardSource, dict[str, Path]]:
    """Thirty training images; a test set with one of them as it is, two of them changed, and seven others."""
    train = [Item(f"train{n}", n % 2, partial(photo, n)) for n in range(30)]
    test = [Item(f"test{n}", 0, partial(photo, 100 + n)) for n in range(7)]
    test += [
        Item("same", 1, partial(photo, 4)),
        Item("small", 1, partial(photo, 11, size=(48, 36))),
        Item("bad", 1, partial(photo, 20, quality=40)),
    ]
    index = write_split(train, root / "data/train", ("a", "b"), seed=0, source_text="", max_samples=8)
    write_split(test, root / "data/test", ("a", "b"), seed=1, source_text="")
    return ShardSource(index), {"test": root / "data/test"}


@pytest.mark.parametrize("workers", [0, 2])
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
    monkeypatch.setattr("vitctl.data.inspect.dedup._PAIRS_ON_A_PAGE", 2)
    files = write_report(found, tmp_path / "report")
    assert [file.name for file in files] == ["matches.csv", "pairs_000.png", "pairs_001.png"]
    assert sorted(tmp_path.joinpath("report").iterdir()) == files
    with files[0].open(newline="") as file:
        rows = {row["key"]: row for row in csv.DictReader(file)}
    assert {key: (row["test_set"], row["test_key"], row["kind"]) for key, row in rows.items()} == {
        "train4": ("test", "same", "exact"),
        "train11": ("test", "small", "near"),
        "train20": ("test", "bad", "near"),
    }
    assert rows["train4"]["bits"] == "0" and int(rows["train11"]["bits"]) <= 6
    for page in files[1:]:
        with Image.open(page) as opened:
            assert opened.format == "PNG"


def test_write_report__of_nothing_is_an_empty_table(tmp_path: Path) -> None:
    own, tests = plant(tmp_path)
    (found,) = compare(ShardSource(own.index), {"test": write_other(tmp_path)}, max_bits=6)
    assert tests and found.matches == ()
    (table,) = write_report([found], tmp_path / "report")
    assert table.read_text().splitlines() == ["key,test_set,test_key,kind,bits,shard,set,label,test_label"]


def write_other(root: Path) -> Path:
    items = [Item(f"other{n}", 0, partial(photo, 500 + n)) for n in range(5)]
    return write_split(items, root / "other", ("a",), seed=0, source_text="").folder


def test_compare_within__each_pair_once_and_across_sides(tmp_path: Path) -> None:
    one = [Item("a", 0, partial(photo, 1)), Item("b", 1, partial(photo, 1)), Item("c", 0, partial(photo, 2))]
    two = [Item("d", 1, partial(photo, 2, quality=40)), Item("e", 0, partial(photo, 3))]
    sides = {
        name: ShardSource(write_split(items, tmp_path / name, ("x", "y"), seed=0, source_text=""))
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
