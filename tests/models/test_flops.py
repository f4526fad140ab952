from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tests.matrix import slow, spread
from tests.models.tiny_models import VIT
from vitctl.models.build import build
from vitctl.models.flops import (
    computed_flops,
    convolution,
    count_macs,
    count_parameters,
    recomputed_share,
    training_flops,
    training_memory_bytes,
)
from vitctl.models.resnet import pad_same
from vitctl.models.variants import (
    RESNETS,
    AxialConfig,
    Config,
    HybridConfig,
    MaskedPatchConfig,
    Recomputed,
    ResNetConfig,
    ViTConfig,
    downstream,
    is_checkpointed,
    variant,
)

JFT_IMAGES = 303_000_000

# Counted on the authors' code. Columns: no head, 1000 classes, 21843, 21843 and 18291 with pre-logits, 1000
# at 384.
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

# The same for hybrids: no head, 1000 classes, 21843, 21843 and 18291 with pre-logits, 1000 at 384.
HYBRID_PARAMETERS = {
    "R50+B/16": (97_890_112, 98_659_112, 114_687_379, 115_277_971, 112_546_483, 98_950_952),
    "R50+B/32": (110_176_832, 110_945_832, 126_974_099, 127_564_691, 124_833_203),
    "R50+L/16": (315_458_624, 316_483_624, 337_847_699, 338_897_299, 335_256_499, 316_872_744),
    "R50+L/32": (327_969_856, 328_994_856, 350_358_931, 351_408_531, 347_767_731, 329_092_136),
    "R26+S/32": (36_046_912, 36_431_912),
    "R26+B/32": (100_614_976, 101_383_976),
    "R+Ti/16": (6_144_704, 6_337_704),
}

# BiT: v2 with 1000 and with 21843 classes, v1 with 1000; a blank was not counted on the authors' code.
RESNET_PARAMETERS = {
    "R50x1": (25_549_352, 68_256_659, 25_557_032),
    "R50x2": (97_988_712, None, 98_004_072),
    "R50x3": (217_319_080, 345_399_315, None),
    "R101x1": (44_541_480, 87_248_787, 44_549_160),
    "R101x3": (387_934_888, 516_015_123, None),
    "R152x1": (60_185_128, None, 60_192_808),
    "R152x2": (236_335_208, 321_728_979, 236_350_568),
    "R152x4": (936_533_224, 1_107_299_923, None),
    "R200x3": (568_633_000, None, 568_656_040),
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
    assert parameters_of(configs[-1]) == expected[-1]


@pytest.mark.parametrize("name", HYBRID_PARAMETERS)
def test_count_parameters__of_hybrids_equals_the_authors(name: str) -> None:
    expected = HYBRID_PARAMETERS[name]
    configs = columns(name)[: len(expected)]
    assert tuple(count_parameters(config) for config in configs) == expected
    assert parameters_of(configs[-1]) == expected[-1]


@pytest.mark.parametrize("name", RESNET_PARAMETERS)
def test_count_parameters__of_resnets_equals_the_authors(name: str) -> None:
    assert set(RESNET_PARAMETERS) == set(RESNETS)
    v2 = variant(name, version="v2")
    configs = (v2, replace(v2, num_classes=21843), variant(name))
    for config, expected in zip(configs, RESNET_PARAMETERS[name], strict=True):
        assert expected is None or count_parameters(config) == expected
    assert count_parameters(v2) == parameters_of(v2)


def test_count_parameters__of_every_family_equals_the_built_model(family: Config) -> None:
    for config in (family, replace(family, num_classes=0), replace(family, image_size=41)):
        assert count_parameters(config) == parameters_of(config)


def test_count_parameters__of_masked_patch_models_equals_the_built_model(masked: MaskedPatchConfig) -> None:
    assert count_parameters(masked) == parameters_of(masked)


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


def counted_macs(config: Config, *, every_token: bool = True) -> float:
    """Half the FLOPs that torch counts for one image."""
    model = build(config, device="meta")
    model.every_token = every_token
    images = torch.empty(1, 3, config.image_size, config.image_size, device="meta")
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        model(images)
    return counter.get_total_flops() / 2


def test_count_macs__padded_is_what_torch_counts_for_every_family(kind: Config) -> None:
    assert count_macs(kind, padded=True) == counted_macs(kind)
    convolutions = isinstance(kind, ResNetConfig | HybridConfig)
    assert (count_macs(kind) < count_macs(kind, padded=True)) == convolutions


def test_computed_flops__are_those_that_torch_counts(kind: Config) -> None:
    padding = count_macs(kind, padded=True) - count_macs(kind)
    assert computed_flops(kind) == 6 * (counted_macs(kind, every_token=False) - padding)
    reads_one = isinstance(kind, ViTConfig) and kind.classifier == "token"
    reads_one = reads_one and kind.position_embedding != "relative"
    assert (computed_flops(kind) < training_flops(kind, 1)) == reads_one


def test_computed_flops__of_a_gated_mlp() -> None:
    config = replace(VIT, mlp="swiglu")
    assert computed_flops(config) == 6 * counted_macs(config, every_token=False)


def test_count_macs__padded_is_what_torch_counts_for_masked_patches(masked: MaskedPatchConfig) -> None:
    assert count_macs(masked, padded=True) == counted_macs(masked)


@pytest.mark.parametrize(
    "name", ["B/16", "R+Ti/16", *slow("H/14", "Axial-B/16", "R50+L/32", "R152x1", "AxialR50")]
)
def test_count_macs__padded_is_what_torch_counts_at_full_size(name: str) -> None:
    for config in (variant(name), variant(name, image_size=384)):
        assert count_macs(config, padded=True) == counted_macs(config)


@pytest.mark.parametrize(
    ("side", "kernel", "stride"), [(56, 3, 1), (56, 3, 2), (37, 3, 2), (224, 7, 2), (10, 1, 2)]
)
@pytest.mark.parametrize("same", [True, False])
def test_convolution__counts_the_taps_that_meet_the_map(
    side: int, kernel: int, stride: int, same: bool
) -> None:
    found = convolution(2, 3, kernel, stride, side, same=same, first=False)
    ones, weight = torch.ones(1, 2, side, side), torch.ones(3, 2, kernel, kernel)
    padded, padding = pad_same(ones, kernel, stride) if same else (ones, kernel // 2)
    assert found.macs == F.conv2d(padded, weight, stride=stride, padding=padding).sum()


def test_count_macs__of_resnet50_is_the_number_of_paper_and_profilers() -> None:
    body = variant("R50x1", num_classes=0)
    assert round(count_macs(body, padded=True) / 1e9, 3) == 4.087
    assert training_flops(body, 7 * JFT_IMAGES) / 1e18 == pytest.approx(50.2, abs=0.05)


@pytest.mark.parametrize(("name", "gmacs", "epochs", "printed"), COSTS)
def test_training_flops__fit_table_6(name: str, gmacs: float, epochs: int, printed: int) -> None:
    body = variant(name, num_classes=0)
    assert round(count_macs(body) / 1e9, 3) == gmacs
    flops = training_flops(body, epochs * JFT_IMAGES)
    assert flops == 6 * count_macs(body) * epochs * JFT_IMAGES
    assert abs(flops / 1e18 - printed) < max(1.2, 0.001 * printed)


def saved_bytes(config: Config, micro_batch: int, precision: str, checkpoint_blocks: Any = 0) -> int:
    """Bytes that autograd keeps for the backward pass, weights left out, shared storage counted once."""
    model = build(config, dtype=torch.float64 if precision == "float64" else torch.float32)
    model.checkpoint_blocks, model.every_token = checkpoint_blocks, True
    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        pointer = tensor.untyped_storage().data_ptr()
        if pointer not in weights:
            kept[pointer] = tensor
        return tensor

    images = torch.zeros(
        micro_batch, 3, config.image_size, config.image_size, dtype=next(model.parameters()).dtype
    )
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16")
    with autocast, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        F.cross_entropy(model(images).flatten(1), torch.zeros(micro_batch, dtype=torch.long))
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def estimated_saved_bytes(
    config: Config, micro_batch: int, precision: Literal["float32", "bf16", "float64"]
) -> int:
    """The estimate less its share of weights and gradients."""
    wide = 8 if precision == "float64" else 4
    estimate = training_memory_bytes(config, micro_batch, precision, optimizer_slots=0, averaging=False)
    return estimate - 2 * wide * count_parameters(config)


def sizes() -> Iterator[tuple[ViTConfig, int]]:
    yield variant("Ti/16", image_size=96, num_classes=10), 4
    yield variant("S/16", depth=3, num_classes=100, representation_size=384), 2
    yield variant("Ti/16", depth=4, image_size=64, classifier="gap", position_embedding="none"), 8


@pytest.mark.parametrize("precision", ["bf16", *slow("float32", "float64")])
def test_training_memory__fits_what_autograd_keeps_for_every_family(
    kind: Config, precision: Literal["float32", "bf16", "float64"]
) -> None:
    measured = saved_bytes(kind, 8, precision)
    assert estimated_saved_bytes(kind, 8, precision) == pytest.approx(measured, rel=0.1)


def test_training_memory__fits_what_autograd_keeps_for_masked_patches(masked: MaskedPatchConfig) -> None:
    assert estimated_saved_bytes(masked, 8, "float32") == pytest.approx(
        saved_bytes(masked, 8, "float32"), rel=0.1
    )


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize(("config", "micro_batch"), spread(1, [*sizes()][1:3], 1))
def test_training_memory__with_checkpointing_is_what_is_kept_and_one_block(
    config: ViTConfig, micro_batch: int, every: int
) -> None:
    kept = saved_bytes(config, micro_batch, "float32", checkpoint_blocks=every)
    whole = saved_bytes(config, micro_batch, "float32")
    bare = 2 * 4 * count_parameters(config)
    estimate = training_memory_bytes(config, micro_batch, "float32", 0, False, checkpoint_blocks=every) - bare
    assert kept < estimate < (0.7 if every == 1 else 1) * whole
    one = (whole - kept) / sum(is_checkpointed(index, every) for index in range(config.depth))
    assert estimate - kept == pytest.approx(one, rel=0.2)


@pytest.mark.parametrize("precision", ["bf16", *slow("float32")])
@pytest.mark.parametrize(
    "config",
    [
        variant("Ti/16", image_size=224, depth=4, num_classes=10),
        AxialConfig(
            patch_size=16, hidden_size=64, depth=4, mlp_size=128, num_heads=2, image_size=224, num_classes=10
        ),
        variant("Ti/16", image_size=64, depth=4, num_classes=10, position_embedding="relative"),
    ],
    ids=["vit", "axial", "relative"],
)
def test_training_memory__with_attention_recomputed_is_what_is_kept_and_one_attention(
    config: ViTConfig, precision: Literal["float32", "bf16"]
) -> None:
    kept = saved_bytes(config, 4, precision, checkpoint_blocks="attention")
    whole = saved_bytes(config, 4, precision)
    estimate = training_memory_bytes(config, 4, precision, 0, False, checkpoint_blocks="attention")
    estimate -= 2 * 4 * count_parameters(config)
    assert kept < estimate < whole
    one = (whole - kept) / (config.depth * (1 + isinstance(config, AxialConfig)))
    assert estimate == pytest.approx(kept + one, rel=0.05)


def test_recomputed_share__of_attention_is_what_torch_counts_more() -> None:
    config = variant("S/16", image_size=64, depth=2, num_classes=10)

    def counted(checkpoint_blocks: Recomputed) -> int:
        model: Any = build(config)
        model.checkpoint_blocks, model.every_token = checkpoint_blocks, True
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            model(torch.zeros(2, 3, 64, 64)).sum().backward()
        return counter.get_total_flops()

    forward = 2 * 2 * count_macs(config)
    more = counted("attention") - counted(0)
    assert recomputed_share(config, "attention") * forward == pytest.approx(more, rel=0.02)
    block = (17 * 12 * 384**2 + 2 * 17**2 * 384) / count_macs(config)  # and the first of them in any case
    shares = [recomputed_share(config, every) for every in (0, 1, 2, 99)]
    assert shares == pytest.approx([0, 2 * block, block, block])


def test_recomputed_share__and_memory_are_those_of_docs() -> None:
    config = variant("B/16", num_classes=1000)

    def activations(which: Recomputed) -> int:
        one, none = (training_memory_bytes(config, n, "bf16", 2, False, which) for n in (1, 0))
        return one - none

    found = {
        which: (1 - activations(which) / activations(0), recomputed_share(config, which) / 3)
        for which in ("attention", 2)
    }
    rounded = {which: tuple(round(100 * number) for number in pair) for which, pair in found.items()}
    assert rounded == {"attention": (14, 9), 2: (35, 17)}


def test_training_memory__with_checkpointing_is_never_more_than_without() -> None:
    config = variant("S/16", depth=3, num_classes=100)
    memory = [training_memory_bytes(config, 2, "float32", 0, False, checkpoint_blocks=n) for n in range(10)]
    assert memory[1] < memory[2] <= memory[3] <= memory[0] == memory[9]


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


@pytest.mark.parametrize(("frozen", "mebibytes"), [(-1, 1236), (6, 601), (14, 167)])
def test_training_memory_bytes__as_measured_with_frozen_layers(frozen: int, mebibytes: int) -> None:
    """The table of benchmarks/results/fine_tuning.md: S/16, 16 images, AdamW in float32."""
    config = downstream(variant("S/16"), num_classes=100, image_size=224)
    planned = training_memory_bytes(config, 16, "float32", 2, averaging=False, frozen=frozen)
    assert planned / 2**20 == pytest.approx(mebibytes, rel=0.15)
