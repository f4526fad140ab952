import pytest
import torch

from vitctl.models.build import build
from vitctl.models.kernels import AttentionKernel, attend, attention_of, attention_rule, set_attention
from vitctl.models.variants import variant


def parts(*shape: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for _ in range(3)
    ]


@pytest.mark.parametrize("shape", [(2, 3, 17, 8), (2, 5, 3, 4, 8)])
def test_attend__both_kernels_have_the_same_values_and_gradients(shape: tuple[int, ...]) -> None:
    inputs, found = parts(*shape), []
    for kernel in ("fused", "math"):
        mixed = attend(*inputs, kernel=kernel)  # type: ignore[misc,arg-type]
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
    mixed = attend(*inputs, kernel="math")
    assert mixed.dtype == torch.bfloat16
    assert (mixed.float() - exact).abs().max() < 0.02


@pytest.mark.slow
def test_set_attention__each_model_has_its_own_kernel() -> None:
    size = {"image_size": 32, "num_classes": 3, "depth": 1}
    one, other, without = (
        build(config).eval()
        for config in (variant("Ti/16", **size), variant("Ti/16", **size), variant("R50x1", image_size=32))
    )
    images = torch.randn(2, 3, 32, 32).bfloat16()
    fused = one.bfloat16()(images)
    set_attention(one, "math")
    set_attention(without, "math")
    assert [attention_of(model) for model in (one, other, without)] == ["math", "fused", "fused"]
    assert torch.equal(other.bfloat16()(images), fused)


@pytest.mark.parametrize("kernel", ["flash", "efficient", "cudnn"])
def test_attend__a_named_kernel_is_the_only_one_that_torch_may_take(
    kernel: AttentionKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    backends, seen = torch.backends.cuda, dict[str, bool]()

    def product(query: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        seen.update(
            flash=backends.flash_sdp_enabled(),
            efficient=backends.mem_efficient_sdp_enabled(),
            cudnn=backends.cudnn_sdp_enabled(),
            math=backends.math_sdp_enabled(),
        )
        return query

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", product)
    attend(*parts(2, 3, 5, 4), kernel=kernel)  # type: ignore[misc]
    assert [name for name, is_on in seen.items() if is_on] == [kernel]
    assert backends.math_sdp_enabled()


def test_attend__flash_has_the_bits_of_fused_on_a_cpu() -> None:
    inputs = parts(2, 3, 17, 8, dtype=torch.float32)
    both = [attend(*inputs, kernel=kernel) for kernel in ("fused", "flash")]  # type: ignore[misc,arg-type]
    assert torch.equal(*both)


@pytest.mark.parametrize(
    ("device", "dtype", "tokens", "expected"),
    [
        ("cpu", torch.bfloat16, 5, "math"),
        ("cpu", torch.bfloat16, 1024, "math"),
        ("cpu", torch.bfloat16, 1025, "fused"),
        ("cpu", torch.float32, 197, "fused"),
        ("cpu", torch.float64, 197, "fused"),
    ],
)
def test_attention_rule__by_device_precision_and_tokens(
    device: str, dtype: torch.dtype, tokens: int, expected: str
) -> None:
    assert attention_rule(device, dtype, tokens) == expected


@pytest.mark.parametrize(
    ("dtype", "head", "major", "deterministic", "expected"),
    [
        (torch.bfloat16, 64, 9, True, "flash"),
        (torch.bfloat16, 64, 9, False, "cudnn"),
        (torch.bfloat16, 160, 9, False, "flash"),
        (torch.bfloat16, 64, 8, False, "flash"),
        (torch.bfloat16, 512, 9, True, "efficient"),
        (torch.bfloat16, 64, 7, True, "math"),
        (torch.float32, 64, 9, True, "efficient"),
        (torch.float32, 6, 9, True, "math"),
        (torch.float64, 64, 9, False, "math"),
    ],
)
def test_attention_rule__on_a_gpu_names_one_that_is_there_and_in_a_fixed_order(
    dtype: torch.dtype,
    head: int,
    major: int,
    deterministic: bool,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (major, 0))
    for tokens in (17, 577, 4096):
        assert attention_rule("cuda", dtype, tokens, head, deterministic=deterministic) == expected
