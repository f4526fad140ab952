import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from vitctl.models import kernels
from vitctl.models.kernels import gelu_tanh

NUMBERS = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
HALF_ULP = 2.0**-8  # of a bf16 number, relative, at most


@pytest.fixture(autouse=True)
def few_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)


def both(inputs: Tensor, gradient: Tensor, *, by_torch: bool) -> list[Tensor]:
    """Outputs and the gradient of the inputs."""
    inputs = inputs.detach().requires_grad_()
    outputs = F.gelu(inputs, approximate="tanh") if by_torch else gelu_tanh(inputs)
    (slope,) = torch.autograd.grad(outputs, inputs, gradient)
    return [outputs.detach(), slope]


def same_bits(found: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert torch.equal(one.isnan(), other.isnan())
        assert torch.equal(one[~one.isnan()].view(torch.int16), other[~other.isnan()].view(torch.int16))


@pytest.mark.parametrize("scale", [1.0, -0.7109375, 3e-5])
def test_gelu_tanh__every_bf16_number_has_the_bits_of_torch(scale: float) -> None:
    gradient = torch.full_like(NUMBERS, scale)
    same_bits(both(NUMBERS, gradient, by_torch=False), both(NUMBERS, gradient, by_torch=True))


def exact(numbers: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Hendrycks and Gimpel's formula and its derivative in float64."""
    inner = math.sqrt(2 / math.pi) * (numbers + 0.044715 * numbers**3)
    tanh = np.tanh(inner)
    inner_slope = math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * numbers**2)
    return 0.5 * numbers * (1 + tanh), 0.5 * (1 + tanh) + 0.5 * numbers * (1 - tanh**2) * inner_slope


def test_gelu_tanh__is_the_formula_to_a_rounding() -> None:
    numbers = NUMBERS[NUMBERS.float().abs() < 1e4]
    found = both(numbers, torch.ones_like(numbers), by_torch=False)
    for one, reference in zip(found, exact(numbers.double().numpy()), strict=True):
        error = np.abs(one.double().numpy() - reference)
        # 3e-6: in float32, 1 + tanh is 0 from -5 on
        assert (error <= HALF_ULP * np.abs(reference) + 3e-6).all()


@pytest.mark.parametrize("shape", [(), (0,), (7,), (3, 5, 11), (2, 2**16 + 3)])
def test_gelu_tanh__shapes_and_strides(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    inputs, gradient = (torch.randn(shape).bfloat16() for _ in range(2))
    pair = [both(inputs, gradient, by_torch=by_torch) for by_torch in (False, True)]
    same_bits(*pair)
    if len(shape) > 1:
        pair = [both(inputs.mT, gradient.mT, by_torch=by_torch) for by_torch in (False, True)]
        same_bits(*pair)


def test_gelu_tanh__tables_first_made_for_inference_serve_training() -> None:
    kernels._gelu_tables.cache_clear()
    with torch.inference_mode():
        gelu_tanh(NUMBERS)
    gradient = torch.ones_like(NUMBERS)
    same_bits(both(NUMBERS, gradient, by_torch=False), both(NUMBERS, gradient, by_torch=True))


def test_gelu_tanh__is_looked_up_where_that_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_up: list[torch.dtype] = []
    apply = kernels._GELU.apply

    def counted(inputs: Tensor) -> Tensor:
        looked_up.append(inputs.dtype)
        outputs: Tensor = apply(inputs)
        return outputs

    monkeypatch.setattr(kernels._GELU, "apply", counted)
    for dtype in (torch.bfloat16, torch.float32, torch.float64, torch.float16):
        numbers = torch.linspace(-4, 4, 50).to(dtype)
        assert torch.equal(gelu_tanh(numbers), F.gelu(numbers, approximate="tanh"))
    gelu_tanh(torch.empty(3, dtype=torch.bfloat16, device="meta"))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    gelu_tanh(NUMBERS)
    assert looked_up == [torch.bfloat16]
