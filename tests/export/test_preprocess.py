"""The pre-processing inside a graph gives the pixels that vitctl's own gives."""

import io
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.matrix import slow, spread
from vitctl.data.images.transforms import EvalTransform
from vitctl.export.preprocess import Preprocess

RULES = ("bilinear", "bilinear_antialias", "bicubic_antialias", "area")
SIZES = ((375, 500), (500, 333), (1200, 97), (256, 256))
PHOTOGRAPHS = Path(__file__).parents[4] / "shared" / "data" / "imagenet-500.tar"


def differing(transform: EvalTransform, image: np.ndarray) -> np.ndarray:
    """By how many levels each value differs."""
    ours = transform(image).double().numpy()
    [theirs] = Preprocess(transform)(torch.from_numpy(image)[None]).numpy()
    assert theirs.shape == ours.shape
    return np.abs(ours - theirs)


@pytest.mark.parametrize("resample", spread(2, RULES, 1))
@pytest.mark.parametrize(
    ("method", "resize"),
    [
        ("square", 0),
        ("torchvision", 256),
        ("letterbox", 0),
        *slow(("square", 256), ("shorter_side", 256), ("transformers", 256)),
    ],
)
def test_preprocess__equals_ours_on_noise(method: str, resize: int, resample: str) -> None:
    transform = EvalTransform(224, method=method, resize=resize, resample=resample, fill=(124, 116, 104))
    for number, size in enumerate(SIZES):
        image = np.random.default_rng(number).integers(0, 256, (*size, 3), dtype=np.uint8)
        assert differing(transform, image).max() == 0, size


@pytest.mark.parametrize("resample", spread(2, RULES))
@pytest.mark.parametrize("size", [(33, 47), (16, 16), (5, 90), (40, 31)])
def test_preprocess__small_images_are_enlarged_within_a_level(size: tuple[int, int], resample: str) -> None:
    image = np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8)
    for method in ("square", "shorter_side", "torchvision", "transformers", "letterbox"):
        assert differing(EvalTransform(32, method=method, resize=36, resample=resample), image).max() <= 1


@pytest.mark.parametrize("resample", spread(1, RULES, 2))
def test_preprocess__of_photographs(resample: str) -> None:
    if not PHOTOGRAPHS.exists():
        pytest.skip("no photographs on this machine")
    transform = EvalTransform(224, method="shorter_side", resize=256, resample=resample)
    with tarfile.open(PHOTOGRAPHS) as archive:
        for member in [member for member in archive if member.isfile()][:8]:
            file = archive.extractfile(member)
            assert file is not None
            image = np.array(Image.open(io.BytesIO(file.read())).convert("RGB"))
            assert differing(transform, image).max() == 0, member.name
