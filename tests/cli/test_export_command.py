"""`vitctl export` as typed: its flags, what it prints, and what it refuses."""

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Vitctl


@pytest.mark.slow
def test_as_typed__int8_with_pre_processing(
    vitctl: Vitctl, pretrained: Path, tiny_data: Path, tmp_path: Path
) -> None:
    line = tuple(
        f"--to onnx --int8 --include-preprocess --features --check-data {tiny_data} --split test[:9]".split()
    )
    loose = ("--set", "export.max_accuracy_loss=1.0", "--set", "export.calibration_images=8")
    said = vitctl("export", "--from", pretrained, *line, *loose, "--out", "out")
    assert (said.code, said.err) == (0, "")
    assert (
        "opset 20, for onnxruntime 1.17 or newer; images uint8 [batch, height, width, 3] -> "
        "logits float [batch, 6], features float [batch, 24]" in said.out
    )
    assert f"of 9 images (test[:9] of {tiny_data})" in said.out
    assert "int8: 14 products with weights, activations by their range on 8 images of train" in said.out
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert (result["provenance"]["precision"], result["provenance"]["split"]) == ("int8", "test[:9]")
    assert {"model.onnx", "model.py", "model.ranges.json"} <= {
        file.name for file in (tmp_path / "out").iterdir()
    }


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--fp16", "--int8"), "--fp16 and --int8: a file has one precision; leave one of them out"),
        (
            ("--fp16",),
            "--fp16, --int8: 'float16' is proven by its accuracy on images: give some with --check-data",
        ),
        (
            ("--to", "hf", "--features"),
            "--features: is for onnx, pt2, openvino, executorch or litert alone; export to onnx, pt2,",
        ),
        (("--set", "machine.device=cuda"), "export computes on the CPU in float32"),
        (("--set", "machine.precision=bf16"), "export computes on the CPU in float32"),
    ],
)
def test_as_typed__what_makes_no_sense(
    vitctl: Vitctl, pretrained: Path, flags: tuple[str, ...], message: str
) -> None:
    said = vitctl("export", "--from", pretrained, *flags)
    assert (said.code, said.err.count("\n")) == (2, 1)
    assert message in said.err


def test_out__a_place_that_cannot_be_written_is_refused_before_the_work(
    vitctl: Vitctl, pretrained: Path, tmp_path: Path
) -> None:
    said = vitctl("export", "--from", pretrained, "--to", "onnx", "--out", "/proc/no/a.onnx")
    assert (said.code, said.err) == (
        2,
        "vitctl: --out /proc/no/a.onnx: cannot write into the folder /proc; choose another path\n",
    )
    assert not (tmp_path / "runs").exists()


def test_out__a_missing_folder_is_made(vitctl: Vitctl, pretrained: Path, tmp_path: Path) -> None:
    said = vitctl("export", "--from", pretrained, "--to", "safetensors", "--out", "new/folder/a.safetensors")
    assert (said.code, said.err) == (0, "")
    assert said.out.endswith("\nnext: vitctl predict IMAGES --from new/folder/a.safetensors\n")
    assert (tmp_path / "new" / "folder" / "a.safetensors").exists()


@pytest.mark.slow
def test_as_typed__one_folder_takes_further_formats_of_the_same_weights(
    vitctl: Vitctl, pretrained: Path, tmp_path: Path
) -> None:
    for to in ("safetensors", "onnx"):
        said = vitctl("export", "--from", pretrained, "--to", to, "--out", "both")
        assert (said.code, said.err) == (0, "")
    files = json.loads((tmp_path / "both" / "result.json").read_text())["files"]
    assert set(files) == {"safetensors", "onnx"}
    other = tmp_path / "both" / "model.safetensors"
    said = vitctl("export", "--from", other, "--to", "onnx", "--out", "both")
    assert said.code != 0
    assert "holds a run of another recipe: weights.source was" in said.err
