"""The rule against a plain loop over all labels."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data.conftest import MakeSplit
from tests.data.old_index import forget_tables
from vitctl.data.shards.index import read_index
from vitctl.data.source.labels import check_labels
from vitctl.data.source.read import Concat, ShardSource, Subset, SyntheticSource
from vitctl.data.source.subsets import Relabelled, of_classes
from vitctl.errors import DataError


def labelled(labels: list[int] | list[list[int]], num_classes: int = 3) -> Relabelled:
    """A source of any labels."""
    own = np.array(labels, np.int64)

    class Given(Relabelled):
        def labels(self, samples: np.ndarray | None = None) -> np.ndarray:
            return own if samples is None else own[samples]

    return Given(SyntheticSource(len(labels), 3, 8), tuple("abcdefg"[:num_classes]), np.zeros(0, np.int64))


@given(st.lists(st.integers(-3, 4), min_size=1, max_size=40))
def test_check_labels__one_each(labels: list[int]) -> None:
    source = labelled(labels)
    odd, none = sum(not -1 <= label < 3 for label in labels), labels.count(-1)
    for use in ("training", "scoring", "draws", "pixels"):
        wanted = f"{odd} of {len(labels)} images have a label that is none of 0 to 2" if odd else ""
        if not odd and none and use in ("training", "scoring"):
            wanted = f"{none} of {len(labels)} images have no label and cannot be"
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
            with pytest.raises(DataError, match=r"'train': [12] of 2 images have"):
                check_labels(labelled(labels), "train", use)  # type: ignore[arg-type]
        else:
            check_labels(labelled(labels), "train", use)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="one label per image is needed here"):
        check_labels(labelled(labels), "train", "draws", single=True)


def test_check_labels__chunks_count_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitctl.data.source.labels._CHUNK", 7)
    labels = [0] * 30
    for sample in (8, 9, 29):
        labels[sample] = 5
    with pytest.raises(
        DataError, match=r"3 of 30 images .*, first number 8 \(5\) of synthetic sample 8: the index is"
    ):
        check_labels(labelled(labels), "test", "scoring")


def test_check_labels__through_every_view(make_split: MakeSplit) -> None:
    folder = make_split(12).folder
    rows = np.load(folder / "samples.npy")
    rows["label"][4] = 3
    np.save(folder / "samples.npy", rows)
    forget_tables(folder)
    source = ShardSource(read_index(folder))
    for view in (source, Subset(source, np.array([2, 4])), Concat((source, source))):
        with pytest.raises(DataError, match=r"label that is none of 0 to 2, first number .*shard-000000.tar"):
            check_labels(view, "train", "pixels")
    with pytest.raises(
        DataError, match=r"'data\.classes': 1 of 12 images have a label that is none of 0 to 2"
    ):
        of_classes(source, ("a", "b"))
    check_labels(Subset(source, np.array([2, 3])), "train", "training")
