"""Computed numbers of samples, against the arrays that they stand for."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data.conftest import MakeSplit
from tests.matrix import each
from vitctl.data.source import rows
from vitctl.data.source.locate import SplitLocation
from vitctl.data.source.order import Order
from vitctl.data.source.rows import RandomPart, Ranges, Rows
from vitctl.data.source.stores import ShardSource, array_digest
from vitctl.data.source.views import concat, random_subset, subset, used_shards


def check(found: Rows, wanted: np.ndarray) -> None:
    """Check every way to read some numbers."""
    assert len(found) == len(wanted)
    assert np.array_equal(found[:], wanted)
    places = np.random.default_rng(0).integers(0, len(wanted), 50)
    assert np.array_equal(found[places], wanted[places])
    assert found[places[:0]].tolist() == []
    assert [int(found[place]) for place in (0, len(wanted) - 1)] == [wanted[0], wanted[-1]]
    for start, stop in (np.sort(places)[:2], np.sort(places)[-2:], (0, 1), (1, 0), (3, len(wanted) + 9)):
        assert np.array_equal(found[start:stop], wanted[start:stop])
    assert array_digest("x", found) == array_digest("x", wanted)
    if isinstance(found, rows.Computed) and found.is_distinct:
        assert len(np.unique(wanted)) == len(wanted)


def drawn(size: int, count: int, seed: int) -> np.ndarray:
    """Return the first numbers of a shuffle in ascending order: the definition of a random subset."""
    return np.sort(Order(size, seed).at(np.arange(count))[1])


def arrays(begins: list[int], lengths: list[int]) -> tuple[Ranges, np.ndarray]:
    begin, length = np.array(begins), np.array(lengths)
    return Ranges(begin, begin + length), np.concatenate(
        [np.arange(b, b + n) for b, n in zip(begin, length, strict=True)]
    )


ranges = st.lists(st.tuples(st.integers(0, 200), st.integers(1, 40)), min_size=1, max_size=8)


@given(ranges, st.lists(st.integers(0, 240), unique=True, max_size=60))
def test_ranges__with_and_without_some_numbers(pairs: list[tuple[int, int]], left_out: list[int]) -> None:
    found, wanted = arrays(*map(list, zip(*pairs, strict=True)))  # type: ignore[arg-type]
    check(found, wanted)
    assert found.is_distinct == (len(np.unique(wanted)) == len(wanted))
    kept = wanted[~np.isin(wanted, left_out)]
    if len(kept):
        check(found.without(np.sort(np.array(left_out, np.int64))), kept)


@each("size", [1, 7, 8, 127, 128, 129, 1000])
@each("share", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_random_part__is_the_start_of_a_shuffle(
    size: int, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "CHUNK", 50)
    count = max(1, round(size * share))
    check(RandomPart(size, count, 5), drawn(size, count, 5))


def test_views__lists_and_random_subsets_are_those_of_arrays(make_split: MakeSplit) -> None:
    """Runs name these digests."""
    source = ShardSource(make_split(60))
    names, ends = [shard.name for shard in source.index.shards], np.cumsum([0, *np.diff([0, *source.ends])])
    assert len(names) > 3
    chosen = [2, 0, 3]
    numbers = np.concatenate([np.arange(ends[shard], ends[shard + 1]) for shard in chosen])
    listed = SplitLocation(source.index.folder, shards=tuple(names[shard] for shard in chosen)).open(0)
    by_array = subset(source, numbers)
    assert (listed.digest, len(listed)) == (by_array.digest, len(by_array))
    assert listed.labels().tolist() == source.labels()[numbers].tolist()
    part = random_subset(listed, 9, 4)
    wanted = drawn(len(numbers), 9, 4)
    assert part.digest == subset(by_array, wanted).digest
    assert part.labels().tolist() == listed.labels()[wanted].tolist()
    joined = concat((part, source))
    assert joined.labels().tolist() == [*part.labels(), *source.labels()]
    both = subset(joined, np.array([10, 2, 68, 9]))
    assert both.labels().tolist() == joined.labels()[[10, 2, 68, 9]].tolist()
    assert [*map(both.key, range(4))] == [joined.key(n) for n in (10, 2, 68, 9)]
    assert [used.tolist() for _, used in used_shards(listed)] == [sorted(chosen)]
    assert [used.tolist() for _, used in used_shards(joined)][1] == [*range(len(names))]
    places = np.searchsorted(source.ends, numbers[wanted], side="right")
    assert [used.tolist() for _, used in used_shards(part)] == [np.unique(places).tolist()]
