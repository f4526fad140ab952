"""Views of splits: subsets, classes, concatenations, their labels and their provenance."""

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data.conftest import MakeSplit, contents
from tests.data.noted_tables import note_tables
from vitctl.data.shards.index import read_index
from vitctl.data.source import views
from vitctl.data.source.stores import ShardSource, SyntheticSource
from vitctl.data.source.views import (
    Source,
    Use,
    View,
    check_labels,
    concat,
    of_classes,
    random_subset,
    source_text,
    split_sources,
    subset,
)
from vitctl.errors import DataError


def test_view__of_views_of_views_holds_the_same_samples_and_origins(make_split: MakeSplit) -> None:
    one, other = ShardSource(make_split(20)), ShardSource(make_split(9, "test"))
    nested = subset(concat((subset(one, np.arange(20)[::-1]), other, one)), np.array([48, 0, 21, 19, 29]))
    wanted = [contents(one)[19], contents(one)[19], contents(other)[1], contents(one)[0], contents(one)[0]]
    assert contents(nested) == wanted
    assert nested.labels(np.array([2, 0])).tolist() == [wanted[2][1], wanted[0][1]]
    joined = concat((of_classes(one, ("a", "b", "c")), random_subset(other, 5, 0), one))
    assert len(joined) == 45 and joined.labels().tolist() == [label for _, label, _ in contents(joined)]
    assert split_sources(joined) == (one, other, one)
    assert source_text(joined) == "noise"
    assert split_sources(SyntheticSource(3, 3, 8)) == ()
    assert source_text(SyntheticSource(3, 3, 8)) == ""
    sent = pickle.loads(pickle.dumps(joined))
    assert (contents(sent), sent.digest) == (contents(joined), joined.digest)


def test_concat__refuses_other_classes_and_numbers_beyond_its_end() -> None:
    both = concat((SyntheticSource(3, 2, 8), SyntheticSource(4, 2, 8)))
    for sample in (-1, 7):
        with pytest.raises(IndexError):
            both.read(sample)
    with pytest.raises(DataError, match="different class names cannot be joined"):
        concat((SyntheticSource(3, 2, 8), SyntheticSource(3, 4, 8)))


def test_view__digests_are_pinned() -> None:
    """Results and resumed runs name them."""
    source = SyntheticSource(60, 3, 8)
    pinned = {
        "after": subset(subset(source, np.arange(40)), np.array([5, 3])),
        "joined": concat((source, subset(source, np.arange(4)))),
        "classes": of_classes(source, ("2", "0")),
    }
    assert {name: view.digest[:16] for name, view in pinned.items()} == {
        "after": "81546309848ba830",
        "joined": "0427fba20e4ed715",
        "classes": "d6162b6f4629e3b0",
    }


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


@pytest.mark.parametrize("size", [0, 1001])
def test_random_subset__refuses_what_is_not_there(size: int) -> None:
    with pytest.raises(DataError, match=rf"a subset of {size:,} images was requested, but there are 1,000"):
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
    with pytest.raises(DataError, match="there are no images of the classes 2"):
        of_classes(Unlabelled(30, 3, 8), ("2",))


def test_of_classes__refuses_other_names(make_split: MakeSplit) -> None:
    source = ShardSource(make_split(20))
    with pytest.raises(DataError, match=r"there is no class 'x'; known: a, b, c"):
        of_classes(source, ("a", "x"))
    with pytest.raises(DataError, match="class 'a' is named twice"):
        of_classes(source, ("a", "a"))


def labelled(labels: list[int] | list[list[int]], num_classes: int = 3) -> Source:
    """A source of any labels."""
    noise = SyntheticSource(len(labels), 3, 8)
    return View((noise,), tuple("abcdefg"[:num_classes]), "", new_labels=np.array(labels, np.int64))


@given(st.lists(st.integers(-3, 4), min_size=1, max_size=40))
def test_check_labels__one_each(labels: list[int]) -> None:
    source = labelled(labels)
    odd, none = sum(not -1 <= label < 3 for label in labels), labels.count(-1)
    for use in ("training", "scoring", "draws", "pixels"):
        wanted = f"{odd} of {len(labels)} images have labels outside 0..2" if odd else ""
        if not odd and none and use in ("training", "scoring"):
            wanted = (
                "no image has a label" if none == len(labels) else f"{none} of {len(labels)} images have no"
            )
        if wanted:
            with pytest.raises(DataError, match=wanted):
                check_labels(source, "test", use)  # type: ignore[arg-type]
        else:
            check_labels(source, "test", use)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("labels", "refused"),
    [
        ([[0, 1], [2, -1]], ""),
        ([[0, 1], [-1, -1]], "training"),
        ([[-1, -1], [-1, -1]], "training scoring"),
        ([[0, 3], [2, -1]], "training scoring pixels"),
        ([[-1, 1], [2, -1]], "training scoring pixels"),
        ([[0, -2], [2, -1]], "training scoring pixels"),
    ],
)
def test_check_labels__several(labels: list[list[int]], refused: str) -> None:
    for use in ("training", "scoring", "pixels"):
        if use in refused:
            with pytest.raises(DataError, match=r"'train': ([12] of 2 images have|no image has a label)"):
                check_labels(labelled(labels), "train", use)  # type: ignore[arg-type]
        else:
            check_labels(labelled(labels), "train", use)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="needs one label per image"):
        check_labels(labelled(labels), "train", "draws", single=True)


def test_check_labels__chunks_count_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(views, "CHUNK", 7)
    labels = [0] * 30
    for sample in (8, 9, 29):
        labels[sample] = 5
    with pytest.raises(DataError, match=r"3 of 30 images .*, first number 8 \(5\) of synthetic sample 8"):
        check_labels(labelled(labels), "test", "scoring")


def test_check_labels__counts_in_the_index_stand_for_the_labels(
    make_split: MakeSplit, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_split(12).folder
    assert json.loads((folder / "index.json").read_text())["labels"] == {"missing": 0, "outside": 0}
    read: list[int] = []
    labels = ShardSource.labels

    def counted(source: ShardSource, samples: np.ndarray | None = None) -> np.ndarray:
        found = labels(source, samples)
        read.append(len(found))
        return found

    def check(folder: Path, use: Use) -> int:
        read.clear()
        source = ShardSource(read_index(folder))
        check_labels(concat((subset(source, np.array([3])), source)), "train", use)
        return sum(read)

    monkeypatch.setattr(ShardSource, "labels", counted)
    assert check(folder, "training") == 0
    some = make_split(12, "some", labels=[0, 1, -1]).folder
    assert json.loads((some / "index.json").read_text())["labels"] == {"missing": 4, "outside": 0}
    assert check(some, "pixels") == 0
    with pytest.raises(DataError, match=r"[45] of 13 images have no label"):
        check(some, "training")


def test_check_labels__through_every_view(make_split: MakeSplit) -> None:
    folder = make_split(12).folder
    rows = np.load(folder / "samples.npy")
    rows["label"][4] = 3
    np.save(folder / "samples.npy", rows)
    note_tables(folder)
    source = ShardSource(read_index(folder))
    for view in (source, subset(source, np.array([2, 4])), concat((source, source))):
        with pytest.raises(DataError, match=r"labels outside 0..2, first number .*shard-000000.tar"):
            check_labels(view, "train", "pixels")
    with pytest.raises(DataError, match=r"'data\.classes': 1 of 12 images have labels outside 0..2"):
        of_classes(source, ("a", "b"))
    check_labels(subset(source, np.array([2, 3])), "train", "training")
