"""The closed form against a direct solve in NumPy."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.matrix import each
from vitctl.engine import fewshot_ridge
from vitctl.engine.fewshot_ridge import (
    L2_GRID,
    choose_l2,
    choose_shots,
    count_correct,
    decompose,
    fitted_scale,
)
from vitctl.errors import DataError

WIDTH, CLASSES = 12, 4


def fit_and_score(
    train: torch.Tensor, labels: torch.Tensor, test: torch.Tensor, *, num_classes: int, l2: float
) -> torch.Tensor:
    ridge = decompose(train, labels, num_classes=num_classes)
    return ridge.scores(ridge.project(test), l2)


def reference(train: np.ndarray, labels: np.ndarray, test: np.ndarray, l2: float) -> np.ndarray:
    """Standardise by the training images, a column of 100, then (X'X + l2 I)^-1 X'Y."""
    mean, std = train.mean(axis=0), train.std(axis=0) + 1e-5
    x, z = (np.concatenate([(t - mean) / std, np.full((len(t), 1), 100.0)], axis=1) for t in (train, test))
    y = 2 * np.eye(CLASSES)[labels] - 1
    weights: np.ndarray = np.linalg.solve(x.T @ x + l2 * np.eye(x.shape[1]), x.T @ y)
    scores: np.ndarray = z @ weights
    return scores


def draw(num: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(num)
    labels = np.arange(num) % CLASSES
    train = rng.normal(size=(num, WIDTH)) + 0.7 * rng.normal(size=(CLASSES, WIDTH))[labels]
    return train, labels, rng.normal(size=(9, WIDTH))


@each("num", [4, 8, WIDTH, WIDTH + 1, WIDTH + 2, 40, 100])
@each("power", [-10, -3, 0, 5, 10, 19])
def test_fit_and_score__equals_the_direct_solve(num: int, power: int) -> None:
    """More and fewer images than WIDTH + 1 take the two ways; both are the same solution."""
    train, labels, test = draw(num)
    got = fit_and_score(
        torch.tensor(train), torch.tensor(labels), torch.tensor(test), num_classes=CLASSES, l2=2.0**power
    ).numpy()
    assert got.dtype == np.float64
    np.testing.assert_allclose(got, reference(train, labels, test, 2.0**power), rtol=0, atol=1e-9)


@pytest.mark.parametrize("num", [8, WIDTH + 1, 40])
def test_decompose__once_serves_every_regulariser(num: int) -> None:
    train, labels, test = draw(num)
    ridge = decompose(torch.tensor(train), torch.tensor(labels), num_classes=CLASSES)
    projected = ridge.project(torch.tensor(test))
    truth = torch.tensor(np.arange(len(test)) % CLASSES)
    x_test = np.concatenate(
        [(test - train.mean(0)) / (train.std(0) + 1e-5), np.full((len(test), 1), 100.0)], axis=1
    )
    assert (len(L2_GRID), L2_GRID[0], L2_GRID[-1]) == (30, 2.0**-10, 2.0**19)
    correct = count_correct(ridge, torch.tensor(test), truth, L2_GRID)
    for l2, count in zip(L2_GRID, correct, strict=True):
        expected = reference(train, labels, test, l2)
        np.testing.assert_allclose(ridge.scores(projected, l2).numpy(), expected, rtol=0, atol=1e-9)
        np.testing.assert_allclose(x_test @ ridge.weights(l2).numpy(), expected, rtol=0, atol=1e-9)
        hits = truth.numpy()[expected.argmax(axis=1) == truth.numpy()]
        assert count.tolist() == np.bincount(hits, minlength=CLASSES).tolist()
        assert count.sum() == int((expected.argmax(axis=1) == truth.numpy()).sum())


@pytest.mark.parametrize("l2", [2.0**-10, 1.0, 1024.0, 2.0**19])
def test_decompose__equals_scikit_learn(l2: float) -> None:
    from sklearn.linear_model import RidgeClassifier

    train, labels, _ = draw(60)
    ridge = decompose(torch.tensor(train), torch.tensor(labels), num_classes=CLASSES)
    x = np.concatenate(
        [(train - train.mean(0)) / (train.std(0) + 1e-5), np.full((len(train), 1), 100.0)], axis=1
    )
    peer = RidgeClassifier(alpha=l2, fit_intercept=False).fit(x, labels)
    np.testing.assert_allclose(ridge.weights(l2).numpy().T, peer.coef_, rtol=0, atol=1e-9)


def test_choose_l2__the_best_mean_rank_and_with_a_set_left_out() -> None:
    """Three sets at four regularisers; ranks are by hand."""
    accuracies = np.array([[0.1, 0.2, 0.3, 0.4], [0.8, 0.7, 0.6, 0.5], [0.30, 0.33, 0.32, 0.31]])
    # ranks: 0 1 2 3 / 3 2 1 0 / 0 3 2 1; sums 3 6 5 4
    assert choose_l2(accuracies, leave_self_out=False).tolist() == [1, 1, 1]
    # without the first 3 5 3 1, the second 0 4 4 4, the third 3 3 3 3
    assert choose_l2(accuracies, leave_self_out=True).tolist() == [1, 1, 0]


def test_choose_l2__nothing_is_left_of_one_set() -> None:
    assert choose_l2(np.array([[0.1, 0.9, 0.3]]), leave_self_out=False).tolist() == [1]
    with pytest.raises(DataError, match="needs at least two data sets; 'all' works with one"):
        choose_l2(np.array([[0.1, 0.9, 0.3]]), leave_self_out=True)


def test_decompose__float32_agrees_at_the_papers_regulariser() -> None:
    train, labels, test = draw(100)
    ridge = decompose(torch.tensor(train), torch.tensor(labels), num_classes=CLASSES, dtype=torch.float32)
    got = ridge.scores(ridge.project(torch.tensor(test)), 1024.0)
    assert got.dtype == torch.float32
    np.testing.assert_allclose(got.numpy(), reference(train, labels, test, 1024.0), rtol=0, atol=1e-4)


def test_decompose__chunks_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    train, labels, test = (torch.tensor(a) for a in draw(100))
    truth = torch.arange(len(test)) % CLASSES
    whole = decompose(train, labels, num_classes=CLASSES)
    correct = count_correct(whole, test, truth, L2_GRID)
    monkeypatch.setattr(fewshot_ridge, "_CHUNK", 7)
    parts = decompose(train, labels, num_classes=CLASSES)
    torch.testing.assert_close(parts.weights(1.0), whole.weights(1.0), rtol=1e-7, atol=1e-9)
    np.testing.assert_array_equal(count_correct(parts, test, truth, L2_GRID), correct)


def test_fit_and_score__does_not_care_about_shift_and_scale_of_features() -> None:
    train, labels, test = draw(40)
    scale, shift = np.linspace(0.5, 30, WIDTH), np.linspace(-5, 5, WIDTH)
    one = fit_and_score(
        torch.tensor(train), torch.tensor(labels), torch.tensor(test), num_classes=CLASSES, l2=8.0
    )
    two = fit_and_score(
        torch.tensor(train * scale + shift),
        torch.tensor(labels),
        torch.tensor(test * scale + shift),
        num_classes=CLASSES,
        l2=8.0,
    )
    np.testing.assert_allclose(one.numpy(), two.numpy(), atol=1e-4)


@settings(max_examples=30)
@given(st.integers(0, 2**31), st.integers(1, 4), st.integers(1, 5))
def test_choose_shots__of_each_class_and_fewer_are_prefixes_of_more(seed: int, shots: int, more: int) -> None:
    labels = np.random.default_rng(1).permutation(np.repeat(np.arange(CLASSES), 9))
    few = choose_shots(labels, shots, num_classes=CLASSES, seed=seed)
    many = choose_shots(labels, min(9, shots + more), num_classes=CLASSES, seed=seed)
    assert labels[few].tolist() == np.repeat(np.arange(CLASSES), shots).tolist()
    assert len(set(many.tolist())) == len(many)
    for label in range(CLASSES):
        own = [few[labels[few] == label], many[labels[many] == label]]
        assert own[0].tolist() == own[1][:shots].tolist()


def test_choose_shots__is_the_authors_draw() -> None:
    """One generator for all classes, each class permuted in turn."""
    labels = np.random.default_rng(5).integers(0, CLASSES, 80)
    rng = np.random.default_rng(3)
    expected = [rng.permutation(np.where(labels == label)[0])[:2] for label in range(CLASSES)]
    assert choose_shots(labels, 2, num_classes=CLASSES, seed=3).tolist() == np.concatenate(expected).tolist()
    assert choose_shots(labels, 2, num_classes=CLASSES, seed=4).tolist() != np.concatenate(expected).tolist()


def test_choose_shots__too_few_images() -> None:
    labels = np.array([0, 0, 1])
    with pytest.raises(DataError, match=r"class 1 has 1 training image, 2 are needed; use fewer shots"):
        choose_shots(labels, 2, num_classes=2, seed=0)


@each("num", [4, WIDTH, WIDTH + 1, WIDTH + 2, 40])
@each("l2", [1e-3, 1.0, 1024.0])
def test_left_out__equals_a_solve_without_each_image(num: int, l2: float) -> None:
    train, labels, test = draw(num)
    ridge = decompose(torch.from_numpy(train), torch.from_numpy(labels), num_classes=CLASSES)
    x, z = (
        np.concatenate([(t - train.mean(0)) / (train.std(0) + 1e-5), np.full((len(t), 1), 100.0)], axis=1)
        for t in (train, test)
    )
    y = 2 * np.eye(CLASSES)[labels] - 1

    def weights(kept: np.ndarray) -> np.ndarray:
        found: np.ndarray = np.linalg.solve(
            x[kept].T @ x[kept] + l2 * np.eye(x.shape[1]), x[kept].T @ y[kept]
        )
        return found

    expected = np.stack([x[n] @ weights(np.arange(num) != n) for n in range(num)])
    seen = ridge.left_out(torch.from_numpy(train), torch.from_numpy(labels), l2)
    np.testing.assert_allclose(seen, expected, rtol=1e-5, atol=1e-6)
    weight, bias = ridge.layer(l2)
    np.testing.assert_allclose(
        torch.from_numpy(test) @ weight.T + bias, z @ weights(np.arange(num) >= 0), atol=1e-6
    )


@pytest.mark.parametrize("loss", ["softmax", "sigmoid"])
def test_fitted_scale__is_where_the_loss_is_least(loss: str) -> None:
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(40) % CLASSES
    noise = torch.randn(40, CLASSES, generator=generator, dtype=torch.float64)
    hot = torch.nn.functional.one_hot(labels, CLASSES).double()
    targets = (1 - 1 / 41) * hot + 1 / 41 / CLASSES

    def loss_at(scale: float, scores: torch.Tensor) -> float:
        if loss == "softmax":
            return float(torch.nn.functional.cross_entropy(scale * scores, targets, reduction="sum"))
        return float(
            torch.nn.functional.binary_cross_entropy_with_logits(scale * scores, targets, reduction="sum")
        )

    for scores in (2 * hot - 1 + noise, 2 * hot - 1):  # the second are all right: still a finite factor
        best = fitted_scale(scores, labels, loss)
        assert 0.1 < best < 20
        at_best = loss_at(best, scores)
        assert at_best <= min(loss_at(best * (1 + change), scores) for change in (-1e-3, 1e-3))
    assert fitted_scale(1 - 2 * hot, labels, loss) == 0.0
