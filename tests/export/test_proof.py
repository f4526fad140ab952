"""What turns logits into answers survives each format, read back here and by the other program, or the format
is refused.
"""

import json
import runpy
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from PIL import Image

from tests.export.conftest import PREPROCESSING, Saved, normalised
from tests.jobs.test_predict import predicted
from tests.matrix import slow, spread
from tests.models.tiny_models import VIT
from tests.trained import do
from vitctl import load_classifier
from vitctl.errors import CheckpointError, RecipeError
from vitctl.export import weights_folder
from vitctl.models.build import Model, build
from vitctl.models.weights.meta import distinct
from vitctl.models.weights.weights_file import read_weights, save_weights
from vitctl.recipe.export_formats import FORMATS as EXPORT_FORMATS

Exported = Callable[..., dict[str, Any]]
FORMATS = ("onnx", "pt2", "safetensors", "timm", "hf", "torchvision", "google")
SQUARE = {**PREPROCESSING, "eval_method": "square", "eval_resize": 0, "resample": "bilinear_antialias"}
PIXELS = np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8)
CASES: dict[str, dict[str, Any]] = {
    "softmax of two cranes": {"class_names": ["hen", "crane", "tench", "crane"], "loss": "softmax"},
    "temperature": {"class_names": ["hen", "crane", "tench", "owl"], "temperature": 0.4},
    "a name like a number": {"class_names": ["hen", "hen", "hen (0)", "owl"]},
    "unnamed": {"class_names": None},
    "sigmoid": {"class_names": ["hen", "crane", "tench", "crane"], "loss": "sigmoid"},
    "one logit": {"class_names": ["defect"]},
    "one logit, sigmoid": {"class_names": ["defect"], "loss": "sigmoid"},
    "softmax of one class": {"class_names": ["defect"], "loss": "softmax"},
}
USUAL = ("temperature", "a name like a number", "sigmoid", "one logit, sigmoid")
OF_PROGRAMS = ("temperature", "sigmoid")  # which take a while
# No place in the file, or the other program computes something else.
REFUSED = {("sigmoid", "torchvision"), ("sigmoid", "google")}
REFUSED |= {("softmax of one class", name) for name in ("timm", "hf", "torchvision", "google")}


def network(to: str, num_classes: int) -> Model:
    config = replace(VIT, depth=1, num_classes=num_classes, gelu="tanh" if to == "google" else "erf")
    generator = torch.Generator().manual_seed(1)
    model = build(config, seed=0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


@pytest.mark.filterwarnings("ignore:these weights do not name", "ignore:several classes have one name")
@pytest.mark.parametrize(
    ("case", "to"),
    [
        *spread(6, [(case, to) for case in USUAL for to in FORMATS if to not in ("onnx", "pt2")]),
        *slow(("temperature", "onnx")),
        *slow(("sigmoid", "pt2")),
        *slow(*((case, to) for case in CASES for to in FORMATS if case not in USUAL and to != "pt2")),
        *slow(*((case, "onnx") for case in USUAL if case != "temperature"), ("temperature", "pt2")),
    ],
)
def test_answers__are_the_same_wherever_they_are_read(
    exported: Exported, tmp_path: Path, case: str, to: str
) -> None:
    meta = {**SQUARE, **CASES[case]}
    names = meta["class_names"] or [str(n) for n in range(4)]
    model = network(to, len(names))
    with torch.inference_mode():
        logits = model(normalised(PIXELS.transpose(2, 0, 1)[None]))[0].double() / meta.get("temperature", 1)
    is_sigmoid = meta.get("loss") == "sigmoid" or case == "one logit"
    likely = (logits.sigmoid() if is_sigmoid else logits.softmax(0)).tolist()
    own = save_weights(tmp_path / "own.safetensors", model.state_dict(), model.config, meta)
    if (case, to) in REFUSED:
        with pytest.raises(CheckpointError, match=r"nothing there says that its \d logits? are a"):
            exported(own, to)
        return
    exported(own, to)
    folder = tmp_path / "run" / to
    place = {"onnx": "model.onnx", "safetensors": "model.safetensors", "google": "google/model.npz"}.get(
        to, to
    )
    answers = dict(zip(distinct(names), likely, strict=True))
    assert len(answers) == len(names)
    if to == "pt2":
        extra = {"vitctl.json": ""}
        torch.export.load(tmp_path / "run" / "model.pt2", extra_files=extra)
        told = json.loads(extra["vitctl.json"])
        assert told["class_names"] == list(distinct(names))
        assert told["activation"] == ("sigmoid" if is_sigmoid else "softmax")
    else:
        for source in (own, tmp_path / "run" / place):
            found = load_classifier(source, precision="float32")(Image.fromarray(PIXELS))
            assert dict(found) == pytest.approx(answers, abs=1e-5)
            assert [p for _, p in found] == sorted((p for _, p in found), reverse=True)
    if to == "onnx":
        told = {one.key: one.value for one in onnx.load(tmp_path / "run" / place).metadata_props}
        assert json.loads(told["class_names"]) == (list(distinct(names)) if meta["class_names"] else None)
        assert told["activation"] == ("sigmoid" if is_sigmoid else "softmax")
    if to in ("hf", "timm"):
        transformers = pytest.importorskip("transformers")
        theirs = transformers.pipeline("image-classification", str(folder), device="cpu")
        found = [(one["label"], one["score"]) for one in theirs(Image.fromarray(PIXELS), top_k=9)]
        wanted = sorted(zip(distinct(names), likely, strict=True), key=lambda pair: -pair[1])
        assert [p for _, p in found] == pytest.approx([p for _, p in wanted], abs=1e-5)
        assert [name.removeprefix("LABEL_") for name, _ in found] == [name for name, _ in wanted]


def test_answers__of_a_file_that_says_something_else_are_refused(
    exported: Exported, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its logits are right: the proof looked at nothing else."""
    model = network("hf", 4)
    own = save_weights(
        tmp_path / "own.safetensors", model.state_dict(), model.config, {**SQUARE, **CASES["sigmoid"]}
    )
    write_json = weights_folder.write_json
    for broken in ({"problem_type": "single_label_classification"}, {"id2label": dict(enumerate("abcd"))}):
        monkeypatch.setattr(
            weights_folder,
            "write_json",
            lambda path, value, new=broken, **how: write_json(path, value | new, **how),
        )
        with pytest.raises(
            CheckpointError, match=r"hf/model\.safetensors.*: answers '.*, and the model '.* not kept"
        ):
            exported(own, "hf")
        assert not (tmp_path / "run" / "hf").exists()


def test_answers__what_the_other_program_cannot_open_is_not_kept(
    exported: Exported, saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers")

    def fails(*_: object, **__: object) -> None:
        raise ValueError("unknown architecture\nvit")

    monkeypatch.setattr(transformers, "pipeline", fails)
    with pytest.raises(
        CheckpointError, match=r"transformers [\d.]+ cannot open it \(unknown architecture.*vit\)"
    ):
        exported(saved(), "hf")
    assert not (tmp_path / "run" / "hf").exists()


@pytest.mark.parametrize("to", [name for name, row in EXPORT_FORMATS.items() if row.in_folder])
def test_answers__a_lone_file_is_refused_where_files_beside_it_tell_them(
    exported: Exported, saved: Saved, tmp_path: Path, to: str
) -> None:
    """It was called verified, and read back without names, and with another GELU and number of heads."""
    lone = tmp_path / f"lone{EXPORT_FORMATS[to].ending}"
    with pytest.raises(RecipeError, match=rf"weights of {to} alone lack .* --out {tmp_path}/lone$"):
        exported(saved(), to, **{"export.file": str(lone)})
    assert not lone.exists()


@pytest.mark.parametrize("kept", ["mean", "class_names", "exif_orientation", "temperature_sha256"])
@pytest.mark.parametrize("to", ["hf", *slow("timm", "torchvision", "google")])
def test_meta__what_an_answer_needs_is_read_back(
    exported: Exported, tmp_path: Path, to: str, kept: str
) -> None:
    """torchvision's and Google's formats have no place for any of it, timm's and transformers' for some."""
    model = network(to, 5)
    meta = {**SQUARE, "exif_orientation": False, "temperature": 2.0, "temperature_sha256": "fitted"}
    exported(save_weights(tmp_path / "own.safetensors", model.state_dict(), model.config, meta), to)
    found = read_weights(tmp_path / "run" / to / ("model.npz" if to == "google" else ""))
    assert found.meta[kept] == meta[kept]
    assert "temperature" not in found.meta
    torch.testing.assert_close(found.state["head.weight"], model.head.weight / 2, rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("more", [*slow(False), True])
def test_headless__a_graph_has_features_and_no_logits(
    exported: Exported, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    more: bool,
) -> None:  # fmt: skip
    model = network("onnx", 0)
    meta = {name: value for name, value in SQUARE.items() if name != "class_names"}
    own = save_weights(tmp_path / "own.safetensors", model.state_dict(), model.config, meta)
    exported(own, "onnx", "pt2", "hf", "timm", **{"export.features": more})
    file, photo = tmp_path / "run" / "model.onnx", tmp_path / "photo.png"
    Image.fromarray(PIXELS).save(photo)
    assert [output.name for output in onnx.load(file).graph.output] == ["features"]
    assert "activation" not in {one.key for one in onnx.load(file).metadata_props}
    extra = {"vitctl.json": ""}
    torch.export.load(tmp_path / "run" / "model.pt2", extra_files=extra)
    assert json.loads(extra["vitctl.json"])["head"] == "none"
    for source in (own, file, tmp_path / "run" / "hf", tmp_path / "run" / "timm"):
        with pytest.raises(CheckpointError, match=r"has no trained head, so it cannot predict classes"):
            predicted(source, [photo])
        classify = load_classifier(source, precision="float32")
        with pytest.raises(CheckpointError, match="has no trained head"):
            classify(photo)
        with torch.inference_mode():
            wanted = model.features(normalised(PIXELS.transpose(2, 0, 1)[None]))
        torch.testing.assert_close(classify.features(photo), wanted, rtol=1e-4, atol=1e-5)
    with pytest.raises(RecipeError, match=r"flip_average: .* has no head"):
        exported(own, "onnx", folder="flipped", **{"export.flip_average": True})
    monkeypatch.setattr(sys, "argv", ["model.py", str(photo)])
    capsys.readouterr()
    runpy.run_path(str(file.with_suffix(".py")), run_name="__main__")
    printed = [float(number) for number in capsys.readouterr().out.split()]
    np.testing.assert_allclose(printed, wanted[0], rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_headless__a_head_of_zeros_is_refused_as_a_graph_too(
    exported: Exported, tmp_path: Path, photos: Path
) -> None:
    model = network("onnx", 5)
    own = save_weights(
        tmp_path / "own.safetensors", model.state_dict(), model.config, {**SQUARE, "head": "zero"}
    )
    exported(own, "onnx")
    for source in (own, tmp_path / "run" / "model.onnx"):
        with pytest.raises(CheckpointError, match=r"has no trained head, so it cannot predict classes"):
            predicted(source, [tmp_path / "photo.png"])
    with pytest.raises(CheckpointError, match="has no trained head"):
        do("evaluate", tmp_path / "score", **{"weights.source": str(own), "data.path": str(photos)})
