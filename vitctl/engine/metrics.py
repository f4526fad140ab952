"""Metrics from the top-5 predictions: pure functions of integers, the same for any number of processes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

TOP_K = 5
# What evaluation.metric can choose, in words.
METRICS = {"accuracy": "accuracy", "mean_per_class": "mean accuracy per class", "f1": "macro F1"}


@dataclass(frozen=True)
class Hits:
    """How many predictions are correct: top-1 and top-5."""

    correct: int
    correct_top5: int
    total: int

    @property
    def accuracy(self) -> float:
        """Top-1 accuracy, 0..1."""
        return self.correct / self.total

    @property
    def top5(self) -> float:
        """Top-5 accuracy, 0..1."""
        return self.correct_top5 / self.total


def label_sets(labels: np.ndarray) -> np.ndarray:
    """Return the labels of each image as a row: `[N, L]`, of `[N]` or `[N, L]`; N may be 0."""
    return labels[:, None] if labels.ndim == 1 else labels


def correct_predictions(best: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Which predictions are among an image's labels: bool `[N, 5]`.

    Args:
        best: int64 `[N, 5]`, predicted classes of each image, the most likely first; fewer columns where
            there are fewer classes.
        labels: int64 `[N]` or `[N, L]`, the correct classes, padded with -1.
    """
    sets = label_sets(labels)
    return np.stack([(best[:, column, None] == sets).any(axis=1) for column in range(best.shape[1])], axis=1)


def count_hits(best: np.ndarray, labels: np.ndarray) -> Hits:
    """Count correct predictions; images without any label do not count.

    Arguments as for `correct_predictions`.
    """
    labelled = (label_sets(labels) >= 0).any(axis=1)
    right = correct_predictions(best, labels)[labelled]
    return Hits(int(right[:, 0].sum()), int(right.any(axis=1).sum()), int(labelled.sum()))


def count_by_class(right: np.ndarray, classes: np.ndarray, num_classes: int) -> np.ndarray:
    """Images, top-1 and top-5 hits of every class: int64 `[K, 3]`.

    Args:
        right: result of `correct_predictions`.
        classes: int64 `[N]`, the class of each image, 0 to K - 1.
        num_classes: K.
    """
    columns = (np.ones(len(classes), bool), right[:, 0], right.any(axis=1))
    return np.stack([np.bincount(classes[which], minlength=num_classes) for which in columns], axis=1)


def mean_per_class(by_class: np.ndarray) -> float:
    """Mean accuracy over the classes that have images, 0..1, each counting the same.

    Args:
        by_class: int64 `[K, 2]` or wider, images and correct predictions of each class, as from
            `count_by_class`.
    """
    there = by_class[by_class[:, 0] > 0]
    return float(np.mean(there[:, 1] / there[:, 0])) if len(there) else 0.0


def macro_f1(by_class: np.ndarray) -> float:
    """Mean of the F1 scores of the classes that occur, as labels or predictions, 0..1.

    F1 of a class is 2 * correct / (images + predictions), as scikit-learn's f1_score(average="macro").

    Args:
        by_class: int64 `[K, 3]`, images, correct predictions and predictions of each class.
    """
    images, correct, predicted = by_class[by_class[:, 0] + by_class[:, 2] > 0].T
    return float(np.mean(2 * correct / (images + predicted))) if len(images) else 0.0


def baselines(labels: np.ndarray, num_answers: int) -> dict[str, float]:
    """Baselines for an accuracy on these images: what a constant and a random prediction would score.

    Args:
        labels: int64 `[N]` or `[N, L]`, the correct classes, padded with -1; images without any do not count.
        num_answers: number of classes that can be predicted.

    Returns:
        `majority_class`: accuracy of always predicting the most frequent class; `chance`: of a random class.
        Shares 0..1.
    """
    sets = label_sets(labels)
    sets = sets[(sets >= 0).any(axis=1)]
    if not len(sets):
        return {"majority_class": 0.0, "chance": 0.0}
    pairs = np.unique(np.stack([np.repeat(np.arange(len(sets)), sets.shape[1]), sets.reshape(-1)]), axis=1)
    answers = pairs[1][pairs[1] >= 0]
    return {
        "majority_class": float(np.bincount(answers).max() / len(sets)),
        "chance": float(len(answers) / len(sets) / num_answers),
    }


def verdict(numbers: Mapping[str, Any]) -> str:
    """Return the warning for an accuracy that a constant prediction reaches too; "" for a better one, or
    without `baselines`.
    """
    accuracy, majority = numbers.get("accuracy"), numbers.get("majority_class")
    if not isinstance(accuracy, float) or not isinstance(majority, float) or accuracy > majority:
        return ""
    return "no better than always predicting the majority class"


def count_confusions(best: np.ndarray, classes: np.ndarray) -> list[tuple[int, int, int]]:
    """Return (class, predicted class, images) of every pair that occurs, in order of class and prediction.

    Args:
        best: as for `correct_predictions`.
        classes: int64 `[N]`, the class of each image.
    """
    pairs, counts = np.unique(np.stack([classes, best[:, 0]], axis=1), axis=0, return_counts=True)
    return [(int(own), int(answer), int(count)) for (own, answer), count in zip(pairs, counts, strict=True)]


def padded_sets(sets: Sequence[Sequence[int]]) -> np.ndarray:
    """Label sets of any length as int64 `[N, L]`, padded with -1."""
    width = max(1, max(map(len, sets), default=1))
    return np.array([[*labels, *[-1] * (width - len(labels))] for labels in sets], np.int64).reshape(
        -1, width
    )
