"""Time of a step on a GPU that nobody has at hand: the FLOPs and bytes of each kernel, and the rates that
GPUs reach. Imports no torch.

A kernel takes as long as its products or its bytes, whichever is longer (Williams et al. 2009). Nothing here
was fitted to the runs that `benchmarks/roofline.py` compares it with.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from vitctl.errors import RecipeError
from vitctl.models.flops import PEAK_TFLOPS, count_parameters, training_flops
from vitctl.models.variants import AxialConfig, Config, HybridConfig, ViTConfig, skips_unused_tokens
from vitctl.system.text import one_line

# Memory in GiB (data sheets say GB for it) and its bandwidth in GB/s: the data sheets of `PEAK_TFLOPS`.
MEMORY = {
    "H200": (141, 4800.0),
    "H100": (80, 3350.0),
    "H100 PCIe": (80, 2000.0),
    "A100": (80, 2039.0),  # SXM; the one with 40 GB has 1,555 GB/s
    "L40S": (48, 864.0),
    "L4": (24, 300.0),
    "GeForce RTX 5090": (32, 1792.0),
    "GeForce RTX 4090": (24, 1008.0),
    "GeForce RTX 3090": (24, 936.0),
    "V100": (32, 900.0),
}
# Shares of the data sheet's rates that kernels reach. Matrix products: between the best shapes on A100 (267.9
# of 312 TFLOP/s) and H100 (792.1 of 989) in the table of the book Machine Learning Engineering (stas00).
# Attention: FlashAttention-2's figures for heads of 64 channels and short sequences. Bytes: as copies reach.
REACHED = {"matrices": 0.83, "attention": 0.45}
REACHED_BYTES = 0.9
_NARROW, _WIDE = 2, 4  # bytes of a number in bf16, and of one in the residual stream, a weight or a gradient
Kind = Literal["matrices", "attention", "element-wise", "optimizer"]


class Kernel(NamedTuple):
    """One kernel of a step: its kind, FLOPs, bytes read and written, and how often it runs."""

    kind: Kind
    flops: float
    bytes: float
    times: int = 1


@dataclass(frozen=True)
class Estimate:
    """Expected time of one step of `images` images.

    `seconds` holds that of each kind of kernel. `mfu` counts the FLOPs as the paper does, and is 0 for a
    forward pass.
    """

    images: int
    seconds: dict[Kind, float]
    mfu: float

    @property
    def images_per_second(self) -> float:
        """Images per second of one GPU that never waits."""
        return self.images / sum(self.seconds.values())


def find_device(name: str) -> str:
    """Return the row of `MEMORY` that a name means, in any case, with or without NVIDIA and GeForce.

    Raises:
        RecipeError: there is none.
    """
    asked = _brandless(name)
    row = next((row for row in MEMORY if _brandless(row) == asked), None)
    if row is None:
        raise RecipeError(f"no GPU is known as '{one_line(name)}'; choose one of: {', '.join(MEMORY)}")
    return row


def _brandless(name: str) -> str:
    return name.strip().lower().removeprefix("nvidia ").removeprefix("geforce ")


def kernels(config: ViTConfig, images: int, *, training: bool = True, compiled: bool = True) -> list[Kernel]:
    """List the kernels of a step in bf16 autocast with fused attention and a fused AdamW.

    Args:
        config: of a network without convolutions.
        images: per step.
        training: with the backward pass and the update; otherwise the forward pass alone.
        compiled: element-wise operations next to each other are one kernel, as torch.compile makes them;
            otherwise each reads and writes memory.
    """
    return [*_kernels(config, images, training, compiled)]


def _kernels(config: ViTConfig, images: int, training: bool, compiled: bool) -> Iterator[Kernel]:
    width, depth, mlp = config.hidden_size, config.depth, config.mlp_size
    tokens, pixels = images * config.num_tokens, images * 3 * config.image_size**2
    patches, passes = images * config.grid[0] * config.grid[1], 3 if training else 1
    fc1 = mlp * (2 if config.mlp == "swiglu" else 1)

    def matrix(count: int, inputs: int, outputs: int, times: int) -> Kernel:
        moved = count * (inputs + outputs) + inputs * outputs
        return Kernel("matrices", 2.0 * count * inputs * outputs, _NARROW * moved, times)

    yield Kernel("element-wise", 0, pixels * (1 + _WIDE))  # bytes to normalised numbers
    yield matrix(patches, 3 * config.patch_size**2, width, 2 if training else 1)  # an image has no gradient
    yield matrix(tokens, width, 3 * width, passes * depth)
    yield matrix(images, config.feature_size, config.num_classes, passes)
    # Where only the class token is read, the last block computes no other one from its attention on.
    last = int(skips_unused_tokens(config))
    for queries, times in ((tokens, depth - last), (images, last)):
        yield matrix(queries, width, width, passes * times)
        yield matrix(queries, width, fc1, passes * times)
        yield matrix(queries, mlp, width, passes * times)
        attended = 2.0 * queries * config.num_tokens * width
        yield Kernel("attention", 2 * attended, _NARROW * 2 * (queries + tokens) * width, times)
        # Norms and residual sums, two of each. Compiled: read a branch, read and write the stream, write the
        # next input. Otherwise the norm, its conversion and the sum are kernels. Then the activation.
        streams = 2 * queries * width * (2 * _NARROW + 2 * _WIDE) * (1 if compiled else 2)
        yield Kernel("element-wise", 0, streams + _NARROW * queries * (fc1 + mlp), times)
        if training:
            # The matrix of attention is computed again.
            yield Kernel("attention", 5 * attended, _NARROW * 4 * (queries + tokens) * width, times)
            streams = 2 * queries * width * (2 * _NARROW + 3 * _WIDE) * (1 if compiled else 2)
            biases = _NARROW * queries * (5 * width + fc1)
            yield Kernel("element-wise", 0, streams + biases + _NARROW * queries * (2 * fc1 + mlp), times)
    if training:
        # AdamW reads weight, gradient and two moments, and writes three of them. The gradient is also read
        # for its norm and set to zero, and the weights are converted.
        update = 7 * _WIDE + 2 * _WIDE + _WIDE + _NARROW
        yield Kernel("optimizer", 0, float(update) * count_parameters(config))


def estimate(
    config: Config, device: str, images: int, *, training: bool = True, compiled: bool = True
) -> Estimate:
    """Estimate the time of a step that never waits for data or other GPUs.

    Args:
        config: of a network of matrix products: `ViTConfig`, not a ResNet, hybrid or axial one.
        device: a row of `MEMORY`.
        images: per step.
        training, compiled: as of `kernels`.

    Raises:
        RecipeError: the device has no row, or the network has convolutions.
    """
    device = find_device(device)
    if not isinstance(config, ViTConfig) or isinstance(config, AxialConfig | HybridConfig):
        raise RecipeError(
            "the time of ResNets, hybrids and axial networks cannot be estimated; give a ViT, such as B/16"
        )
    peak, bandwidth = PEAK_TFLOPS[device] * 1e12, MEMORY[device][1] * 1e9
    seconds: dict[Kind, float] = {}
    for kernel in kernels(config, images, training=training, compiled=compiled):
        computing = kernel.flops / (peak * REACHED.get(kernel.kind, 1.0))
        taken = kernel.times * max(computing, kernel.bytes / (bandwidth * REACHED_BYTES))
        seconds[kernel.kind] = seconds.get(kernel.kind, 0.0) + taken
    mfu = training_flops(config, images) / (peak * sum(seconds.values())) if training else 0.0
    return Estimate(images, seconds, mfu)
