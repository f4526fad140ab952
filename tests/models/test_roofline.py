"""Expected times of steps on GPUs: FLOPs against an independent count, bytes and seconds by arithmetic, rates
against published ones.
"""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.conftest import ROOT
from tests.matrix import each
from vitctl.errors import RecipeError
from vitctl.models.flops import PEAK_TFLOPS, computed_flops, count_parameters, forward_flops
from vitctl.models.kernels import AttentionKernel, set_attention
from vitctl.models.roofline import (
    GPUS,
    NARROW,
    OVER_PUBLISHED,
    WIDEST,
    Kind,
    Step,
    estimate,
    find_device,
    kernels,
)
from vitctl.models.variants import MaskedPatchConfig, ViTConfig, variant
from vitctl.models.vit import VisionTransformer


def vit(name: str = "B/16", **values: Any) -> ViTConfig:
    config = variant(name, **{"image_size": 224, "num_classes": 10, **values})
    assert isinstance(config, ViTConfig)
    return config


def of(kind: Kind, config: ViTConfig, step: Step, what: str = "bytes") -> float:
    """Sum over the kernels of a kind."""
    chosen = (one for one in kernels(config, step) if one.kind == kind)
    return sum(getattr(one, what) * one.times for one in chosen)


@each("name", ["Ti/16", "B/16", "H/14"])
@each(
    "values",
    [
        {"classifier": "token", "representation_size": 64},
        {"classifier": "patches"},
        {"classifier": "attention"},
        {"classifier": "attention", "mlp": "swiglu"},
        {"position_embedding": "relative"},
        {"position_embedding": "relative_bias"},
    ],
)
def test_flops_are_those_that_the_cost_of_layers_counts(name: str, values: dict[str, Any]) -> None:
    config = vit(name, **values)
    for plain in (False, True):
        counted = (one.flops * one.times for one in kernels(config, Step(3, training=False, plain=plain)))
        assert sum(counted) == 3 * forward_flops(config)


def test_flops__of_masked_patches() -> None:
    sizes = {"patch_size": 16, "hidden_size": 64, "depth": 2, "mlp_size": 128, "num_heads": 2}
    config = MaskedPatchConfig(**sizes, target="downsized")
    counted = sum(one.flops * one.times for one in kernels(config, Step(3, training=False)))
    assert counted == 3 * forward_flops(config)


def test_products_of_large_steps_bound_the_time_from_below() -> None:
    step = Step(256)
    found = estimate(vit(), "A100", step)
    assert 0 < found.mfu < 1
    assert found.seconds["matrices"] > 3 * 256 * 2 * 16.5e9 / 312e12  # GMACs of matrices for each image
    assert found.seconds["starting"] == 0
    for slower in (replace(step, compiled=False), replace(step, plain=True)):
        assert estimate(vit(), "A100", slower).images_per_second < found.images_per_second
    scored = estimate(vit(), "A100", replace(step, training=False))
    assert scored.images_per_second > 3 * found.images_per_second
    assert scored.mfu == 0


def test_mfu__counts_what_the_log_counts() -> None:
    """The last block skips 196 tokens; a teacher has one pass."""
    config, teacher = vit(), vit("Ti/16", classifier="patches")
    alone, taught = (estimate(config, "H100", Step(64, teacher=one)) for one in (None, teacher))
    for found, more in ((alone, 0), (taught, forward_flops(teacher))):
        flops = 64 * (computed_flops(config) + more)
        assert found.mfu == pytest.approx(flops / (989e12 * sum(found.seconds.values())))
    assert computed_flops(config) == 6 * (196 * 768**2 + blocks(12) + 768 * 10)


def blocks(depth: int) -> int:
    """Multiply-accumulates of the blocks of B/16 at 224, the last of which computes the class token alone."""
    attended, width = 2 * 197 * 768, 768
    token = 9 * width**2 + attended  # behind query, key and value
    return depth * 197 * 3 * width**2 + (depth - 1) * 197 * token + token


def test_attention__takes_its_share_of_each_gpu() -> None:
    """FLOPs by hand: 4 D for each pair of tokens forward and 10 D backward, where the matrix is computed
    again.
    """
    config, pairs = vit(image_size=384, classifier="patches"), 12 * 577**2
    for gpu, forward, backward in (("H100", 0.29, 0.22), ("A100", 0.50, 0.43)):
        seconds = estimate(config, gpu, Step(64)).seconds
        peak = PEAK_TFLOPS[gpu] * 1e12
        assert seconds["attention"] == pytest.approx(64 * 4 * 768 * pairs / (forward * peak))
        assert seconds["backward"] == pytest.approx(64 * 10 * 768 * pairs / (backward * peak))
        assert "plain" not in seconds
    assert GPUS["H200"][2:5] == GPUS["H100"][2:5]  # the chip is the same


def test_plain_attention__writes_and_reads_its_matrix() -> None:
    """Six products, each of which touches a matrix of bf16 once; the softmax by passes over it."""
    config = vit(classifier="patches")
    matrices = 8 * 12 * 12 * 197**2  # images, blocks, heads
    # Two of queries, keys, values and outputs beside each product; seven copies of one of them.
    around = (6 + 7) * 2 * 2 * 8 * 12 * 197 * 768
    for compiled, softmax in ((True, 4 + 6), (False, 20 + 24)):
        step = Step(8, plain=True, compiled=compiled)
        assert of("plain", config, step) == matrices * (6 * 2 + softmax) + around
    assert of("plain", config, Step(8)) == of("attention", config, step) == 0
    relative = vit(classifier="patches", position_embedding="relative_bias")
    assert of("plain", relative, Step(8)) > of("plain", config, Step(8, plain=True))


@pytest.mark.parametrize("compiled", [True, False])
def test_dropout__writes_masks_and_reads_them(compiled: bool) -> None:
    """Two masks of D and one of the MLP in each block, and one of float32 tokens before them."""
    step = Step(8, compiled=compiled)
    without, with_it = (vit(classifier="patches", dropout=rate) for rate in (0.0, 0.1))
    number = 1 if compiled else 1 + 2 + 2  # a mask; the kernel also reads and writes bf16
    tokens = 8 * 197
    more = 2 * (tokens * 768 * (1 + 4 + 4) + 12 * tokens * (2 * 768 + 3072) * number)
    assert of("element-wise", with_it, step) - of("element-wise", without, step) == more
    scored = replace(step, training=False)
    assert of("element-wise", with_it, scored) == of("element-wise", without, scored)
    assert (
        estimate(with_it, "A100", step).images_per_second < estimate(without, "A100", step).images_per_second
    )


def test_stochastic_depth_and_scales__touch_branches_that_are_not_compiled() -> None:
    config, tokens = vit(classifier="patches"), 8 * 197
    for values in ({"drop_path": 0.1}, {"layer_scale": 1e-4}):
        changed = vit(classifier="patches", **values)
        for compiled in (True, False):
            step = Step(8, compiled=compiled)
            more = of("element-wise", changed, step) - of("element-wise", config, step)
            scales = 6 * 2 * (count_parameters(changed) - count_parameters(config))  # they are converted
            assert more == scales + (0 if compiled else 2 * 12 * 2 * tokens * 768 * 4)


def test_update__once_for_all_passes() -> None:
    """A pass costs the same; the update and what it moves for each weight do not repeat."""
    config, seconds = vit("Ti/16"), {}
    weights = count_parameters(config)
    for passes in (1, 8):
        step = Step(512, passes=passes)
        seconds[passes] = estimate(config, "H100", step).seconds
        added = 12 * (passes - 1)  # a gradient and the sum are read, and it is written
        assert of("optimizer", config, step) == weights * (28 + 12 + added)
        assert of("matrices", config, step, "flops") == of("matrices", config, Step(512), "flops")
    assert seconds[8]["optimizer"] == pytest.approx(weights * (40 + 84) / (0.9 * 3350e9))
    assert of("optimizer", config, Step(1, slots=1)) == weights * 32
    assert of("optimizer", config, Step(1, averaging=True)) == weights * 52
    # Gradients of several passes are whole in each process, which then updates its part.
    assert of("optimizer", config, Step(8, passes=3, shards=8)) == weights * (40 / 8 + 2 * 12)
    # Eight passes of a small batch: nearer to one pass than eight updates would be.
    small = estimate(config, "H100", Step(8, passes=8)).seconds
    assert small["optimizer"] < 8 * estimate(config, "H100", Step(1)).seconds["optimizer"]


def test_teacher__adds_its_forward_pass() -> None:
    """Blocks of the student alone are compiled."""
    config, teacher = vit("Ti/16"), vit("B/16")
    step = Step(64, passes=2)
    alone, both = (estimate(config, "A100", replace(step, teacher=one)).seconds for one in (None, teacher))
    its = estimate(teacher, "A100", replace(step, training=False, compiled=False)).seconds
    assert both["matrices"] == pytest.approx(alone["matrices"] + its["matrices"])
    assert both["optimizer"] == alone["optimizer"]
    with pytest.raises(RecipeError, match="ResNets"):
        estimate(config, "A100", Step(8, teacher=variant("R50x1")))


def test_starting__bounds_small_steps() -> None:
    """A block of a forward pass is at least 4 products, attention, 7 other operations and 8 conversions."""
    config = vit("Ti/16", classifier="patches")
    step = Step(1, training=False, compiled=False)
    assert 1 / estimate(config, "H100", step).images_per_second >= 12 * 20 * 10e-6
    assert estimate(config, "H100", step).images_per_second < 420
    compiled = replace(step, compiled=True)
    assert estimate(config, "H100", compiled).images_per_second < 12 / (12 * 16 * 5e-6)
    assert estimate(config, "H100", replace(step, images=2048)).seconds["starting"] == 0
    # As long as nothing but starting counts, images are free.
    few, more = (estimate(config, "H100", replace(step, images=n)) for n in (1, 4))
    assert more.images_per_second == pytest.approx(4 * few.images_per_second)


_VIEWS = {
    *("_unsafe_view", "alias", "as_strided", "detach", "empty_like", "expand", "permute", "select"),
    *("slice", "t", "transpose", "unbind", "unsqueeze", "view"),
}


class _Counted(TorchDispatchMode):
    """Counts operations that compute."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += op.overloadpacket.__name__ not in _VIEWS
        return op(*args, **(kwargs or {}))


@pytest.mark.parametrize("kernel", ["fused", "math"])
@pytest.mark.parametrize("values", [{}, {"layer_scale": 1e-4}])
def test_starting__counts_what_torch_dispatches(kernel: AttentionKernel, values: dict[str, Any]) -> None:
    """Operations of a block in autocast: those of three blocks without those of one."""
    passes: dict[int, list[int]] = {}
    configs = {
        depth: replace(vit("Ti/16", image_size=32, classifier="patches", gelu="erf", **values), depth=depth)
        for depth in (1, 3)
    }
    for depth, config in configs.items():
        model = VisionTransformer(config)
        set_attention(model, kernel)
        for parameter in model.parameters():
            torch.nn.init.constant_(parameter, 0.01)
        forward, backward = _Counted(), _Counted()
        with forward, torch.autocast("cpu", torch.bfloat16):
            loss = model(torch.ones(2, 3, 32, 32)).sum()
        with backward:
            loss.backward()
        passes[depth] = [forward.operations, backward.operations]
    forward_only, both = (
        [
            sum(one.started * one.times for one in kernels(configs[depth], step) if one.kind != "optimizer")
            for depth in (1, 3)
        ]
        for step in (
            Step(2, training=training, compiled=False, plain=kernel == "math") for training in (False, True)
        )
    )
    found = [three - one for one, three in zip(passes[1], passes[3], strict=True)]
    started = [forward_only[1] - forward_only[0], both[1] - both[0] - forward_only[1] + forward_only[0]]
    # On a GPU plain attention has a softmax of float32, between two conversions in each pass; the backward
    # passes of fused attention and of each norm are three and two kernels.
    more = [2, 2 + 2] if kernel == "math" else [0, 2 + 2]
    assert started == [on_cpu + 2 * gpu for on_cpu, gpu in zip(found, more, strict=True)]


# timm, results/*.csv at aa4b5850: fp16, images per second.
@pytest.mark.parametrize(
    ("name", "size", "batch", "device", "rate"),
    [
        ("Ti/16", 224, 256, "GeForce RTX 4090", 24266.11),
        ("S/16", 224, 256, "GeForce RTX 4090", 9665.97),
        ("B/16", 224, 256, "GeForce RTX 4090", 3345.67),
        ("B/32", 224, 256, "GeForce RTX 4090", 11925.14),
        ("L/16", 384, 256, "GeForce RTX 4090", 343.49),
        ("B/16", 224, 1024, "GeForce RTX 5090", 4378.83),
        ("H/14", 224, 1024, "GeForce RTX 5090", 505.25),
    ],
)
def test_published_rates_of_forward_passes_are_within_a_seventh(
    name: str, size: int, batch: int, device: str, rate: float
) -> None:
    config = variant(name, image_size=size, num_classes=1000, classifier="patches")
    found = estimate(config, device, Step(batch, training=False)).images_per_second
    assert found == pytest.approx(rate, rel=1 / 7)


# The same of torch 1.12, which trains with plain attention and SGD, and compiles nothing.
@pytest.mark.parametrize(
    ("name", "size", "batch", "rate"),
    [
        ("Ti/16", 224, 512, 2293.54),
        ("Ti/16", 384, 128, 512.2),
        ("S/16", 384, 64, 239.05),
        ("L/16", 384, 12, 29.07),
    ],
)
def test_published_rates_of_training_are_within_three_tenths(
    name: str, size: int, batch: int, rate: float
) -> None:
    config = variant(name, image_size=size, num_classes=1000, classifier="patches")
    step = Step(batch, compiled=False, plain=True, slots=1)
    assert estimate(config, "GeForce RTX 3090", step).images_per_second == pytest.approx(rate, rel=0.3)


@each(
    ("name", "row"),
    [
        ("NVIDIA A100-SXM4-40GB", "A100 40GB"),
        ("NVIDIA A100 80GB PCIe", "A100"),
        ("A100-40GB", "A100 40GB"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("H100-SXM", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA GeForce RTX 4090", "GeForce RTX 4090"),
        (" rtx 4090", "GeForce RTX 4090"),
        ("NVIDIA H200", "H200"),
        ("Tesla V100-SXM2-32GB", "V100"),
        ("v100", "V100"),
    ],
)
def test_find_device__by_the_names_of_drivers_and_of_people(name: str, row: str) -> None:
    assert find_device(name) == row


@each(
    "name",
    [
        "",
        "B/16\n",
        "NVIDIA H100 NVL",
        "NVIDIA L40",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "rtx 4090 d",
        "NVIDIA A100-SXM4-40GB MIG 3g.20gb",
        "NVIDIA GH200 480GB",
        "Tesla V100-SXM2-16GB",
    ],
)
def test_find_device__a_sibling_or_a_part_is_not_guessed(name: str) -> None:
    with pytest.raises(RecipeError, match="choose one of"):
        find_device(name)


def test_what_is_not_known_is_refused() -> None:
    assert GPUS.keys() <= PEAK_TFLOPS.keys()
    with pytest.raises(RecipeError, match="TPU"):
        estimate(variant("B/16"), "TPU v3", Step(8))
    with pytest.raises(RecipeError, match="ResNets"):
        estimate(variant("R50x1"), "H100", Step(8))


def test_docs__the_constants_are_those_of_the_results() -> None:
    table = (ROOT / "benchmarks" / "results" / "roofline.md").read_text()
    assert f"Fitted: WIDEST {WIDEST:g}, NARROW {NARROW:g};" in table
    for kind, rate in (("compiled", "7,716"), ("eager", "2,305")):
        [ratio] = re.findall(rf"^\| {kind} \| {rate} \| .* \| ([\d.]+) \|", table, re.MULTILINE)
        assert round(float(ratio), 1) == OVER_PUBLISHED[kind == "compiled"]
