"""Graphs for boards and phones, each in its own runtime; what is not installed is skipped with its extra."""

import json
import subprocess
import sys
import zipfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.export.conftest import NAMES, PREPROCESSING, Saved, network, normalised
from tests.matrix import slow
from vitctl.errors import CheckpointError, RecipeError
from vitctl.export import device_graphs
from vitctl.recipe.export_formats import FORMATS

Exported = Callable[..., dict[str, Any]]


def cells(*names: str) -> list[Any]:
    """These formats; all but OpenVINO are slow, and skipped without their packages."""
    found = []
    for name in names:
        lacking = [module for module in FORMATS[name].requires if find_spec(module) is None]
        reason = f"not installed: pip install 'vitctl[{name}]'"
        marks = [pytest.mark.skipif(bool(lacking), reason=reason)]
        found.append(pytest.param(name, marks=[*marks, *([pytest.mark.slow] * (name != "openvino"))]))
    return found


DEVICES = ("openvino", "executorch", "litert")
FAMILIES = ("dinov3", "eva", "beit", "siglip", "clip", "hybrid", "resnet v2", "axial", "relative")


def opened_elsewhere(to: str, file: Path, images: torch.Tensor) -> list[np.ndarray]:
    """The outputs by the lines of docs/weights.md, without vitctl."""
    if to == "openvino":
        sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
        import openvino

        compiled = openvino.Core().compile_model(file, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
        found = compiled(images.numpy())
        return [np.array(found[name]) for name in ("logits", "features")]
    if to == "executorch":
        from executorch.runtime import Runtime

        method = Runtime.get().load_program(file).load_method("forward")
        rows = [[one.numpy().copy() for one in method.execute([image])] for image in torch.split(images, 1)]
        return [np.concatenate(one) for one in zip(*rows, strict=True)]
    from ai_edge_litert.interpreter import Interpreter

    run = Interpreter(str(file)).get_signature_runner()
    rows = [[*run(images=image.numpy()).values()] for image in torch.split(images, 1)]
    return [np.concatenate(one) for one in zip(*rows, strict=True)]


@pytest.mark.parametrize("to", cells(*DEVICES))
@pytest.mark.parametrize("family", ["vit", *slow(*FAMILIES)])
def test_devices__agree_with_every_family(
    saved: Saved, exported: Exported, tmp_path: Path, to: str, family: str
) -> None:
    result = exported(saved(family), to, **{"export.features": True})
    assert result["metrics"]["max_difference"][to] < 1e-4
    file = tmp_path / "run" / f"model{FORMATS[to].ending}"
    images = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    model = network(family)
    with torch.inference_mode():
        wanted = (model(normalised(images)).numpy(), model.features(normalised(images)).numpy())
    found = opened_elsewhere(to, file, images)
    for got, should_be in zip(found, wanted, strict=True):
        np.testing.assert_allclose(got, should_be, rtol=0, atol=1e-4 * should_be.std())


@pytest.mark.parametrize("to", cells(*DEVICES))
def test_devices__carry_class_names_and_pre_processing(
    saved: Saved, exported: Exported, tmp_path: Path, to: str
) -> None:
    """As text that needs no runtime, and no path of this machine with it."""
    exported(saved(loss="sigmoid"), to)
    file = tmp_path / "run" / f"model{FORMATS[to].ending}"
    if to == "openvino":
        [text] = [line for line in file.read_text().splitlines() if "<vitctl value=" in line]
        told = json.loads(text.partition('value="')[2].rpartition('"')[0].replace("&quot;", '"'))
    else:
        with zipfile.ZipFile(file) as archive:
            told = json.loads(archive.read("vitctl.json"))
    assert told["class_names"] == list(NAMES) and told["activation"] == "sigmoid"
    kept = ("image_size", "eval_method", "eval_resize", "resample")
    assert {key: told[key] for key in kept} == {key: PREPROCESSING[key] for key in kept}
    contents = [one.read_bytes() for one in (tmp_path / "run").glob("model.*")]
    places = (str(Path(__file__).parents[2]), torch.__file__.rpartition("/")[0], str(tmp_path))
    assert [place for place in places for content in contents if place.encode() in content] == []


@pytest.mark.parametrize("to", cells(*DEVICES))
def test_devices__take_squares_where_onnx_takes_photographs(
    saved: Saved, exported: Exported, to: str
) -> None:
    path = saved()
    result = exported(path, "onnx", to, **{"export.include_preprocess": True})
    assert set(result["metrics"]["max_difference"]) == {"onnx", to}
    with pytest.raises(
        RecipeError, match="include_preprocess is for onnx or pt2 alone; export to onnx or pt2"
    ):
        exported(path, to, folder="alone", **{"export.include_preprocess": True})


@pytest.mark.parametrize("to", cells("litert"))
def test_litert__int8_is_proven_by_accuracy(
    saved: Saved, exported: Exported, tmp_path: Path, photos: Path, to: str
) -> None:
    values = {"export.precision": "int8", "export.max_accuracy_loss": 0.2, "data.path": str(photos)}
    own = exported(saved(), to, **values)["metrics"]["scores"][to]
    assert own["same_answers"] >= 0.8 * own["total"] > 0
    exported(saved(), to, folder="full")
    narrow, full = (tmp_path / folder / "model.tflite" for folder in ("run", "full"))
    assert narrow.stat().st_size < full.stat().st_size
    assert (opened_elsewhere(to, narrow, torch.zeros(2, 3, 32, 32, dtype=torch.uint8))[0] != 0).any()


@pytest.mark.parametrize("to", cells("openvino"))
def test_devices__a_file_that_disagrees_is_not_kept(
    saved: Saved, exported: Exported, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: str
) -> None:
    """The logits are those of another network, which is what a converter's approximation amounts to."""
    trace = device_graphs.trace

    def broken(model: Any, path: Path, notes: dict[str, str]) -> None:
        with torch.no_grad():
            model.model.head.bias[0] += 0.01
        trace(model, path, notes)
        with torch.no_grad():
            model.model.head.bias[0] -= 0.01

    monkeypatch.setattr(device_graphs, "trace", broken)
    with pytest.raises(CheckpointError, match=r"model\.xml: the exported file differs .* was not kept"):
        exported(saved(), to)
    assert [path.name for path in (tmp_path / "run").iterdir() if "model" in path.name] == []


@pytest.mark.parametrize("to", cells("openvino"))
def test_devices__what_the_other_program_cannot_take_is_one_line(
    saved: Saved, exported: Exported, monkeypatch: pytest.MonkeyPatch, to: str
) -> None:
    def torn(_model: Any, path: Path, _notes: dict[str, str]) -> None:
        path.write_bytes(b"no graph")

    monkeypatch.setattr(device_graphs, "trace", torn)
    with pytest.raises(
        CheckpointError, match=r"openvino [\d.]+ cannot take this network .*--to onnx"
    ) as told:
        exported(saved(), to)
    assert "\n" not in str(told.value)


def test_devices__missing_packages_are_named_with_their_extras() -> None:
    """In a process that has no such package, whatever is installed here."""
    program = (
        "from vitctl.recipe import export_formats\n"
        "export_formats.find_spec = lambda name: None\n"
        "try: export_formats.check_options(['executorch', 'onnx', 'litert'], '', 'float32', [])\n"
        "except ValueError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == (
        "to = executorch, litert: missing executorch, litert_torch, ai_edge_litert; "
        "pip install 'vitctl[executorch,litert]'\n"
    )


@pytest.mark.skipif(find_spec("openvino") is None, reason="not installed: pip install 'vitctl[openvino]'")
def test_openvino__reports_nothing_to_its_maker() -> None:
    program = (
        "import socket, time; asked = []; socket.getaddrinfo = lambda *a, **k: asked.append(a)\n"
        "from vitctl.export import device_graphs; device_graphs._openvino(); time.sleep(1); print(asked)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("opset", [18, *slow(19, 21)])
@pytest.mark.parametrize("inside", [False, *slow(True)])
def test_opset__is_written_with_the_oldest_runtime_that_reads_it(
    saved: Saved, exported: Exported, tmp_path: Path, opset: int, inside: bool
) -> None:
    """The numbers of onnxruntime's documentation: the operator set, and the IR of that release."""
    import onnx

    exported(saved(), "onnx", **{"export.opset": opset, "export.include_preprocess": inside})
    file = onnx.load(tmp_path / "run" / "model.onnx")
    since, ir = {18: ("1.14", 8), 19: ("1.16", 9), 21: ("1.18", 10)}[opset]
    assert ([entry.version for entry in file.opset_import if not entry.domain], file.ir_version) == (
        [opset],
        ir,
    )
    assert f"opset {opset}, for onnxruntime {since} or newer" in (tmp_path / "run" / "log.jsonl").read_text()


@pytest.mark.parametrize(
    ("to", "opset", "words"),
    [("onnx", 17, "opset = 17 should be one of 18, 19, 20, 21"), ("pt2", 18, "opset is for onnx alone")],
)
def test_opset__what_cannot_be_written(
    saved: Saved, exported: Exported, to: str, opset: int, words: str
) -> None:
    with pytest.raises(RecipeError, match=words):
        exported(saved(), to, **{"export.opset": opset})
