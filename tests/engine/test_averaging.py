"""Polyak averages against NumPy."""

import numpy as np
import pytest
import torch
from torch import nn

from vitctl.engine.optimizer import Average, averaged

YES, NO = torch.tensor(True), torch.tensor(False)


def test_average__is_the_recurrence() -> None:
    model = nn.Linear(3, 2, dtype=torch.float64)
    average = Average(model, 0.9)
    expected = model.weight.detach().numpy().copy()
    for step in range(5):
        with torch.no_grad():
            model.weight.add_(0.1 * (step + 1))
        average.update(model, YES)
        expected = 0.9 * expected + 0.1 * model.weight.detach().numpy()
    np.testing.assert_allclose(average.tensors["weight"].numpy(), expected, rtol=1e-14, atol=1e-15)
    assert set(average.tensors) == {"weight", "bias"}


def test_average__debiased_is_the_weighted_mean_of_all_steps_but_the_start() -> None:
    """Step i of n has the weight 0.9 ** (n - i), and all of them add up to 1."""
    model, seen = nn.Linear(3, 2, dtype=torch.float64), []
    average = Average(model, 0.9, debias=True)
    for step in range(7):
        with torch.no_grad():
            model.weight.add_(0.1 * (step + 1) ** 2)
        average.update(model, YES)
        seen.append(model.weight.detach().numpy().copy())
        shares = 0.9 ** np.arange(step, -1, -1)
        expected = np.tensordot(shares / shares.sum(), np.array(seen), axes=1)
        np.testing.assert_allclose(average.tensors["weight"].numpy(), expected, rtol=1e-13)


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
    average.update(model, YES)
    assert torch.equal(average.tensors["weight"], torch.lerp(start, start + 1.0, 0.5))


def test_average__load_copies() -> None:
    model = nn.Linear(1, 1)
    average = Average(model, 0.5, debias=True)
    saved = {"weight": torch.tensor([[3.0]]), "bias": torch.tensor([4.0])}
    average.load(saved, updates=3)
    average.update(model, YES)
    assert average.updates == 4
    assert float(saved["weight"]) == 3.0
    assert torch.equal(
        average.tensors["weight"],
        torch.lerp(torch.tensor([[3.0]]), model.weight.detach(), 0.5 / (1 - 0.5**4)),
    )


@pytest.mark.parametrize("debias", [False, True])
def test_average__a_skipped_update_is_none(debias: bool) -> None:
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    other.load_state_dict(model.state_dict())
    one, two = Average(model, 0.9, debias=debias), Average(other, 0.9, debias=debias)
    for step in range(4):
        one.update(model, NO)
        for net, average in ((model, one), (other, two)):
            with torch.no_grad():
                net.weight.add_(0.1 * (step + 1))
            average.update(net, YES)
        one.update(model, NO)
    assert all(torch.equal(one.tensors[name], two.tensors[name]) for name in one.tensors)
    assert one.updates == two.updates == 4 * debias  # counted where they matter
