"""Distortions of training images against the programs whose rules they follow."""

import random
import zlib
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageFilter
from timm.data import auto_augment
from timm.data.transforms import CenterCropOrPad, ResizeKeepRatio
from torchvision.transforms import v2

from tests.matrix import slow, spread
from vitctl.data.images.augment import (
    OPERATIONS,
    TIMM_OPERATIONS,
    TIMM_POLICIES,
    Strength,
    big_vision_randaugment,
    color_jitter,
    three_augment,
    timm_autoaugment,
    timm_randaugment,
)
from vitctl.data.images.transforms import EvalTransform, TrainTransform, augmentation_rng, fill_colour
from vitctl.errors import RecipeError
from vitctl.recipe.load import load_recipe

# CRC-32 of the results of big_vision's own pp/autoaugment.py on `picture()`, run by TensorFlow 2.21 within
# tf.data, at these magnitudes, with the positive sign and the cutout's centre at `CENTRE`.
MAGNITUDES, CENTRE = (0, 5, 9, 20, 25), (43, 145)
TENSORFLOWS = {
    "AutoContrast": (1198097496, 1198097496, 1198097496, 1198097496, 1198097496),
    "Equalize": (1137483279, 1137483279, 1137483279, 1137483279, 1137483279),
    "Invert": (3344289687, 3344289687, 3344289687, 3344289687, 3344289687),
    "Rotate": (4081112540, 4107468887, 3852853731, 2621941487, 2514173785),
    "Posterize": (410258752, 1380984494, 1289359015, 4081112540, 410258752),
    "Solarize": (3344289687, 4249668863, 2246637374, 3344289687, 4249668863),
    "Color": (2894155674, 4081112540, 3069747516, 2975003683, 3791174504),
    "Contrast": (562269710, 4081112540, 2862479506, 2885969067, 2948438872),
    "Brightness": (382967684, 4081112540, 923105579, 3460144421, 3203476902),
    "Sharpness": (1466465004, 4081112540, 4110126394, 2471114445, 4228633078),
    "ShearX": (4081112540, 3384521284, 1888892288, 4205433771, 319544454),
    "ShearY": (4081112540, 3813279158, 4194932482, 2273463923, 4035054170),
    "TranslateX": (4081112540, 2150387128, 2927587083, 3322290908, 3322290908),
    "TranslateY": (4081112540, 1410860453, 2514146730, 3322290908, 3322290908),
    "Cutout": (4081112540, 3486753379, 4124138961, 4146580818, 2791459119),
    "SolarizeAdd": (4081112540, 888454462, 216057011, 2010411726, 3431626851),
}


def picture() -> np.ndarray:
    """Noise that brightens downwards, with a flat band: uint8 `[130, 150, 3]`."""
    n = np.arange(130 * 150 * 3, dtype=np.int64)
    pixels = ((n * 37 + n**2 * 11) % 256 * (n // 450) // 130).astype(np.uint8).reshape(130, 150, 3)
    pixels[40:60] = 77
    return pixels


class Fixed:
    """A generator that draws what a test wants."""

    def __init__(self, *drawn: Any) -> None:
        self.drawn = list(drawn)

    def random(self) -> Any:
        return self.drawn.pop(0)

    def integers(self, _size: int) -> Any:
        return self.drawn.pop(0)

    def uniform(self, _low: float, _high: float) -> Any:
        return self.drawn.pop(0)


@pytest.mark.parametrize("name", OPERATIONS)
def test_big_vision__every_operation_is_that_of_its_authors_bit_for_bit(name: str) -> None:
    drawn = CENTRE if name == "Cutout" else (0.1,)
    results = [OPERATIONS[name](picture(), at / 10, Fixed(*drawn)) for at in MAGNITUDES]  # type: ignore[arg-type]
    assert all(result.dtype == np.uint8 for result in results)
    assert tuple(zlib.crc32(result.tobytes()) for result in results) == TENSORFLOWS[name]


def test_big_vision__a_negative_sign_moves_the_other_way() -> None:
    image, grey = picture(), np.full((130, 150, 3), 128, np.uint8)
    for name, axis in (("TranslateX", 1), ("TranslateY", 0)):
        moved = OPERATIONS[name](image, 0.9, Fixed(0.9))  # type: ignore[arg-type]
        size = image.shape[axis]
        expected = np.concatenate((grey.take(range(90), axis), image.take(range(size - 90), axis)), axis=axis)
        np.testing.assert_array_equal(moved, expected)
    mirrored = OPERATIONS["Rotate"](image[:, ::-1], 0.9, Fixed(0.9))[:, ::-1]  # type: ignore[arg-type]
    turned = OPERATIONS["Rotate"](image, 0.9, Fixed(0.1))  # type: ignore[arg-type]
    assert (mirrored == turned).all(axis=2).mean() > 0.99


IMAGENET_GREY = (124, 116, 104)
MANNERS = Image.Resampling.BILINEAR, Image.Resampling.BICUBIC


def timms(increasing: bool) -> list[str]:
    """Names of timm's operations, in its order."""
    return list(auto_augment.rand_augment_choices("", increasing=increasing))


@pytest.mark.parametrize("increasing", [True, False])
@pytest.mark.parametrize("resample", spread(1, MANNERS))
@pytest.mark.parametrize("number", range(15))
def test_timm__every_operation_is_timms_bit_for_bit(
    number: int, resample: Image.Resampling, increasing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At levels with fractions too, with either sign; only Posterize to no bits is refused by Pillow 13."""
    name, image = timms(increasing)[number], Image.fromarray(picture())
    hparams = {"img_mean": IMAGENET_GREY, "interpolation": resample}
    ours = list(TIMM_OPERATIONS.values())[number]
    for level in (0, 0.3, 2.4, 5, 7.7, 9, 9.43, 10):
        for sign in (1, -1):
            monkeypatch.setattr(random, "random", lambda up=sign > 0: 0.1 if up else 0.9)
            theirs = auto_augment.AugmentOp(name, prob=1.0, magnitude=level, hparams=hparams)
            found = np.array(ours(image, Strength(level / 10, sign, increasing, resample, IMAGENET_GREY)))
            if "Posterize" in name and (level == 10 if increasing else level < 2.5):
                assert not found.any()
                with pytest.raises(ValueError, match="bits must be"):
                    theirs(image)
            else:
                np.testing.assert_array_equal(found, np.array(theirs(image)))


@pytest.mark.parametrize(
    ("string", "values"),
    [
        ("rand-m9-mstd0.5-inc1", {"magnitude": 9, "std": 0.5, "increasing": True}),
        ("rand-m7-n3-p0.8-mstd2", {"magnitude": 7, "layers": 3, "probability": 0.8, "std": 2.0}),
    ],
)
def test_timm__whole_images_are_timms_for_the_same_draws(
    string: str, values: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Operations, whether they are applied, signs and magnitudes come from our generator on both sides."""
    chosen = {"layers": 2, "probability": 0.5, "std": 0.0, "increasing": False, **values}
    manner = {"resample": Image.Resampling.BICUBIC, "fill": IMAGENET_GREY}
    hparams = {"img_mean": IMAGENET_GREY, "interpolation": Image.Resampling.BICUBIC}
    theirs = auto_augment.rand_augment_transform(string, hparams)
    one = theirs.ops[0]
    read = theirs.num_layers, one.prob, one.magnitude, one.magnitude_std
    assert read == tuple(chosen[key] for key in ("layers", "probability", "magnitude", "std"))
    image, changed = Image.fromarray(picture()), 0
    for seed in range(80):
        rng, expected = np.random.default_rng(seed), image
        for _ in range(chosen["layers"]):
            operation = theirs.ops[int(rng.integers(len(theirs.ops)))]
            draws = [rng.random(), rng.random()]
            level = float(rng.normal(chosen["magnitude"], chosen["std"]))
            monkeypatch.setattr(random, "random", lambda draws=draws: draws.pop(0))
            monkeypatch.setattr(random, "gauss", lambda _mean, _std, level=level: level)
            try:
                expected = operation(expected)
            except ValueError:  # Posterize to no bits, see above
                expected = Image.new("RGB", image.size)
        found = timm_randaugment(image, np.random.default_rng(seed), **chosen, **manner)
        np.testing.assert_array_equal(np.array(found), np.array(expected))
        changed += found != image
    assert changed > 40


@pytest.mark.parametrize("policy", TIMM_POLICIES)
def test_timm__policies_are_timms_for_the_same_draws(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    manner = {"resample": Image.Resampling.BICUBIC, "fill": IMAGENET_GREY}
    hparams = {"img_mean": IMAGENET_GREY, "interpolation": Image.Resampling.BICUBIC}
    theirs = auto_augment.auto_augment_transform(policy, hparams).policy
    image, changed = Image.fromarray(picture()[50:100, :60]), set()
    for seed in range(120):
        rng, expected = np.random.default_rng(seed), image
        pair = int(rng.integers(len(theirs)))
        for operation in theirs[pair]:
            chance, sign = rng.random(), rng.random()
            draws = [chance, sign] if operation.prob < 1 else [sign]
            monkeypatch.setattr(random, "random", lambda draws=draws: draws.pop(0))
            try:
                expected = operation(expected)
            except ValueError:  # Posterize to no bits, which Pillow 13 refuses
                expected = Image.new("RGB", image.size)
        found = timm_autoaugment(image, np.random.default_rng(seed), policy=policy, **manner)
        np.testing.assert_array_equal(np.array(found), np.array(expected))
        changed |= {pair} if found != image else set()
    assert len(changed) > 15


def odd_pictures() -> list[np.ndarray]:
    """Of one colour, of two levels, of few levels with a frequent one: their histograms have gaps."""
    draw = np.random.default_rng(0).integers
    flat, shape = np.full((40, 40, 3), (0, 7, 255), np.uint8), (40, 40, 3)
    few = np.where(draw(0, 10, shape) > 0, 9, draw(0, 256, shape)).astype(np.uint8)
    return [flat, (draw(0, 2, shape) * 200).astype(np.uint8), few]


@pytest.mark.parametrize("policy", ["imagenet", "cifar10", "trivial", *slow("svhn")])
def test_auto_augment__is_torchvisions_with_the_same_draws(policy: str) -> None:
    made = (
        v2.TrivialAugmentWide
        if policy == "trivial"
        else partial(v2.AutoAugment, v2.AutoAugmentPolicy(policy))
    )
    theirs = made(fill=[128.0] * 3)  # type: ignore[operator]
    smalls = [picture()[60:100, :40], *odd_pictures()]
    transform, before = TrainTransform(40, "none", flip=False, auto_augment=policy), torch.get_rng_state()
    for seed in range(120):
        small = smalls[seed % len(smalls)]
        found = transform(small, augmentation_rng(0, 0, seed))
        with torch.random.fork_rng():
            torch.manual_seed(int(augmentation_rng(0, 0, seed).integers(2**63)))
            expected = np.array(theirs(Image.fromarray(small)))
        np.testing.assert_array_equal(found.permute(1, 2, 0).numpy(), expected)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("string", ["rand-m9-mstd0.5-inc1", "rand-m7-n3-p0.8", "rand", "rand-n1-inc0"])
def test_auto_augment__reads_timms_string_as_timm(string: str) -> None:
    """Also over a recipe that has other values of the same keys, and back."""
    theirs = auto_augment.rand_augment_transform(string, {"img_mean": IMAGENET_GREY})
    data = load_recipe("mae_b16", [("data.auto_augment", string)]).recipe.data
    one = theirs.ops[0]
    read = [
        data.randaugment_layers,
        data.randaugment_probability,
        data.randaugment_magnitude,
        data.randaugment_std,
    ]
    assert read == [theirs.num_layers, one.prob, one.magnitude, one.magnitude_std]
    assert data.randaugment_increasing == ("PosterizeIncreasing" in {one.name for one in theirs.ops})
    assert (data.randaugment_rules, data.auto_augment) == ("timm", "")
    other = load_recipe("mae_b16", [("data.auto_augment", name) for name in (string, "ta_wide")]).recipe.data
    assert (other.auto_augment, other.randaugment_layers, other.randaugment_std) == ("trivial", 0, 0.0)


def test_auto_augment__in_a_file_goes_over_its_parents_and_under_what_stands_beside_it(
    tmp_path: Path,
) -> None:
    text = 'extends = "mae_b16"\n[data]\nauto_augment = "rand-m6"\n'
    (tmp_path / "a.toml").write_text(f"{text}randaugment_layers = 1\n")
    loaded = load_recipe(tmp_path / "a.toml")
    values = {
        key: loaded.recipe.data.__dict__[f"randaugment_{key}"] for key in ("layers", "magnitude", "std")
    }
    assert values == {"layers": 1, "magnitude": 6, "std": 0.0}
    assert loaded.origin("data.randaugment_std") == "a.toml:3"
    with pytest.raises(RecipeError, match="original or v0"):
        load_recipe("finetune", [("data.auto_augment", "augmix")])


def test_timm__training_distorts_by_its_keys() -> None:
    """The crop, then the operations, from one generator."""
    keys = {"probability": 0.7, "std": 0.5, "increasing": True}
    transform = TrainTransform(
        32, "none", flip=False, randaugment_layers=2, randaugment_magnitude=8, randaugment_rules="timm",
        resample="bicubic_antialias", fill=IMAGENET_GREY, **{f"randaugment_{key}": keys[key] for key in keys},
    )  # fmt: skip
    small = np.random.default_rng(0).integers(40, 200, (32, 32, 3), dtype=np.uint8)
    manner = {"resample": Image.Resampling.BICUBIC, "fill": IMAGENET_GREY, "layers": 2, "magnitude": 8}
    for sample in range(40):
        rng = augmentation_rng(0, 0, sample)
        transform.draw(32, 32, rng)
        expected = np.array(timm_randaugment(Image.fromarray(small), rng, **manner, **keys))
        found = transform(small, augmentation_rng(0, 0, sample)).permute(1, 2, 0).numpy()
        np.testing.assert_array_equal(found, expected)


def test_three_augment__is_one_of_three_by_torchvision_and_pillow() -> None:
    image = Image.fromarray(picture())
    expected = (v2.functional.rgb_to_grayscale(image, 3), v2.functional.solarize(image, 128),
                image.filter(ImageFilter.GaussianBlur(1.3)))  # fmt: skip
    for number, each in enumerate(expected):
        found = three_augment(image, Fixed(number, 1.3))  # type: ignore[arg-type]
        np.testing.assert_array_equal(np.array(found), np.array(each))
    small = image.crop((0, 60, 20, 80))
    kinds = [np.array(three_augment(small, np.random.default_rng(seed))) for seed in range(600)]
    grey = sum(bool((kind == kind[..., :1]).all()) for kind in kinds)
    solarized = sum(bool((kind == np.array(expected[1].crop((0, 60, 20, 80)))).all()) for kind in kinds)
    assert 160 <= grey <= 240
    assert 160 <= solarized <= 240


@pytest.mark.parametrize("strengths", [(0.3, 0.3, 0.3), (0.4, 0.0, 1.5, 0.2)])
def test_color_jitter__is_torchvisions_with_the_same_draws(strengths: tuple[float, ...]) -> None:
    """torchvision applies its own parameters, which are set to what the generator draws."""
    image = Image.fromarray(picture())
    jitter = v2.ColorJitter(*strengths)
    for seed in range(12):
        rng = np.random.default_rng(seed)
        order = rng.permutation(len(strengths)).tolist()
        factors: list[float | None] = [None] * 4
        for number in order:
            if strength := strengths[number]:
                low, high = (-strength, strength) if number == 3 else (max(0, 1 - strength), 1 + strength)
                factors[number] = float(rng.uniform(low, high))
        names = ("brightness_factor", "contrast_factor", "saturation_factor", "hue_factor")
        expected = jitter.transform(image, {"fn_idx": order, **dict(zip(names, factors, strict=True))})
        found = color_jitter(image, strengths, np.random.default_rng(seed))
        np.testing.assert_array_equal(np.array(found), np.array(expected))


@pytest.mark.parametrize("size", [(130, 150), (97, 31), (20, 64), (64, 64), (33, 200)])
def test_letterbox__is_timms_crop_mode_border(size: tuple[int, int]) -> None:
    """Size, place and colour exactly; pixels to a level, because Pillow resizes there."""
    image = np.random.default_rng(size).integers(90, 180, (*size, 3), dtype=np.uint8)
    fill = fill_colour((0.485, 0.456, 0.406))
    assert fill == (124, 116, 104)
    timms = CenterCropOrPad(64, fill=fill)(ResizeKeepRatio(64, 1.0, "bicubic")(Image.fromarray(image)))
    transform = EvalTransform(64, method="letterbox", resample="bicubic_antialias", fill=fill)
    found = transform(image).permute(1, 2, 0).numpy()
    theirs = np.array(timms)
    assert np.abs(found.astype(int) - theirs).max() <= 1
    np.testing.assert_array_equal((found == fill).all(axis=2), (theirs == fill).all(axis=2))
    training = TrainTransform(64, crop="letterbox", flip=False, resample="bicubic_antialias", fill=fill)
    np.testing.assert_array_equal(training(image, augmentation_rng(0, 0, 0)).permute(1, 2, 0).numpy(), found)


def test_letterbox__the_thinnest_image_keeps_a_pixel() -> None:
    found = EvalTransform(32, method="letterbox", fill=(1, 2, 3))(np.full((1, 4000, 3), 200, np.uint8))
    assert [int(value) for value in (found != 200).sum(dim=(1, 2))] == [31 * 32] * 3


def test_train_transform__the_order_of_the_operations() -> None:
    image = picture()
    whole = TrainTransform(
        32,
        "none",
        randaugment_layers=1,
        randaugment_rules="big_vision",
        vertical_flip=True,
        augment3=True,
        color_jitter=(0.3, 0.3, 0.3),
    )
    plain = TrainTransform(32, "none", flip=False)(image, augmentation_rng(0, 0, 0)).permute(1, 2, 0).numpy()
    seen = set()
    for seed in range(8):
        rng = augmentation_rng(seed, 0, 0)
        across, down = rng.random() < 0.5, rng.random() < 0.5
        expected = plain[:: -1 if down else 1, :: -1 if across else 1]
        expected = big_vision_randaugment(expected, rng, layers=1, magnitude=9)
        coloured = color_jitter(three_augment(Image.fromarray(expected), rng), (0.3, 0.3, 0.3), rng)
        found = whole(image, augmentation_rng(seed, 0, 0)).permute(1, 2, 0).numpy()
        np.testing.assert_array_equal(found, np.array(coloured))
        seen.add((across, down))
    assert len(seen) > 2


def test_big_vision__draws_each_of_its_sixteen_operations_anew() -> None:
    image = picture()[:16, :16]
    assert len(OPERATIONS) == 16
    for seed in range(30):
        rng = np.random.default_rng(seed)
        expected = image
        for _ in range(2):
            name = list(OPERATIONS)[int(rng.integers(16))]
            expected = OPERATIONS[name](expected, 1.0, rng)
        found = big_vision_randaugment(image, np.random.default_rng(seed), layers=2, magnitude=10)
        np.testing.assert_array_equal(found, expected)


def test_timm__draws_from_its_generator_alone() -> None:
    before = random.getstate(), np.random.get_state()[1].tolist()
    transform = TrainTransform(
        32,
        "random_resized",
        randaugment_layers=3,
        randaugment_rules="timm",
        randaugment_std=1.0,
        fill=(0, 9, 200),
    )
    images = [transform(picture(), augmentation_rng(0, 0, sample)) for sample in (*range(12), *range(12))]
    assert all(torch.equal(one, two) for one, two in zip(images[:12], images[12:], strict=True))
    assert not all(torch.equal(image, images[0]) for image in images[1:12])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before
