"""ONNX files and `torch.export` programs compute what the model does, in float32 to rounding, in less as
accurately, or they are not there. The program beside an ONNX file runs as it is.
"""

import json
import runpy
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from PIL import Image

from tests.conftest import ROOT
from tests.export.conftest import NUM_IMAGES, PREPROCESSING, Saved, network, normalised, pixels
from tests.matrix import slow
from vitctl.data.images.transforms import EvalTransform, fill_colour
from vitctl.errors import CheckpointError, RecipeError, VitctlError
from vitctl.export import graph_files
from vitctl.export.resizing import stored_transform
from vitctl.jobs.inputs.weights import find_weights
from vitctl.models.build import Model
from vitctl.models.vit import VisionTransformer

Exported = Callable[..., dict[str, Any]]


def answers(file: Path, images: np.ndarray) -> list[np.ndarray]:
    return onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"]).run(
        None, {"images": images}
    )


def notes(folder: Path) -> str:
    records = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return "\n".join(note for record in records for note in record.get("notes", ()))


@pytest.mark.parametrize("family", ["vit", *slow("hybrid", "resnet v2", "axial")])
def test_onnx__agrees_with_every_family_at_any_batch(
    saved: Saved, exported: Exported, tmp_path: Path, family: str
) -> None:
    weights = saved(family)
    result = exported(weights, "onnx", **{"export.features": True})
    assert result["metrics"]["max_difference"]["onnx"] <= 1e-4
    assert result["provenance"]["batch_sizes"] == [1, 3, 8]
    model = network(family)
    for batch in (1, 3, 8):
        images = np.random.default_rng(batch).integers(0, 256, (batch, 3, 32, 32), dtype=np.uint8)
        found = answers(tmp_path / "run" / "model.onnx", images)
        with torch.inference_mode():
            inputs = normalised(images)
            wanted = (model(inputs).numpy(), model.features(inputs).numpy())
        assert len(found) == 2
        for got, should_be in zip(found, wanted, strict=True):
            np.testing.assert_allclose(got, should_be, rtol=0, atol=1e-4 * should_be.std())
    axes = (
        "opset 20, for onnxruntime 1.17 or newer; images uint8 [batch, 3, 32, 32] -> "
        "logits float [batch, 5], features float [batch, "
    )
    assert axes in notes(tmp_path / "run")


@pytest.mark.parametrize("format", slow("onnx", "pt2"))
def test_graphs__hold_no_path_of_this_machine(
    saved: Saved, exported: Exported, tmp_path: Path, format: str
) -> None:
    """Exporters record where each operation was called, in stack traces."""
    exported(saved("vit"), format)
    file = tmp_path / "run" / f"model.{format}"
    contents = [file.read_bytes()]
    if format == "pt2":
        with zipfile.ZipFile(file) as archive:
            contents += [archive.read(name) for name in archive.namelist()]
    places = (str(ROOT), torch.__file__.rpartition("/")[0], 'File \\"', 'File "')
    assert [place for place in places for content in contents if place.encode() in content] == []


@pytest.mark.slow
def test_onnx__kernels_are_standardised_once(saved: Saved, exported: Exported, tmp_path: Path) -> None:
    """Not again in every pass: weights of a convolution are constants of the graph."""
    exported(saved("resnet v2"), "onnx", **{"export.features": True})  # a graph that is exported above
    graph = onnx.load(tmp_path / "run" / "model.onnx").graph
    constants = {tensor.name for tensor in graph.initializer}
    convolutions = [node for node in graph.node if node.op_type == "Conv"]
    assert len(convolutions) > 5
    assert all(node.input[1] in constants for node in convolutions)
    assert not [node for node in graph.node if node.op_type == "Sqrt"]


@pytest.mark.slow
def test_out__a_program_of_the_user_stays(saved: Saved, exported: Exported, tmp_path: Path) -> None:
    """`--out main.onnx` replaced main.py."""
    (tmp_path / "main.py").write_text("mine")
    result = exported(saved(), "onnx", **{"export.file": str(tmp_path / "main.onnx")})
    assert (tmp_path / "main.py").read_text() == "mine"
    assert result["files"]["onnx"] == str(tmp_path / "main.onnx")
    assert f"{tmp_path}/main.py exists and was not replaced" in notes(tmp_path / "run")
    assert (tmp_path / "run" / "main.py").read_text().startswith("import json")


def test_out__a_program_of_another_network_is_no_part_of_the_export(
    saved: Saved, exported: Exported, tmp_path: Path
) -> None:
    """The graph was replaced and the program kept, with the other one's softmax, size and crop."""
    to = {"export.file": str(tmp_path / "main.onnx")}
    exported(saved(), "onnx", **to)
    exported(saved(), "onnx", **to)
    (tmp_path / "main.py").write_text((tmp_path / "main.py").read_text() + "# mine")
    before = (tmp_path / "main.onnx").read_bytes()
    with pytest.raises(
        RecipeError, match=r"main\.py is the program of another network, or was edited; remove"
    ):
        exported(saved(), "onnx", **to)
    assert (tmp_path / "main.onnx").read_bytes() == before


@pytest.mark.slow
def test_out__a_file_of_the_user_beside_it_is_no_part_of_the_export(
    saved: Saved, exported: Exported, tmp_path: Path
) -> None:
    """`--out main.xml` replaced main.bin; of an earlier export it is replaced."""
    pytest.importorskip("openvino")
    (tmp_path / "main.bin").write_text("mine")
    with pytest.raises(RecipeError, match=r"main\.bin exists, and would be replaced; give another name"):
        exported(saved(), "openvino", **{"export.file": str(tmp_path / "main.xml")})
    assert (tmp_path / "main.bin").read_text() == "mine"


def test_out__nothing_is_replaced_before_all_is_written(
    saved: Saved, exported: Exported, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "to" / "new.onnx"
    target.parent.mkdir()
    target.write_text("old")

    def full(source: Path, to: Path) -> None:
        if Path(source).suffix == ".py":
            raise OSError(28, "No space left on device", str(source), None, str(to))
        Path(to).write_bytes(b"half")

    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.raises(VitctlError, match="no space left on device") as caught:
        exported(saved(), "onnx", **{"export.file": str(target)})
    assert ".partial" not in str(caught.value)
    assert {path.name: path.read_text() for path in target.parent.iterdir()} == {"new.onnx": "old"}


@pytest.mark.parametrize("method", slow("shorter_side", "letterbox"))
def test_onnx__pre_processing_inside_gives_vitctls_answers(
    saved: Saved, exported: Exported, tmp_path: Path, photos: Path, method: str
) -> None:
    """Photographs of any size, one by one and in batches; the accuracy is that of the model, no note on
    resizing is left.
    """
    weights = saved(resample="bicubic_antialias", eval_method=method)
    result = exported(weights, "onnx", **{"export.include_preprocess": True, "data.path": str(photos)})
    own = result["metrics"]["scores"]["onnx"]
    assert (own["same_answers"], own["num_images"], own["correct"]) == (
        NUM_IMAGES,
        NUM_IMAGES,
        own["model"]["correct"],
    )
    assert "answers_changed" not in result["metrics"]
    assert "images uint8 [batch, height, width, 3]" in notes(tmp_path / "run")
    model, transform = network("vit"), stored_transform(find_weights(str(weights)).weights.meta)
    for number in range(8):
        image = pixels(number)
        with torch.inference_mode():
            wanted = model(normalised(transform(image).numpy()[None])).numpy()
        [got] = answers(tmp_path / "run" / "model.onnx", np.stack([image] * 3))
        np.testing.assert_allclose(got, np.repeat(wanted, 3, axis=0), atol=0.02 * wanted.std())
        assert got.argmax(axis=1).tolist() == [int(wanted.argmax())] * 3


def test_onnx__large_weights_lie_beside(
    saved: Saved, exported: Exported, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files move together, under the name that the user gives, and the program beside them runs them."""
    monkeypatch.setattr(graph_files, "MOST_BYTES_INSIDE", 1000)
    target = tmp_path / "own" / "flowers.onnx"
    target.parent.mkdir()
    result = exported(saved(), "onnx", **{"export.file": str(target)})
    assert result["files"] == {"onnx": str(target)}
    for folder in (target.parent, tmp_path / "run"):
        names = {file.name for file in folder.iterdir() if file.name.startswith("flowers")}
        assert names == {"flowers.onnx", "flowers.onnx.data", "flowers.py"}
        assert (folder / "flowers.onnx.data").stat().st_size > 50_000
    images = np.zeros((2, 3, 32, 32), np.uint8)
    [logits] = answers(target, images)
    assert logits.shape == (2, 5)


GIVEN = {"export.calibration_images": 8, "export.max_accuracy_loss": 0.2}


@pytest.mark.parametrize(
    ("precision", "inside"), [("int8", False), *slow(("float16", False), ("int8", True))]
)
def test_onnx__lower_precision_is_proven_by_accuracy(
    saved: Saved, exported: Exported, tmp_path: Path, photos: Path, precision: str, inside: bool
) -> None:
    values = {
        "export.precision": precision,
        "data.path": str(photos),
        "export.include_preprocess": inside,
    }
    result = exported(saved(), "onnx", **GIVEN, **values)
    own = result["metrics"]["scores"]["onnx"]
    assert (own["num_images"], own["model"]["total"], own["total"]) == (NUM_IMAGES,) * 3
    assert own["same_answers"] >= NUM_IMAGES * 0.8
    assert result["provenance"]["precision"] == precision
    assert f"the same answer on {own['same_answers']} of {NUM_IMAGES} images (test of {photos})" in notes(
        tmp_path / "run"
    )
    folder = tmp_path / "run"
    ranges = json.loads((folder / "model.ranges.json").read_text())
    assert len(ranges) > 20
    assert all(one["layer"] and one["range"][0] <= one["range"][1] for one in ranges.values())
    graph = onnx.load(folder / "model.onnx").graph
    kinds = {tensor.data_type for tensor in graph.initializer if len(tensor.dims) in (2, 4)}
    assert (onnx.TensorProto.FLOAT16 if precision == "float16" else onnx.TensorProto.INT8) in kinds
    assert not [file for file in folder.iterdir() if "partial" in file.name]


def test_onnx__ranges_are_those_of_the_model(
    saved: Saved, exported: Exported, tmp_path: Path, photos: Path
) -> None:
    """Compared with hooks on the network, whose last block the graph computes for the class token alone."""
    weights = saved()
    exported(weights, "onnx", **GIVEN, **{"export.precision": "float16", "data.path": str(photos)})
    ranges = json.loads((tmp_path / "run" / "model.ranges.json").read_text())
    model, seen = network("vit"), []
    assert isinstance(model, VisionTransformer)
    model.blocks[1].mlp.fc1.register_forward_hook(lambda _module, _given, output: seen.append(output[:, :1]))
    transform = stored_transform(find_weights(str(weights)).weights.meta)
    for number in range(NUM_IMAGES):
        with torch.inference_mode():
            model(normalised(transform(pixels(number)).numpy()[None]))
    wanted = [float(torch.cat(seen).min()), float(torch.cat(seen).max())]
    found = [one["range"] for one in ranges.values() if one["layer"] == "blocks.1.mlp.fc1"]
    np.testing.assert_allclose(found[-1], wanted, rtol=1e-4)


def large_weight(model: Model) -> None:
    model.blocks[1].mlp.fc1.bias[0] = 1e5


def large_activation(model: Model) -> None:
    """Each weight fits into float16, and what they compute does not."""
    model.blocks[1].norm2.weight.mul_(3000)
    model.blocks[1].mlp.fc1.weight.mul_(300)
    model.blocks[1].mlp.fc2.weight.mul_(1e-6)


@pytest.mark.parametrize(
    ("plant", "named"),
    [
        *slow(
            (large_weight, r"weight blocks\.1\.mlp\.fc1\.bias: 1e\+05"),
            (large_activation, r"layer blocks\.1\.mlp\.fc1 \(MatMul\): "),
        ),
    ],
)
def test_onnx__float16_that_overflows_is_refused_with_its_layer(
    saved: Saved, exported: Exported, tmp_path: Path, photos: Path, plant: Callable[[Model], None], named: str
) -> None:
    values = {"export.precision": "float16", "data.path": str(photos)}
    message = (
        rf"run/model\.onnx: float16 overflows in {named}.*, above its maximum of 65,504; "
        r"the file was not kept"
    )
    with pytest.raises(CheckpointError, match=message):
        exported(saved("vit", plant), "onnx", **values)
    assert [
        file.name for file in (tmp_path / "run").iterdir() if "model" in file.name or "partial" in file.name
    ] == []


@pytest.mark.slow
def test_onnx__a_loss_of_accuracy_is_refused(
    saved: Saved, exported: Exported, tmp_path: Path, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = graph_files.open_onnx
    always_four = np.float32([0, 0, 0, 0, 99])
    monkeypatch.setattr(
        graph_files,
        "open_onnx",
        lambda request, path: run(request, path)._replace(
            run=lambda images: [run(request, path).run(images)[0] + always_four]
        ),
    )

    def always_zero(model: Model) -> None:
        model.head.weight.mul_(0.01)
        model.head.bias.copy_(torch.tensor([9.0, 0, 0, 0, 0]))

    said = (
        r"accuracy 16\.67%, of the float32 model 20\.83%; the same answer on 0 of 24 .*; "
        r"a loss of 1\.00% is allowed"
    )
    with pytest.raises(CheckpointError, match=said):
        exported(saved("vit", always_zero), "onnx", **{"export.precision": "int8", "data.path": str(photos)})
    assert [file.name for file in (tmp_path / "run").iterdir() if "model" in file.name] == []


@pytest.mark.parametrize(
    ("to", "resample", "values", "words"),
    [
        ("onnx", "area", {"export.precision": "int8"}, "is proven by its accuracy on images: give some with"),
        ("pt2", "area", {"export.precision": "int8"}, "precision = 'int8' is for onnx or litert alone"),
        (
            "safetensors",
            "area",
            {"export.include_preprocess": True},
            "include_preprocess is for onnx or pt2 alone",
        ),
        ("onnx", "hamming", {"export.include_preprocess": True}, "bicubic_antialias, area, not by hamming;"),
        ("onnx", "mean", {}, r"resize images by 'mean'.* set data.eval_resample to one of"),
    ],
)
def test_export__what_cannot_be_written_is_refused(
    saved: Saved, exported: Exported, photos: Path, to: str, resample: str, values: dict[str, Any], words: str
) -> None:
    images = {"data.path": str(photos)} if to == "pt2" else {}
    with pytest.raises(VitctlError, match=words):
        exported(saved(resample=resample), to, **values, **images)


ELSEWHERE = """
import json, sys, numpy, torch
extra = {"vitctl.json": ""}
run = torch.export.load(sys.argv[1], extra_files=extra).module()
names = json.loads(extra["vitctl.json"])["class_names"]
logits, features = run(torch.from_numpy(numpy.load(sys.argv[2])))
assert "vitctl" not in sys.modules
print(json.dumps([names, logits.tolist(), list(features.shape)]))
"""


@pytest.mark.slow
def test_program__runs_elsewhere(saved: Saved, exported: Exported, tmp_path: Path) -> None:
    result = exported(saved(), "pt2", **{"export.features": True})
    assert result["metrics"]["max_difference"]["pt2"] <= 1e-4
    images = np.random.default_rng(0).integers(0, 256, (5, 3, 32, 32), dtype=np.uint8)
    np.save(tmp_path / "images.npy", images)
    file = tmp_path / "run" / "model.pt2"
    command = [sys.executable, "-W", "ignore", "-c", ELSEWHERE, str(file), str(tmp_path / "images.npy")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    names, logits, shape = json.loads(done.stdout)
    model = network("vit")
    with torch.inference_mode():
        wanted = model(normalised(images)).numpy()
        assert shape == list(model.features(normalised(images)).shape)
    np.testing.assert_allclose(logits, wanted, atol=1e-4 * wanted.std())
    assert names == list("abcde")


@pytest.mark.parametrize(
    ("rule", "inside", "turned"),
    [
        ({"eval_method": "square", "eval_resize": 0, "resample": "bilinear_antialias"}, False, True),
        ({"eval_method": "shorter_side", "eval_resize": 36, "resample": "bicubic_antialias"}, False, False),
        # Weights that do not say are turned upright, as `predict` does.
        *slow(({"eval_method": "shorter_side", "eval_resize": 36, "resample": "bilinear"}, True, None)),
        ({"eval_method": "letterbox", "eval_resize": 0, "resample": "bicubic_antialias"}, False, True),
        *slow(({"eval_method": "letterbox", "eval_resize": 0, "resample": "area"}, True, True)),
        *slow(
            ({"eval_method": "transformers", "eval_resize": 37, "resample": "lanczos"}, False, True),
            ({"eval_method": "square", "eval_resize": 0, "resample": "nearest"}, False, None),
        ),
    ],
)
def test_sample__prints_our_five_best(
    saved: Saved,
    exported: Exported,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    rule: dict[str, Any],
    inside: bool,
    turned: bool | None,
) -> None:
    loss = None if inside else "sigmoid"
    weights = saved(**rule, exif_orientation=turned, loss=loss)
    exported(weights, "onnx", **{"export.include_preprocess": inside})
    program = tmp_path / "run" / "model.py"
    assert len(program.read_text().splitlines()) <= 15
    coarse = np.random.default_rng(1).integers(0, 256, (9, 12, 3))
    pixels = np.kron(coarse, np.ones((9, 9, 1))).astype(np.uint8)
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(pixels).save(tmp_path / "photo.png", exif=exif)
    monkeypatch.setattr(sys, "argv", [str(program), str(tmp_path / "photo.png")])
    capsys.readouterr()
    runpy.run_path(str(program), run_name="__main__")
    monkeypatch.setattr(sys, "argv", [str(program)])
    with pytest.raises(SystemExit, match=r"^usage: python .*model\.py PHOTOGRAPH$"):
        runpy.run_path(str(program), run_name="__main__")
    shown = np.ascontiguousarray(np.rot90(pixels, -1)) if turned is not False else pixels
    transform = EvalTransform(
        32,
        method=rule["eval_method"],
        resize=rule["eval_resize"],
        resample=rule["resample"],
        fill=fill_colour(PREPROCESSING["mean"]),
    )
    with torch.inference_mode():
        logits = network("vit")(normalised(transform(shown)[None]))[0]
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [name for _, name in rows] == ["abcde"[number] for number in logits.argsort(descending=True)]
    printed, likely = [float(value) for value, _ in rows], logits.sigmoid() if loss else logits.softmax(0)
    np.testing.assert_allclose(printed, likely.sort(descending=True).values, atol=0.01)
