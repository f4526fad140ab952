"""A trained network as a function of images, whichever program runs it."""

from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from vitctl.engine.computation import Kernels, use_kernels
from vitctl.engine.distributed.runtime import Computation, Normaliser
from vitctl.engine.evaluation import class_logits, image_features
from vitctl.models.build import Model

Activation = Literal["softmax", "sigmoid"]


def probabilities(logits: Tensor, activation: Activation) -> Tensor:
    """Of each class, float64 `[B, K]`: they sum to 1 (softmax), or are independent of each other (sigmoid)."""
    wide = logits.double()
    return wide.softmax(dim=1) if activation == "softmax" else wide.sigmoid()


class Outputs(NamedTuple):
    """What a network makes of some images, on the CPU.

    Args:
        logits: `[B, K]`; None of a network without a head.
        features: float32 `[B, R]`, the input of the classification layer; None where they were not asked for.
    """

    logits: Tensor | None
    features: Tensor | None


class Network(Protocol):
    """A trained network, ready to be used."""

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        ...

    @property
    def has_head(self) -> bool:
        """Whether it gives logits."""
        ...

    @property
    def has_features(self) -> bool:
        """Whether it gives the input of its classification layer."""
        ...

    @property
    def resizes(self) -> bool:
        """Whether it prepares photographs of any size by itself."""
        ...

    def __call__(self, images: Tensor, *, with_features: bool = False) -> Outputs:
        """Outputs of uint8 images `[B, 3, S, S]`; `[B, 3, H, W]` where it resizes them."""
        ...


@dataclass(frozen=True)
class TorchNetwork:
    """A model in evaluation mode on its device. `normalise` has the mean and deviation of its weights."""

    model: Model
    computation: Computation
    normalise: Normaliser
    kernels: Kernels
    has_head: bool
    has_features: bool = True
    resizes: bool = False

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return self.computation.device

    @torch.inference_mode()
    def __call__(self, images: Tensor, *, with_features: bool = False) -> Outputs:
        inputs = self.normalise(images)
        use_kernels(self.kernels)
        if not with_features:
            return Outputs(class_logits(self.computation, self.model, inputs).cpu(), None)
        features = image_features(self.computation, self.model, inputs)
        logits = None
        if self.has_head and self.model.head is not None:
            logits = class_logits(self.computation, self.model.head, features).cpu()
        return Outputs(logits, features.float().cpu())
