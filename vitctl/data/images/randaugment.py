"""RandAugment with torchvision's operations. All randomness comes from the random generator of the sample."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache

import numpy as np
import torch
from PIL import Image
from torch import Tensor

MAX_MAGNITUDE = 30
_GREY = [128.0, 128.0, 128.0]  # fill colour outside the image, as in the code of AutoAugment's authors


def rand_augment(image: Tensor, rng: np.random.Generator, *, layers: int, magnitude: int) -> Tensor:
    """Distort one image by `layers` operations, each drawn from the fourteen of RandAugment.

    Args:
        image: uint8 `[3, H, W]`.
        rng: the only source of randomness. torchvision draws from torch's global generator, which is seeded
            from `rng` here and restored afterwards.
        layers: number of operations, at least 1.
        magnitude: 0 to 30, as torchvision counts it: 30 is the strongest that AutoAugment had (10 in its
            authors' code).

    Returns:
        uint8 `[3, H, W]`, channels last in memory.

    Source: RandAugment (arXiv 1909.13719), by torchvision.transforms.v2
    """
    picture = Image.fromarray(
        image.permute(1, 2, 0).numpy()
    )  # operations on Pillow images take a third of the time
    with _torch_seeded(int(rng.integers(2**63))):
        distorted = distortion(layers, magnitude)(picture)
    return torch.from_numpy(np.array(distorted)).permute(2, 0, 1)


@lru_cache
def distortion(layers: int, magnitude: int) -> Callable[[Image.Image], Image.Image]:
    """torchvision's transform.

    Created before workers are forked, so that they share the memory of the import.
    """
    from torchvision.transforms import v2

    transform: Callable[[Image.Image], Image.Image] = v2.RandAugment(
        layers, magnitude, num_magnitude_bins=MAX_MAGNITUDE + 1, fill=_GREY
    )
    return transform


@contextmanager
def _torch_seeded(seed: int) -> Iterator[None]:
    """Seed torch's CPU generator within the block, and restore it.

    `torch.manual_seed` would also reset the generators of GPUs.
    """
    generator = torch.default_generator
    state = generator.get_state()
    generator.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(state)
