"""The data sets of a few-shot evaluation, and the scores of its draws."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitctl.data.datasets.catalog import find_data_set
from vitctl.data.source.views import Source, check_labels, source_text
from vitctl.engine.evaluation import Score
from vitctl.engine.metrics import mean_per_class
from vitctl.engine.ridge import choose_shots, count_correct, decompose
from vitctl.errors import DataError
from vitctl.jobs.inputs.data import check_once, open_whole
from vitctl.jobs.record.result import data_used
from vitctl.recipe.protocols import FewshotImages

# Data sets for which the authors' evaluators use other splits than train and test.
SPLITS = {
    "colorectal": ("train[:2000]", "train[2000:]"),
    "imagenet": ("train[:65000]", "validation"),
    "uc_merced": ("train[:1000]", "train[1000:]"),
}


@dataclass(frozen=True)
class FewshotSet:
    """A data set with the split that shots are drawn from and the one that is scored."""

    name: str
    train_split: str
    eval_split: str
    train: Source
    test: Source

    @property
    def num_classes(self) -> int:
        """The number of classes of the set, independent of the labels that occur."""
        return len(self.train.class_names)

    @property
    def used(self) -> dict[str, Any]:
        """Provenance of its numbers."""
        own = {
            "train_split": self.train_split,
            "train_sha256": self.train.digest,
            "train_source": source_text(self.train),
            "num_train": len(self.train),
        }
        return own | data_used(self.test, self.eval_split)


def open_sets(data: FewshotImages, shots: Sequence[int], run_dir: Path) -> list[FewshotSet]:
    """The data sets of a recipe's [data], checked to have enough images for the shots.

    Raises:
        DataError: data is missing, the splits have different classes, labels are invalid, an expression takes
            an image twice, or a class has fewer images than shots.
    """
    places = [data.model_copy(update={"dataset": name, "path": ""}) for name in data.datasets] or [data]
    sets = []
    for place in places:
        name = (
            find_data_set(place.dataset).name if place.dataset and not place.path else Path(place.path).name
        )
        default = SPLITS.get(name, ("train", "test"))
        train_split, eval_split = place.train_split or default[0], place.eval_split or default[1]
        train, test = (open_whole(place, split, run_dir) for split in (train_split, eval_split))
        one = FewshotSet(name, train_split, eval_split, train, test)
        _check(one, max(shots))
        sets.append(one)
    return sets


def _check(one: FewshotSet, shots: int) -> None:
    if one.train.class_names != one.test.class_names:
        raise DataError(
            f"'{one.train_split}' and '{one.eval_split}' do not have the same classes in the same order"
        )
    check_labels(one.train, one.train_split, "draws", single=True)
    check_labels(one.test, one.eval_split, "scoring", single=True)
    for source, split in ((one.train, one.train_split), (one.test, one.eval_split)):
        check_once(source, split)
    choose_shots(
        one.train.labels(), shots, num_classes=one.num_classes, seed=0, class_names=one.train.class_names
    )


def score_draw(
    one: FewshotSet,
    features: tuple[Tensor, Tensor],
    *,
    shots: int,
    seed: int,
    l2s: Sequence[float],
    dtype: torch.dtype,
) -> list[Score]:
    """Scores of the test images by one draw, for each regulariser.

    Args:
        one: the data set.
        features: of its training and test images, [N, R] and [M, R].
        shots, seed: of the draw.
        l2s: regularisers.
        dtype: of the solve.
    """
    labels = one.train.labels()
    chosen = choose_shots(labels, shots, num_classes=one.num_classes, seed=seed)
    chosen_labels = torch.from_numpy(labels[chosen])
    ridge = decompose(features[0][chosen], chosen_labels, num_classes=one.num_classes, dtype=dtype)
    test_labels = one.test.labels()
    images = np.bincount(test_labels, minlength=one.num_classes)
    return [
        Score(int(right.sum()), len(test_labels), mean_per_class(np.stack([images, right], axis=1)))
        for right in count_correct(ridge, features[1], torch.from_numpy(test_labels), l2s)
    ]


def drawn_rows(one: FewshotSet, shots: int, seed: int) -> list[tuple[str | int, ...]]:
    """(data set, seed, class, place, index, key) of every drawn image; `s` shots are those with place < s."""
    chosen = choose_shots(one.train.labels(), shots, num_classes=one.num_classes, seed=seed).tolist()
    names = one.train.class_names
    return [
        (one.name, seed, names[i // shots], i % shots, sample, one.train.key(sample))
        for i, sample in enumerate(chosen)
    ]
