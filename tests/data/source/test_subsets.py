import numpy as np
import pytest

from tests.data.conftest import MakeSplit, contents
from vitctl.data.source.read import ShardSource, SyntheticSource
from vitctl.data.source.subsets import of_classes, random_subset
from vitctl.errors import DataError


def samples_of(source: object) -> list[int]:
    return [int(source.key(number)) for number in range(len(source))]  # type: ignore[attr-defined, arg-type]


def test_random_subset__the_smaller_lies_in_the_larger() -> None:
    source = SyntheticSource(1000, 7, 8)
    chosen = [set(samples_of(random_subset(source, size, 3))) for size in (1, 10, 300, 999)]
    assert [len(samples) for samples in chosen] == [1, 10, 300, 999]
    assert chosen[0] < chosen[1] < chosen[2] < chosen[3]
    assert chosen[2] != set(samples_of(random_subset(source, 300, 4)))
    assert random_subset(source, 1000, 3) is source


def test_random_subset__comes_in_storage_order_with_its_own_digest() -> None:
    source = SyntheticSource(1000, 7, 8)
    subset = random_subset(source, 300, 3)
    assert samples_of(subset) == sorted(samples_of(subset))
    digests = {
        source.digest,
        *(random_subset(source, size, seed).digest for size in (300, 301) for seed in (3, 4)),
    }
    assert len(digests) == 5
    assert random_subset(source, 300, 3).digest == subset.digest


def test_random_subset__draws_fairly() -> None:
    source = SyntheticSource(50, 7, 8)
    counts = np.zeros(50)
    for seed in range(2000):
        counts[samples_of(random_subset(source, 10, seed))] += 1
    assert abs(counts - 400).max() < 5 * np.sqrt(2000 * 0.2 * 0.8)


@pytest.mark.parametrize("size", [0, 1001])
def test_random_subset__refuses_what_is_not_there(size: int) -> None:
    with pytest.raises(DataError, match=rf"a subset of {size:,} images was asked for, there are 1,000"):
        random_subset(SyntheticSource(1000, 7, 8), size, 0)


def test_of_classes__keeps_and_renumbers(make_split: MakeSplit) -> None:
    source = ShardSource(make_split(20))
    everything = contents(source)
    chosen = of_classes(source, ("c", "a"))
    assert chosen.class_names == ("c", "a")
    new = {2: 0, 0: 1}
    assert contents(chosen) == [(key, new[label], data) for key, label, data in everything if label in new]
    assert chosen.labels(np.array([0])).tolist() == [chosen.labels()[0]]
    assert chosen.location(0).startswith(str(source.index.folder))
    names = [("c", "a"), ("a", "c"), ("a",), ("a", "b", "c")]
    assert len({of_classes(source, name).digest for name in names} | {source.digest}) == 5


def test_of_classes__leaves_out_what_has_no_label() -> None:
    class Unlabelled(SyntheticSource):
        def labels(self, samples: np.ndarray | None = None) -> np.ndarray:
            labels = super().labels(samples)
            return np.where(labels == 2, -1, labels)

    assert set(of_classes(Unlabelled(30, 3, 8), ("0", "1")).labels().tolist()) == {0, 1}
    with pytest.raises(DataError, match="no image is of the classes 2"):
        of_classes(Unlabelled(30, 3, 8), ("2",))


def test_of_classes__refuses_other_names(make_split: MakeSplit) -> None:
    source = ShardSource(make_split(20))
    with pytest.raises(DataError, match=r"there is no class 'x'; known: a, b, c"):
        of_classes(source, ("a", "x"))
    with pytest.raises(DataError, match="class 'a' is named twice"):
        of_classes(source, ("a", "a"))
