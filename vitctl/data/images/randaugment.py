"""RandAugment, drawn from the generator of one sample and from nothing else."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache

import numpy as np
import torch
from PIL import Image
from torch import Tensor

MAX_MAGNITUDE = 30
_GREY = [128.0, 128.0, 128.0]  # what moves in from outside the picture, as in the code of AutoAugment's authors


def rand_augment(image: Tensor, rng: np.random.Generator, *, layers: int, magnitude: int) -> Tensor:
    """Distort one image by `layers` operations, each drawn from the fourteen of RandAugment.

    Args:
        image: uint8 `[3, H, W]`.
        rng: the only source of chance: torchvision, whose operations these are, draws from torch's global generator, which
            is set from here and put back.
        layers: operations one after the other, at least 1.
        magnitude: 0 to 30, as torchvision counts it: 30 is the strongest that AutoAugment had (10 in its authors' code).

    Returns:
        uint8 `[3, H, W]`, a pixel's colours side by side in memory.

    Source: RandAugment (arXiv 1909.13719), by torchvision.transforms.v2
    """
    picture = Image.fromarray(image.permute(1, 2, 0).numpy())  # Pillow's operations take a third of the tensors' time
    with _torch_seeded(int(rng.integers(2**63))):
        distorted = distortion(layers, magnitude)(picture)
    return torch.from_numpy(np.array(distorted)).permute(2, 0, 1)


@lru_cache
def distortion(layers: int, magnitude: int) -> Callable[[Image.Image], Image.Image]:
    """torchvision's transform. Made before workers are forked, it lets them share the memory of the import."""
    from torchvision.transforms import v2

    made: Callable[[Image.Image], Image.Image] = v2.RandAugment(
        layers, magnitude, num_magnitude_bins=MAX_MAGNITUDE + 1, fill=_GREY
    )
    return made


@contextmanager
def _torch_seeded(seed: int) -> Iterator[None]:
    """Within the block torch's CPU generator starts from a seed; `torch.manual_seed` would reset those of GPUs too."""
    generator = torch.default_generator
    state = generator.get_state()
    generator.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(state)
