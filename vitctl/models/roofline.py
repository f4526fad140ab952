"""Estimated step time on a GPU that is not at hand, from each kernel's FLOPs and bytes and the GPU's rates.

Imports no torch.

A kernel takes as long as its products or its bytes, whichever is longer (Williams et al. 2009); a step takes
at least as long as the host needs to start its kernels. `WIDEST` and `NARROW` were computed from half of the
rates that `benchmarks/roofline.py` compares it with; it names two other numbers, chosen after they were seen.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from vitctl.errors import RecipeError
from vitctl.models.flops import PEAK_TFLOPS, computed_flops, count_parameters, known_device
from vitctl.models.variants import (
    AxialConfig,
    Config,
    HybridConfig,
    MaskedPatchConfig,
    ViTConfig,
    skips_unused_tokens,
)
from vitctl.system.text import one_line


class Gpu(NamedTuple):
    """A GPU's memory and rates, in addition to its peak in `PEAK_TFLOPS`.

    memory: GiB that torch reports, the least of several drivers; ECC and the driver keep the rest of the data
    sheet's number. bandwidth: GB/s, by the data sheet. matrices, attention, backward: shares of the peak
    that matrix products reach, and fused attention in its forward and in its backward pass. plain: share of
    the bandwidth that the kernels of plain attention reach.
    """

    memory: float
    bandwidth: float
    matrices: float
    attention: float
    backward: float
    plain: float


# Matrices: the best shapes on A100 (267.9 of 312 TFLOP/s) and H100 (792.1 of 989) in the table of the book
# Machine Learning Engineering (stas00); 0.83, between the two, is an estimate. A 4090's clocks exceed those
# of its data sheet: attention alone has reached 173 of 165.2 (below), so products are assumed to reach it.
# Attention, for heads of 64 channels and 512 tokens without a mask:
# - A100: 0.45 for both passes together, FlashAttention-2 (arXiv 2307.08691); divided as its best shapes are,
#   0.73 forward and 0.63 backward.
# - H100: FlashAttention-2 reached 252 TFLOP/s forward and 190 backward (Dao-AILab/flash-attention#2688,
#   assumed to be on an H100).
#   torch 2.11 prefers cuDNN there, if newer than 9.15; it was at least 1.15 times as fast (pytorch#122510).
#   252 and 190 times this, of 989, are estimates. An H200 has the same chip.
# - RTX 3090: those of an RTX A5000, also a GA102: 84.1 and 52.9 of 111.1 (gpu-mode/ring-attention#10).
# - RTX 4090: 150.9 forward, 173 for 16,384 tokens (ROCm/flash-attention#27). Backward, and both passes of
#   L40S, L4 and RTX 5090: estimates from the rows above.
# - V100, which has no FlashAttention: an estimate.
# Plain attention in the same measurements, forward: 43.2 (H100), 14.5 (A5000) and 20.2 TFLOP/s (4090), where
# 256 FLOPs move 8 bytes of the matrix and, with 512 tokens, 3 of queries, keys, values, outputs and their
# copies. Other rows are estimates; those of an H200 give the times of an H100.
GPUS = {
    "H200": Gpu(139.7, 4800.0, 0.80, 0.29, 0.22, 0.38),
    "H100": Gpu(79.1, 3350.0, 0.80, 0.29, 0.22, 0.55),
    "H100 PCIe": Gpu(79.1, 2000.0, 0.80, 0.29, 0.22, 0.83),
    "A100": Gpu(79.1, 2039.0, 0.86, 0.50, 0.43, 0.70),  # SXM, 80 GB
    "A100 40GB": Gpu(39.4, 1555.0, 0.86, 0.50, 0.43, 0.70),
    "L40S": Gpu(44.3, 864.0, 0.83, 0.76, 0.48, 0.83),
    "L4": Gpu(22.0, 300.0, 0.83, 0.76, 0.48, 0.83),
    "GeForce RTX 5090": Gpu(31.3, 1792.0, 0.83, 0.76, 0.48, 0.83),
    "GeForce RTX 4090": Gpu(23.5, 1008.0, 1.0, 0.91, 0.57, 0.86),
    "GeForce RTX 3090": Gpu(23.6, 936.0, 0.83, 0.76, 0.48, 0.81),
    "V100": Gpu(31.7, 900.0, 0.83, 0.30, 0.20, 0.70),
}
REACHED_BYTES = 0.9  # of the bandwidth, as copies reach
# Seconds for the host to start a kernel: 4 to 6 microseconds for the driver, and about as much for torch and
# Python if they call each operation. Both are estimates.
STARTING = {"compiled": 5e-6, "eager": 10e-6}
# A product whose weights have a smaller side of S reaches WIDEST / (1 + NARROW / S) of its GPU's share: small
# networks fill a GPU less. Fitted by `benchmarks/roofline.py` to half of timm's rates, tested on the others.
WIDEST, NARROW = 1.15, 100.0
# The estimate of S/16 over the only published rate of a training of that size on an H100; at widths up to
# SMALL a plan says so.
OVER_PUBLISHED, SMALL = {True: 1.6, False: 4.4}, 384  # compiled or not
# Launches of an update: norm, clip (two) and the fused optimizer, each on so many tensors at a time.
_UPDATE_OPERATIONS, _TENSORS_AT_ONCE = 4, 36
_NARROW, _WIDE = 2, 4  # bytes per number: bf16; residual stream, weights and gradients
Kind = Literal["matrices", "attention", "backward", "plain", "element-wise", "optimizer", "starting", "again"]


class Kernel(NamedTuple):
    """Kernels of a step: kind, FLOPs, bytes read and written, runs, host launches per run, and the smaller
    side of a product's weights.
    """

    kind: Kind
    flops: float
    bytes: float
    times: int = 1
    started: int = 1
    side: int = 0


@dataclass(frozen=True)
class Step:
    """A step of one GPU in bf16 autocast.

    Args:
        passes: forward passes that its `images` are divided into; one update follows.
        training: with backward passes and the update, otherwise forward passes alone.
        compiled: blocks are compiled, so adjacent element-wise operations are one kernel; otherwise each
            reads and writes memory.
        plain: attention is plain products, as always with relative positions; otherwise fused.
        slots: numbers that the optimizer keeps for each weight.
        shards: processes that share the update; communication between them is not counted.
        again: recomputed share of both passes, assumed to run as fast as they do.
        teacher: of a distillation, a network of matrix products.
    """

    images: int
    passes: int = 1
    training: bool = True
    compiled: bool = True
    plain: bool = False
    slots: int = 2
    averaging: bool = False
    shards: int = 1
    again: float = 0.0
    teacher: Config | None = None


@dataclass(frozen=True)
class Estimate:
    """Expected time of a step.

    `seconds` is by kind of kernel; `starting` is the additional time if the host starts kernels slower than
    the GPU runs them. `mfu` counts FLOPs as a training log does, and is 0 for a forward pass.
    """

    step: Step
    seconds: dict[Kind, float]
    mfu: float

    @property
    def images_per_second(self) -> float:
        """Images per second of one GPU that never waits."""
        return self.step.images / sum(self.seconds.values())


def find_device(name: str) -> str:
    """Return the row of `GPUS` for a device name, see `known_device`; RecipeError if there is none."""
    row = known_device(name)
    if row not in GPUS:
        raise RecipeError(f"no GPU is known as '{one_line(name)}'", fix=f"choose one of: {', '.join(GPUS)}")
    return row


def kernels(config: ViTConfig, step: Step) -> Iterator[Kernel]:
    """Yield the kernels of a step of a network without convolutions."""
    parameters = count_parameters(config)
    for kernel in _pass(config, step, step.images / step.passes):
        yield kernel._replace(times=kernel.times * step.passes)
    if isinstance(step.teacher, ViTConfig):
        # Only the student's blocks are compiled.
        seen = replace(step, training=False, compiled=False, teacher=None)
        yield from kernels(step.teacher, seen)
    if step.training:
        # Gradients are added to those of earlier passes.
        yield Kernel("optimizer", 0, 3 * _WIDE * parameters, step.passes - 1, 12 * config.depth)
        # Read: weight, gradient and the optimizer's numbers; all but the gradient are written. The gradient
        # is also read for its norm, and clipped. An average is read and written, and the weight read again.
        moved = 3 + 2 * step.slots + 3 + 3 * step.averaging
        launches = _UPDATE_OPERATIONS * math.ceil((12 * config.depth + 8) / _TENSORS_AT_ONCE)
        yield Kernel("optimizer", 0, moved * _WIDE * parameters / step.shards, 1, launches)


def _pass(config: ViTConfig, step: Step, images: float) -> Iterator[Kernel]:
    """Yield the kernels of a forward pass and its backward pass."""
    width, depth, mlp, training = config.hidden_size, config.depth, config.mlp_size, step.training
    tokens, patches = images * config.num_tokens, images * config.grid[0] * config.grid[1]
    products, directions = (3, 2) if training else (1, 1)
    fc1 = mlp * (2 if config.mlp == "swiglu" else 1)
    drops = training and config.dropout > 0
    # Without compilation, stochastic depth and scales each read and write a branch.
    paths, scales = training and config.drop_path > 0, config.layer_scale > 0
    touched = 0 if step.compiled else 2 * (2 * _NARROW) * width * (paths + scales)

    def matrix(count: float, inputs: int, outputs: int, times: int = products) -> Kernel:
        moved = count * (inputs + outputs) + inputs * outputs
        flops, side = 2.0 * count * inputs * outputs, min(inputs, outputs)
        return Kernel("matrices", flops, _NARROW * moved, times, side=side)

    # Bytes to normalised numbers; weights to bf16, and their gradients back.
    yield Kernel("element-wise", 0, images * 3 * config.image_size**2 * (1 + _WIDE))
    yield Kernel("element-wise", 0, (_NARROW + _WIDE) * count_parameters(config), directions, 8 * depth)
    yield matrix(patches, 3 * config.patch_size**2, width, directions)  # an image has no gradient
    if drops:
        yield Kernel("element-wise", 0, tokens * width * (2 * _WIDE + 1), directions)
    yield matrix(tokens, width, 3 * width, products * depth)
    yield from (matrix(*sizes) for sizes in _head(config, images) if all(sizes))
    # If only the class token is read, the last block computes no other from its attention on.
    last = int(skips_unused_tokens(config))
    for queries, times in ((tokens, depth - last), (images, last)):
        yield matrix(queries, width, width, products * times)
        yield matrix(queries, width, fc1, products * times)
        yield matrix(queries, mlp, width, products * times)
        for kernel in _attention(config, step, queries, tokens):
            yield kernel._replace(times=kernel.times * times)
        # Dropout writes a mask, and reads it in the backward pass; not compiled, it is a kernel.
        dropped = drops * (2 * width + mlp) * (1 if step.compiled else 1 + 2 * _NARROW)
        # Norms and residual sums, two of each. Compiled: read a branch, read and write the stream, write the
        # next input. Otherwise the norm, its conversion and the sum are kernels. Then the activation.
        streams = 2 * width * (2 * _NARROW + 2 * _WIDE) * (1 if step.compiled else 2)
        moved = queries * (streams + dropped + touched + _NARROW * (fc1 + mlp))
        yield Kernel(
            "element-wise", 0, moved, times, 3 if step.compiled else 7 + 3 * drops + 13 * paths + 2 * scales
        )
        if training:
            # The gradients of query, key and value are put together; timm's, by whose rates this is fitted,
            # are also copied where they are not compiled.
            streams = 2 * width * (2 * _NARROW + 3 * _WIDE + 3 * _NARROW) * (1 if step.compiled else 2)
            moved = queries * (streams + dropped + touched + _NARROW * (5 * width + fc1 + 2 * fc1 + mlp))
            yield Kernel(
                "element-wise",
                0,
                moved,
                times,
                10 if step.compiled else 16 + 3 * drops + 2 * paths + 6 * scales,
            )


def _head(config: ViTConfig, images: float) -> list[tuple[float, int, int]]:
    """Return rows, inputs and outputs of each product after the blocks."""
    if isinstance(config, MaskedPatchConfig):
        return [(images * config.grid[0] * config.grid[1], config.hidden_size, config.patch_outputs)]
    width, pooled = config.hidden_size, images * (config.classifier == "attention")
    mlp = config.mlp_size * (3 if config.mlp == "swiglu" else 2)
    return [
        (pooled * config.num_tokens, width, 2 * width),  # keys and values
        (pooled, width, 2 * width + 2 * config.num_tokens + mlp),  # query, output, attention, MLP
        (images, config.pooled_size, config.representation_size),
        (images, config.feature_size, config.num_classes),
    ]


def _attention(config: ViTConfig, step: Step, queries: float, tokens: float) -> Iterator[Kernel]:
    """Yield the kernels of attention in one block."""
    width, pairs, products = config.hidden_size, queries * config.num_tokens, 3 if step.training else 1
    product, moved = 2.0 * pairs * width, _NARROW * (queries + tokens) * width
    matrix, position = config.num_heads * pairs, config.position_embedding
    if not (step.plain or position.startswith("relative")):
        yield Kernel("attention", 2 * product, 2 * moved)
        if step.training:  # the matrix is recomputed
            yield Kernel("backward", 5 * product, 4 * moved, 1, 3)
        return
    yield Kernel("plain", product, moved + _NARROW * matrix, 2 * products)
    # Five copies by head, of which one is scaled, and two in the backward pass.
    yield Kernel("plain", 0, moved, 7 if step.training else 5)
    # The softmax and its backward pass read and write bf16. Not compiled, they are kernels of float32 between
    # conversions. Relative positions are added before it.
    touched = 4 + step.training * 6 if step.compiled else 20 + step.training * 24
    touched += position.startswith("relative") * (1 + step.training) * 2 * _NARROW
    yield Kernel("plain", 0, matrix * touched, 1, 6 if step.training else 3)
    if position == "relative":  # a product of each query with each offset, whose rows are then shifted
        offsets = queries * (2 * config.num_tokens - 1)
        yield Kernel("plain", 2.0 * offsets * width, 3 * _NARROW * offsets * config.num_heads, products)


def estimate(config: Config, device: str, step: Step) -> Estimate:
    """Estimate the time of a step that never waits for data or other GPUs, for a row of `GPUS`.

    Raises:
        RecipeError: the device has no row, or a network has convolutions.
    """
    device = find_device(device)
    networks = config, step.teacher or config
    if not isinstance(config, ViTConfig) or any(
        not isinstance(one, ViTConfig) or isinstance(one, AxialConfig | HybridConfig) for one in networks
    ):
        raise RecipeError(
            "the time of ResNets, hybrids and axial networks cannot be estimated",
            fix="give a ViT, such as B/16",
        )
    gpu, peak = GPUS[device], PEAK_TFLOPS[device] * 1e12
    shares, reached = {"attention": gpu.attention, "backward": gpu.backward}, {"plain": gpu.plain}
    seconds: dict[Kind, float] = {}
    started = 0.0
    for kernel in kernels(config, step):
        computing = kernel.flops / (peak * shares.get(kernel.kind, gpu.matrices))
        computing *= (1 + NARROW / kernel.side) / WIDEST if kernel.side else 1
        moving = kernel.bytes / (gpu.bandwidth * 1e9 * reached.get(kernel.kind, REACHED_BYTES))
        seconds[kernel.kind] = seconds.get(kernel.kind, 0.0) + kernel.times * (max(computing, moving))
        started += kernel.times * kernel.started * STARTING["compiled" if step.compiled else "eager"]
    seconds["starting"] = max(0.0, started - sum(seconds.values()))
    seconds["again"] = step.again * (sum(seconds.values()) - seconds.get("optimizer", 0.0))
    flops = step.training * step.images * computed_flops(config, teacher=step.teacher)
    return Estimate(step, seconds, flops / (peak * sum(seconds.values())))
