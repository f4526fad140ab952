from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from vitctl.models.build import build
from vitctl.models.flops import count_macs, count_parameters, training_flops, training_memory_bytes
from vitctl.models.variants import ViTConfig, variant

JFT_IMAGES = 303_000_000

# Counted on the authors' code. Columns: no head, 1000 classes, 21843, 21843 and 18291 with pre-logits, 1000 at 384.
PARAMETERS = {
    "Ti/16": (5_524_416, 5_717_416, 9_740_115, 9_777_171, 9_091_635, 5_790_376),
    "S/16": (21_665_664, 22_050_664, 30_075_219, 30_223_059, 28_855_539, 22_196_584),
    "S/32": (22_493_952, 22_878_952, 30_903_507, 31_051_347, 29_683_827, 22_915_432),
    "B/8": (85_807_872, 86_576_872, 102_605_139, 103_195_731, 100_464_243, 87_744_232),
    "B/16": (85_798_656, 86_567_656, 102_595_923, 103_186_515, 100_455_027, 86_859_496),
    "B/32": (87_455_232, 88_224_232, 104_252_499, 104_843_091, 102_111_603, 88_297_192),
    "L/16": (303_301_632, 304_326_632, 325_690_707, 326_740_307, 323_099_507, 304_715_752),
    "L/32": (305_510_400, 306_535_400, 327_899_475, 328_949_075, 325_308_275, 306_632_680),
    "H/14": (630_764_800, 632_045_800, 658_745_683, 660_385_363, 655_835_251, 632_651_240),
    "b/32": (22_493_952, 22_878_952),
}

# Table 6: GMACs at 224 that its exaFLOPs follow from, epochs over JFT-300M, exaFLOPs as printed.
COSTS = [
    ("B/32", 4.408, 7, 55),
    ("B/16", 17.563, 7, 224),
    ("L/32", 15.377, 7, 196),
    ("L/16", 61.554, 7, 783),
    ("L/16", 61.554, 14, 1567),
    ("H/14", 167.294, 14, 4262),
]


def columns(name: str) -> list[ViTConfig]:
    config = variant(name)
    rep = config.hidden_size
    return [
        replace(config, num_classes=0),
        config,
        replace(config, num_classes=21843),
        replace(config, num_classes=21843, representation_size=rep),
        replace(config, num_classes=18291, representation_size=rep),
        replace(config, image_size=384),
    ]


def parameters_of(config: ViTConfig) -> int:
    return sum(weight.numel() for weight in build(config, device="meta").parameters())


@pytest.mark.parametrize("name", PARAMETERS)
def test_count_parameters__equals_the_authors(name: str) -> None:
    expected = PARAMETERS[name]
    configs = columns(name)[: len(expected)]
    assert tuple(count_parameters(config) for config in configs) == expected
    assert tuple(parameters_of(config) for config in configs) == expected


def test_count_parameters__equals_the_authors_for_the_base_of_appendix_d2() -> None:
    config = ViTConfig(patch_size=32, hidden_size=1024, depth=8, mlp_size=2048, num_heads=16, num_classes=0)
    assert (count_parameters(config), parameters_of(config)) == (70_400_000, 70_400_000)
    assert count_parameters(replace(config, num_classes=1000)) == 71_425_000


configs = st.builds(
    lambda heads, per_head, **fields: ViTConfig(num_heads=heads, hidden_size=heads * per_head, **fields),
    heads=st.integers(1, 4),
    per_head=st.integers(1, 9),
    patch_size=st.integers(1, 9),
    image_size=st.integers(9, 40),
    depth=st.integers(1, 3),
    mlp_size=st.integers(1, 50),
    num_classes=st.integers(0, 20),
    representation_size=st.integers(0, 20),
    classifier=st.sampled_from(["token", "gap"]),
    position_embedding=st.sampled_from(["learned", "none"]),
)


@settings(max_examples=40, deadline=None)
@given(configs)
def test_count_parameters__equals_the_built_model(config: ViTConfig) -> None:
    assert count_parameters(config) == parameters_of(config)


@pytest.mark.parametrize(
    "config",
    [
        variant("B/16"),
        variant("B/32", classifier="gap", num_classes=0),
        variant("H/14", image_size=384, num_classes=18291, representation_size=1280),
    ],
    ids=["token", "gap", "remainder"],
)
def test_count_macs__is_half_of_what_torch_counts(config: ViTConfig) -> None:
    model = build(config, device="meta")
    images = torch.empty(1, 3, config.image_size, config.image_size, device="meta")
    # The plain attention, because torch counts it operation by operation.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        model(images)
    assert counter.get_total_flops() == 2 * count_macs(config)


@pytest.mark.parametrize(("name", "gmacs", "epochs", "printed"), COSTS)
def test_training_flops__fit_table_6(name: str, gmacs: float, epochs: int, printed: int) -> None:
    body = variant(name, num_classes=0)
    assert round(count_macs(body) / 1e9, 3) == gmacs
    flops = training_flops(body, epochs * JFT_IMAGES)
    assert flops == 6 * count_macs(body) * epochs * JFT_IMAGES
    assert abs(flops / 1e18 - printed) < max(1.2, 0.001 * printed)


def saved_bytes(config: ViTConfig, micro_batch: int, precision: str) -> int:
    """Bytes that autograd really keeps for the backward pass, weights left out, shared storage counted once."""
    model = build(config, dtype=torch.float64 if precision == "float64" else torch.float32)
    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        pointer = tensor.untyped_storage().data_ptr()
        if pointer not in weights:
            kept[pointer] = tensor
        return tensor

    images = torch.zeros(micro_batch, 3, config.image_size, config.image_size, dtype=next(model.parameters()).dtype)
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16")
    with autocast, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        F.cross_entropy(model(images), torch.zeros(micro_batch, dtype=torch.long))
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def estimated_saved_bytes(config: ViTConfig, micro_batch: int, precision: Literal["float32", "bf16", "float64"]) -> int:
    """The estimate less its share of weights and gradients."""
    wide = 8 if precision == "float64" else 4
    estimate = training_memory_bytes(config, micro_batch, precision, optimizer_slots=0, averaging=False)
    return estimate - 2 * wide * count_parameters(config)


def sizes() -> Iterator[tuple[ViTConfig, int]]:
    yield variant("Ti/16", image_size=96, num_classes=10), 4
    yield variant("S/16", depth=3, num_classes=100, representation_size=384), 2
    yield variant("Ti/16", depth=4, image_size=64, classifier="gap", position_embedding="none"), 8


@pytest.mark.parametrize("precision", ["float32", "bf16", "float64"])
@pytest.mark.parametrize(("config", "micro_batch"), list(sizes()))
def test_training_memory__fits_what_autograd_keeps(
    config: ViTConfig, micro_batch: int, precision: Literal["float32", "bf16", "float64"]
) -> None:
    measured = saved_bytes(config, micro_batch, precision)
    assert estimated_saved_bytes(config, micro_batch, precision) == pytest.approx(measured, rel=0.03)


def test_training_memory__dropout_keeps_one_byte_per_value() -> None:
    plain = variant("Ti/16", image_size=64, depth=2)
    dropped = replace(plain, dropout=0.1)
    masks = estimated_saved_bytes(dropped, 2, "float32") - estimated_saved_bytes(plain, 2, "float32")
    assert masks > 0
    # On the CPU torch keeps each mask as float32, on a GPU as bool.
    assert saved_bytes(dropped, 2, "float32") - saved_bytes(plain, 2, "float32") == 4 * masks


def test_training_memory__counts_every_copy_of_the_weights() -> None:
    config = variant("B/16")
    copies = 4 * count_parameters(config)
    bare = training_memory_bytes(config, 1, "bf16", optimizer_slots=0, averaging=False)
    assert training_memory_bytes(config, 1, "bf16", optimizer_slots=1, averaging=False) == bare + copies
    assert training_memory_bytes(config, 1, "bf16", optimizer_slots=2, averaging=True) == bare + 3 * copies
