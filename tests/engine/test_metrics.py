"""Counts against plain loops over the images."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest
from scipy.stats import t as student
from sklearn import config_context
from sklearn.metrics import (
    accuracy_score,
    average_precision_score,
    f1_score,
    precision_recall_fscore_support,
)

from vitctl.engine.metrics import (
    Hits,
    average_precisions,
    best_thresholds,
    bootstrap,
    class_scores,
    correct_predictions,
    count_by_class,
    count_confusions,
    count_hits,
    interval_text,
    label_set_scores,
    macro_f1,
    macro_scores,
    mcnemar,
    padded_sets,
    t_interval,
    verdict,
    wilson,
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


@given(st.integers(1, 60_000), st.floats(0, 1))
def test_wilson__is_scipys(total: int, share: float) -> None:
    correct = round(share * total)
    interval = binomtest(correct, total).proportion_ci(method="wilson")
    assert wilson(correct, total) == pytest.approx([interval.low, interval.high], rel=1e-12, abs=1e-15)


@pytest.mark.parametrize("values", [[0.5, 0.6], [0.5, 0.6, 0.7], [0.1, 0.9, 0.4, 0.4, 0.3]])
def test_t_interval__is_scipys(values: list[float]) -> None:
    error = np.std(values, ddof=1) / np.sqrt(len(values))
    expected = student.interval(0.95, len(values) - 1, np.mean(values), error)
    assert t_interval(values) == pytest.approx(expected, rel=1e-12)


def test_wilson__published() -> None:
    """Newcombe 1998, Table I, method 3: 81 of 263, 0 of 20 and 29 of 29."""
    published = {(81, 263): (0.2553, 0.3662), (0, 20): (0, 0.1611), (29, 29): (0.8830, 1)}
    assert {key: tuple(round(end, 4) for end in wilson(*key)) for key in published} == published


@given(st.lists(st.tuples(st.integers(0, K - 1), st.integers(0, K - 1)), min_size=1, max_size=60))
def test_class_scores__are_scikit_learns(pairs: list[tuple[int, int]]) -> None:
    own, answer = np.array(pairs).T
    by_class = np.stack(
        [np.bincount(which, minlength=K) for which in (own, own[own == answer], answer)], axis=1
    )
    expected = precision_recall_fscore_support(own, answer, labels=range(K), zero_division=np.nan)[:3]
    assert class_scores(by_class) == pytest.approx(np.stack(expected, axis=1), rel=1e-14, nan_ok=True)
    macro = precision_recall_fscore_support(own, answer, average="macro", zero_division=0)[:3]
    assert list(macro_scores(by_class).values()) == pytest.approx(macro, rel=1e-13)


@pytest.mark.slow
def test_bootstrap__is_near_one_that_draws_the_images_and_scores_them_with_scikit_learn() -> None:
    generator = np.random.default_rng(1)
    own = generator.integers(0, 5, 200) * 2
    # No class is rare: where one may vanish, the ends of the reference itself differ by 0.02 between seeds.
    answer = np.where(generator.random(200) < 0.7, own, generator.integers(0, 6, 200) * 2)
    found = bootstrap(own, answer, own == answer)
    assert found == bootstrap(own, answer, own == answer)
    draws = [generator.integers(0, 200, 200) for _ in range(1000)]
    with config_context(assume_finite=True, skip_parameter_validation=True):
        f1 = [f1_score(own[drawn], answer[drawn], average="macro") for drawn in draws]
    recalls = [
        np.mean([np.mean(answer[drawn][own[drawn] == c] == c) for c in np.unique(own[drawn])])
        for drawn in draws
    ]
    for name, values in (("f1", f1), ("mean_per_class", recalls)):
        assert found[name] == pytest.approx(np.quantile(values, (0.025, 0.975)), abs=0.012), name


def test_interval_text__of_anything_else_is_empty() -> None:
    assert interval_text([0.745, 0.7825]) == "74.5-78.2%"
    assert [interval_text(value) for value in (None, [1.0], ["a", 2.0], "ab", {"a": 1})] == [""] * 5


@pytest.mark.parametrize(("one", "other"), [(0, 0), (0, 1), (3, 3), (5, 15), (182, 19), (2000, 2100)])
def test_mcnemar__is_the_two_sided_binomial_test(one: int, other: int) -> None:
    expected = binomtest(one, one + other).pvalue if one + other else 1.0
    assert mcnemar(one, other) == mcnemar(other, one) == pytest.approx(expected, rel=1e-9)


def test_label_set_scores__as_scikit_learn() -> None:
    generator = np.random.default_rng(3)
    truth = generator.random((200, 6)) < [0.5, 0.3, 0.1, 0.05, 0.02, 0]
    scores = np.round(generator.random((200, 6)) + 0.4 * truth, 2)  # with ties
    thresholds = np.array([0.5, 0.7, 0.9, 0.9, 1.2, 2.0])
    found = label_set_scores(scores, truth, thresholds)
    predicted, there = scores >= thresholds, truth.any(axis=0)
    expected = average_precision_score(truth[:, there], scores[:, there])
    assert found["map"] == pytest.approx(expected, abs=1e-14)
    same = f1_score(truth, predicted, average="macro", zero_division=np.nan)
    assert found["f1"] == pytest.approx(same, abs=1e-14)
    assert found["micro_f1"] == pytest.approx(f1_score(truth, predicted, average="micro"), abs=1e-14)
    assert found["subset_accuracy"] == accuracy_score(truth, predicted)
    assert np.isnan(average_precisions(scores, truth)).tolist() == [False] * 5 + [True]


@given(st.lists(st.tuples(st.integers(0, K - 1), st.integers(0, K - 1)), min_size=1, max_size=40))
def test_macro_f1__has_one_convention_for_one_and_for_several_labels(pairs: list[tuple[int, int]]) -> None:
    """Also where classes are absent, only predicted or never predicted; `labels` has those that occur."""
    labels, answers = np.array(pairs).T
    truth, predicted = np.eye(K, dtype=bool)[labels], np.eye(K, dtype=bool)[answers]
    found = label_set_scores(predicted.astype(float), truth, np.full(K, 0.5))["f1"]
    occurring = np.flatnonzero(truth.any(axis=0) | predicted.any(axis=0))
    assert found == pytest.approx(f1_score(labels, answers, average="macro", zero_division=0.0), rel=1e-14)
    more = np.concatenate([truth, truth | predicted, np.zeros_like(truth)])  # none, one and two labels
    answered = np.concatenate([predicted, truth, predicted])
    found = label_set_scores(answered.astype(float), more, np.full(K, 0.5))["f1"]
    same: dict[str, Any] = {"labels": occurring, "average": "macro", "zero_division": 0.0}
    assert found == pytest.approx(f1_score(more, answered, **same), rel=1e-14)


def test_best_thresholds__no_other_score_has_a_higher_f1() -> None:
    generator = np.random.default_rng(4)
    truth = generator.random((60, 3)) < 0.3
    scores = np.round(generator.random((60, 3)) + 0.3 * truth, 1)
    for label, best in enumerate(best_thresholds(scores, truth)):
        own, values = truth[:, label], np.unique(scores[:, label])
        reached = [f1_score(own, scores[:, label] >= value) for value in values]
        assert best == values[::-1][np.argmax(reached[::-1])]
    assert best_thresholds(scores, np.zeros_like(truth)).tolist() == [0.5] * 3
