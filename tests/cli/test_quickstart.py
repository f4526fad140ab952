"""The quickstart once, where pre-training must visibly help and every promised file exist; the doctor."""

import json
from pathlib import Path

import onnx
import pytest

from tests.cli.conftest import Vitctl
from vitctl.cli import quickstart
from vitctl.errors import DataError
from vitctl.launch import doctor
from vitctl.launch.doctor import Finding
from vitctl.models.weights.weights_file import read_weights
from vitctl.recipe.load import Loaded


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_quickstart__fine_tuned_beats_scratch_beats_majority(
    tmp_path: Path, seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    rows = {
        row.step + (" " + row.what.split(",")[0] if row.step == "vtab" else ""): row
        for row in quickstart.run_quickstart(out, seed)
    }
    assert list(rows)[:4] == ["shards", "pretrain", "fewshot", "finetune"]
    (trained, scratch), majority = rows["finetune"].accuracies, rows["finetune"].majority
    assert majority is not None
    assert trained > scratch + 0.05
    assert scratch > majority + 0.05
    assert rows["pretrain"].accuracies[0] > 0.2
    trained, scratch = rows["fewshot"].accuracies
    assert trained > scratch
    assert sum(row.step == "vtab" for row in quickstart.run_quickstart(out, seed)) == len(quickstart.TASKS)
    said = capsys.readouterr().out
    assert "vitctl finetune --from" in said and (out / "report.html").as_uri() in said
    assert said.count("finished earlier") == len(quickstart.FOLDERS)
    result = json.loads((out / "export" / "result.json").read_text())
    model = onnx.load(result["files"]["onnx"])
    assert json.loads({p.key: p.value for p in model.metadata_props}["class_names"]) == list("0123456789")
    assert read_weights(result["files"]["safetensors"]).config.num_classes == 10
    page = (out / "report.html").read_text()
    assert len(page) < 3_000_000
    assert all(f">{name}<" in page for name in quickstart.FOLDERS)
    assert "as in the result" in page


def test_quickstart__every_recipe_of_it_computes_in_float32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """docs/results.md prints its numbers: `auto` gives others on machines that are good at bf16."""
    seen: list[str] = []

    def prepare(loaded: Loaded, _run_dir: Path) -> None:
        seen.append(f"{loaded.recipe.job} {loaded.recipe.machine.precision}")
        raise DataError("no further")

    monkeypatch.setattr("vitctl.launch.prepare_run.prepare_run", prepare)
    step = quickstart._Steps(tmp_path, 0)
    for folder, recipe in (
        ("a", "quickstart"),
        ("b", "fewshot"),
        ("c", "quickstart_finetune"),
        ("d", "vtab_mini"),
        ("e", "export"),
    ):
        with pytest.raises(DataError):
            step.run(folder, recipe)
    assert seen == [f"{job} float32" for job in ("pretrain", "fewshot", "finetune", "vtab", "export")]


def test_quickstart__its_table_fits_80_columns(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    what = (
        "12,345 images in 4 sets",
        "5 digit scans a class, frozen",
        "shapes-location, 1,000 images",
        "ONNX, safetensors, within 1e-06",
    )
    rows = [quickstart.Row("pretrain", text, 1000, (1.0, 1.0), 1.0) for text in what]
    quickstart._print_end(rows, tmp_path)
    table = capsys.readouterr().out.split("seconds in all")[0].strip().splitlines()[:5]
    assert max(map(len, table)) <= 80
    assert [line.split()[-1] for line in table] == ["seconds", *["1000"] * 4]


def test_doctor__exits_2_when_something_needs_attention(
    vitctl: Vitctl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        doctor, "run_checks", lambda: [Finding(True, "torch", "2"), Finding(False, "disk", "[full]")]
    )
    said = vitctl("doctor")
    assert said.code == 2
    assert "[full]" in said.out
    assert "1 of 2 need attention" in said.out
    monkeypatch.setattr(doctor, "run_checks", lambda: [Finding(True, "torch", "2")])
    said = vitctl("doctor")
    assert (said.code, said.out.splitlines()[-1]) == (0, "all is well")


def test_quickstart__stopped_says_how_to_continue(vitctl: Vitctl, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(_out: Path, _seed: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("vitctl.cli.quickstart.run_quickstart", stopped)
    monkeypatch.setattr("os.getloadavg", lambda: (1000.0, 0.0, 0.0))
    said = vitctl("quickstart", "--out", "q", "--seed", 1)
    assert (said.code, said.err) == (
        3,
        "vitctl: stopped; continue with: vitctl quickstart --out q --seed 1\n",
    )
    assert "this machine is busy (load 1000.0 on " in said.out
