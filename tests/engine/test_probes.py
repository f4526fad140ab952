"""Nearest neighbours and logistic regression against NumPy in float64 and scikit-learn."""

import itertools

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from tests.engine.divided import HeldBytes
from vitctl.engine import probes
from vitctl.engine.probes import (
    answer_bytes,
    drawn,
    linear,
    logistic,
    logistic_bytes,
    nearest,
    predicted,
    vote,
)
from vitctl.engine.runtime import Runtime

CPU = torch.device("cpu")


def _random(n: int, m: int, width: int, classes: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    train, test = (torch.randn(count, width, generator=generator) for count in (n, m))
    return train, test, torch.arange(n) % classes


@pytest.mark.parametrize("chunks", [(1024, 32768), (7, 13)])
def test_nearest__equals_numpy_and_decides_ties(
    monkeypatch: pytest.MonkeyPatch, runtime: Runtime, chunks: tuple[int, int]
) -> None:
    monkeypatch.setattr(probes, "_QUERIES", chunks[0])
    monkeypatch.setattr(probes, "_STORED", chunks[1])
    signs = torch.randint(0, 2, (90, 4), generator=torch.Generator().manual_seed(1)).float() * 2 - 1
    train, test = signs[:70], signs[70:]  # of unit length 2: similarities are exact, and most are equal
    values, places = nearest(train, test, 9, dtype=torch.float64, runtime=runtime)
    exact = (test.double() @ train.double().T / 4).numpy()
    expected = np.argsort(-exact, axis=1, kind="stable")[:, :9]
    assert (places.numpy() == expected).all()
    assert (values.numpy() == np.take_along_axis(exact, expected, 1)).all()


def test_vote__equals_numpy(runtime: Runtime) -> None:
    train, test, labels = _random(300, 40, 16, 7)
    near, places = nearest(train, test, 50, dtype=torch.float64, runtime=runtime)
    found = vote(near, labels[places], (1, 10, 50), num_classes=7, temperature=0.07)
    a, b = (x.double().numpy() / np.linalg.norm(x.double(), axis=1, keepdims=True) for x in (train, test))
    similar = b @ a.T
    order = np.argsort(-similar, axis=1, kind="stable")
    for k, classes in found.items():
        votes = np.zeros((40, 7))
        for row in range(40):
            for place in order[row, :k]:
                votes[row, labels[place]] += np.exp(similar[row, place] / 0.07)
        assert (classes.numpy() == votes.argmax(1)).all()


def test_vote__of_equal_votes_the_lower_class() -> None:
    found = vote(torch.ones(1, 4), torch.tensor([[3, 1, 1, 3]]), (2, 4), num_classes=5, temperature=0.07)
    assert (found[2].item(), found[4].item()) == (1, 1)


def test_vote__equals_scikit_learn(runtime: Runtime) -> None:
    neighbors = pytest.importorskip("sklearn.neighbors")
    train, test, labels = _random(300, 40, 16, 7)
    near, places = nearest(train, test, 20, dtype=torch.float64, runtime=runtime)
    found = vote(near, labels[places], (20,), num_classes=7, temperature=0.07)[20]
    theirs = neighbors.KNeighborsClassifier(
        20, algorithm="brute", metric="cosine", weights=lambda distance: np.exp((1 - distance) / 0.07)
    ).fit(train.double().numpy(), labels.numpy())
    assert (theirs.predict(test.double().numpy()) == found.numpy()).all()


@pytest.mark.parametrize("c", [1e-3, 0.1, 10.0])
def test_logistic__equals_scikit_learn(c: float) -> None:
    linear_model = pytest.importorskip("sklearn.linear_model")
    train, test, labels = _random(200, 30, 8, 4)
    layer = logistic(train, labels, c, num_classes=4)
    theirs = linear_model.LogisticRegression(C=c, tol=1e-12, max_iter=10_000).fit(train.double(), labels)
    assert np.abs(layer[:-1].T.numpy() - theirs.coef_).max() < 1e-6
    likely = (test.double() @ layer[:-1] + layer[-1]).softmax(1).numpy()
    assert np.abs(likely - theirs.predict_proba(test.double().numpy())).max() < 1e-6
    rows = torch.nn.functional.one_hot(labels, 4)  # the gradient; a line search on losses ends near 1e-8
    excess = (train.double() @ layer[:-1] + layer[-1]).softmax(1) - rows
    assert (train.double().T @ excess + layer[:-1] / c).abs().max() / 200 < 1e-7
    assert excess.sum(0).abs().max() / 200 < 1e-7


@pytest.mark.parametrize("c", [0.01, 10.0, 1e5])
def test_logistic__a_rough_solution_answers_as_the_exact_one(c: float) -> None:
    train, test, labels = _random(200, 200, 8, 4)
    train = train + 2 * torch.eye(8)[labels]
    exact = logistic(train, labels, c, num_classes=4)
    rough = logistic(train, labels, c, num_classes=4, rough=True)
    assert not rough.equal(exact)
    likely = [(test.double() @ layer[:-1] + layer[-1]).softmax(1) for layer in (exact, rough)]
    assert (likely[0] - likely[1]).abs().max() < 1e-4
    assert predicted(test, rough).equal(predicted(test, exact))


@pytest.mark.parametrize(("width", "classes"), [(64, 3), (16, 40)])
def test_memory__is_what_was_planned(width: int, classes: int) -> None:
    train, test, labels = _random(2000, 1000, width, classes)
    with HeldBytes() as held:
        layer = logistic(train, labels, 0.1, num_classes=classes)
    assert 0.8 < held.most / logistic_bytes(len(train), width, classes) < 1.1
    with HeldBytes() as held:
        held.known.add(test.untyped_storage()._cdata)  # parts of it are views
        predicted(test, layer)
    assert 0.8 < held.most / answer_bytes(len(test), width, classes) < 1.1


def test_drawn__every_image_once_in_each_epoch() -> None:
    steps = [drawn(3, 10, 4, step) for step in range(5)]
    places = torch.cat(steps)
    assert [sorted(part.tolist()) for part in places.split(10)] == [list(range(10))] * 2
    assert places[:10].tolist() != places[10:].tolist()
    assert drawn(3, 3, 8, 2).bincount().tolist() in ([2, 3, 3], [3, 2, 3], [3, 3, 2])


@pytest.mark.parametrize("lrs", [(0.003, 0.2, 1.5)])
def test_linear__each_head_equals_torch_sgd(lrs: tuple[float, ...]) -> None:
    train, _, labels = _random(50, 1, 8, 4)
    inputs, steps = (slice(None), slice(2, 5)), 60
    how = {"num_classes": 4, "seed": 5, "momentum": 0.9, "dtype": torch.float64, "device": CPU}
    batches = [drawn(5, 50, 16, step) for step in range(steps)]
    heads = linear(train, labels, lrs, batches=batches, steps=steps, inputs=inputs, **how)
    start = linear(train, labels, lrs, batches=[], steps=steps, inputs=inputs, **how)
    assert start[0][:, -1].eq(0).all() and 0.005 < start[0][0, :-1].std() < 0.015
    for (group, part), (number, lr) in itertools.product(enumerate(inputs), enumerate(lrs)):
        head, first, seen = heads[group][number], start[group][number], train[:, part].double()
        layer = torch.nn.Linear(seen.shape[1], 4, dtype=torch.float64)
        layer.load_state_dict({"weight": first[:-1].T, "bias": first[-1]})
        solver = torch.optim.SGD(layer.parameters(), lr=lr, momentum=0.9, weight_decay=0)
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(solver, steps)
        for at in batches:
            solver.zero_grad()
            torch.nn.functional.cross_entropy(layer(seen[at]), labels[at]).backward()
            solver.step()
            cosine.step()
        assert (layer.weight.T - head[:-1]).abs().max() < 1e-10
        assert (layer.bias - head[-1]).abs().max() < 1e-10


def test_logistic__features_far_from_their_scale() -> None:
    generator = np.random.default_rng(0)
    labels = np.arange(300) % 4
    shifts = generator.normal(size=(4, 20))[labels]
    features = 100 + 30 * (generator.normal(size=(300, 20)) + 0.5 * shifts)
    for c in (1e-4, 1e-2):
        layer = logistic(torch.from_numpy(features), torch.from_numpy(labels), c, num_classes=4).numpy()
        other = LogisticRegression(C=c, tol=1e-12, max_iter=1000, solver="newton-cholesky")
        expected = other.fit(features, labels).predict_proba(features)
        logits = features @ layer[:-1] + layer[-1]
        found = np.exp(logits - logits.max(axis=1, keepdims=True))
        np.testing.assert_allclose(found / found.sum(axis=1, keepdims=True), expected, atol=1e-6)
