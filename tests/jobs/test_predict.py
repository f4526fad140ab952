"""Predictions are what `evaluate` counts, image by image; whatever cannot be used is reported and harms
nothing else.
"""

import hashlib
import io
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from PIL import Image, ImageOps
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from tests.conftest import TINY
from tests.matrix import slow
from tests.trained import CPU, Job, do
from vitctl import VitctlError, load_classifier, open_split
from vitctl.data.images.decode import without_heic
from vitctl.data.source.stores import ImageFiles
from vitctl.data.source.views import Source, View
from vitctl.errors import CheckpointError, DataError, RecipeError
from vitctl.jobs.inputs.classifier import open_classifier
from vitctl.jobs.inputs.given_images import find_images
from vitctl.jobs.predict import Prediction, known_classes, predict
from vitctl.models.weights.weights_file import read_weights, save_weights
from vitctl.recipe.load import load_recipe
from vitctl.recipe.schema import Evaluate


def recipe(source: Path, **values: Any) -> Evaluate:
    given = {**CPU, "machine.precision": "float32", "weights.source": str(source), **values}
    return load_recipe("evaluate", [*given.items()]).recipe


def predicted(source: Path, images: list[Path] | Source, **values: Any) -> list[Prediction]:
    own = {name: values.pop(name) for name in ("top", "threshold", "features") if name in values}
    sources = [ImageFiles([*map(str, images)]) if isinstance(images, list) else images]
    return [one for batch in predict(recipe(source, **values), sources, **own) for one in batch]


def logits(source: Path, images: list[Path], **values: Any) -> Tensor:
    settings = recipe(source, **values)
    size = settings.evaluation.batch_size
    opened = open_classifier(settings)
    batches = [
        *opened.answers(ImageFiles([*map(str, images)]), batch_size=size, workers=settings.machine.workers)
    ]
    assert not any(error for batch in batches for error in batch.errors)
    return torch.cat([batch.logits for batch in batches if batch.logits is not None])


@contextmanager
def outputs_of_models() -> Iterator[list[Tensor]]:
    """What every whole model gives while a job runs, whichever function calls it."""
    seen: list[Tensor] = []

    def look(module: nn.Module, _: Any, output: Any) -> None:
        if hasattr(module, "features") and hasattr(module, "config"):
            seen.append(output.detach().clone())

    handle = nn.modules.module.register_module_forward_hook(look)
    try:
        yield seen
    finally:
        handle.remove()


@pytest.fixture
def extracted(tiny_data: Path, tmp_path: Path) -> list[Path]:
    """The test images as files, in the order of the split."""
    source = open_split("test", path=tiny_data)
    (tmp_path / "images").mkdir()
    paths = [tmp_path / "images" / f"{number:02d}.png" for number in range(len(source))]
    for number, path in enumerate(paths):
        path.write_bytes(source.read(number))
    return paths


@pytest.fixture(scope="session")
def trained(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose predictions differ from image to image, by softmax."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    values = {"schedule.total_steps": 60, "optimizer.lr": 0.003, "loss.name": "softmax", "data.crop": "none"}
    values |= {"model.depth": 1}
    do(TINY, folder, **{"data.path": str(tiny_data), **CPU, **values})
    return folder


def averaged(trained: Path) -> Path:
    """The weights that represent that run."""
    return trained / "checkpoints" / "step_00000060" / "ema.safetensors"


@pytest.fixture(scope="session")
def onnx_file(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("onnx") / "export"
    do("export", folder, **{"weights.source": str(trained), "export.to": ("onnx",)})
    return folder / "model.onnx"


@pytest.mark.parametrize(
    ("precision", "batch_size"), [("float32", 10), ("bf16", 256), *slow(("float64", 23))]
)
def test_predict__gives_the_logits_of_evaluate_bit_for_bit(
    job: Job, trained: Path, extracted: list[Path], precision: str, batch_size: int
) -> None:
    how = {"machine.precision": precision, "evaluation.batch_size": batch_size}
    with outputs_of_models() as seen:
        job("evaluate", **{"weights.source": str(trained), **how})
    counted = torch.cat(seen)[: len(extracted)]
    own = logits(trained, extracted, **how)
    assert own.dtype == counted.dtype
    assert torch.equal(own, counted)
    assert len(own.argmax(1).unique()) > 2


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_predict__gives_the_logits_of_evaluate_on_a_gpu(
    job: Job, trained: Path, extracted: list[Path], precision: str
) -> None:
    how = {"machine.precision": precision, "machine.device": "cuda", "evaluation.batch_size": 10}
    with outputs_of_models() as seen:
        job("evaluate", **{"weights.source": str(trained), **how})
    assert torch.equal(logits(trained, extracted, **how), torch.cat(seen)[: len(extracted)].cpu())


def test_predict__its_best_classes_are_those_that_evaluate_counts(
    job: Job, trained: Path, extracted: list[Path], tiny_data: Path
) -> None:
    result = job("evaluate", "score", **{"weights.source": str(trained), "machine.precision": "float32"})
    source = open_split("test", path=tiny_data)
    names, labels = source.class_names, source.labels()
    own = predicted(trained, extracted)
    assert [one.name for one in own] == [*map(str, extracted)]
    best = [one.classes[0][0] for one in own]
    assert (
        sum(name == names[label] for name, label in zip(best, labels, strict=True))
        == result["metrics"]["correct"]
    )
    top5 = [names[label] in dict(one.classes) for one, label in zip(own, labels, strict=True)]
    assert sum(top5) == result["metrics"]["top5_correct"]


def test_predict__accuracy_of_labelled_images_is_that_of_evaluate(
    job: Job, trained: Path, tiny_data: Path, tmp_path: Path
) -> None:
    """Of shards, and of the same images in a folder for each class; others have no label."""
    scored = job("evaluate", **{"weights.source": str(trained), "machine.precision": "float32"})["metrics"]
    split = open_split("test", path=tiny_data)
    for sample, label in enumerate(split.labels()):
        place = tmp_path / "photos" / split.class_names[label] / f"{sample}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(split.read(sample))
    (tmp_path / "photos" / "others").mkdir()
    (tmp_path / "photos" / "others" / "x.png").write_bytes(split.read(0))
    (tmp_path / "photos" / split.class_names[0] / "bad.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    how = recipe(trained, **{"machine.precision": "float32"})
    for names in ([f"{tiny_data}:test"], [str(tmp_path / "photos")]):
        sources = find_images(names, how.data, stdin=io.BytesIO(), note=lambda _: None)
        right = [one.is_right for batch in predict(how, sources, threshold=1.0) for one in batch]
        assert (right.count(True), right.count(False)) == (
            scored["correct"],
            scored["total"] - scored["correct"],
        )
    assert right.count(None) == 2


def test_known_classes__of_shards_with_several_labels_and_of_other_classes() -> None:
    labels = np.array([[1, 0], [2, -1], [-1, -1]])
    shards = View((), ("a", "b", "c"), "", np.arange(3), labels)
    assert known_classes(shards, ("a", "b", "c")).tolist() == labels.tolist()
    assert known_classes(shards, ("b", "a", "c")).tolist() == [[0, 1], [2, -1], [-1, -1]]
    for others in (("a", "b"), ()):
        assert known_classes(shards, others).tolist() == [[-1]] * 3


def test_predict__shards_are_read_as_they_are(trained: Path, extracted: list[Path], tiny_data: Path) -> None:
    source = open_split("test", path=tiny_data)
    own = predicted(trained, source)
    assert [one.name for one in own] == [source.key(n) for n in range(23)]
    assert [one.classes for one in own] == [one.classes for one in predicted(trained, extracted)]


@pytest.mark.slow
def test_predict__an_onnx_file_gives_the_same_answers(
    trained: Path, onnx_file: Path, extracted: list[Path], photographs: dict[str, Path]
) -> None:
    images = [*extracted, *(path for name, path in photographs.items() if name not in BAD)]
    for size in (1, 8, 256):
        ours = logits(trained, images, **{"evaluation.batch_size": size})
        theirs = logits(onnx_file, images, **{"evaluation.batch_size": size})
        assert torch.equal(ours.argmax(1), theirs.argmax(1))
        assert (ours - theirs).abs().max() <= 1e-4 * ours.std()
    ours_told, theirs_told = predicted(trained, images), predicted(onnx_file, images)
    assert [[name for name, _ in one.classes] for one in ours_told] == [
        [name for name, _ in one.classes] for one in theirs_told
    ]
    likely = [[[p for _, p in one.classes] for one in told] for told in (ours_told, theirs_told)]
    np.testing.assert_allclose(*likely, atol=1e-5)


@pytest.mark.slow
def test_flip_average__is_the_mean_of_the_logits_of_an_image_and_its_mirror_image(
    job: Job, trained: Path, extracted: list[Path], tiny_data: Path, tmp_path: Path
) -> None:
    """The same in predict, in evaluate and in an exported graph, beside the features of the image itself."""
    mirrored = []
    for path in extracted:
        with Image.open(path) as image:
            mirrored.append(tmp_path / f"{path.stem}.png")
            ImageOps.mirror(image).save(mirrored[-1])
    plain = logits(trained, extracted)
    wanted = (plain.double() + logits(trained, mirrored).double()) / 2
    assert (plain - wanted).abs().max() > 1e-2 * plain.std()
    averaged = {"evaluation.flip_average": True}
    found = logits(trained, extracted, **averaged)
    assert (found - wanted).abs().max() <= 1e-5 * plain.std()
    labels = torch.from_numpy(open_split("test", path=tiny_data).labels())
    result = job(
        "evaluate", "flipped", **{"weights.source": str(trained), "machine.precision": "float32", **averaged}
    )
    assert result["metrics"]["correct"] == int((found.argmax(1) == labels).sum())
    assert result["provenance"]["flip_average"] is True
    options = {"export.to": ("onnx",), "export.flip_average": True, "export.features": True}
    exported = do("export", tmp_path / "export", **{"weights.source": str(trained), **options})
    assert exported["provenance"]["flip_average"] is True
    file = tmp_path / "export" / "model.onnx"
    assert {one.key: one.value for one in onnx.load(file).metadata_props}["flip_average"] == "true"
    assert (logits(file, extracted) - wanted).abs().max() <= 1e-4 * plain.std()
    features = []
    for weights, values in ((trained, averaged), (trained, {}), (file, {})):
        path = tmp_path / f"{len(features)}.safetensors"
        given = predicted(weights, extracted, features=path, **values)
        by_class = zip(
            given, (wanted if path.stem != "1" else plain).softmax(1).amax(1).tolist(), strict=True
        )
        assert all(abs(one.classes[0][1] - share) < 1e-4 for one, share in by_class)
        features.append(load_file(path)["features"])
    assert torch.equal(features[0], features[1])
    torch.testing.assert_close(features[2], features[1], atol=1e-4, rtol=1e-3)
    with pytest.raises(RecipeError, match="averages or not as it was exported"):
        logits(file, extracted, **averaged)


@pytest.mark.slow
def test_openvino__runs_the_file_as_it_is(onnx_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openvino_telemetry", None)  # it would report to its maker
    openvino = pytest.importorskip("openvino")
    network = open_classifier(recipe(onnx_file)).network
    images = torch.randint(0, 256, (3, 3, 16, 16), dtype=torch.uint8)
    model = openvino.Core().compile_model(onnx_file, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    ours = network(images).logits
    np.testing.assert_allclose(model(images.numpy())["logits"], ours, atol=1e-4 * float(ours.std()))


@pytest.mark.slow
def test_predict__onnxruntime_reports_nothing_to_its_maker(onnx_file: Path, tmp_path: Path) -> None:
    """It keeps the number of a user, and what is to be sent, in these folders. In CI it does not."""
    image, folders = tmp_path / "image.png", {name: tmp_path / name for name in ("HOME", "TMPDIR")}
    Image.new("RGB", (32, 32)).save(image)
    for folder in folders.values():
        folder.mkdir()
    unset = ("CI", "GITHUB_ACTIONS", "JENKINS_URL", "TF_BUILD", "ORT_DISABLE_TELEMETRY")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    line = (sys.executable, "-m", "vitctl", "predict", image, "--from", onnx_file)
    subprocess.run(line, check=True, env={**environment, **{k: str(v) for k, v in folders.items()}})
    assert [path for folder in folders.values() for path in folder.rglob("*")] == []


@pytest.mark.slow
def test_predict__an_onnx_file_that_resizes_gives_the_same_answers(
    trained: Path, extracted: list[Path], photographs: dict[str, Path], tmp_path: Path
) -> None:
    """Photographs of any size, one after the other, beside bad ones; its features too."""
    values = {"weights.source": str(trained), "export.to": ("onnx",)}
    do("export", tmp_path / "out", **values, **{"export.include_preprocess": True, "export.features": True})
    file, images = tmp_path / "out" / "model.onnx", [*extracted, *photographs.values()]
    ours, theirs = (
        predicted(trained, images),
        predicted(file, images, features=tmp_path / "their.safetensors"),
    )
    assert [one.error for one in ours] == [one.error for one in theirs]
    assert any(one.error for one in ours)
    assert [[name for name, _ in one.classes] for one in ours] == [
        [name for name, _ in one.classes] for one in theirs
    ]
    likely = [[[p for _, p in one.classes] for one in told if not one.error] for told in (ours, theirs)]
    np.testing.assert_allclose(*likely, atol=1e-5)
    predicted(trained, images, features=tmp_path / "our.safetensors")
    held = [load_file(tmp_path / f"{name}.safetensors") for name in ("our", "their")]
    assert torch.equal(held[0]["sha256"], held[1]["sha256"])
    torch.testing.assert_close(held[0]["features"], held[1]["features"], atol=1e-4, rtol=1e-4)
    whole = [pillow(path) for name, path in photographs.items() if name not in BAD]
    both = [
        load_classifier(one, precision="float32" if one == trained else "auto").logits(whole)
        for one in (trained, file)
    ]
    torch.testing.assert_close(*both, atol=1e-4, rtol=1e-4)


def pillow(path: Path) -> Image.Image:
    with Image.open(path) as image:
        image.load()
    return image


def jpeg(pixels: np.ndarray, **how: Any) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", **how)
    return file.getvalue()


@pytest.mark.parametrize("to", ["hf", *slow("google")])
def test_predict__weights_of_other_programs(job: Job, extracted: list[Path], tmp_path: Path, to: str) -> None:
    job("finetune", "fine", **{"schedule.total_steps": 20, "optimizer.lr": 0.05, "data.image_size": 16})
    do("export", tmp_path / "out", **{"weights.source": str(tmp_path / "fine"), "export.to": (to,)})
    file = next((tmp_path / "out").rglob("model.*"))
    told = predicted(file, extracted)
    own = predicted(tmp_path / "fine", extracted, **{"data.eval_method": "square"})
    assert [one.classes for one in told] == [one.classes for one in own]


BAD = ("corrupt.jpg", "empty.jpg", "gone.jpg", "text.jpg", "folder.jpg")


@pytest.fixture
def photographs(tmp_path: Path) -> dict[str, Path]:
    """Photographs as people have them, the same picture in each: upright, rotated by its EXIF data, CMYK; and
    bad ones.
    """
    folder = tmp_path / "photographs"
    folder.mkdir()
    rng = np.random.default_rng(0)
    small = Image.fromarray(rng.integers(0, 256, (4, 6, 3), np.uint8))
    upright = np.asarray(small.resize((60, 40), Image.Resampling.BICUBIC))
    rotated = np.rot90(upright)  # orientation 6: turned by 90 degrees clockwise to be shown
    exif = Image.Exif()
    exif[0x0112] = 6
    images = {
        "upright.png": Image.fromarray(upright),
        "grey.png": Image.fromarray(upright).convert("L"),
        "cmyk.jpg": Image.fromarray(upright).convert("CMYK"),
        "rotated.png": Image.fromarray(rotated),
        "camera.jpg": Image.fromarray(rotated),
    }
    for name, image in images.items():
        image.save(folder / name, **({"exif": exif} if name in ("rotated.png", "camera.jpg") else {}))
    whole = jpeg(rng.integers(0, 256, (64, 64, 3), np.uint8))
    (folder / "corrupt.jpg").write_bytes(whole[: len(whole) // 2])
    (folder / "empty.jpg").write_bytes(b"")
    (folder / "text.jpg").write_text("this is no image")
    (folder / "folder.jpg").mkdir()
    return {name: folder / name for name in (*images, *BAD)}


def test_predict__a_folder_with_good_and_bad_photographs(trained: Path, photographs: dict[str, Path]) -> None:
    """A rotated photograph is shown upright; a CMYK one as Pillow converts it; the bad ones do not change the
    others.
    """
    told = {Path(one.name).name: one for one in predicted(trained, [*photographs.values()])}
    assert [*told] == [*photographs]
    assert {name: one.error for name, one in told.items() if one.error} == {
        "corrupt.jpg": "truncated",
        "empty.jpg": "empty file",
        "gone.jpg": "cannot be read (No such file or directory)",
        "text.jpg": "not an image",
        "folder.jpg": "is a folder, should be a file",
    }
    assert all(one.classes == [] for one in told.values() if one.error)
    assert told["rotated.png"].classes == told["upright.png"].classes
    converted = photographs["cmyk.jpg"].with_name("converted.png")
    with Image.open(photographs["cmyk.jpg"]) as cmyk:
        cmyk.convert("RGB").save(converted)
    good = [path for name, path in photographs.items() if name not in BAD]
    alone = {Path(one.name).name: one for one in predicted(trained, [*good, converted])}
    assert alone["converted.png"].classes == alone["cmyk.jpg"].classes
    assert alone["upright.png"].classes != alone["grey.png"].classes
    for name in alone.keys() & told.keys():
        assert [label for label, _ in alone[name].classes] == [label for label, _ in told[name].classes]
        np.testing.assert_allclose(*[[p for _, p in one[name].classes] for one in (alone, told)], atol=1e-6)


def test_predict__heic_is_shown_as_the_jpeg_that_shards_get(
    trained: Path, photographs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pillow_heif = pytest.importorskip("pillow_heif")
    phone = tmp_path / "phone.heic"
    pillow_heif.from_pillow(pillow(photographs["upright.png"])).save(phone)
    stored = tmp_path / "stored.jpg"
    stored.write_bytes(without_heic(phone.read_bytes()))
    own, theirs = predicted(trained, [phone, stored])
    assert own.classes == theirs.classes != []
    file = tmp_path / "out.safetensors"
    predicted(trained, [phone], features=file)
    with safe_open(file, "np") as opened:
        assert bytes(opened.get_tensor("sha256")[0]).hex() == hashlib.sha256(phone.read_bytes()).hexdigest()
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    [lacking] = predicted(trained, [phone])
    assert lacking.error == "HEIC: read with pillow-heif: pip install 'vitctl[heic]'"


def test_predict__stored_pixels_where_the_weights_say_so(
    trained: Path, photographs: dict[str, Path], tmp_path: Path
) -> None:
    weights = read_weights(averaged(trained))
    as_stored = save_weights(
        tmp_path / "w.safetensors", weights.state, weights.config, {**weights.meta, "exif_orientation": False}
    )
    silent = {key: value for key, value in weights.meta.items() if key != "exif_orientation"}
    untold = save_weights(tmp_path / "u.safetensors", weights.state, weights.config, silent)
    pair = [photographs["upright.png"], photographs["rotated.png"]]
    upright, rotated = predicted(as_stored, pair)
    assert upright.classes != rotated.classes
    upright, rotated = predicted(untold, pair)
    assert upright.classes == rotated.classes


def test_predict__pre_processing_is_that_of_the_weights(
    trained: Path, photographs: dict[str, Path], tmp_path: Path
) -> None:
    """The shorter side, resized by area, and the centre crop, against pixels that are cropped by hand."""
    weights = read_weights(averaged(trained))
    meta = {**weights.meta, "eval_method": "shorter_side", "eval_resize": 40, "resample": "area"}
    cropping = save_weights(tmp_path / "w.safetensors", weights.state, weights.config, meta)
    with Image.open(photographs["upright.png"]) as image:
        image.crop((22, 12, 38, 28)).save(tmp_path / "centre.png")
    whole, centre = logits(cropping, [photographs["upright.png"]]), logits(trained, [tmp_path / "centre.png"])
    assert torch.equal(whole, centre)


def test_predict__probabilities_are_those_of_the_loss(
    pretrained: Path, trained: Path, onnx_file: Path, extracted: list[Path]
) -> None:
    raw = logits(pretrained, extracted).double().numpy()
    sigmoid = 1 / (1 + np.exp(-raw))
    exponents = np.exp(logits(trained, extracted).double().numpy())
    softmax = exponents / exponents.sum(1, keepdims=True)
    for source, expected in ((pretrained, sigmoid), (trained, softmax), (onnx_file, softmax)):
        told = predicted(source, extracted, top=6)
        best_first = -np.sort(-expected, axis=1)
        np.testing.assert_allclose([[p for _, p in one.classes] for one in told], best_first, atol=1e-5)
    highest = float(sigmoid.max(1).min())
    kept = predicted(pretrained, extracted, top=6, threshold=highest)
    assert [len(one.classes) for one in kept] == (sigmoid >= highest).sum(1).tolist()
    assert {len(one.classes) for one in predicted(pretrained, extracted, top=2)} == {2}


def test_features__replace_nothing_but_features(trained: Path, extracted: list[Path], tmp_path: Path) -> None:
    """They replaced the weights that gave them."""
    saved = sorted((trained / "checkpoints").iterdir())[-1] / "model.safetensors"
    weights = Path(shutil.copy(saved, tmp_path / "w.safetensors"))
    before = weights.read_bytes()
    with pytest.raises(
        RecipeError, match=r"w\.safetensors: already exists and holds no features; choose another name"
    ):
        predicted(weights, extracted[:2], features=weights)
    assert weights.read_bytes() == before
    for _ in range(2):
        predicted(trained, extracted[:2], features=tmp_path / "own.safetensors")


def test_features__are_what_the_head_is_fed(
    trained: Path, extracted: list[Path], photographs: dict[str, Path], tmp_path: Path
) -> None:
    """The head is applied by NumPy; the digests are of the files; bad files are left out."""
    odd = extracted[0].with_name("b\udcff\n.png")
    odd.write_bytes(extracted[0].read_bytes())
    images = [extracted[3], photographs["empty.jpg"], *extracted[:3], photographs["corrupt.jpg"], odd]
    good = [images[0], *images[2:5], odd]
    file = tmp_path / "out.safetensors"
    told = predicted(trained, images, features=file, **{"evaluation.batch_size": 2})
    assert [bool(one.error) for one in told] == [path not in good for path in images]
    with safe_open(file, "np") as opened:
        features, digests = opened.get_tensor("features"), opened.get_tensor("sha256")
        names, about = bytes(opened.get_tensor("names")).split(b"\0"), opened.metadata()
    assert [name.decode("utf-8", "surrogateescape") for name in names] == [*map(str, good)]
    assert [bytes(row).hex() for row in digests] == [hashlib.sha256(p.read_bytes()).hexdigest() for p in good]
    weights = read_weights(averaged(trained))
    assert about["weights_sha256"] == weights.digest
    assert (features.dtype, features.shape[0]) == (np.float32, len(good))
    by_hand = features @ weights.state["head.weight"].numpy().T + weights.state["head.bias"].numpy()
    np.testing.assert_allclose(by_hand, logits(trained, good).numpy(), rtol=1e-5, atol=1e-5)
    assert predicted(trained, good, **{"evaluation.batch_size": 2}) == [one for one in told if not one.error]


def test_features__no_file_before_all_images_are_there(
    trained: Path, extracted: list[Path], tmp_path: Path
) -> None:
    file = tmp_path / "out.safetensors"
    predicted(trained, extracted[:1], features=file)
    old = file.read_bytes()
    stream = predict(
        recipe(trained, **{"evaluation.batch_size": 4}), [ImageFiles([*map(str, extracted)])], features=file
    )
    next(stream)
    stream.close()
    assert file.read_bytes() == old
    (tmp_path / "empty.jpg").write_bytes(b"")
    with pytest.raises(
        DataError, match=r"out\.safetensors: not written, because none of the images can be used"
    ):
        predicted(trained, [tmp_path / "empty.jpg"], features=file)
    assert file.read_bytes() == old
    assert {path.name for path in tmp_path.iterdir()} == {"images", "empty.jpg", "out.safetensors"}
    for wrong in (tmp_path / "out.npz", tmp_path / "none" / "out.safetensors"):
        with pytest.raises(RecipeError, match="--features "):
            predicted(trained, extracted, features=wrong)


def test_features__need_no_head(trained: Path, extracted: list[Path], tmp_path: Path) -> None:
    weights = read_weights(averaged(trained))
    body = {name: tensor for name, tensor in weights.state.items() if not name.startswith("head.")}
    meta = {key: value for key, value in weights.meta.items() if key != "class_names"}
    headless = save_weights(tmp_path / "body.safetensors", body, replace(weights.config, num_classes=0), meta)
    with pytest.raises(
        CheckpointError, match=r"has no trained head, .* cannot predict classes; .* --features"
    ):
        predicted(headless, extracted)
    told = predicted(headless, extracted, features=tmp_path / "out.safetensors")
    assert {(*one.classes, one.error) for one in told} == {("",)}
    with safe_open(tmp_path / "out.safetensors", "np") as opened:
        features = opened.get_tensor("features")
    classify = load_classifier(headless, precision="float32")
    np.testing.assert_array_equal(features, classify.features([*map(pillow, extracted)]).numpy())
    with pytest.raises(CheckpointError, match="has no trained head"):
        classify(pillow(extracted[0]))


@pytest.mark.slow
def test_predict__files_are_read_when_their_batch_comes(
    trained: Path, extracted: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    read = ImageFiles.read
    monkeypatch.setattr(ImageFiles, "read", lambda self, n: (seen.append(n), read(self, n))[1])
    many = ImageFiles([str(extracted[0])] * 100_000)
    stream = predict(recipe(trained, **{"evaluation.batch_size": 3}), [many])
    assert len(next(stream)) == 3
    assert seen == [0, 1, 2]


def test_predict__numbers_that_are_none_are_refused(
    trained: Path, extracted: list[Path], tmp_path: Path
) -> None:
    weights = read_weights(averaged(trained))
    state = {**weights.state, "head.weight": weights.state["head.weight"] * 3e38}
    state["head.weight"] = state["head.weight"].clamp(-3e38, 3e38)
    state["head.bias"] = torch.full_like(state["head.bias"], 3e38)
    broken = save_weights(tmp_path / "w.safetensors", state, weights.config, weights.meta)
    with pytest.raises(DataError, match="the model's logits are NaN or infinite"):
        predicted(broken, extracted)


def test_predict__classes_without_names_are_numbers(
    trained: Path, extracted: list[Path], tmp_path: Path
) -> None:
    weights = read_weights(averaged(trained))
    meta = {key: value for key, value in weights.meta.items() if key != "class_names"}
    unnamed = save_weights(tmp_path / "w.safetensors", weights.state, weights.config, meta)
    notes: list[str] = []
    [batch] = predict(recipe(unnamed), [ImageFiles([str(extracted[0])])], note=notes.append)
    assert {name for name, _ in batch[0].classes} < set("012345")
    assert notes[-1] == "warning: these weights do not name their classes; the classes are numbered from 0"


@pytest.mark.parametrize("kind", ["run", "onnx"])
def test_load_classifier__answers_as_predict(
    trained: Path, onnx_file: Path, extracted: list[Path], photographs: dict[str, Path], kind: str
) -> None:
    source = {"run": trained, "onnx": onnx_file}[kind]
    files = [*extracted[:3], *(path for name, path in photographs.items() if name not in BAD)]
    classify = load_classifier(
        source, device="cpu", precision="auto" if kind == "onnx" else "float32", batch_size=len(files)
    )
    images = [*map(pillow, files)]
    told = predicted(source, files)
    assert classify(images) == [one.classes for one in told]
    assert classify.class_names == tuple(read_weights(averaged(trained)).meta["class_names"])
    assert torch.equal(classify.logits(images), logits(source, files))
    one = classify(images[0])
    assert [name for name, _ in one] == [name for name, _ in told[0].classes]
    np.testing.assert_allclose([p for _, p in one], [p for _, p in told[0].classes], atol=1e-6)
    assert classify.logits(images[0]).shape == (1, 6)
    if kind == "onnx":
        with pytest.raises(
            VitctlError, match=r"model\.onnx: has no features output; use the run that it was exported from"
        ):
            classify.features(images)
    else:
        assert classify.features(images).shape == (len(files), 24)
        assert len(load_classifier(source, top=2)(images[0])) == 2


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"top": 0}, "top = 0: should be a whole number, at least 1"),
        ({"device": "cuda"}, "machine.device = 'cuda': PyTorch finds no GPU"),
        ({"batch_size": 0}, "batch_size = 0: should be a whole number, at least 1"),
        ({"weights": "worst"}, "weights.which"),
    ],
)
def test_load_classifier__senseless_values(trained: Path, values: dict[str, Any], said: str) -> None:
    if torch.cuda.is_available() and values.get("device") == "cuda":
        pytest.skip("there is a GPU")
    with pytest.raises(VitctlError, match=said):
        load_classifier(trained, **values)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ([], "images should be an image, or a list of images that is not empty"),
        ("gone.jpg", "image 0 of 1: "),
        ([np.zeros((4, 4, 3))], r"image 0 of 1: .* uint8 \[H, W, 3\].* is float64 \[4, 4, 3\]"),
        ([np.zeros((4, 4), np.uint8)], r"is uint8 \[4, 4\]"),
        ([3], "image 0 of 1: .* is int"),
        (None, "image 0 of 1: .* is NoneType"),
        (b"a.jpg", "image 0 of 1: .* is bytes"),
        (torch.zeros(4, 4, 3, dtype=torch.uint8), "image 0 of 1: .* is Tensor"),
        (np.zeros((0, 0, 3), np.uint8), "image 0 of 1: not an image: 0x0 pixels"),
    ],
)
def test_load_classifier__what_is_no_image(trained: Path, wrong: Any, said: str) -> None:
    with pytest.raises(DataError, match=said):
        load_classifier(trained)(wrong)


def test_load_classifier__paths_and_arrays_answer_as_images_do(
    trained: Path, extracted: list[Path], photographs: dict[str, Path]
) -> None:
    files = [*extracted[:3], *(path for name, path in photographs.items() if name not in BAD)]
    classify = load_classifier(trained, device="cpu", precision="float32", batch_size=len(files))
    told = predicted(trained, files)
    assert classify(files) == classify([*map(str, files)]) == [one.classes for one in told]
    pixels = np.random.default_rng(0).integers(0, 256, (5, 19, 23, 3), dtype=np.uint8)
    assert classify([*pixels]) == classify([*map(Image.fromarray, pixels)])
    assert [name for name, _ in classify(pixels[0])] == [name for name, _ in classify([pixels[0]])[0]]
    assert [name for name, _ in classify(files[0])] == [name for name, _ in told[0].classes]


def test_load_classifier__images_that_are_none(trained: Path, photographs: dict[str, Path]) -> None:
    classify = load_classifier(trained)
    with (
        pytest.raises(DataError, match="image 1 of 2: truncated"),
        Image.open(photographs["corrupt.jpg"]) as corrupt,
    ):
        classify([Image.new("RGB", (3, 3)), corrupt])


@pytest.mark.parametrize(
    ("logits", "said"),
    [
        (np.zeros((1, 6), np.float32), r"float32 \[1, 6\]"),
        (np.zeros((4, 6), np.int64), r"int64 \[4, 6\]"),
        (np.zeros(6, np.float32), r"float32 \[6\]"),
        (np.zeros((50, 6), np.float32), r"float32 \[50, 6\]"),
    ],
)
def test_onnx__logits_that_are_no_rows_for_the_images(
    onnx_file: Path, extracted: list[Path], tmp_path: Path, logits: np.ndarray, said: str
) -> None:
    """They were tracebacks, or answers."""
    model = onnx.load(onnx_file)
    nodes = [onnx.helper.make_node("Constant", [], ["logits"], value=onnx.numpy_helper.from_array(logits))]
    output = onnx.helper.make_tensor_value_info(
        "logits", onnx.helper.np_dtype_to_tensor_dtype(logits.dtype), None
    )
    graph = onnx.helper.make_graph(nodes, "odd", [model.graph.input[0]], [output])
    odd = onnx.helper.make_model(graph, opset_imports=model.opset_import, ir_version=model.ir_version)
    odd.metadata_props.extend(model.metadata_props)
    onnx.save(odd, tmp_path / "odd.onnx")
    with pytest.raises(
        CheckpointError, match=rf"logits of 4 images is {said}, should be numbers, a row for each image"
    ):
        predicted(tmp_path / "odd.onnx", extracted[:4], **{"evaluation.batch_size": 4})


def test_onnx__what_it_does_not_take(onnx_file: Path, extracted: list[Path], tmp_path: Path) -> None:
    (tmp_path / "bad.onnx").write_bytes(b"\x08\x01 nothing of the kind")
    for values, path, said in (
        ({"weights.which": "best"}, onnx_file, "an ONNX file holds one set of weights"),
        ({"data.image_size": 32}, onnx_file, r"data\.image_size = 32: .* takes images of 16 pixels"),
        ({"machine.precision": "bf16"}, onnx_file, r"machine\.precision = 'bf16'"),
        ({}, tmp_path / "none.onnx", "no such ONNX file"),
        ({}, tmp_path / "bad.onnx", "onnxruntime cannot open it"),
    ):
        with pytest.raises(VitctlError, match=said):
            predicted(path, extracted, **values)
    with pytest.raises(CheckpointError, match="has no features output"):
        predicted(onnx_file, extracted, features=tmp_path / "out.safetensors")
