"""Ten steps of each optimizer against NumPy, in the order in which the authors' code computes them."""

from typing import Any

import numpy as np
import pytest
import torch
from timm.optim import create_optimizer_v2
from torch import nn

from vitctl.engine import optimizer as module
from vitctl.engine.optimizer import (
    Average,
    build_optimizer,
    clip_gradients,
    load_optimizer_tensors,
    optimizer_tensors,
    take_step,
)
from vitctl.errors import CheckpointError
from vitctl.recipe.sections import Optimizer

LRS = [0.0, 0.01, 0.02, 0.03, 0.04, 0.04, 0.03, 0.02, 0.01, 0.001]
B1, B2, EPS = 0.9, 0.999, 1e-8


class Toy(nn.Module):
    """A matrix, a norm's scale and bias, and a token: all of them decay."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        shapes = {"kernel": (3, 4), "scale": (4,), "bias": (4,), "token": (1, 1, 4)}
        for name, shape in shapes.items():
            value = torch.randn(shape, generator=generator, dtype=torch.float64)
            self.register_parameter(name, nn.Parameter(value))


def gradients() -> list[dict[str, Any]]:
    rng = np.random.default_rng(2)
    return [{name: rng.normal(size=p.shape) for name, p in Toy().named_parameters()} for _ in LRS]


def optimizer_for(model: nn.Module, name: str, weight_decay: float) -> torch.optim.Optimizer:
    adam = {"beta1": B1, "beta2": B2, "eps": EPS} if name == "adam" else {}
    return build_optimizer(model, Optimizer(name=name, lr=1.0, weight_decay=weight_decay, **adam))


def ten_steps(name: str, weight_decay: float) -> dict[str, Any]:
    model = Toy()
    optimizer = optimizer_for(model, name, weight_decay)
    for lr, grads in zip(LRS, gradients(), strict=True):
        _step(model, optimizer, lr, grads)
    return {name: p.detach().numpy() for name, p in model.named_parameters()}


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, lr: float, grads: dict[str, Any]) -> None:
    for key, p in model.named_parameters():
        p.grad = torch.tensor(grads[key])
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()


def start_values() -> dict[str, Any]:
    return {name: p.detach().numpy().copy() for name, p in Toy().named_parameters()}


@pytest.mark.parametrize("weight_decay", [0.0, 0.1, 0.3])
def test_adam__is_the_authors_form_over_every_parameter(weight_decay: float) -> None:
    """p - lr m / (sqrt(v) + eps) - lr wd p, moments corrected for their start, eps outside the root."""
    values = start_values()
    first = {k: np.zeros_like(v) for k, v in values.items()}
    second = {k: np.zeros_like(v) for k, v in values.items()}
    for t, (lr, grads) in enumerate(zip(LRS, gradients(), strict=True), 1):
        for k, p in values.items():
            first[k] = B1 * first[k] + (1 - B1) * grads[k]
            second[k] = B2 * second[k] + (1 - B2) * grads[k] ** 2
            m, v = first[k] / (1 - B1**t), second[k] / (1 - B2**t)
            values[k] = p - lr * m / (np.sqrt(v) + EPS) - lr * weight_decay * p
    got = ten_steps("adam", weight_decay)
    assert len(got) == 4
    for k, expected in values.items():
        np.testing.assert_allclose(got[k], expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_sgd__momentum_without_nesterov_and_decay_inside_the_momentum(weight_decay: float) -> None:
    values = start_values()
    momenta = {k: np.zeros_like(v) for k, v in values.items()}
    for lr, grads in zip(LRS, gradients(), strict=True):
        for k, p in values.items():
            momenta[k] = 0.9 * momenta[k] + grads[k] + weight_decay * p
            values[k] = p - lr * momenta[k]
    got = ten_steps("sgd", weight_decay)
    for k, expected in values.items():
        np.testing.assert_allclose(got[k], expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(("opt", "nesterov"), [("sgd", True), ("momentum", False)])
def test_sgd__is_timms_of_either_name_bit_for_bit(opt: str, nesterov: bool) -> None:
    ours, theirs = Toy(), Toy()
    chosen = Optimizer(name="sgd", lr=1.0, weight_decay=0.1, nesterov=nesterov)
    pair = [
        (ours, build_optimizer(ours, chosen)),
        (theirs, create_optimizer_v2(theirs.parameters(), opt, lr=1.0, weight_decay=0.1, momentum=0.9)),
    ]
    for lr, grads in zip(LRS, gradients(), strict=True):
        for model, optimizer in pair:
            _step(model, optimizer, lr, grads)
        np.testing.assert_allclose(ours.kernel.detach(), theirs.kernel.detach(), rtol=1e-15, atol=0)
    with pytest.raises(ValueError, match="nesterov does nothing"):
        Optimizer(name="sgd", lr=1.0, momentum=0.0, nesterov=True)


@pytest.mark.parametrize("name", ["adam", "sgd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_take_step__skips_updates_that_are_not_finite(name: str, dtype: torch.dtype) -> None:
    """The first update, too, may be skipped."""
    model, other = Toy().to(dtype), Toy().to(dtype)
    optimizer, plain = optimizer_for(model, name, 0.1), optimizer_for(other, name, 0.1)
    for step, (lr, grads) in enumerate(zip(LRS, gradients(), strict=True)):
        for key, p in model.named_parameters():
            p.grad = torch.tensor(grads[key], dtype=dtype)
        optimizer.param_groups[0]["lr"] = lr
        finite = step not in (0, 4)
        take_step(optimizer, torch.tensor(finite))
        if finite:
            _step(other, plain, lr, {key: grad.astype(str(dtype)[6:]) for key, grad in grads.items()})
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert not torch.equal(model.kernel, Toy().to(dtype).kernel)


@pytest.mark.parametrize("name", ["adam", "sgd"])
def test_optimizer__rate_0_changes_nothing_but_the_moments(name: str) -> None:
    model = Toy()
    optimizer = optimizer_for(model, name, 0.1)
    _step(model, optimizer, 0.0, gradients()[0])
    for k, p in model.named_parameters():
        assert torch.equal(p, dict(Toy().named_parameters())[k])
    assert len(optimizer_tensors(optimizer, model)) == (12 if name == "adam" else 4)


@pytest.mark.parametrize("bound", [1.0, 0.1, 1e3, 0.0])
def test_clip__is_exactly_min_of_1_and_bound_over_norm(bound: float) -> None:
    model, grads = Toy(), gradients()[0]
    for key, p in model.named_parameters():
        p.grad = torch.tensor(grads[key])
    norm = np.sqrt(sum((g**2).sum() for g in grads.values()))
    assert 1.0 < norm < 1e3
    assert float(clip_gradients(model.parameters(), bound)[0]) == pytest.approx(norm, rel=1e-14)
    factor = min(1.0, bound / norm) if bound else 1.0
    for key, p in model.named_parameters():
        assert p.grad is not None
        np.testing.assert_allclose(p.grad.numpy(), grads[key] * factor, rtol=1e-14)


def test_clip__by_value_is_torchs_and_the_norm_is_of_before() -> None:
    """After the scale that makes the gradient that of the mean; what is not finite stays so."""
    ours, theirs = Toy(), Toy()
    for key, grad in gradients()[0].items():
        getattr(ours, key).grad, getattr(theirs, key).grad = torch.tensor(grad), torch.tensor(grad) * 1.5
    norm, *_ = clip_gradients(ours.parameters(), 0.0, max_value=0.3, scale=torch.tensor(1.5))
    assert norm == pytest.approx(torch.nn.utils.get_total_norm([p.grad for p in theirs.parameters()]).item())
    torch.nn.utils.clip_grad_value_(theirs.parameters(), 0.3)
    for one, two in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one.grad, two.grad) and one.grad.abs().max() == 0.3
    with pytest.raises(ValueError, match="both clip"):
        Optimizer(name="sgd", lr=1.0, clip_norm=1.0, clip_value=0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("count", [0, 1, 37])
def test_clip__gives_the_bits_of_torch_and_the_norm_of_each_parameter(dtype: torch.dtype, count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    parameters = [nn.Parameter(torch.zeros(n + 1, 300 + n, dtype=dtype)) for n in range(count)]
    for p in parameters:
        p.grad = torch.randn(p.shape, generator=generator, dtype=dtype)
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm, *each = clip_gradients(parameters, 0.0)
    assert torch.equal(norm, nn.utils.get_total_norm(gradients))
    assert [float(n) for n in each] == [float(torch.linalg.vector_norm(g)) for g in gradients]


@pytest.mark.parametrize("name", ["adam", "sgd"])
def test_optimizer_tensors__go_on_bit_for_bit(name: str) -> None:
    straight, model = Toy(), Toy()
    one, two = optimizer_for(straight, name, 0.1), optimizer_for(model, name, 0.1)
    steps = list(zip(LRS, gradients(), strict=True))
    for lr, grads in steps:
        _step(straight, one, lr, grads)
    for lr, grads in steps[:4]:
        _step(model, two, lr, grads)
    tensors = optimizer_tensors(two, model)
    assert all("/" in key for key in tensors)
    resumed = Toy()
    resumed.load_state_dict(model.state_dict())
    three = optimizer_for(resumed, name, 0.1)
    load_optimizer_tensors(three, resumed, tensors)
    for lr, grads in steps[4:]:
        _step(resumed, three, lr, grads)
    assert all(torch.equal(a, b) for a, b in zip(straight.parameters(), resumed.parameters(), strict=True))
    assert {k: v.tolist() for k, v in optimizer_tensors(three, resumed).items()} == {
        k: v.tolist() for k, v in optimizer_tensors(one, straight).items()
    }


def test_load_optimizer_tensors__of_another_model() -> None:
    model = Toy()
    optimizer = optimizer_for(model, "adam", 0.0)
    with pytest.raises(
        CheckpointError, match="optimizer state does not fit the model: 5 parameters differ, first bias"
    ):
        load_optimizer_tensors(optimizer, model, {"exp_avg/other": torch.zeros(1)})
    load_optimizer_tensors(optimizer, model, {})
    assert optimizer_tensors(optimizer, model) == {}


@pytest.mark.parametrize("decay_on", ["all", "matrices"])
def test_lamb__all_at_once_is_one_by_one(decay_on: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU; skipped updates, the first too, change nothing."""
    chosen = Optimizer(name="lamb", lr=1.0, weight_decay=0.1, decay_on=decay_on)
    ways = []
    for devices in ((), ("cpu",)):
        monkeypatch.setattr(module, "MANY_AT_ONCE", devices)
        model = Toy()
        optimizer = build_optimizer(model, chosen)
        for step, (lr, grads) in enumerate(zip(LRS, gradients(), strict=True)):
            for key, p in model.named_parameters():
                p.grad = torch.tensor(grads[key]) * (1 if step not in (0, 4) else float("nan"))
            for group in optimizer.param_groups:
                group["lr"] = lr
            before = [t.clone() for t in (*model.parameters(), *optimizer_tensors(optimizer, model).values())]
            take_step(optimizer, torch.tensor(step not in (0, 4)))
            after = [*model.parameters(), *optimizer_tensors(optimizer, model).values()]
            is_same = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
            assert is_same == (step in (0, 4))
        ways.append([t.detach() for t in after])
    for one, other in zip(*ways, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("debias", [False, True])
def test_average__all_at_once_is_one_by_one(debias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    ways = []
    for devices in ((), ("cpu",)):
        monkeypatch.setattr(module, "MANY_AT_ONCE", devices)
        model, generator = Toy(), torch.Generator().manual_seed(1)
        average = Average(model, 0.9, debias=debias)
        for finite in (False, True, True, False, True):
            for p in model.parameters():
                p.data = torch.randn(p.shape, generator=generator, dtype=p.dtype)
            before = {name: t.clone() for name, t in average.tensors.items()}
            average.update(model, torch.tensor(finite))
            assert all(torch.equal(t, before[name]) for name, t in average.tensors.items()) != finite
        ways.append(average.tensors)
    for name, one in ways[0].items():
        torch.testing.assert_close(one, ways[1][name], rtol=1e-13, atol=1e-15)
