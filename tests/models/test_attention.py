from collections.abc import Iterator

import pytest
import torch

from vitctl.models import attention
from vitctl.models.attention import attend, choose_attention, set_attention

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    choose_attention.cache_clear()
    yield
    set_attention("fused")
    choose_attention.cache_clear()


def parts(*shape: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for _ in range(3)]


@pytest.mark.parametrize("shape", [(2, 3, 17, 8), (2, 5, 3, 4, 8)])
def test_attend__both_kernels_have_the_same_values_and_gradients(shape: tuple[int, ...]) -> None:
    inputs, found = parts(*shape), []
    for mode in ("fused", "math"):
        set_attention(mode)  # type: ignore[arg-type]
        mixed = attend(*inputs)
        assert mixed.shape == shape
        found.append([mixed, *torch.autograd.grad(mixed.square().sum(), inputs)])
    for fused, plain in zip(*found, strict=True):
        assert (fused - plain).abs().max() < 1e-12 * fused.abs().max()


def test_attend__bias_is_added_to_scaled_logits() -> None:
    query, key, value = parts(2, 3, 5, 4)
    bias = torch.randn(2, 3, 5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    weights = (torch.einsum("bhid,bhjd->bhij", query, key) / 2 + bias).exp()
    expected = weights / weights.sum(-1, keepdim=True) @ value
    assert (attend(query, key, value, bias) - expected).abs().max() < 1e-12


def test_attend__plain_products_in_bf16_take_the_softmax_in_float32() -> None:
    inputs = parts(2, 3, 64, 16, dtype=torch.bfloat16)
    exact = attend(*(tensor.float() for tensor in inputs))
    set_attention("math")
    mixed = attend(*inputs)
    assert mixed.dtype == torch.bfloat16
    assert (mixed.float() - exact).abs().max() < 0.02


def test_choose_attention__takes_the_faster_and_measures_each_shape_once(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[tuple[str, tuple[int, ...]]] = []

    def seconds(kernel: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> float:
        assert (dtype, device) == (torch.float32, CPU)
        measured.append((kernel, shape))
        return {"fused": shape[2], "math": 10}[kernel]

    monkeypatch.setattr(attention, "_seconds", seconds)
    for _ in range(2):
        assert choose_attention((1, 1, 5, 4), torch.float32, CPU) == "fused"
        assert choose_attention((1, 1, 50, 4), torch.float32, CPU) == "math"
    assert sorted(measured) == [(kernel, (1, 1, n, 4)) for kernel in ("fused", "math") for n in (5, 50)]


def test_choose_attention__really_measures_without_drawing_a_number() -> None:
    before = torch.get_rng_state()
    with torch.inference_mode():
        assert choose_attention((2, 3, 17, 8), torch.float32, CPU) in ("fused", "math")
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("choice", ["fused", "math"])
def test_attend__auto_does_what_was_chosen(monkeypatch: pytest.MonkeyPatch, choice: str) -> None:
    inputs = parts(2, 3, 17, 8, dtype=torch.float32)
    set_attention(choice)  # type: ignore[arg-type]
    forced = attend(*inputs)
    monkeypatch.setattr(attention, "choose_attention", lambda *_: choice)
    set_attention("auto")
    assert torch.equal(attend(*inputs), forced)


def test_attend__auto_measures_nothing_on_meta_or_in_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "choose_attention", lambda *_: pytest.fail("measured"))
    set_attention("auto")
    meta = [torch.empty(1, 2, 3, 4, device="meta") for _ in range(3)]
    assert attend(*meta).shape == (1, 2, 3, 4)
    inputs = parts(1, 2, 3, 4)
    traced = torch.compile(attend, backend="eager", fullgraph=True)(*inputs)
    set_attention("fused")
    assert torch.equal(traced, attend(*inputs))
