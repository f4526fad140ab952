"""The hybrids: a Vision Transformer whose patches are cut from the feature map of a ResNet."""

import torch
from torch import Tensor

from vitctl.models.blocks import Generator
from vitctl.models.resnet import backbone_v1, initialise_backbone
from vitctl.models.variants import HybridConfig
from vitctl.models.vit import VisionTransformer
from vitctl.models.vit import initialise as initialise_transformer


class HybridTransformer(VisionTransformer):
    """A `VisionTransformer` behind a ResNet V1 without head; everything after the patch embedding is the
    same.

    Paper: Section 3.1, Hybrid Architecture; Section 4.1
    """

    def __init__(self, config: HybridConfig) -> None:
        super().__init__(config)
        self.backbone = backbone_v1(config)

    def embed(self, images: Tensor) -> Tensor:
        """Return the patch embeddings `[B, rows * columns, D]`, row-major, of `images` `[B, 3, H, W]` in [-1,
        1].
        """
        return super().embed(self.backbone(images, self.checkpoint_blocks))


@torch.no_grad()
def initialise(model: HybridTransformer, generator: Generator) -> None:
    """Draw every weight of `model` in place: the backbone's, then the Transformer's, as `vit.initialise`
    does.
    """
    initialise_backbone(model.backbone, generator)
    initialise_transformer(model, generator)
