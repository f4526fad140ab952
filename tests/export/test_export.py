"""An exported file says what it is, agrees with the model, or is not there."""

import json
from collections.abc import Callable
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import numpy as np
import onnx
import pytest

from tests.export.conftest import PREPROCESSING, network
from tests.trained import Job, do
from vitctl.errors import CheckpointError, RecipeError
from vitctl.export import graph_files
from vitctl.export.graph import Raw
from vitctl.export.proof import TOLERANCE, agree, run_model
from vitctl.models.weights.weights_file import read_weights, weights_digest
from vitctl.recipe.export_formats import FORMATS


@pytest.fixture(scope="module")
def exported(pretrained: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    folder = tmp_path_factory.mktemp("exported") / "run"
    return do("export", folder, **{"weights.source": str(pretrained)}), folder


def test_export__both_files_agree_and_are_named(exported: tuple[dict[str, Any], Path]) -> None:
    result, folder = exported
    assert result["files"] == {
        "onnx": str(folder / "model.onnx"),
        "safetensors": str(folder / "model.safetensors"),
    }
    assert result["metrics"]["max_difference"]["safetensors"] == 0.0
    assert result["metrics"]["max_difference"]["onnx"] < 1e-4
    assert sorted(p.name for p in folder.iterdir() if "model" in p.name) == [
        "model.onnx",
        "model.py",
        "model.safetensors",
    ]


def test_export__onnx_carries_names_and_preprocessing(
    exported: tuple[dict[str, Any], Path], pretrained: Path
) -> None:
    proto = onnx.load(exported[1] / "model.onnx")
    onnx.checker.check_model(proto)
    notes = {p.key: p.value for p in proto.metadata_props}
    weights = read_weights(pretrained / "checkpoints" / "step_00000020" / "ema.safetensors")
    assert json.loads(notes["class_names"]) == weights.meta["class_names"]
    assert len(json.loads(notes["class_names"])) == 6
    assert json.loads(notes["preprocessing"]) == {
        "image_size": 16,
        "eval_method": "square",
        "eval_resize": 0,
        "resample": "bilinear_antialias",
        "exif_orientation": True,
        "mean": [0.5, 0.5, 0.5],
        "std": [0.5, 0.5, 0.5],
        "loss": "sigmoid",
    }
    assert (notes["producer"], notes["weights_sha256"]) == ("vitctl", weights_digest(weights.state))


@pytest.mark.parametrize(("which", "file"), [("", "ema"), ("ema", "ema"), ("model", "model")])
def test_export__of_the_averaged_weights(
    job: Job, pretrained: Path, tmp_path: Path, which: str, file: str
) -> None:
    """What the run scored, and `evaluate` scores, is what is exported, unless the weights themselves are
    asked for.
    """
    result = job(
        "export", **{"export.to": ("safetensors",), "weights.which": which, "machine.precision": "auto"}
    )
    wanted = read_weights(pretrained / "checkpoints" / "step_00000020" / f"{file}.safetensors")
    assert weights_digest(read_weights(tmp_path / "run").state) == weights_digest(wanted.state)
    p = result["provenance"]
    assert (p["weights_chosen"], p["weights_step"], p["weights_averaged"]) == ("last", 20, file == "ema")
    assert p["precision"] == "float32"


def test_export__a_file_that_disagrees_is_refused_and_not_kept(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph that runs and computes something else: its head is changed on the way into the file."""
    trace = graph_files.trace

    def broken(model: Any, path: Path, notes: dict[str, str], opset: int) -> None:
        trace(model, path, notes, opset)
        proto = onnx.load(path)
        [head] = [tensor for tensor in proto.graph.initializer if tensor.name == "network.model.head.bias"]
        head.raw_data = np.float32([1, 0, 0, 0, 0, 0]).tobytes()
        onnx.save(proto, path)

    monkeypatch.setattr(graph_files, "trace", broken)
    with pytest.raises(CheckpointError, match=r"model\.onnx: the exported file differs .* was not kept"):
        job("export", **{"export.to": ("onnx",), "machine.precision": "auto"})
    assert [p.name for p in (tmp_path / "run").iterdir() if "onnx" in p.name or "model" in p.name] == []
    assert json.loads((tmp_path / "run" / "result.json").read_text())["status"] == "failed"


@pytest.mark.parametrize(
    ("harm", "text"),
    [
        (lambda logits: logits * 1.001, "standard deviations of the logits"),
        (lambda logits: logits * np.nan, "by nan standard deviations"),
        (lambda logits: logits[:1], r"by shape: \[1, 5\], should be \[3, 5\]"),
    ],
)
def test_agree__refuses_wrong_numbers_and_shapes(harm: Callable[[np.ndarray], np.ndarray], text: str) -> None:
    model = Raw(network("vit"), PREPROCESSING)
    run = run_model(model)
    assert agree(Path("a.onnx"), model, (1, 3), run, TOLERANCE) == 0
    with pytest.raises(
        CheckpointError, match=f"a.onnx: the exported file differs from the model {text}|{text}"
    ):
        agree(Path("a.onnx"), model, (1, 3), lambda images: [harm(run(images)[0])], TOLERANCE)


@pytest.mark.parametrize(("to", "said"), [(("onnx", "tflite"), "tflite"), ((), "nothing")])
def test_export__unknown_format(job: Job, to: tuple[str, ...], said: str) -> None:
    with pytest.raises(RecipeError, match=f"export.to: {said} cannot be written; choose from onnx, pt2"):
        job("export", **{"export.to": to})


def test_formats__are_documented_and_name_functions() -> None:
    rows = (f"| `{row.name}` | {row.what} |" for row in FORMATS.values())
    table = "\n".join(["| `--to` | what is written |", "|---|---|", *rows]) + "\n"
    assert table in (Path(__file__).parents[2] / "docs" / "weights.md").read_text()
    assert all(callable(resolve_name(name)) for row in FORMATS.values() for name in (row.writer, row.prover))
