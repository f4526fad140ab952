"""Every initialiser of `vit.initialise`, by its distribution, and the reproducibility of the draws."""

import math
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from scipy import stats

from vitctl.models.build import build
from vitctl.models.variants import ViTConfig, variant
from vitctl.models.vit import EncoderBlock, VisionTransformer, initialise

CONFIG = variant("B/16", depth=2, representation_size=512, head_bias=-10.0)
LIKELY = 1e-3  # the smallest p-value that a fixed seed may show


@pytest.fixture(scope="module")
def model() -> VisionTransformer:
    return build(CONFIG, seed=3)


def sample(weight: torch.Tensor) -> torch.Tensor:
    """At most 20,000 values, from all over the tensor."""
    values = weight.detach().flatten().double()
    return values[:: max(1, len(values) // 20_000)]


def assert_lecun_normal(weight: torch.Tensor, fan_in: int) -> None:
    """A normal truncated at two of its own deviations, with a variance of 1 / fan-in after the cut."""
    std = 1 / math.sqrt(fan_in) / stats.truncnorm.std(-2, 2)
    assert weight.std().item() == pytest.approx(1 / math.sqrt(fan_in), rel=0.01)
    assert 1.99 * std < weight.abs().max().item() <= 2 * std * (1 + 1e-6)
    assert stats.kstest(sample(weight).numpy(), stats.truncnorm(-2, 2, scale=std).cdf).pvalue > LIKELY


def assert_xavier_uniform(weight: torch.Tensor, fan_in: int, fan_out: int) -> None:
    limit = math.sqrt(6 / (fan_in + fan_out))
    assert 0.999 * limit < weight.abs().max().item() <= limit * (1 + 1e-6)
    assert stats.kstest(sample(weight).numpy(), stats.uniform(-limit, 2 * limit).cdf).pvalue > LIKELY


def assert_normal(weight: torch.Tensor, std: float) -> None:
    assert weight.std().item() == pytest.approx(std, rel=0.05)
    assert stats.kstest(sample(weight).numpy(), stats.norm(0, std).cdf).pvalue > LIKELY


def test_initialise__patches_and_pre_logits_are_lecun_normal(model: VisionTransformer) -> None:
    assert model.pre_logits is not None
    assert_lecun_normal(model.patch_embedding.weight, 16 * 16 * 3)
    assert_lecun_normal(model.pre_logits.weight, 768)


def test_initialise__attention_is_xavier_uniform_for_each_of_q_k_v(model: VisionTransformer) -> None:
    for block in model.blocks:
        assert isinstance(block, EncoderBlock)
        matrices = (*block.attention.qkv.weight.chunk(3), block.attention.out.weight)
        assert [matrix.shape for matrix in matrices] == [(768, 768)] * 4
        for matrix in matrices:
            assert_xavier_uniform(matrix, 768, 768)


def test_initialise__mlp_is_xavier_uniform_with_tiny_normal_biases(model: VisionTransformer) -> None:
    for block in model.blocks:
        assert isinstance(block, EncoderBlock)
        for dense in (block.mlp.fc1, block.mlp.fc2):
            assert_xavier_uniform(dense.weight, 768, 3072)
            assert_normal(dense.bias, 1e-6)


def test_initialise__positions_are_normal_and_not_truncated(model: VisionTransformer) -> None:
    assert model.position_embedding is not None
    assert model.position_embedding.shape == (1, 197, 768)
    assert_normal(model.position_embedding, 0.02)
    assert model.position_embedding.abs().max().item() > 4 * 0.02


def test_initialise__everything_else_is_constant(model: VisionTransformer) -> None:
    drawn = ("qkv.weight", "out.weight", "fc1.weight", "fc2.weight", "fc1.bias", "fc2.bias")
    drawn += ("patch_embedding.weight", "position_embedding", "pre_logits.weight")
    constants = {name: weight for name, weight in model.named_parameters() if not name.endswith(drawn)}
    assert len(constants) == 1 + 1 + 2 * 6 + 2 + 1 + 2
    for name, weight in constants.items():
        value = (
            -10.0
            if name == "head.bias"
            else 1.0
            if name.endswith(("norm.weight", "norm1.weight", "norm2.weight"))
            else 0.0
        )
        assert torch.equal(weight, torch.full_like(weight, value)), name


def test_initialise__blocks_and_projections_are_drawn_apart(model: VisionTransformer) -> None:
    matrices = [
        m
        for block in model.blocks
        if isinstance(block, EncoderBlock)
        for m in block.attention.qkv.weight.chunk(3)
    ]
    assert len({matrix.detach().numpy().tobytes() for matrix in matrices}) == 3 * CONFIG.depth


def test_initialise__same_generator_same_weights(tiny: ViTConfig) -> None:
    first, second = (VisionTransformer(tiny) for _ in range(2))
    for model in (first, second):
        initialise(model, np.random.default_rng(5))
    other = build(tiny, seed=6)
    for name, weight in first.state_dict().items():
        assert torch.equal(weight, second.state_dict()[name])
    assert not torch.equal(first.patch_embedding.weight, other.patch_embedding.weight)


DIGESTS = """
import hashlib
from vitctl.models.build import build
from vitctl.models.variants import variant
for name, size in {"Ti/16": {"depth": 2}, "R26+S/32": {"depth": 1}, "Axial-B/32": {"depth": 1}}.items():
    digest = hashlib.sha256()
    for weight in build(variant(name, image_size=64, num_classes=10, **size), seed=7).state_dict().values():
        digest.update(weight.numpy().tobytes())
    print(name, digest.hexdigest())
"""
PROCESSORS = {
    "as it is": {},
    "none": {
        "ATEN_CPU_CAPABILITY": "default",
        "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
        "NPY_DISABLE_CPU_FEATURES": "X86_V3 X86_V4 AVX512_ICL AVX512_SPR",
        "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX2,-FMA,-AVX512F",
    },
    "AVX2": {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
}


@pytest.mark.slow
def test_build__every_processor_draws_the_same_weights() -> None:
    """Torch's normal takes a vectorised logarithm and cosine, and 0.2 % of its draws depended on the
    processor.
    """
    found = {
        name: subprocess.run(
            [sys.executable, "-W", "ignore", "-c", DIGESTS],
            env={**os.environ, **less},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for name, less in PROCESSORS.items()
    }
    assert len(found["as it is"].splitlines()) == 3
    assert set(found.values()) == {found["as it is"]}
