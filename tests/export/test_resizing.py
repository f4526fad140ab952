"""Exported weights answer as their run does when the other program prepares the images itself, or it is said
how often not.
"""

import io
import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from PIL import Image

from tests.matrix import slow
from tests.trained import do
from vitctl.data.datasets.readers.arrays import encode_png
from vitctl.data.images.transforms import EvalTransform
from vitctl.data.writer.intake import Item
from vitctl.data.writer.shard_writer import write_split
from vitctl.export.resizing import stored_transform
from vitctl.jobs.inputs.weights import find_weights, loaded_model
from vitctl.models.build import Model, build
from vitctl.models.variants import variant
from vitctl.models.weights.weights_file import save_weights
from vitctl.recipe.export_formats import FORMATS, readers_transform
from vitctl.recipe.load import Override, load_recipe
from vitctl.recipe.write import to_toml

NAMES = tuple("abcde")
SIZES = ((40, 56), (75, 50), (64, 64), (33, 47))
NUM_IMAGES = 40


RULES = [
    {
        "image_size": 32,
        "eval_method": method,
        "eval_resize": resize,
        "resample": resample,
        "exif_orientation": False,
    }
    for method, resize, resample in (
        ("shorter_side", 36, "bilinear_antialias"),
        ("shorter_side", 36, "area"),
    )
]
CLEAR = (
    0.1  # between the two largest logits; a pixel that is rounded to the other side moves them by up to 0.04
)


def noise(seed: int) -> np.ndarray:
    height, width = SIZES[seed % 4]
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


@cache
@torch.inference_mode()
def clear() -> list[int]:
    """Seeds of images with a clear answer by every rule: of others the answer depends on how a processor
    rounds pixels.
    """
    model, seeds = network().eval(), range(3 * NUM_IMAGES)
    found = torch.ones(len(seeds), dtype=torch.bool)
    for rule in RULES:
        transform = stored_transform(rule)
        images = torch.stack([transform(noise(seed)) for seed in seeds])
        best = model((images.float() / 255 - 0.5) / 0.5).topk(2).values
        found &= best[:, 0] - best[:, 1] > CLEAR
    return [seed for seed in seeds if found[seed]][:NUM_IMAGES]


def network() -> Model:
    made = build(variant("Ti/8", image_size=32, num_classes=5, depth=2, gelu="erf"), seed=0)
    generator = torch.Generator().manual_seed(1)
    for parameter in made.parameters():
        parameter.data.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    made.get_parameter("head.bias").data.zero_()
    return made


def pixels(number: int) -> np.ndarray:
    return noise(clear()[number])


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("photos")
    for split in ("train", "test"):
        items = [Item(f"{n}.png", n % 5, lambda n=n: encode_png(pixels(n))) for n in range(NUM_IMAGES)]
        write_split(items, out / split, NAMES, seed=3, source_text="noise", max_samples=30)
    return out


def run_folder(
    folder: Path, photos: Path, preprocessing: dict[str, Any], job: str = "finetune", **values: Any
) -> Path:
    """A run whose weights answer differently to different images."""
    given = {"data.path": str(photos), "data.image_size": 32, **values}
    folder.mkdir()
    loaded = load_recipe(job, [Override(key, value) for key, value in given.items()])
    (folder / "recipe.toml").write_text(to_toml(loaded))
    made = network()
    meta = {"mean": [0.5] * 3, "std": [0.5] * 3, "image_size": 32, "class_names": list(NAMES)} | preprocessing
    path = folder / "checkpoints" / "step_00000001" / "model.safetensors"
    path.parent.mkdir(parents=True)
    save_weights(path, made.state_dict(), made.config, meta)
    return path


@torch.inference_mode()
def ours(weights: Path) -> list[str]:
    """The answer to each image, with the stored pre-processing."""
    found = find_weights(str(weights))
    model, _ = loaded_model(found, 0, torch.float32)
    transform = stored_transform(found.weights.meta)
    images = torch.stack([transform(pixels(number)) for number in range(NUM_IMAGES)])
    return [NAMES[int(number)] for number in model.eval()((images.float() / 255 - 0.5) / 0.5).argmax(1)]


def exported(tmp_path: Path, weights: Path, to: str, **values: Any) -> tuple[Path, dict[str, Any]]:
    result = do(
        "export", tmp_path / "export", **{"weights.source": str(weights), "export.to": (to,), **values}
    )
    return Path(result["files"][to]).parent, result


def opened(number: int) -> Image.Image:
    return Image.open(io.BytesIO(encode_png(pixels(number))))


@torch.inference_mode()
def theirs(folder: Path, to: str) -> list[str]:
    """The same, by the other program with the pre-processing that it reads out of the folder."""
    answers = []
    if to == "hf":
        transformers = pytest.importorskip("transformers")
        processor = transformers.AutoImageProcessor.from_pretrained(folder)
        model = transformers.ViTForImageClassification.from_pretrained(folder).eval()
    else:
        timm = pytest.importorskip("timm")
        model = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
        transform = timm.data.create_transform(
            **timm.data.resolve_model_data_config(model), is_training=False
        )
    for number in range(NUM_IMAGES):
        image = opened(number)
        if to == "hf":
            logits = model(**processor(images=image, return_tensors="pt")).logits
        else:
            logits = model(transform(image)[None])
        answers.append(NAMES[int(logits.argmax())])
    return answers


SQUARE = {"eval_method": "square", "eval_resize": 0}
CROPPED = {"eval_method": "shorter_side", "eval_resize": 36}


@pytest.mark.parametrize(
    ("to", "rule", "told"),
    [
        *slow(("hf", {**CROPPED, "resample": "bilinear_antialias"},
         "bilinear with antialias (square 32), these weights are scored by bilinear with antialias (shorter "
         "side 36, centre 32)")),
        ("timm", {**CROPPED, "resample": "area"},
         "bilinear with antialias (shorter side 36, centre 32, torchvision's rounding), these weights are "
         "scored by area"),
    ],
)  # fmt: skip
def test_export__what_a_format_cannot_say_is_told_with_the_answers_it_changes(
    photos: Path, tmp_path: Path, to: str, rule: dict[str, Any], told: str
) -> None:
    """The count is that of the real program."""
    weights = run_folder(tmp_path / "run", photos, rule)
    folder, result = exported(tmp_path, weights, to)
    pairs = zip(ours(weights), theirs(folder, to), strict=True)
    changed = sum(own != other for own, other in pairs)
    assert 0 < changed < NUM_IMAGES
    assert result["metrics"]["answers_changed"][to] == {"changed": changed, "total": NUM_IMAGES}
    log = [json.loads(line) for line in (tmp_path / "export" / "log.jsonl").read_text().splitlines()]
    [note] = [note for record in log for note in record.get("notes", ()) if "predictions" in note]
    assert told in note
    assert f"changes {changed} of 40 predictions ({changed / 40:.1%}) on test of {tmp_path / 'run'}" in note
    assert f"- {note}\n" in (folder / "README.md").read_text()
    described = json.loads((folder / "config.json").read_text())["vitctl"]
    assert (described["resizing"], described["preprocessing"]["resample"]) == (note, rule["resample"])


@pytest.mark.slow
def test_export__onnx_tells_it_in_its_metadata(photos: Path, tmp_path: Path) -> None:
    weights = run_folder(tmp_path / "run", photos, {**CROPPED, "resample": "area"})
    folder, result = exported(tmp_path, weights, "onnx")
    props = {prop.key: prop.value for prop in onnx.load(folder / "model.onnx").metadata_props}
    assert (
        "resizes by bilinear with antialias (shorter side 36, centre 32), these weights are scored by area"
        in props["resizing"]
    )
    assert result["metrics"]["answers_changed"]["onnx"]["total"] == NUM_IMAGES


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"export.check_images": 0}, "export.check_images = 0"),
        ({"data.path": "nowhere"}, "nowhere"),
        ({"job": "probe"}, "the images of `vitctl probe` are not opened here; measure it with --check-data"),
        *slow(
            ({"data.path": "s3://bucket/set"}, r"its images are not on this machine (s3://bucket/set)"),
            ({"data.eval_split": ""}, "the run scores no images"),
            ({}, "the weights are not in a run folder"),
        ),
    ],
)
def test_export__says_that_nothing_was_measured(
    photos: Path, tmp_path: Path, values: dict[str, Any], reason: str
) -> None:
    of_run = {key: value for key, value in values.items() if not key.startswith("export.")}
    weights = run_folder(tmp_path / "run", photos, {**SQUARE, "resample": "bilinear"}, **of_run)
    if not values:
        weights = weights.rename(tmp_path / "alone.safetensors")
    of_export = {key: value for key, value in values.items() if key.startswith("export.")}
    folder, result = exported(tmp_path, weights, "torchvision", **of_export)
    assert result["metrics"]["answers_changed"]["torchvision"] == {"changed": None, "total": 0}
    text = (folder / "README.md").read_text()
    assert "how many predictions that changes was not measured: " in text
    assert reason in text


def test_their_transform__of_what_each_format_can_say() -> None:
    own = EvalTransform(32, method="shorter_side", resize=36, resample="bilinear_antialias")
    assert readers_transform(FORMATS["google"], own) == EvalTransform(32, resize=32)
    assert readers_transform(FORMATS["safetensors"], own) == own
    square = EvalTransform(32, resize=32, resample="bicubic_antialias")
    assert all(
        readers_transform(FORMATS[to], square) == square for to in ("hf", "timm", "onnx", "torchvision")
    )
    whole = EvalTransform(32, method="letterbox", resize=32, resample="bicubic_antialias")
    theirs = {
        to: readers_transform(FORMATS[to], whole).method for to in ("onnx", "timm", "hf", "torchvision")
    }
    assert list(theirs.values()) == ["letterbox", "letterbox", "square", "torchvision"]
    plain = EvalTransform(32, resize=32)
    assert readers_transform(FORMATS["google"], plain) == plain
