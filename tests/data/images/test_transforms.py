import random
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image
from timm.data.transforms import RandomResizedCropAndInterpolation
from torchvision.transforms import v2

from tests.matrix import each, slow
from vitctl.data.images.decode import BadSample
from vitctl.data.images.transforms import (
    EvalTransform,
    TrainTransform,
    area_resized,
    augmentation_rng,
    inception_box,
    rand_augment,
    random_resized_box,
)

SHAPES = [(50, 37, 24), (20, 31, 48), (24, 24, 24), (301, 200, 64)]


def picture(height: int, width: int) -> np.ndarray:
    return np.random.default_rng((height, width)).integers(0, 256, (height, width, 3), dtype=np.uint8)


def numpy_bilinear(image: np.ndarray, height: int, width: int) -> np.ndarray:
    """Half-pixel centres, edges repeated, no antialiasing; written from the definition."""

    def taps(num_out: int, num_in: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        centre = np.clip((np.arange(num_out) + 0.5) * num_in / num_out - 0.5, 0, num_in - 1)
        low = np.floor(centre).astype(int)
        return low, np.minimum(low + 1, num_in - 1), centre - low

    top, bottom, down = taps(height, image.shape[0])
    left, right, across = taps(width, image.shape[1])
    rows = image[top] * (1 - down)[:, None, None] + image[bottom] * down[:, None, None]
    return rows[:, left] * (1 - across)[:, None] + rows[:, right] * across[:, None]


@pytest.mark.parametrize(("height", "width", "size"), SHAPES)
def test_eval_transform__bilinear_is_the_definition(height: int, width: int, size: int) -> None:
    image = picture(height, width)
    found = EvalTransform(size)(image)
    assert (found.shape, found.dtype) == ((3, size, size), torch.uint8)
    difference = found.permute(1, 2, 0).numpy() - numpy_bilinear(image, size, size)
    assert np.abs(difference).max() <= 1
    assert abs(difference.mean()) < 0.05


@pytest.mark.parametrize("kernel", ["bilinear", "bicubic"])
@pytest.mark.parametrize(("height", "width", "size"), SHAPES)
def test_eval_transform__antialias_is_pillow(height: int, width: int, size: int, kernel: str) -> None:
    image = picture(height, width)
    found = EvalTransform(size, resample=f"{kernel}_antialias")(image).permute(1, 2, 0).numpy().astype(int)
    pillow = np.array(Image.fromarray(image).resize((size, size), Image.Resampling[kernel.upper()]))
    assert np.abs(found - pillow).max() <= 1


def test_eval_transform__differs_from_pillow_as_the_docs_say() -> None:
    """docs/weights.md: by two levels where Pillow resizes the width first, which Pillow 13 does not do for
    some tall images; by bicubic it then differs more.
    """
    root = Path(__file__).parents[3]
    promise = " ".join((root / "docs/weights.md").read_text().split())
    assert "at most two levels of 255" in promise and "Pillow 13" in promise
    assert "up to 12 levels at 224 x 224" in (root / "benchmarks/results/pixels.md").read_text()
    rng, largest = np.random.default_rng(0), 0
    for width, height in ((500, 375), (375, 500), (333, 500), (240, 320), (500, 200), (180, 500), (90, 60)):
        noise = Image.fromarray(rng.integers(0, 256, (height // 3, width // 3, 3), np.uint8))
        image = noise.resize((width, height), Image.Resampling.BICUBIC)  # a photograph has few sharp edges
        for kernel in ("bilinear", "bicubic"):
            for options in ({}, {"method": "shorter_side", "resize": 224}):
                transform = EvalTransform(224, resample=f"{kernel}_antialias", **options)
                rows, columns = transform.scaled(height, width) if options else (224, 224)
                top, left = transform.margin(rows), transform.margin(columns)
                found = transform(np.array(image)).permute(1, 2, 0).numpy().astype(int)

                def difference(resized: Image.Image) -> int:
                    part = np.asarray(resized)[top : top + 224, left : left + 224].astype(int)  # noqa: B023
                    return int(np.abs(found - part).max())  # noqa: B023

                rule = Image.Resampling[kernel.upper()]
                assert difference(image.resize((columns, height), rule).resize((columns, rows), rule)) <= 2
                at_once = difference(image.resize((columns, rows), rule))
                is_turned = int(version("pillow").partition(".")[0]) >= 13 and height > width
                assert at_once <= (12 if is_turned and kernel == "bicubic" else 2)
                largest = max(largest, at_once)
    assert largest > 2 or int(version("pillow").partition(".")[0]) < 13  # else the docs need not name it


# tf.image.resize(image, size, method="area") of TensorFlow 2.21, the first channel.
AREA = {
    (3, 4): [[121.2, 105.3143, 179.7143, 198.1143], [178.2286, 131.2571, 79.4857, 169.2],
             [150.9143, 72.8572, 136.2857, 165.6572]],
    (6, 5): [[60, 150.5714, 191.7142, 226.5714, 156.8572], [168.8, 75.8286, 62.5714, 189.3143, 228.6286],
             [196.1714, 139.0857, 49.4857, 136.4571, 175.0857], [186, 179.4286, 64.6857, 126.5143, 142.5143],
             [160.2286, 145.6571, 64.2857, 159.4857, 167.4857],
             [118.8572, 96.2857, 48.2857, 176.8572, 176.8572]],
}  # fmt: skip


@pytest.mark.parametrize("size", AREA)
def test_area__is_tensorflows(size: tuple[int, int]) -> None:
    """No other resampling is: torch's area and Pillow's BOX count whole pixels."""
    numbers = np.arange(5 * 7 * 3)
    image = ((numbers * 37 + numbers**2 * 11) % 256).astype(np.uint8).reshape(5, 7, 3)
    expected = np.rint(AREA[size])
    np.testing.assert_array_equal(area_resized(image, size)[..., 0], expected)
    pillow = np.asarray(Image.fromarray(image).resize(size[::-1], Image.Resampling.BOX), float)[..., 0]
    area = F.interpolate(torch.from_numpy(image).double().permute(2, 0, 1)[None], size, mode="area")[
        0, 0
    ].numpy()
    assert min(np.abs(pillow - expected).max(), np.abs(area - expected).max()) > 25


def test_eval_transform__crop_is_central_and_rounds_down() -> None:
    image = picture(29, 29)
    found = EvalTransform(24, resize=29)(image)
    np.testing.assert_array_equal(found.permute(1, 2, 0).numpy(), image[2:26, 2:26])


@pytest.mark.parametrize(
    ("height", "width", "top", "left"), [(32, 50, 4, 13), (51, 32, 13, 4), (32, 32, 4, 4)]
)
def test_eval_transform__shorter_side_keeps_the_aspect(height: int, width: int, top: int, left: int) -> None:
    image = picture(height, width)
    found = EvalTransform(24, method="shorter_side", resize=32)(image)
    np.testing.assert_array_equal(found.permute(1, 2, 0).numpy(), image[top : top + 24, left : left + 24])


@pytest.mark.parametrize(("height", "width"), [(37, 50), (51, 33), (100, 41), (41, 41), (67, 201), (33, 35)])
def test_eval_transform__torchvisions_geometry_is_timms_too(height: int, width: int) -> None:
    create_transform = pytest.importorskip("timm.data").create_transform
    noise = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    image = np.array(Image.fromarray(noise).resize((width * 3, height * 3), Image.Resampling.BICUBIC))
    found = EvalTransform(32, method="torchvision", resize=37, resample="bicubic_antialias")(image)
    theirs = create_transform(32, interpolation="bicubic", crop_pct=32 / 37, mean=(0,) * 3, std=(1,) * 3)
    expected = theirs(Image.fromarray(image)) * 255
    assert (found - expected).abs().max() < 5  # Pillow rounds the weights otherwise; noise a pixel off is 50
    resize = v2.Resize(37, v2.InterpolationMode.BICUBIC, antialias=True)
    crop = v2.Compose([v2.PILToTensor(), resize, v2.CenterCrop(32)])
    np.testing.assert_array_equal(found.numpy(), crop(Image.fromarray(image)).numpy())


def test_eval_transform__a_hair_does_not_fill_the_memory() -> None:
    with pytest.raises(BadSample, match="too large: 40000x1 pixels would become 10240000x256"):
        EvalTransform(224, method="shorter_side", resize=256)(np.zeros((1, 40_000, 3), np.uint8))


def test_train_transform__none_is_the_evaluation_or_its_mirror_image() -> None:
    image = picture(40, 55)
    plain = EvalTransform(16)(image)
    transform = TrainTransform(16, crop="none")
    found = [transform(image, augmentation_rng(0, 0, sample)) for sample in range(200)]
    mirrored = sum(torch.equal(pixels, plain.flip(2)) for pixels in found)
    assert mirrored + sum(torch.equal(pixels, plain) for pixels in found) == 200
    assert 70 < mirrored < 130
    still = TrainTransform(16, crop="none", flip=False)
    assert all(torch.equal(still(image, augmentation_rng(0, 0, sample)), plain) for sample in range(9))


def test_train_transform__random_crop_reaches_every_corner() -> None:
    image = picture(10, 10)
    transform = TrainTransform(8, crop="random", resize=10, flip=False)
    found = {transform(image, augmentation_rng(0, 0, sample)).numpy().tobytes() for sample in range(300)}
    parts = [
        image[top : top + 8, left : left + 8].transpose(2, 0, 1) for top in range(3) for left in range(3)
    ]
    assert found == {np.ascontiguousarray(part).tobytes() for part in parts}


@example(96, 10, 10)
@given(st.integers(1, 400), st.integers(1, 400), st.integers(0, 1000))
def test_inception_box__lies_inside(height: int, width: int, seed: int) -> None:
    box = inception_box(height, width, np.random.default_rng(seed), (0.05, 1.0), (0.75, 1.33))
    top, left, box_height, box_width = box
    assert top >= 0 < box_height
    assert left >= 0 < box_width
    assert top + box_height <= height
    assert left + box_width <= width
    if box != (0, 0, height, width):
        least = 0.05 * height * width * (1 - 1e-6)  # the rule is in float32: 48 of 960 pixels are 5 %
        assert least <= box_height * box_width <= height * width
        assert abs(box_width - box_height) <= 0.33 * box_height + 0.5


class Scripted:
    """Draws one aspect, then the height so many places above the lowest, and no offset."""

    def __init__(self, aspect: float, place: int) -> None:
        self.aspect, self.place, self.num_heights = aspect, place, 0

    def uniform(self, low: float, high: float) -> float:
        assert low <= self.aspect < high
        if self.num_heights:
            raise StopIteration  # the first box was refused
        return self.aspect

    def integers(self, low: int, high: int | None = None) -> int:
        if high is None:
            return 0
        self.num_heights = high - low
        return low + self.place


def drawn_boxes(
    height: int, width: int, aspect: float, area_range: tuple[float, float]
) -> list[tuple[int, int]]:
    """Height and width of the box for every height that may be drawn.

    (0, 0) where another aspect is drawn.
    """
    found: list[tuple[int, int]] = []
    while True:
        rng: Any = Scripted(aspect, len(found))
        try:
            _, _, *box = inception_box(height, width, rng, area_range, (0.75, 1.33))
        except StopIteration:
            box = [0, 0]
        found.append((box[0], box[1]))
        if len(found) == rng.num_heights:
            return found


def tensorflows_boxes(
    height: int, width: int, aspect: float, area_range: tuple[float, float]
) -> list[tuple[int, int]]:
    """The same from the rule of sample_distorted_bounding_box_op.cc, over all heights at once, in float64."""
    low, high = np.array(area_range) * height * width
    every = np.arange(1, 4 * (height + width))
    fitting = every[(np.rint(every * aspect) <= width) & (every <= height)]
    lowest, highest = int(np.rint(np.sqrt(low / aspect))), int(np.rint(np.sqrt(high / aspect)))
    highest = min(highest, int(fitting.max(initial=0)))
    heights = np.arange(min(lowest, highest), highest + 1)
    for step, is_off in ((1, lambda area: area < low), (-1, lambda area: area > high)):
        heights = heights + step * is_off(heights * np.rint(heights * aspect))
    widths = np.rint(heights * aspect).astype(int)
    good = (low <= heights * widths) & (heights * widths <= high) & (heights <= height) & (widths <= width)
    return [(int(h), int(w)) if ok else (0, 0) for h, w, ok in zip(heights, widths, good, strict=True)]


ASPECTS = [float(np.float32(0.75 + 0.58 * (k + 0.5) / 401)) for k in range(401)]


@pytest.mark.parametrize("area_range", [(0.05, 1.0), (0.08, 0.93), (0.3, 0.31)])
@pytest.mark.parametrize(
    ("height", "width"), [(5, 9), (28, 97), *slow((16, 16), (32, 32), (31, 24), (224, 224))]
)
def test_inception_box__is_tensorflows_for_every_draw(
    height: int, width: int, area_range: tuple[float, float]
) -> None:
    for aspect in ASPECTS:
        expected = tensorflows_boxes(height, width, aspect, area_range)
        assert drawn_boxes(height, width, aspect, area_range) == expected, aspect


SIZES = (375, 500), (500, 375), (333, 50), (40, 640), (8, 8), (1, 5)
IMAGENET_AREA, IMAGENET_ASPECT = (0.08, 1.0), (3 / 4, 4 / 3)


@each("size", SIZES)
@each("area", [IMAGENET_AREA, (0.9, 1.0), (0.2, 0.2)])
def test_random_resized_box__is_timms_for_every_draw(
    size: tuple[int, int], area: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """timm has torchvision's rule, ten attempts and the crop of the centre included."""
    height, width = size
    image = Image.new("L", (width, height))
    for seed in range(60):
        rng = np.random.default_rng(seed)
        monkeypatch.setattr(random, "uniform", lambda low, high, rng=rng: rng.uniform(low, high))
        monkeypatch.setattr(random, "randint", lambda low, high, rng=rng: int(rng.integers(low, high + 1)))
        theirs = RandomResizedCropAndInterpolation.get_params(image, area, IMAGENET_ASPECT)
        found = random_resized_box(height, width, np.random.default_rng(seed), area, IMAGENET_ASPECT)
        assert found == theirs


def test_train_transform__random_resized_cuts_its_box() -> None:
    image = np.random.default_rng(0).integers(0, 256, (90, 70, 3), dtype=np.uint8)
    area, aspect = (0.3, 0.5), (1.0, 1.5)
    transform = TrainTransform(24, "random_resized", flip=False, area_range=area, aspect_range=aspect)
    for seed in range(8):
        top, left, height, width = random_resized_box(90, 70, augmentation_rng(seed, 0, 0), area, aspect)
        assert 0.27 < height * width / 6300 < 0.53 and 0.95 < width / height < 1.55
        whole = TrainTransform(24, "none", flip=False)(
            image[top : top + height, left : left + width], augmentation_rng(0, 0, 0)
        )
        assert torch.equal(transform(image, augmentation_rng(seed, 0, 0)), whole)


def test_inception_box__gives_up_with_the_whole_image() -> None:
    assert inception_box(1000, 2, np.random.default_rng(0), (0.05, 1.0), (0.75, 1.33)) == (0, 0, 1000, 2)


def test_augmentation_rng__differs_by_every_argument() -> None:
    keys = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 0, 2**40), (5, 10**6, 0)]
    assert len({augmentation_rng(*key).random() for key in keys}) == len(keys)
    assert augmentation_rng(3, 4, 5).random() == augmentation_rng(3, 4, 5).random()


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


@pytest.mark.parametrize(
    ("method", "resize", "words"),
    [
        ("square", 0, "squashed"),
        ("square", 18, "the centre of square 18"),
        ("shorter_side", 16, "the centre of shorter side 16"),
        ("torchvision", 18, "the centre of shorter side 18"),
    ],
)
def test_eval_transform__says_how_images_become_square(method: Any, resize: int, words: str) -> None:
    assert str(EvalTransform(16, method=method, resize=resize)) == f"images of 16 pixels, {words}"


def test_padded__is_torchvisions_crop_with_padding() -> None:
    pixels = np.random.default_rng(0).integers(1, 256, (32, 32, 3), dtype=np.uint8)
    padded = np.pad(pixels, ((4, 4), (4, 4), (0, 0)))
    transform, seen = TrainTransform(32, "padded", resize=40), set()
    for seed in range(60):
        drawn = transform.draw(32, 32, np.random.default_rng(seed))
        found = transform(pixels, np.random.default_rng(seed)).permute(1, 2, 0).numpy()
        (top, left), step = drawn.corner, -1 if drawn.flip else 1
        np.testing.assert_array_equal(found, padded[top : top + 32, left : left + 32][:, ::step])
        seen |= {top, left}
    assert seen == set(range(9))
