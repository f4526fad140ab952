"""From pre-training to an exported file, each command taking the newest run."""

import json
from pathlib import Path
from typing import Any

from tests.cli.conftest import Vitctl
from tests.conftest import TINY

QUICK = ("--set", "machine.workers=0", "--set", "machine.device=cpu")


def result(folder: Path) -> Any:
    return json.loads((folder / "result.json").read_text())


def test_the_whole_way(vitctl: Vitctl, tiny_data: Path, tmp_path: Path) -> None:
    assert vitctl("pretrain", "-r", TINY, "--data", tiny_data, "--set", "averaging.decay=0").code == 0
    [trained] = (tmp_path / "runs").iterdir()
    named = f"weights: runs/{trained.name}/checkpoints/step_00000020/model.safetensors ("

    said = vitctl("fewshot", "--shots", 5, "--data", tiny_data, "--out", "few", *QUICK)
    assert (said.code, said.err) == (0, "")
    assert named in said.out
    assert "5-shot accuracy" in said.out
    assert list(result(tmp_path / "few")["metrics"]["accuracy"]) == ["5"]

    small = ("--steps", 4, "--set", "schedule.warmup_steps=1", "--set", "schedule.batch_size=8", *QUICK)
    said = vitctl("finetune", "--data", tiny_data, "--res", 16, "--out", "fine", *small)
    assert (said.code, said.err) == (0, "")
    assert named in said.out

    said = vitctl("evaluate", "--from", "fine", "--data", tiny_data, "--out", "score", *QUICK)
    assert (said.code, said.err) == (0, "")
    assert result(tmp_path / "score")["metrics"] == result(tmp_path / "fine")["metrics"]
    assert "weights: fine/checkpoints/step_00000004/model.safetensors" in said.out

    said = vitctl("evaluate", "--data", tiny_data, "--split", "train[:5]", "--out", "part", *QUICK)
    assert named in said.out
    assert result(tmp_path / "part")["metrics"]["total"] == 5

    said = vitctl("export", "--to", "safetensors", "--out", "file")
    assert (said.code, said.err) == (0, "")
    assert named in said.out
    assert "file/model.safetensors: verified, largest difference 0.0e+00" in said.out

    few_steps = ("--steps", 2, "--set", "schedule.warmup_steps=1", "--set", "schedule.batch_size=8")
    said = vitctl("vtab", "--suite", "mini", "--task", "digits", "--out", "table", *few_steps, *QUICK)
    assert (said.code, said.err) == (0, "")
    assert named in said.out
    assert "mean of 1 tasks (partial)" in said.out
    assert result(tmp_path / "table")["metrics"]["partial"] is True


def test_as_typed__fewshot_without_weights(vitctl: Vitctl, tmp_path: Path) -> None:
    said = vitctl("fewshot", "--shots", 5)
    assert said.code == 2
    assert said.err.startswith(f"vitctl: no finished pre-training run under {tmp_path}/runs; give weights with --from")
    assert said.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_as_typed__fewshot_with_weights_needs_no_data(vitctl: Vitctl, pretrained: Path, tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "first").symlink_to(pretrained)
    said = vitctl("fewshot", "--shots", 5)
    assert (said.code, said.err) == (0, "")
    assert "weights: runs/first/checkpoints/" in said.out
    assert "5-shot accuracy" in said.out


def test_every_command__without_weights_says_so(vitctl: Vitctl, tmp_path: Path) -> None:
    for command in ("finetune", "fewshot", "vtab", "evaluate", "export"):
        said = vitctl(command)
        assert (said.code, said.err.count("\n")) == (2, 1), command
        assert "give weights with --from RUN_OR_FILE" in said.err, command
    assert list(tmp_path.iterdir()) == []


def test_vtab__the_real_suite_names_what_is_missing(vitctl: Vitctl, pretrained: Path) -> None:
    said = vitctl("vtab", "--from", pretrained)
    assert said.code == 2
    assert said.err.startswith("vitctl: 19 of 19 tasks have no usable shards under data: caltech101, ")
    assert "--suite mini needs no data" in said.err


def test_export__unknown_format(vitctl: Vitctl, pretrained: Path) -> None:
    said = vitctl("export", "--from", pretrained, "--to", "tflite")
    assert said.code == 2
    assert (
        said.err
        == "vitctl: export.to: tflite cannot be written; choose from onnx, safetensors, google, timm, hf, torchvision\n"
    )
