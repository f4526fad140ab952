"""Images are made as transformers' image processor makes them that preprocessor_config.json describes."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.matrix import slow, spread
from tests.models.weights.conftest import refused
from vitctl.errors import CheckpointError, VitctlError
from vitctl.jobs.inputs.weights import planned_weights, scored_weights, stored_eval_transform
from vitctl.models.variants import ViTConfig
from vitctl.models.weights.layouts import RESAMPLE
from vitctl.models.weights.weights_file import read_weights, write_weights
from vitctl.recipe.load import load_recipe
from vitctl.recipe.schema import Evaluate

transformers = pytest.importorskip("transformers")
_SIDES = [(40, 61), (61, 40), (33, 47), (50, 75), (32, 33), (90, 37), (37, 91), (32, 32), (64, 200)]
_COLOURS = {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6]}


@pytest.fixture
def folder(plain: ViTConfig, make_weights: Any, tmp_path: Path) -> Path:
    """A folder of transformers' ViT that records nothing of ours."""
    write_weights(make_weights(plain), tmp_path, "hf")
    return tmp_path


def _recipe(folder: Path, **values: Any) -> Evaluate:
    given = [(name.replace("__", "."), value) for name, value in values.items()]
    recipe = load_recipe("evaluate", [("weights.source", str(folder)), *given]).recipe
    assert isinstance(recipe, Evaluate)
    return recipe


def _ours(folder: Path, image: np.ndarray, **values: Any) -> torch.Tensor:
    recipe, weights = _recipe(folder, **values), read_weights(folder)
    found = planned_weights(recipe, str(folder), weights.config, weights.meta)
    meta = scored_weights(recipe, found).weights.meta
    colours = stored_eval_transform(recipe, meta)(image).double() / 255
    mean, std = (torch.tensor(meta[name], dtype=torch.float64).view(3, 1, 1) for name in ("mean", "std"))
    return (colours - mean) / std


CASES: list[tuple[str, dict[str, Any]]] = [
    ("ViT", {"size": {"height": 32, "width": 32}}),
    ("ViT", {"size": 32, "do_rescale": False}),
    ("ViT", {"size": 32, "do_normalize": False}),
    ("ViT", {"size": 32, "do_normalize": False, "do_rescale": False}),
    ("ViT", {"size": 32, "rescale_factor": 1 / 127.5, **_COLOURS}),
    *(("ViT", {"size": 32, "resample": number}) for number in (0, 1, 2, 3)),
    ("ViT", {"size": 24, "do_pad": True, "pad_size": {"height": 24, "width": 24}}),
    ("ViT", {"size": {"shortest_edge": 37}, "do_center_crop": True, "crop_size": 32}),
    ("DeiT", {"size": 37, "crop_size": 32, **_COLOURS}),
    ("DeiT", {"size": 35, "crop_size": 32}),
    ("Bit", {"size": {"shortest_edge": 36}, "crop_size": {"height": 32, "width": 32}}),
    ("Bit", {"size": {"shortest_edge": 37}, "crop_size": {"height": 24, "width": 24}}),
    ("CLIP", {"size": 32, "crop_size": 32}),
    ("CLIP", {"size": 35, "crop_size": 32, "do_convert_rgb": False}),
    ("CLIP", {"size": 32, "crop_size": 32, "do_center_crop": False, "default_to_square": True}),
    ("Siglip", {"size": {"height": 32, "width": 32}}),
    ("Beit", {"size": 32, "resample": 2}),
    ("Beit", {"size": 40, "do_center_crop": True, "crop_size": 32}),
    ("ConvNext", {"size": {"shortest_edge": 32}}),
    ("ConvNext", {"size": 32, "crop_pct": 0.5}),
    ("ConvNext", {"size": 32, "crop_pct": 0.9}),
    ("ConvNext", {"size": {"shortest_edge": 384}, "crop_pct": 0.9}),
    ("ViT", {}), ("DeiT", {}), ("Bit", {}), ("CLIP", {}), ("Siglip", {}), ("Beit", {}), ("ConvNext", {}),
    ("DINOv3ViT", {}),
    # null is not the default of the class
    ("ViT", {"size": 32, "do_normalize": None, "image_mean": None, "crop_size": None}),
    ("ViT", {"size": 32, "do_rescale": None, "rescale_factor": None, "do_center_crop": None}),
    ("CLIP", {"size": {"height": 32, "width": 32}, "do_center_crop": None}),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "values"), spread(6, CASES), ids=str)
def test_processor__its_pixels_are_ours(kind: str, values: dict[str, Any], folder: Path) -> None:
    name = f"{kind}ImageProcessor"
    theirs = getattr(transformers, name)(**values)
    (folder / "preprocessor_config.json").write_text(json.dumps({**values, "image_processor_type": name}))
    weights = read_weights(folder)
    assert "assumed" not in weights.meta
    generator = np.random.default_rng(0)
    for sides in _SIDES if values else _SIDES[:2]:
        image = generator.integers(0, 256, (*sides, 3), np.uint8)
        if values.get("resample") == 1:  # between rows and columns, torch and Pillow cut off noise otherwise
            image = image // 16 + 120
        expected = theirs(image, return_tensors="pt")["pixel_values"][0].double()
        ours = _ours(folder, image)
        assert ours.shape == expected.shape, sides
        # Pillow's filters and numbers that are resized between 0 and 1 differ by rounding: a level or two
        levels = 2 if kind == "DINOv3ViT" or values.get("resample") == 1 else 0
        spread = torch.tensor(weights.meta["std"]).min() * 255
        assert (ours - expected).abs().max() <= (levels + 1e-3) / spread, sides
    size = weights.meta["image_size"]
    assert ("positions" in "".join(weights.meta.get("remarks", ()))) == (size != weights.config.image_size)


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"do_resize": False, "do_center_crop": True, "crop_size": 32}, "do_resize is false"),
        ({"size": {"height": 32, "width": 40}}, "size is"),
        ({"size": {"longest_edge": 40}}, "size is"),
        ({"size": {"shortest_edge": 32, "longest_edge": 40}}, "size is"),
        ({"size": {"shortest_edge": 32}}, "do_center_crop is null"),
        ({"size": 32, "do_center_crop": True, "crop_size": 40}, "crop_size is 40"),
        ({"size": 32, "do_center_crop": True, "crop_size": {"height": 32, "width": 16}}, "crop_size is"),
        ({"size": 24, "do_pad": True, "pad_size": {"height": 32, "width": 32}}, "pad_size is"),
        ({"image_processor_type": "ConvNextImageProcessor", "size": {"height": 8, "width": 8}}, "size is"),
        ({"image_processor_type": "ConvNextImageProcessor", "size": 32, "crop_pct": 1.2}, "crop_pct is 1.2"),
        ({"image_processor_type": "ConvNextImageProcessor", "size": 32, "do_center_crop": True,
          "crop_size": 16}, "crop_size is 16"),
    ],
    ids=str,
)  # fmt: skip
def test_processor__what_cannot_be_followed_is_refused_until_it_is_set(
    values: dict[str, Any], key: str, folder: Path
) -> None:
    (folder / "preprocessor_config.json").write_text(json.dumps(values))
    image = np.zeros((40, 50, 3), np.uint8)
    with pytest.raises(CheckpointError, match=key) as error:
        _ours(folder, image)
    assert "--set data.eval_method=square" in str(error.value)
    assert "\n" not in str(error.value)
    assert _ours(folder, image, data__eval_method="square").shape == (3, 32, 32)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"do_flip_channel_order": True}, "do_flip_channel_order is true, only false is supported"),
        ({"rescale_offset": True}, "rescale_offset is true, a key that vitctl does not know"),
        (
            {"image_processor_type": "EfficientNetImageProcessor"},
            "EfficientNetImageProcessor is not supported",
        ),
    ],
)
def test_processor__another_class_or_key_is_refused(values: Any, words: str, folder: Path) -> None:
    (folder / "preprocessor_config.json").write_text(json.dumps(values))
    refused(folder, f"preprocessor_config.json: {words}")


@pytest.mark.parametrize("kind", ["ViT", *slow("DeiT", "ConvNext")])
@pytest.mark.parametrize(
    "key", ["size", "resample", "rescale_factor", "image_mean", "image_std", "crop_size"]
)
def test_processor__a_null_that_transformers_refuses_is_refused(kind: str, key: str, folder: Path) -> None:
    name = f"{kind}ImageProcessor"
    (folder / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": name, key: None}))
    theirs = transformers.AutoImageProcessor.from_pretrained(folder)
    try:
        theirs(np.zeros((40, 50, 3), np.uint8), return_tensors="pt")
    except ValueError:
        refused(folder, rf"preprocessor_config.json: {key} is null, which tr\w+ ref")
    else:
        assert key == "crop_size"
        assert kind != "DeiT"
        read_weights(folder)


def test_resample__filters_are_pillows_and_others_are_refused_with_the_key(folder: Path) -> None:
    from PIL import Image

    image = np.random.default_rng(0).integers(64, 192, (61, 40, 3), np.uint8)
    for number, name in enumerate(RESAMPLE):
        (folder / "preprocessor_config.json").write_text(
            json.dumps({"size": 32, "resample": number, "do_normalize": False})
        )
        assert read_weights(folder).meta["resample"] == RESAMPLE[name]
        theirs = np.array(Image.fromarray(image).resize((32, 32), Image.Resampling(number)))
        ours = (_ours(folder, image) * 255).permute(1, 2, 0).numpy()
        assert np.abs(ours - theirs).max() < (3 if name == "bicubic" else 1) + 0.01
    (folder / "preprocessor_config.json").write_text('{"size": 32, "resample": 99}')
    with pytest.raises(
        VitctlError, match=r"'filter 99 of Pillow'.* set data.eval_resample to one of bil"
    ) as error:
        _ours(folder, image)
    assert "\n" not in str(error.value)
    assert _ours(folder, image, data__eval_resample="lanczos").shape == (3, 32, 32)


def test_size__that_of_the_processor_is_that_of_every_job(folder: Path) -> None:
    from vitctl import load_model

    (folder / "preprocessor_config.json").write_text('{"size": 24}')
    model, meta = load_model(folder)
    assert (meta["image_size"], model.config.image_size) == (24, 24)
    model, _ = load_model(folder, image_size=32)
    assert model.config == replace(read_weights(folder).config, image_size=32)
