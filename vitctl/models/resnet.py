"""The paper's ResNets: GroupNorm and weight-standardised convolutions, in two numerically exact versions."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitctl.models.blocks import Block, Generator, draw, lecun_normal, plain_norm, run, zero
from vitctl.models.kernels import Head
from vitctl.models.variants import HybridConfig, Recomputed, ResNetConfig, UnitShape, is_checkpointed, stages


@dataclass(frozen=True)
class Numerics:
    """Numerical details in which the published implementations differ.

    `std_eps` is added to a kernel's standard deviation, `variance_eps` to its variance. SAME padding is
    TensorFlow's: an odd pixel goes to the right and the bottom; without it padding is symmetric.
    """

    norm_eps: float
    std_eps: float
    variance_eps: float
    same_padding: bool


V1 = Numerics(norm_eps=1e-6, std_eps=1e-5, variance_eps=0.0, same_padding=True)
V2 = Numerics(norm_eps=1e-5, std_eps=0.0, variance_eps=1e-10, same_padding=False)


class StdConv(nn.Conv2d):
    """A convolution without bias whose kernel has mean 0 and deviation 1 for each output channel."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, numerics: Numerics) -> None:
        super().__init__(inputs, outputs, kernel, stride, bias=False)
        self.numerics = numerics
        self.is_standard = False

    def standardise_once(self) -> None:
        """Replace the kernel by the standardised one: faster, for a model no longer trained or saved."""
        self.weight.data = standardise(self.weight.data, self.numerics)
        self.is_standard = True

    def forward(self, images: Tensor) -> Tensor:
        kernel, stride = self.kernel_size[0], self.stride[0]
        padding = kernel // 2
        if self.numerics.same_padding:
            images, padding = pad_same(images, kernel, stride)
        weight = self.weight if self.is_standard else standardise(self.weight, self.numerics)
        return F.conv2d(images, weight, None, stride, padding)


def standardise(weight: Tensor, numerics: Numerics) -> Tensor:
    """Return `weight` `[out, in, k, k]` with mean 0 and (nearly) variance 1 for each output channel."""
    variance, mean = torch.var_mean(weight, dim=(1, 2, 3), correction=0, keepdim=True)
    return (weight - mean) / ((variance + numerics.variance_eps).sqrt() + numerics.std_eps)


def pad_same(images: Tensor, kernel: int, stride: int, value: float = 0.0) -> tuple[Tensor, int]:
    """Pad square maps so that side n becomes ceil(n / stride); return them with the padding left per side.

    A convolution or pooling adds equal padding at no cost; only an odd pixel has to be added here.
    """
    side = images.shape[-1]
    total = max(0, (-(-side // stride) - 1) * stride + kernel - side)
    before, after = total // 2, total - total // 2
    if before == after:
        return images, before
    return F.pad(images, (before, after, before, after), value=value), 0


class GroupNorm(nn.GroupNorm):
    """A GroupNorm in the precision of its weights, which autocast ensures on a GPU and not on a CPU."""

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images.to(self.weight.dtype))


class RootV1(nn.Module):
    """Convolution, norm, ReLU and max-pooling, `[B, 3, H, W]` to `[B, C, H / 4, W / 4]`."""

    def __init__(self, width: int, num_groups: int, numerics: Numerics = V1) -> None:
        super().__init__()
        self.conv = StdConv(3, width, 7, 2, numerics)
        self.norm = GroupNorm(num_groups, width, eps=numerics.norm_eps)

    def forward(self, images: Tensor) -> Tensor:
        padded, padding = pad_same(F.relu(self.norm(self.conv(images))), 3, 2, value=-torch.inf)
        return F.max_pool2d(padded, 3, 2, padding)


class UnitV1(Block):
    """A bottleneck with a norm after each convolution, `[B, inputs, H, W]` to `[B, outputs, H', W']`."""

    def __init__(self, shape: UnitShape, num_groups: int) -> None:
        super().__init__()
        middle, outputs = shape.middle, shape.outputs
        self.conv1 = StdConv(shape.inputs, middle, 1, 1, V1)
        self.norm1 = GroupNorm(num_groups, middle, eps=V1.norm_eps)
        self.conv2 = StdConv(middle, middle, 3, shape.stride, V1)
        self.norm2 = GroupNorm(num_groups, middle, eps=V1.norm_eps)
        self.conv3 = StdConv(middle, outputs, 1, 1, V1)
        self.norm3 = GroupNorm(num_groups, outputs, eps=V1.norm_eps)
        if shape.projected:
            self.projection = StdConv(shape.inputs, outputs, 1, shape.stride, V1)
            self.projection_norm = GroupNorm(num_groups, outputs, eps=V1.norm_eps)
        self.projected = shape.projected

    def forward(self, images: Tensor) -> Tensor:
        shortcut = self.projection_norm(self.projection(images)) if self.projected else images
        inner = F.relu(self.norm1(self.conv1(images)))
        inner = F.relu(self.norm2(self.conv2(inner)))
        return F.relu(shortcut + self.norm3(self.conv3(inner)))


class RootV2(nn.Module):
    """Convolution and max-pooling alone, `[B, 3, H, W]` to `[B, C, H / 4, W / 4]`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = StdConv(3, width, 7, 2, V2)

    def forward(self, images: Tensor) -> Tensor:
        # These values may all be negative, and then the zeros at the border win, as in the release.
        return F.max_pool2d(_zero_border(self.conv(images)), 3, 2)


def _zero_border(images: Tensor) -> Tensor:
    """Return `images` in a frame of zeros, `[B, C, H + 2, W + 2]`.

    ONNX Runtime would merge `F.pad` into the next max-pooling, where padding counts as minus infinity.
    """
    row = torch.zeros_like(images[:, :, :1])
    images = torch.cat([row, images, row], dim=2)
    column = torch.zeros_like(images[..., :1])
    return torch.cat([column, images, column], dim=3)


class UnitV2(Block):
    """A bottleneck with a norm before each convolution, `[B, inputs, H, W]` to `[B, outputs, H', W']`."""

    def __init__(self, shape: UnitShape, num_groups: int) -> None:
        super().__init__()
        middle, outputs = shape.middle, shape.outputs
        self.norm1 = GroupNorm(num_groups, shape.inputs, eps=V2.norm_eps)
        self.conv1 = StdConv(shape.inputs, middle, 1, 1, V2)
        self.norm2 = GroupNorm(num_groups, middle, eps=V2.norm_eps)
        self.conv2 = StdConv(middle, middle, 3, shape.stride, V2)
        self.norm3 = GroupNorm(num_groups, middle, eps=V2.norm_eps)
        self.conv3 = StdConv(middle, outputs, 1, 1, V2)
        self.projection = StdConv(shape.inputs, outputs, 1, shape.stride, V2) if shape.projected else None

    def forward(self, images: Tensor) -> Tensor:
        active = F.relu(self.norm1(images))
        shortcut = images if self.projection is None else self.projection(active)
        inner = self.conv1(active)
        inner = self.conv2(F.relu(self.norm2(inner)))
        outputs: Tensor = shortcut + self.conv3(F.relu(self.norm3(inner)))
        return outputs


class Backbone(nn.Module):
    """A root and the stages of units after it, images `[B, 3, H, W]` to a map `[B, C, h, w]`."""

    def __init__(
        self, config: HybridConfig | ResNetConfig, root: nn.Module, unit: Callable[[UnitShape], Block]
    ) -> None:
        super().__init__()
        self.root = root
        self.stages = nn.ModuleList(nn.ModuleList(unit(shape) for shape in stage) for stage in stages(config))

    def forward(self, images: Tensor, checkpoint_blocks: Recomputed = 0) -> Tensor:
        found: Tensor = self.root(images)
        for index, unit in enumerate(unit for stage in self.stages for unit in cast(nn.ModuleList, stage)):
            found = run(unit, (found,), is_checkpointed(index, checkpoint_blocks))
        return found


def backbone_v1(config: HybridConfig | ResNetConfig) -> Backbone:
    """Return the post-activation backbone of the hybrids and of the paper's baselines."""
    root = RootV1(config.width, config.num_groups)
    return Backbone(config, root, lambda shape: UnitV1(shape, config.num_groups))


def backbone_v2(config: ResNetConfig) -> Backbone:
    """Return the pre-activation backbone of BiT's public weights."""
    return Backbone(config, RootV2(config.width), lambda shape: UnitV2(shape, config.num_groups))


class ResNet(nn.Module):
    """Images to logits. Weights are undefined before `initialise` or `load_state_dict`: use `build.build`.

    The paper does not say which version its ResNet (BiT) baselines are; v1 is that of its hybrids, v2 that of
    the weights BiT released. `checkpoint_blocks` trades memory for time in training, and changes no result.
    Paper: Section 4.1, BiT
    """

    def __init__(self, config: ResNetConfig, backbone: Backbone | None = None) -> None:
        super().__init__()
        self.config = config
        self.checkpoint_blocks: Recomputed = 0
        self.backbone = backbone or (backbone_v1 if config.version == "v1" else backbone_v2)(config)
        last = config.version == "v2"
        self.norm = GroupNorm(config.num_groups, config.feature_size, eps=V2.norm_eps) if last else None
        self.head = Head(config.feature_size, config.num_classes) if config.num_classes else None

    def features(self, images: Tensor) -> Tensor:
        """Return the representation `[B, R]` that feeds the head, of `images` `[B, 3, H, W]` in [-1, 1]."""
        found: Tensor = self.backbone(images, self.checkpoint_blocks)
        if self.norm is not None:
            found = F.relu(self.norm(found))
        return found.mean(dim=(2, 3))

    def forward(self, images: Tensor) -> Tensor:
        """Return logits `[B, K]` of `[B, 3, H, W]` in [-1, 1]; without a head, their representation."""
        features = self.features(images)
        return features if self.head is None else self.head(features)


@torch.no_grad()
def initialise(model: ResNet, generator: Generator) -> None:
    initialise_backbone(model.backbone, generator)
    if model.norm is not None:
        plain_norm(model.norm)
    if model.head is not None:
        zero(model.head.weight)
        model.head.bias.fill_(model.config.head_bias)


@torch.no_grad()
def initialise_backbone(backbone: Backbone, generator: Generator) -> None:
    """Draw every weight in place. A v1 unit begins as its shortcut: its last norm has scale 0."""
    for module in backbone.modules():
        if isinstance(module, StdConv):
            draw(module.weight, lecun_normal, generator)
        elif isinstance(module, GroupNorm):
            plain_norm(module)
    for module in backbone.modules():
        if isinstance(module, UnitV1):
            zero(module.norm3.weight)
