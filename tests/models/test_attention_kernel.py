import pytest
import torch

from vitctl.models import kernels
from vitctl.models.kernels import attend, attention_rule, has_amx, set_attention


def parts(*shape: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for _ in range(3)
    ]


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


def test_attend__mixed_is_math_with_gradients_and_fused_without() -> None:
    inputs, found = parts(2, 3, 197, 16, dtype=torch.bfloat16), {}
    for mode in ("fused", "math", "mixed"):
        set_attention(mode)  # type: ignore[arg-type]
        with torch.no_grad():
            scored = attend(*inputs)
        mixed = attend(*inputs)
        found[mode] = [scored, mixed, *torch.autograd.grad(mixed.float().square().sum(), inputs)]
    (scored, *trained), expected = found["mixed"], [found["fused"][0], *found["math"][1:]]
    assert all(torch.equal(a, b) for a, b in zip([scored, *trained], expected, strict=True))
    assert not torch.equal(scored, trained[0])


@pytest.mark.parametrize(
    ("device", "dtype", "tokens", "expected", "with_amx"),
    [
        ("cpu", torch.bfloat16, 5, "math", "math"),
        ("cpu", torch.bfloat16, 127, "math", "math"),
        ("cpu", torch.bfloat16, 128, "math", "mixed"),
        ("cpu", torch.bfloat16, 1024, "math", "mixed"),
        ("cpu", torch.bfloat16, 1025, "fused", "fused"),
        ("cpu", torch.float32, 197, "fused", "fused"),
        ("cpu", torch.float64, 197, "fused", "fused"),
        ("cuda", torch.bfloat16, 197, "fused", "fused"),
        ("cuda", torch.float32, 17, "fused", "fused"),
    ],
)
def test_attention_rule__by_device_precision_and_tokens(
    device: str,
    dtype: torch.dtype,
    tokens: int,
    expected: str,
    with_amx: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for is_there, kernel in ((False, expected), (True, with_amx)):
        monkeypatch.setattr(kernels, "has_amx", lambda is_there=is_there: is_there)
        assert attention_rule(device, dtype, tokens) == kernel


def test_has_amx__not_where_torch_may_not_use_avx512(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's fused kernel fails there: pack_vnni2 is only supported when avx512 is supported."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    for capability, expected in (("AVX512", True), ("AVX2", False), ("DEFAULT", False)):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda name=capability: name)
        assert has_amx() == expected
