"""Parameters, operations and memory of a network, from its configuration, and the peaks of devices.

Imports no torch.
"""

import re
from collections.abc import Sequence
from functools import cache
from typing import Literal, NamedTuple

from vitctl.models.variants import (
    AxialConfig,
    AxialResNetConfig,
    Config,
    HybridConfig,
    MaskedPatchConfig,
    Recomputed,
    ResNetConfig,
    UnitShape,
    ViTConfig,
    is_checkpointed,
    skips_unused_tokens,
    stages,
)


class Cost(NamedTuple):
    """The cost of some layers. Values kept for the backward pass are counted in numbers, masks in bytes.

    parameters: weights and biases. macs: multiply-accumulates of the forward pass; `padded_macs` adds those
    with a convolution's zero padding. wide: numbers kept in the precision of the weights; `narrow`: in that
    of the matrix products. casts: numbers kept a second time, narrow, only if the two precisions differ.
    weight_casts: the same for weights, once for all images. standardised: weights that are kept centred,
    wide, and finished, narrow, once for all images. masks: bytes kept by dropout and max-pooling. boundary:
    wide numbers that enter the layers, which are all that is kept if the layers are recomputed.
    """

    parameters: int = 0
    macs: int = 0
    padded_macs: int = 0
    wide: int = 0
    narrow: int = 0
    casts: int = 0
    weight_casts: int = 0
    standardised: int = 0
    masks: int = 0
    boundary: int = 0


def add(*costs: Cost) -> Cost:
    return Cost(*map(sum, zip(*costs, strict=True)))


def product(macs: int) -> Cost:
    """Return the cost of matrix products with so many `macs`, which keep nothing."""
    return Cost(macs=macs, padded_macs=macs)


def linear(count: int, inputs: int, outputs: int, *, bias: bool = True, is_head: bool = False) -> Cost:
    """Return the cost of a matrix over `count` tokens; its input is kept, that of a head wide."""
    weights, seen = inputs * outputs, count * inputs if outputs else 0
    kept = Cost(wide=seen) if is_head else Cost(narrow=seen, weight_casts=weights)
    return add(product(count * weights), kept, Cost(parameters=weights + bias * outputs))


def norm(count: int, width: int, groups: int) -> Cost:
    """Return the cost of LayerNorm or GroupNorm of `count` positions: input and `groups` moments are kept."""
    return Cost(parameters=2 * width, wide=count * width + 2 * groups)


def relu(count: int, width: int) -> Cost:
    """Return the cost of a ReLU of `count` positions. The output is kept."""
    return Cost(wide=count * width)


def convolution(
    inputs: int, outputs: int, kernel: int, stride: int, side: int, *, same: bool, first: bool
) -> Cost:
    """Return the cost of a standardised convolution of a map of `side`.

    The layer before keeps its input already, unless this is the `first` or uneven SAME padding copies it.
    """
    after = -(-side // stride)
    padding = max(0, (after - 1) * stride + kernel - side)
    begin = padding // 2 if same else kernel // 2
    valid = sum(0 <= place * stride + tap - begin < side for place in range(after) for tap in range(kernel))
    weights = inputs * outputs * kernel**2
    copied = same and padding % 2 == 1
    kept = inputs * (side + padding if copied else side) ** 2
    return Cost(
        parameters=weights,
        macs=inputs * outputs * valid**2,
        padded_macs=weights * after**2,
        narrow=kept if copied or first else 0,
        casts=0 if copied or first else kept,
        standardised=weights,
    )


_FLOPS_PER_MAC = 2
FORWARD_AND_BACKWARD = 3  # the backward pass multiplies twice: gradients of inputs and of weights
_BACKWARD = FORWARD_AND_BACKWARD - 1

USABLE_SHARE = 0.9  # of a GPU's memory; the rest is for the framework
# Bytes of a stored number (weights, gradients, residual stream) and of one inside the matrix products.
_WIDTHS = {"float32": (4, 4), "tf32": (4, 4), "bf16": (4, 2), "float64": (8, 8)}


def count_parameters(config: Config) -> int:
    """Return the exact number of parameters. Paper: Table 1"""
    return _total(config).parameters


def count_trained(config: Config, frozen: int) -> int:
    """Return the exact number of parameters after the `place` called `frozen`; -1: of all."""
    return add(*_trained(config, frozen)).parameters


def count_macs(config: Config, *, padded: bool = False) -> int:
    """Return the multiply-accumulates of one image's forward pass, in matrix products alone.

    `padded` also counts those of convolutions with the zeros around a map, as profilers do. Without those,
    and without the head (`num_classes` and `representation_size` 0), it equals the paper's cost figures (B/16
    at 224: 17.563 G). Paper: Table 6
    """
    total = _total(config)
    return total.padded_macs if padded else total.macs


def count_adapted(config: Config, rank: int, targets: Sequence[str], blocks: Sequence[int]) -> int:
    """Return the exact number of parameters of adapters (see `lora.adapt`) and of the head."""
    assert isinstance(config, ViTConfig)
    wide = {"fc1": config.mlp_size * (1 + (config.mlp == "swiglu")), "fc2": config.mlp_size}
    sizes = sum(config.hidden_size + wide.get(target, config.hidden_size) for target in targets)
    return (
        rank * sizes * (len(blocks) or config.depth)
        + _head(config.feature_size, config.num_classes).parameters
    )


def training_flops(config: Config, num_images: int, frozen: int = -1, *, adapters: bool = False) -> int:
    """Return the FLOPs of training on `num_images` images, repeats included: 6 per multiply-accumulate.

    Layers up to the `place` called `frozen` have no backward pass, which is 4 of the 6. With `adapters` the
    matrices of blocks have no gradient; the FLOPs of adapters, about a hundredth, are not counted.

    Paper: Table 6
    """
    parts = _trained(config, frozen)
    backward = _BACKWARD * add(*parts).macs
    if adapters and isinstance(config, ViTConfig):
        backward -= config.num_tokens * sum(block.weight_casts for block in parts[1:])
    return _FLOPS_PER_MAC * (count_macs(config) + backward) * num_images


def computed_flops(
    config: Config, frozen: int = -1, *, adapters: bool = False, teacher: Config | None = None
) -> int:
    """Return the FLOPs per image of a training step as computed: without those that nothing depends on.

    A training's log, its plan and `models.roofline` count these for MFU. `training_flops` counts, as the
    paper does, every token in every block. If only the class token is read, the last block computes no
    other. The backward pass counts as two forward passes, also for the first layer, which needs one;
    products with the zeros around a map do not count. A teacher has a forward pass. At 224 pixels torch's
    count is 0.909 (R+Ti/16), 0.989 to 1 (ViT and axial) and 1 to 1.04 (ResNets) of this; at 64, where
    borders weigh more, up to 1.12.
    """
    flops = training_flops(config, 1, frozen, adapters=adapters) + (forward_flops(teacher) if teacher else 0)
    if not isinstance(config, ViTConfig) or not skips_unused_tokens(config):
        return flops
    width, spared = config.hidden_size, config.num_tokens - 1
    layers = 3 if config.mlp == "swiglu" else 2
    linear = width * width + layers * width * config.mlp_size  # the output, the MLP
    passes = 1 + _BACKWARD * (frozen < config.depth)
    each = passes * (linear + 2 * config.num_tokens * width) - adapters * linear  # and the attention
    return flops - _FLOPS_PER_MAC * spared * each


def forward_flops(config: Config) -> int:
    """Return the FLOPs of one image in a network that is not trained, as computed."""
    all_but_head = 2**30
    backward = _BACKWARD * add(*_trained(config, all_but_head)).macs
    return computed_flops(config, all_but_head) - _FLOPS_PER_MAC * backward


def training_memory_bytes(
    config: Config,
    micro_batch: int,
    precision: Literal["float32", "tf32", "bf16", "float64"],
    optimizer_slots: int,
    averaging: bool,
    checkpoint_blocks: Recomputed = 0,
    frozen: int = -1,
) -> int:
    """Estimate the device memory of one training step with `micro_batch` images.

    Included are weights, gradients, `optimizer_slots` numbers per weight (SGD with momentum 1, Adam 2),
    one averaged copy, and what the forward pass keeps for the backward pass; of parts that
    `checkpoint_blocks` recomputes, the input, and the inside of the largest part. `bf16` is autocast over
    float32 weights, as on a GPU, which keeps norms in float32. Fused attention is assumed, which keeps no
    [N, N] matrix. Not included are the framework's context, workspaces and fragmentation. Layers up to the
    `place` called `frozen` count with their weights, and the inside of the largest block while it
    computes.
    """
    trained = _trained(config, frozen)
    whole, inside = add(*trained), _recomputed(config, trained[1:], checkpoint_blocks)
    largest = max([Cost(), *inside], key=lambda part: _kept_bytes(part, micro_batch, precision))
    less = Cost(*(-number for number in add(*inside)))
    # At most as much as without recomputing: later blocks are freed when a block is recomputed.
    kept = min(
        (add(whole, less, Cost(wide=-less.boundary), largest), whole),
        key=lambda cost: _kept_bytes(cost, micro_batch, precision),
    )
    wide, _ = _WIDTHS[precision]
    weights = count_parameters(config) + (1 + optimizer_slots + averaging) * count_trained(config, frozen)
    untrained = _network(config)[1] if frozen >= 0 else []  # one at a time, nothing is kept yet
    once = _kept_bytes(kept, 0, precision)
    an_image = max(
        _kept_bytes(part, 1, precision) - _kept_bytes(part, 0, precision) for part in (kept, *untrained)
    )
    return wide * weights + once + micro_batch * an_image


def converted_bytes(
    config: Config,
    precision: Literal["float32", "tf32", "bf16", "float64"],
    checkpoint_blocks: Recomputed = 0,
    *,
    gathers_bf16: bool = False,
    frozen: int = -1,
) -> int:
    """Return the bf16 copies of weights, kept for the backward pass, within `training_memory_bytes`.

    They are of full weights even if weights are sharded, except linear layers of blocks that are gathered in
    bf16 (`gathers_bf16`), and gathered again in the backward pass.
    """
    ends, *blocks = _trained(config, frozen)
    inside = _recomputed(config, blocks, checkpoint_blocks)
    if gathers_bf16:
        blocks, inside = ([part._replace(weight_casts=0) for part in parts] for parts in (blocks, inside))
    once, again = ([_kept_bytes(part, 0, precision) for part in parts] for parts in (blocks, inside))
    return _kept_bytes(ends, 0, precision) + sum(once) - sum(again) + max([0, *again])


def _recomputed(config: Config, blocks: Sequence[Cost], checkpoint_blocks: Recomputed) -> list[Cost]:
    """Return the cost of each recomputed part of a network's last blocks."""
    if checkpoint_blocks != "attention":
        return [block for index, block in enumerate(blocks) if is_checkpointed(index, checkpoint_blocks)]
    if not isinstance(config, ViTConfig):
        return []
    lengths = config.grid if isinstance(config, AxialConfig) else (config.num_tokens,)
    return [_attention(config, length) for length in lengths] * min(len(blocks), config.depth)


def recomputed_share(config: Config, checkpoint_blocks: Recomputed) -> float:
    """Return the share of the forward pass that is recomputed in the backward pass."""
    parts = _recomputed(config, _network(config)[1], checkpoint_blocks)
    again = add(Cost(), *parts).macs
    if checkpoint_blocks == "attention" and isinstance(config, ViTConfig):
        again -= (
            len(parts) * config.num_tokens * config.hidden_size**2
        )  # its last layer, whose output is known
    return again / count_macs(config)


def _kept_bytes(
    cost: Cost, micro_batch: int, precision: Literal["float32", "tf32", "bf16", "float64"]
) -> int:
    """Return what autograd keeps between forward and backward, besides the weights."""
    wide, narrow = _WIDTHS[precision]
    mixed = narrow != wide
    per_image = wide * cost.wide + narrow * (cost.narrow + mixed * cost.casts) + cost.masks
    once = (wide + narrow) * cost.standardised + mixed * narrow * cost.weight_casts
    return micro_batch * per_image + once


def block_parameters(config: Config) -> list[int]:
    return [block.parameters for block in _network(config)[1]]


def _total(config: Config) -> Cost:
    ends, blocks = _network(config)
    return add(ends, *blocks)


@cache
def _network(config: Config) -> tuple[Cost, list[Cost]]:
    """Return the cost of everything before and after the blocks, and of each block."""
    if isinstance(config, ViTConfig):
        return _transformer(config)
    root, units = _backbone(config)
    last = -(-config.image_size // 2 ** (len(config.stage_depths) + 1))
    end = [norm(last**2, config.feature_size, config.num_groups), relu(last**2, config.feature_size)]
    return add(
        root, *(end if config.version == "v2" else []), _head(config.feature_size, config.num_classes)
    ), units


def _trained(config: Config, frozen: int) -> list[Cost]:
    ends, blocks = _network(config)
    if frozen < 0:
        return [ends, *blocks]
    head, depth = _head(config.feature_size, config.num_classes), 0
    if isinstance(config, ViTConfig):
        depth = config.depth
        head = add(head, *([] if frozen > depth + 1 else [_attention_pool(config)]))
        head = add(head, *([] if frozen > depth else [_last_norm(config)]))
    return [head, *blocks[len(blocks) - max(0, depth - frozen) :]]


def _transformer(config: ViTConfig) -> tuple[Cost, list[Cost]]:
    width = config.hidden_size
    patches, patch = config.grid[0] * config.grid[1], config.map_channels * config.patch_size**2
    embedding = add(
        product(patches * patch * width),
        Cost(parameters=(patch + config.patch_bias) * width, weight_casts=patch * width),
        norm(config.num_tokens, width, groups=config.num_tokens) if config.norm_pre else Cost(),
    )
    map_values = Cost(narrow=config.map_channels * config.map_size**2)
    before, units = _backbone(config) if isinstance(config, HybridConfig) else (Cost(), [])
    if isinstance(config, MaskedPatchConfig):
        loss = Cost(wide=patches * config.patch_outputs)
        head = add(
            linear(patches, width, config.patch_outputs, is_head=True), loss, Cost(parameters=width)
        )  # the mask embedding
    else:
        head = add(
            _attention_pool(config),
            linear(1, config.pooled_size, config.representation_size, is_head=True),
            _head(config.feature_size, config.num_classes),
        )
    ends = add(before, map_values, embedding, _positions(config), _last_norm(config), head)
    lengths = config.grid if isinstance(config, AxialConfig) else (config.num_tokens,)
    boundary = Cost(boundary=config.num_tokens * width)
    block = add(*(_encoder_block(config, length) for length in lengths), boundary)
    return ends, units + config.depth * [block]


def _last_norm(config: ViTConfig) -> Cost:
    """Return the cost of the last norm, of which the head reads one token."""
    count, width = config.num_tokens, config.hidden_size
    normed = count if config.norm_at == "tokens" else 1
    return add(norm(normed, width, groups=normed), Cost(wide=count * width))


def _head(inputs: int, outputs: int) -> Cost:
    """Return the cost of the last layer and the loss, which keeps the logits."""
    return add(linear(1, inputs, outputs, is_head=True), Cost(wide=outputs))


def _positions(config: ViTConfig) -> Cost:
    """Return the cost of the class token and the tables added to tokens, with their dropout."""
    width, tables = config.hidden_size, config.depth if config.position_at == "every_layer" else 1
    learned = config.num_tokens - config.prefix_tokens + config.prefix_rows
    sizes = {"learned": learned * width, "2d": sum(config.grid) * (width // 2)}
    parameters = config.prefix_tokens * width + tables * sizes.get(config.position_embedding, 0)
    return Cost(parameters=parameters, masks=config.num_tokens * width * (config.dropout > 0))


def _encoder_block(config: ViTConfig, length: int) -> Cost:
    count, width, mlp = config.num_tokens, config.hidden_size, config.mlp_size
    return add(
        norm(count, width, groups=count),
        _attention(config, length)._replace(boundary=0),
        norm(count, width, groups=count),
        _mlp(config, count),
        Cost(masks=(config.dropout > 0) * count * (2 * width + mlp)),
        # a scale keeps what it scales
        Cost(parameters=2 * width, narrow=2 * count * width) if config.layer_scale else Cost(),
    )


def _attention(config: ViTConfig, length: int) -> Cost:
    """Return the cost of attention of every token with `length` tokens, after its norm."""
    count, width = config.num_tokens, config.hidden_size
    return add(
        linear(count, width, 3 * width, bias=False),
        Cost(parameters=width * {"qkv": 3, "qv": 2, "none": 0}[config.qkv_bias]),
        product(2 * count * length * width),
        # query, key, value; the log-sum of each head
        Cost(narrow=3 * count * width, wide=count * config.num_heads, boundary=count * width),
        _relative(config),
        linear(count, width, width),
    )


def _mlp(config: ViTConfig, count: int) -> Cost:
    width, mlp, gated = config.hidden_size, config.mlp_size, config.mlp == "swiglu"
    return add(
        linear(count, width, mlp * (1 + gated)),
        # GELU keeps its input; SwiGLU also the SiLU of its gate; the sigmoid of a quick GELU is kept
        Cost(narrow=count * mlp * (3 if gated else 2 if config.gelu == "quick" else 1)),
        norm(count, mlp, groups=count) if config.mlp_norm else Cost(),
        linear(count, mlp, width),
    )


def _attention_pool(config: ViTConfig) -> Cost:
    if config.classifier != "attention":
        return Cost()
    count, width = config.num_tokens, config.hidden_size
    return add(
        Cost(parameters=width, narrow=2 * count * width),  # the probe; keys and values
        linear(1, width, width),
        linear(count, width, 2 * width),
        product(2 * count * width),
        linear(1, width, width),
        norm(1, width, groups=1),
        _mlp(config, 1),
    )


def _relative(config: ViTConfig) -> Cost:
    """Return the cost of relative positions: another product; plain attention keeps its matrices."""
    if config.position_embedding == "relative_bias":
        rows, columns = config.grid
        offsets = (2 * rows - 1) * (2 * columns - 1) + 3
        matrices = config.num_heads * config.num_tokens**2
        copied = config.num_tokens * config.hidden_size  # the scaled query
        return Cost(parameters=offsets * config.num_heads, narrow=matrices + copied)
    if config.position_embedding != "relative":
        return Cost()
    count, offsets, heads = config.num_tokens, 2 * config.num_tokens - 1, config.num_heads
    kept = Cost(
        # Weights; logits by offset; query, key, value, copied.
        narrow=heads * count**2 + heads * count * offsets + 4 * count * config.hidden_size,
    )
    weights = Cost(parameters=offsets * config.hidden_size, weight_casts=offsets * config.hidden_size)
    return add(product(count * offsets * config.hidden_size), kept, weights)


def _backbone(config: HybridConfig | ResNetConfig) -> tuple[Cost, list[Cost]]:
    version = config.version if isinstance(config, ResNetConfig) else "v1"
    half, width = -(-config.image_size // 2), config.width
    root = [
        convolution(3, width, 7, 2, config.image_size, same=version == "v1", first=True),
        Cost(masks=8 * width * (-(-half // 2)) ** 2),  # where each maximum was
    ]
    if version == "v1":
        padded = (half + 1) ** 2 if half % 2 == 0 else 0  # an odd map needs no copy
        root += [norm(half**2, width, config.num_groups), relu(half**2, width), Cost(wide=width * padded)]
    else:
        root.append(Cost(wide=width * (half + 2) ** 2))
    return add(*root), [_unit(shape, config, version) for stage in stages(config) for shape in stage]


def _unit(shape: UnitShape, config: HybridConfig | ResNetConfig, version: str) -> Cost:
    inputs, middle, outputs, groups = shape.inputs, shape.middle, shape.outputs, config.num_groups
    before, after = shape.side**2, (-(-shape.side // shape.stride)) ** 2
    same = version == "v1"
    if isinstance(config, AxialResNetConfig):
        inner = _axial_attentions(shape, config)
    else:
        inner = convolution(middle, middle, 3, shape.stride, shape.side, same=same, first=False)
        inner = add(inner, norm(after, middle, groups))
    parts = [
        convolution(inputs, middle, 1, 1, shape.side, same=same, first=False),
        norm(before, middle, groups),
        relu(before, middle),
        inner,
        relu(after, middle),
        convolution(middle, outputs, 1, 1, -(-shape.side // shape.stride), same=same, first=False),
    ]
    around = (after, outputs) if version == "v1" else (before, inputs)
    parts += [norm(*around, groups), relu(*around), Cost(boundary=before * inputs)]
    if shape.projected:
        parts.append(convolution(inputs, outputs, 1, shape.stride, shape.side, same=same, first=False))
        parts += [norm(after, outputs, groups)] if version == "v1" else []
    return add(*parts)


def _axial_attentions(shape: UnitShape, config: AxialResNetConfig) -> Cost:
    """Return the cost of row, then column attention, with relative positions, on `shape.middle` channels."""
    count, width, length = shape.side**2, shape.middle, shape.side
    embedding = (2 * length - 1) * 2 * (width // config.num_heads)
    one = add(
        linear(count, width, 2 * width, bias=False),
        norm(count, 2 * width, shape.side * config.num_groups),
        # Logits of query with key, query with position and key with position; then values, and those of
        # positions.
        product(count * length * (3 * width // 2 + 2 * width)),
        Cost(parameters=embedding, narrow=3 * count * width + 2 * config.num_heads * count * length),
        norm(count, width, shape.side * config.num_groups),
    )
    return add(one, one)


# Dense peak of the matrix units in TFLOP/s, for bf16 summed in float32; a sparse peak is twice that. The
# device is what torch sees: one of the two halves of an MI250(X). float32 has no entry and no MFU. Each entry
# names its source; not all have been checked against it again.
PEAK_TFLOPS = {
    "GB200": 2500.0,  # NVIDIA GB200 NVL72 data sheet, 360 PFLOP/s sparse of 72
    "B200": 2250.0,  # NVIDIA HGX B200 data sheet
    "GH200": 989.0,  # NVIDIA GH200 data sheet, 1,979 sparse
    "H200": 989.0,  # NVIDIA H200 data sheet (SXM), 1,979 sparse
    "H200 NVL": 835.5,  # the same, 1,671 sparse
    "H100": 989.0,  # NVIDIA H100 data sheet (SXM), 1,979 sparse
    "H100 NVL": 835.5,  # the same, 1,671 sparse
    "H100 PCIe": 756.0,  # the same, 1,513 sparse
    "A100": 312.0,  # NVIDIA A100 data sheet, SXM and PCIe
    "A100 40GB": 312.0,
    "A40": 149.7,  # NVIDIA A40 data sheet
    "A30": 165.0,  # NVIDIA A30 data sheet
    "A10": 125.0,  # NVIDIA A10 data sheet; not the A10G of Amazon
    "RTX A6000": 154.8,  # NVIDIA GA102 white paper, appendix A
    "L40S": 362.0,  # NVIDIA L40S data sheet, 733 sparse
    "L40": 181.0,  # NVIDIA L40 data sheet, 362 sparse
    "L4": 121.0,  # NVIDIA L4 data sheet, 242 sparse
    "RTX 6000 Ada Generation": 364.2,  # NVIDIA Ada white paper, appendix A
    "GeForce RTX 5090": 209.5,  # NVIDIA RTX Blackwell white paper, appendix A
    "GeForce RTX 4090": 165.2,  # NVIDIA Ada white paper, appendix A
    "GeForce RTX 3090": 71.2,  # NVIDIA GA102 white paper, appendix A
    "V100": 125.0,  # NVIDIA V100 data sheet, float16: it has no bf16
    "MI325X": 1307.4,  # AMD Instinct MI325X data sheet
    "MI300X": 1307.4,  # AMD Instinct MI300X data sheet
    "MI300A": 980.6,  # AMD Instinct MI300A data sheet
    "MI250X": 191.5,  # AMD Instinct MI250X data sheet, 383.0 for its two halves
    "MI250": 181.0,  # AMD Instinct MI250 data sheet, 362.1 for its two halves
    "MI210": 181.0,  # AMD Instinct MI210 data sheet
}
NO_BF16 = ("V100",)
# Names that contain a row's but have another rate, or are a part, as a virtual GPU such as A10-4Q;
# MI250X/MI250 is ambiguous.
_ANOTHER = re.compile(
    r"\b(Ti|SUPER|D|Laptop|Max-Q|MIG|GRID|VF|HBM2e|16GB|64GB|MI250X/MI250)\b|-\d+[A-Z]\b", re.I
)


def bf16_tflops(device_name: str) -> float:
    """Return a device's dense bf16 peak in TFLOP/s; 0 if unknown (see `known_device`) or without bf16."""
    name = known_device(device_name)
    return PEAK_TFLOPS[name] if name and name not in NO_BF16 else 0.0


# Compiling the layers of a ViT takes at most so long on a GPU (on CPUs 18 to 29 s:
# benchmarks/results/kernels.md), and a step then takes less time by this share at least: published are 1.15
# to 3 times the rate. The rate without is that of the plan.
COMPILE_SECONDS, _SAVED, _SHARE_OF_PEAK = 90.0, 0.15, 0.4


def compile_rule(device_name: str, flops: float) -> bool:
    """Return whether compiling saves more time than it takes on a GPU that computes `flops` in all."""
    peak = 1e12 * (bf16_tflops(device_name) or max(PEAK_TFLOPS.values()))
    return _SAVED * flops / (_SHARE_OF_PEAK * peak) > COMPILE_SECONDS


def known_device(device_name: str) -> str:
    """Return the `PEAK_TFLOPS` row for a driver's or common device name, in any case; "" if unknown.

    The longest row name whose words all occur in the name wins.
    """
    found = [name for name in PEAK_TFLOPS if _words(name) <= _words(device_name)]
    return "" if _ANOTHER.search(device_name) else max(found, key=len, default="")


def _words(device_name: str) -> set[str]:
    return set(re.findall("[a-z0-9]+", device_name.lower())) - {"geforce"}
