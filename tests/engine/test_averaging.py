"""Polyak averages against NumPy."""

import numpy as np
import torch
from torch import nn

from vitctl.engine.averaging import Average, averaged


def test_average__is_the_recurrence() -> None:
    model = nn.Linear(3, 2, dtype=torch.float64)
    average = Average(model, 0.9)
    expected = model.weight.detach().numpy().copy()
    for step in range(5):
        with torch.no_grad():
            model.weight.add_(0.1 * (step + 1))
        average.update(model)
        expected = 0.9 * expected + 0.1 * model.weight.detach().numpy()
    np.testing.assert_allclose(average.tensors["weight"].numpy(), expected, rtol=1e-14)
    assert set(average.tensors) == {"weight", "bias"}


def test_averaged__swaps_and_swaps_back_even_after_an_error() -> None:
    model = nn.Linear(3, 2)
    average = Average(model, 0.5)
    start = model.weight.detach().clone()
    with torch.no_grad():
        model.weight.add_(1.0)
    inside = None
    try:
        with averaged(model, average):
            inside = model.weight.detach().clone()
            raise RuntimeError
    except RuntimeError:
        pass
    assert inside is not None
    assert torch.equal(inside, start)
    assert torch.equal(model.weight, start + 1.0)
    assert torch.equal(average.tensors["weight"], start)
    average.update(model)
    assert torch.equal(average.tensors["weight"], torch.lerp(start, start + 1.0, 0.5))


def test_averaged__without_an_average_does_nothing() -> None:
    model = nn.Linear(3, 2)
    start = model.weight.detach().clone()
    with averaged(model, None):
        assert torch.equal(model.weight, start)


def test_average__load_copies() -> None:
    model = nn.Linear(1, 1)
    average = Average(model, 0.5)
    saved = {"weight": torch.tensor([[3.0]]), "bias": torch.tensor([4.0])}
    average.load(saved)
    average.update(model)
    assert float(saved["weight"]) == 3.0
    assert torch.equal(average.tensors["weight"], torch.lerp(torch.tensor([[3.0]]), model.weight.detach(), 0.5))
