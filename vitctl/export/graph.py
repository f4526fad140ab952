"""What an exported graph computes: a network with the value range of its images, and what else is asked for."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from vitctl.data.images.transforms import EvalTransform
from vitctl.export.preprocess import Preprocess
from vitctl.models.build import Model
from vitctl.models.resnet import StdConv

INPUT, LOGITS, FEATURES = "images", "logits", "features"
# What the names of layers and weights in a graph begin with, longest first.
SCOPES = ("network.model", "network")


class _Network(nn.Module):
    """Normalised images to logits [B, K], or to them and the representation [B, R]."""

    def __init__(self, model: Model, features: bool) -> None:
        super().__init__()
        self.model, self.gives_features = model, features

    def forward(self, images: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        if not self.gives_features:
            logits: Tensor = self.model(images)
            return logits
        features = self.model.features(images)
        return (features if self.model.head is None else self.model.head(features)), features


class Raw(nn.Module):
    """A model with its value range in front: uint8 images [B, 3, S, S] to logits [B, K].

    Args:
        model: in evaluation mode.
        meta: `mean` and `std` of the weights.
        transform: pre-processing inside the graph: it then takes photographs, uint8 [B, H, W, 3], of one size
            per batch.
        features: give the representation [B, R] as a second output.
    """

    def __init__(
        self,
        model: Model,
        meta: dict[str, Any],
        transform: EvalTransform | None = None,
        *,
        features: bool = False,
    ) -> None:
        super().__init__()
        self.network = _Network(model, features)
        self.preprocess = None if transform is None else Preprocess(transform)
        self.mean: Tensor
        self.std: Tensor
        self.register_buffer("mean", torch.tensor(meta["mean"]).view(1, 3, 1, 1))
        self.register_buffer("std", torch.tensor(meta["std"]).view(1, 3, 1, 1))

    @property
    def outputs(self) -> list[str]:
        """Names of what it returns."""
        return [LOGITS, FEATURES] if self.network.gives_features else [LOGITS]

    @property
    def model(self) -> Model:
        """The network alone."""
        return self.network.model

    def forward(self, images: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        pixels = images if self.preprocess is None else self.preprocess(images)
        outputs: Tensor | tuple[Tensor, Tensor] = self.network(
            (pixels.float() / 255.0 - self.mean) / self.std
        )
        return outputs

    def example(self, batch: int, number: int = 0) -> Tensor:
        """Noise to trace or to verify the graph with.

        Args:
            batch: number of images.
            number: where sizes are free, each number gives photographs of another size.
        """
        size = self.model.config.image_size
        shape = (batch, 3, size, size)
        if self.preprocess is not None:
            height, width = ((2 * size + 7, size + 11), (size, size), (size + 5, 3 * size))[number % 3]
            shape = (batch, height, width, 3)
        generator = torch.Generator().manual_seed(number)
        return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)

    @property
    def free_axes(self) -> tuple[str, ...]:
        """Names of the axes of the input whose length is free, the first ones."""
        return ("batch",) if self.preprocess is None else ("batch", "height", "width")

    def free_sizes(self) -> dict[int, torch.export.Dim]:
        """These axes as `torch.export` takes them."""
        return {axis: torch.export.Dim(name) for axis, name in enumerate(self.free_axes)}

    def traced(self) -> "Raw":
        """The same for an exporter: kernels that are standardised in every pass are so once and for all."""
        if not any(isinstance(module, StdConv) for module in self.modules()):
            return self
        own = copy.deepcopy(self)
        for module in own.modules():
            if isinstance(module, StdConv):
                module.standardise_once()
        return own
