"""Counts against plain loops over the images."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import f1_score

from vitctl.engine.metrics import (
    Hits,
    correct_predictions,
    count_by_class,
    count_confusions,
    count_hits,
    macro_f1,
    padded_sets,
    verdict,
)

K = 7
SETS = st.lists(st.lists(st.integers(0, K - 1), max_size=3, unique=True), min_size=1, max_size=30)


def answers(num_images: int, seed: int = 0) -> np.ndarray:
    """Five different classes for each image."""
    generator = np.random.default_rng(seed)
    return np.stack([generator.permutation(K)[:5] for _ in range(num_images)])


@given(SETS, st.integers(0, 99))
def test_count_hits__is_what_a_loop_counts_and_empty_sets_are_left_out(
    sets: list[list[int]], seed: int
) -> None:
    best = answers(len(sets), seed)
    scored = [(row.tolist(), labels) for row, labels in zip(best, sets, strict=True) if labels]
    expected = Hits(
        sum(row[0] in labels for row, labels in scored),
        sum(bool(set(row) & set(labels)) for row, labels in scored),
        len(scored),
    )
    assert count_hits(best, padded_sets(sets)) == expected


def test_count_hits__one_label_each_is_the_same_as_sets_of_one() -> None:
    best, labels = answers(40), np.random.default_rng(1).integers(0, K, 40)
    hits = count_hits(best, labels)
    assert hits == count_hits(best, padded_sets([[int(label)] for label in labels]))
    assert hits.correct == int((best[:, 0] == labels).sum()) > 0
    assert (hits.accuracy, hits.top5) == (hits.correct / 40, hits.correct_top5 / 40)


def test_count_by_class__and_confusions_sum_to_the_hits() -> None:
    best, labels = answers(60), np.random.default_rng(2).integers(0, K - 1, 60)
    by_class = count_by_class(correct_predictions(best, labels), labels, K)
    hits = count_hits(best, labels)
    assert by_class.sum(axis=0).tolist() == [60, hits.correct, hits.correct_top5]
    assert by_class[K - 1].tolist() == [0, 0, 0]
    pairs = count_confusions(best, labels)
    assert pairs == sorted(pairs)
    assert sum(count for *_, count in pairs) == 60
    assert sum(count for own, answer, count in pairs if own == answer) == hits.correct


def test_padded_sets__of_nothing() -> None:
    assert padded_sets([[], []]).tolist() == [[-1], [-1]]
    assert padded_sets([[3], [1, 2], []]).tolist() == [[3, -1], [1, 2], [-1, -1]]


def test_verdict__of_an_accuracy_that_a_constant_prediction_reaches() -> None:
    for accuracy, majority, warns in ((0.2, 0.25, True), (0.25, 0.25, True), (0.26, 0.25, False)):
        assert bool(verdict({"accuracy": accuracy, "majority_class": majority})) == warns
    assert verdict({"accuracy": 0.0}) == verdict({}) == ""
    assert verdict({"accuracy": {"5": 0.1}, "majority_class": 0.2}) == ""


@given(st.lists(st.tuples(st.integers(0, K - 1), st.integers(0, K - 1)), min_size=1, max_size=40))
def test_macro_f1__is_scikit_learns(pairs: list[tuple[int, int]]) -> None:
    labels, answers = np.array(pairs).T
    by_class = np.stack(
        [np.bincount(which, minlength=K) for which in (labels, labels[labels == answers], answers)], axis=1
    )
    expected = f1_score(labels, answers, average="macro", zero_division=0.0)
    assert macro_f1(by_class) == pytest.approx(expected, rel=1e-14)
