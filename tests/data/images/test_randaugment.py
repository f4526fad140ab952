"""RandAugment: torchvision's operations, our chance."""

from itertools import islice

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

from vitctl.data.images.randaugment import rand_augment
from vitctl.data.images.transforms import TrainTransform, augmentation_rng
from vitctl.data.loader.batches import train_batches
from vitctl.data.source.order import Order
from vitctl.data.source.unsharded import SyntheticSource
from vitctl.errors import DataError

IMAGE = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (3, 20, 20), dtype=np.uint8))


def augmented(sample: int, layers: int = 2, magnitude: int = 15) -> torch.Tensor:
    return rand_augment(IMAGE, augmentation_rng(0, 0, sample), layers=layers, magnitude=magnitude)


@pytest.mark.parametrize("magnitude", [0, 15, 30])
def test_rand_augment__is_torchvisions_from_the_same_seed(magnitude: int) -> None:
    reference = v2.RandAugment(2, magnitude, fill=[128.0] * 3)
    changed = 0
    for sample in range(30):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(augmentation_rng(0, 0, sample).integers(2**63)))
            picture = reference(Image.fromarray(IMAGE.permute(1, 2, 0).numpy()))
        expected = torch.from_numpy(np.array(picture)).permute(2, 0, 1)
        found = augmented(sample, magnitude=magnitude)
        assert torch.equal(found, expected)
        assert (found.dtype, found.shape) == (torch.uint8, IMAGE.shape)
        changed += not torch.equal(found, IMAGE)
    assert changed >= 5


def test_rand_augment__draws_from_its_generator_alone_and_moves_no_other() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = [augmented(sample) for sample in range(20)]
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert all(torch.equal(augmented(sample), image) for sample, image in enumerate(first))
    assert len({image.numpy().tobytes() for image in first}) > 10


def test_train_transform__randaugment_comes_last_and_off_draws_nothing() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (40, 50, 3), dtype=np.uint8)
    plain, full = TrainTransform(16), TrainTransform(16, randaugment_layers=2, randaugment_magnitude=20)
    for sample in range(10):
        one, other = augmentation_rng(0, 0, sample), augmentation_rng(0, 0, sample)
        expected = rand_augment(plain(pixels, one), one, layers=2, magnitude=20)
        assert torch.equal(full(pixels, other), expected)


def test_train_batches__randaugment_does_not_depend_on_workers() -> None:
    transform = TrainTransform(12, randaugment_layers=2, randaugment_magnitude=15)
    state = torch.get_rng_state()
    runs = [
        list(
            islice(
                train_batches(
                    SyntheticSource(23, 3, 16),
                    Order(23, 0),
                    transform,
                    seed=0,
                    batch_size=8,
                    micro_batch=8,
                    rank=0,
                    num_processes=1,
                    first_step=0,
                    num_workers=workers,
                ),
                4,
            )
        )
        for workers in (0, 2)
    ]
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(one.images, other.images) for one, other in zip(*runs, strict=True))


@pytest.mark.parametrize("changes", [{"randaugment_layers": -1}, {"randaugment_magnitude": 31}])
def test_train_transform__refuses_what_randaugment_has_not(changes: dict[str, int]) -> None:
    with pytest.raises(
        DataError,
        match=r"randaugment_layers is .*, randaugment_magnitude .*; should be at least 0, and 0 to 30",
    ):
        TrainTransform(16, **changes)  # type: ignore[arg-type]
