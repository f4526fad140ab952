"""Metrics from the top-5 predictions: pure functions of integers, the same for any number of processes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

TOP_K = 5
_Z95 = 1.959963984540054  # the normal distribution's quantile at 0.975
_DRAWS, _DRAWS_AT_ONCE, _SEED = 1000, 50, 0x626F6F74  # bootstrap


@dataclass(frozen=True)
class Hits:
    """Counts of correct top-1 and top-5 predictions."""

    correct: int
    correct_top5: int
    total: int

    @property
    def accuracy(self) -> float:
        return self.correct / self.total

    @property
    def top5(self) -> float:
        return self.correct_top5 / self.total


def label_sets(labels: np.ndarray) -> np.ndarray:
    """Return the labels as rows `[N, L]`, from `[N]` or `[N, L]`; N may be 0."""
    return labels[:, None] if labels.ndim == 1 else labels


def correct_predictions(best: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return which predictions are among an image's labels, bool `[N, 5]`.

    Args:
        best: int64 `[N, 5]`, predicted classes, the most likely first; fewer columns with fewer classes.
        labels: int64 `[N]` or `[N, L]`, the correct classes, padded with -1.
    """
    sets = label_sets(labels)
    return np.stack([(best[:, column, None] == sets).any(axis=1) for column in range(best.shape[1])], axis=1)


def count_hits(best: np.ndarray, labels: np.ndarray) -> Hits:
    """Count correct predictions, ignoring unlabelled images. Arguments as for `correct_predictions`."""
    labelled = (label_sets(labels) >= 0).any(axis=1)
    right = correct_predictions(best, labels)[labelled]
    return Hits(int(right[:, 0].sum()), int(right.any(axis=1).sum()), int(labelled.sum()))


def count_by_class(right: np.ndarray, classes: np.ndarray, num_classes: int) -> np.ndarray:
    """Return images, top-1 and top-5 hits of every class, int64 `[K, 3]`.

    `right` is from `correct_predictions`; `classes` are int64 `[N]`, 0 to K - 1.
    """
    columns = (np.ones(len(classes), bool), right[:, 0], right.any(axis=1))
    return np.stack([np.bincount(classes[which], minlength=num_classes) for which in columns], axis=1)


def mean_per_class(by_class: np.ndarray) -> float:
    """Return the unweighted mean accuracy, 0..1, over the classes that have images, see `count_by_class`."""
    there = by_class[by_class[:, 0] > 0]
    return float(np.mean(there[:, 1] / there[:, 0])) if len(there) else 0.0


def macro_f1(by_class: np.ndarray) -> float:
    """Return the mean F1 score, 0..1, over the classes that occur as labels or predictions; 0 if none does.

    F1 of a class is 2 * correct / (images + predictions), as scikit-learn's f1_score(average="macro"). A
    class that is never predicted, or only predicted, counts as 0. `by_class` is int64 `[K, 3]`: images,
    correct predictions and predictions; with several labels per image, an image counts for each.
    """
    images, correct, predicted = by_class[by_class[:, 0] + by_class[:, 2] > 0].T
    return float(np.mean(2 * correct / (images + predicted))) if len(images) else 0.0


def class_scores(by_class: np.ndarray) -> np.ndarray:
    """Return precision, recall and F1 per class, `[K, 3]`, NaN if the divisor is 0; see `macro_f1`."""
    images, correct, predicted = by_class.astype(np.float64).T
    divisors = np.stack([predicted, images, (images + predicted) / 2], axis=1)
    scores = np.full(divisors.shape, np.nan)
    np.divide(correct[:, None], divisors, out=scores, where=divisors > 0)
    return scores


def macro_scores(by_class: np.ndarray) -> dict[str, float]:
    """Return `macro_precision`, `macro_recall` and `f1`, means over the classes that occur; see `macro_f1`.

    A score whose divisor is 0 counts as 0, as in scikit-learn with zero_division=0.
    """
    occurring = by_class[by_class[:, 0] + by_class[:, 2] > 0]
    scores = np.nan_to_num(class_scores(occurring)).mean(axis=0) if len(occurring) else np.zeros(3)
    precision, recall, _ = map(float, scores)
    return {"macro_precision": precision, "macro_recall": recall, "f1": macro_f1(by_class)}


def wilson(correct: int, total: int) -> list[float]:
    """Return the 95 % Wilson score interval, 0..1, of a share of independent images.

    Source: Wilson 1927, Probable inference, the law of succession, and statistical inference
    """
    if not total:
        return [0.0, 1.0]
    share, z2 = correct / total, _Z95**2
    centre = (share + z2 / (2 * total)) / (1 + z2 / total)
    half = _Z95 / (1 + z2 / total) * np.sqrt(share * (1 - share) / total + z2 / (4 * total**2))
    low, high = max(0.0, float(centre - half)), min(1.0, float(centre + half))
    return [low if correct else 0.0, high if correct < total else 1.0]


def t_interval(values: Sequence[float]) -> list[float]:
    """Return the 95 % interval of the mean of two or more independent values, by Student's t."""
    from scipy.special import stdtrit

    half = stdtrit(len(values) - 1, 0.975) * np.std(values, ddof=1) / np.sqrt(len(values))
    return [float(np.mean(values) - half), float(np.mean(values) + half)]


def bootstrap(classes: np.ndarray, answers: np.ndarray, right: np.ndarray) -> dict[str, list[float]]:
    """Return 95 % percentile intervals of `mean_per_class` and `f1` over 1,000 resamples of the images.

    Images are drawn with replacement, with a fixed seed. Drawing the counts of the cells (class, answer,
    right) from their multinomial distribution is equivalent and faster.

    Args:
        classes: int64 `[N]`, the class of each image; N is at least 1.
        answers: int64 `[N]`, the predicted class.
        right: bool `[N]`, whether it counts as correct.

    Source: Efron and Tibshirani 1993, An Introduction to the Bootstrap, chapter 13
    """
    cells, counts = np.unique(np.stack([classes, answers, right]), axis=1, return_counts=True)
    (own, answer, is_right), generator = cells, np.random.default_rng(_SEED)
    names = np.union1d(own, answer)
    of_class, of_answer = np.searchsorted(names, own), np.argsort(answer, kind="stable")
    # Cells are sorted by class, so each class is one group.
    starts = np.unique(own, return_index=True)[1]
    answer_starts = np.unique(answer[of_answer], return_index=True)[1]
    kept = np.unique(of_class), np.searchsorted(names, np.unique(answer))
    means: list[np.ndarray] = []
    for _ in range(_DRAWS // _DRAWS_AT_ONCE):
        drawn = generator.multinomial(len(classes), counts / len(classes), size=_DRAWS_AT_ONCE)
        images, correct, predicted = (np.zeros((_DRAWS_AT_ONCE, len(names))) for _ in range(3))
        images[:, kept[0]] = np.add.reduceat(drawn, starts, axis=1)
        correct[:, kept[0]] = np.add.reduceat(drawn * is_right, starts, axis=1)
        predicted[:, kept[1]] = np.add.reduceat(drawn[:, of_answer], answer_starts, axis=1)
        pairs = ((correct, images), (2 * correct, images + predicted))
        with np.errstate(invalid="ignore"):  # classes that were not drawn are left out of the mean
            means.append(np.stack([np.nanmean(above / below, axis=1) for above, below in pairs], axis=1))
    low, high = np.quantile(np.concatenate(means), (0.025, 0.975), axis=0)
    return {name: [float(low[n]), float(high[n])] for n, name in enumerate(("mean_per_class", "f1"))}


def mcnemar(one: int, other: int) -> float:
    """Return the two-sided p-value of McNemar's exact test: a fair coin decides each discordant image.

    `one` and `other` count images that only the first, and only the second classifier gets right.

    Source: McNemar 1947, Note on the sampling error of the difference between correlated proportions
    """
    tosses, term, total = one + other, 1, 1  # integers of any size: exact
    for heads in range(min(one, other)):
        term = term * (tosses - heads) // (heads + 1)  # the number of ways, exact
        total += term
    return min(1.0, 2 * total / (1 << tosses))


def interval_text(interval: Any) -> str:
    """Format an interval of a share as "74.5-78.2%"; "" if the result has none."""
    if not isinstance(interval, list) or [type(end) for end in interval] != [float, float]:
        return ""
    low, high = (100 * end for end in interval)
    return f"{low:.1f}-{high:.1f}%"


def baselines(labels: np.ndarray, num_answers: int) -> dict[str, float]:
    """Return the accuracy, 0..1, of a constant prediction (`majority_class`) and a random one (`chance`).

    `labels` are int64 `[N]` or `[N, L]`, padded with -1; unlabelled images do not count.
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
    """Return a warning if a constant prediction reaches this accuracy; "" if not, or without `baselines`."""
    accuracy, majority = numbers.get("accuracy"), numbers.get("majority_class")
    if not isinstance(accuracy, float) or not isinstance(majority, float) or accuracy > majority:
        return ""
    return "no better than always predicting the majority class"


def count_confusions(best: np.ndarray, classes: np.ndarray) -> list[tuple[int, int, int]]:
    """Return (class, predicted class, images) of every pair that occurs, in that order."""
    pairs, counts = np.unique(np.stack([classes, best[:, 0]], axis=1), axis=0, return_counts=True)
    return [(int(own), int(answer), int(count)) for (own, answer), count in zip(pairs, counts, strict=True)]


def padded_sets(sets: Sequence[Sequence[int]]) -> np.ndarray:
    """Return label sets of any length as int64 `[N, L]`, padded with -1."""
    width = max(1, max(map(len, sets), default=1))
    return np.array([[*labels, *[-1] * (width - len(labels))] for labels in sets], np.int64).reshape(
        -1, width
    )


def average_precisions(scores: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """Return each class's average precision, float64 `[K]`, as scikit-learn's; NaN for classes without
    images.

    `scores` are `[N, K]`, the higher the more likely; `truth` is bool `[N, K]`.
    """
    found = np.full(scores.shape[1], np.nan)
    for label in np.flatnonzero(truth.any(axis=0)):
        ends, correct = _at_thresholds(scores[:, label], truth[:, label])[1:]
        found[label] = (np.diff(correct, prepend=0) * correct / ends).sum() / correct[-1]
    return found


def best_thresholds(scores: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """Return each class's threshold `[K]` with the best F1, the highest of ties; 0.5 without images."""
    found = np.full(scores.shape[1], 0.5)
    for label in np.flatnonzero(truth.any(axis=0)):
        values, ends, correct = _at_thresholds(scores[:, label], truth[:, label])
        found[label] = values[np.argmax(correct / (ends + correct[-1]))]
    return found


def label_set_scores(scores: np.ndarray, truth: np.ndarray, thresholds: np.ndarray) -> dict[str, float]:
    """Return the metrics of `OF_LABEL_SETS`, 0..1, where a class is predicted from its threshold `[K]` on.

    `map` is the mean over the classes that have images, `f1` is `macro_f1`, micro F1 and subset accuracy
    cover all classes. They equal scikit-learn's average_precision_score, f1_score and accuracy_score.
    """
    predicted = scores >= thresholds
    return {name: float(metric.of(scores, truth, predicted)) for name, metric in OF_LABEL_SETS.items()}


def _mean_precision(scores: np.ndarray, truth: np.ndarray, _: np.ndarray) -> float:
    return float(np.nanmean(average_precisions(scores, truth)))


def _micro_f1(_: np.ndarray, truth: np.ndarray, predicted: np.ndarray) -> float:
    return float(2 * (predicted & truth).sum() / max(1, truth.sum() + predicted.sum()))


def _macro_f1(_: np.ndarray, truth: np.ndarray, predicted: np.ndarray) -> float:
    return macro_f1(np.stack([truth.sum(0), (predicted & truth).sum(0), predicted.sum(0)], axis=1))


def _subset_accuracy(_: np.ndarray, truth: np.ndarray, predicted: np.ndarray) -> float:
    return float((predicted == truth).all(axis=1).mean())


def _at_thresholds(scores: np.ndarray, truth: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the distinct scores `[T]`, falling, with the images and the class's images at or above each."""
    order = np.argsort(-scores, kind="stable")
    falling = scores[order]
    last = np.flatnonzero(np.diff(falling, append=-np.inf))
    return falling[last], last + 1, np.cumsum(truth[order])[last]


class Metric(NamedTuple):
    """A metric in results and logs in addition to accuracy, 0..1: its English name and function.

    `single_labels`: it needs one label per image.
    """

    words: str
    of: Callable[..., float]
    single_labels: bool = False


# From images, correct predictions and predictions per class, int64 [K, 3]; evaluation.metric chooses one.
MEANS = {
    "mean_per_class": Metric("mean accuracy per class", mean_per_class),
    "f1": Metric("macro F1", macro_f1, single_labels=True),
}
METRICS = {"accuracy": "accuracy"} | {name: metric.words for name, metric in MEANS.items()}  # in words
METRICS["loss"] = "loss"  # the only one of which less is better
# Of images with several labels each: scores [N, K], labels and predictions, bool [N, K].
OF_LABEL_SETS = {
    "map": Metric("mean average precision", _mean_precision),
    "micro_f1": Metric("micro F1", _micro_f1),
    "f1": Metric("macro F1", _macro_f1),
    "subset_accuracy": Metric("all classes right", _subset_accuracy),
}


def metric_text(metric: str, value: float) -> str:
    """Write a number of `METRICS`: a share in percent, the loss as it is."""
    return f"{value:.4f}" if metric == "loss" else f"{value:.2%}"
