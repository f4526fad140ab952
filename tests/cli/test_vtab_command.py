"""`vitctl vtab`: its switches, and its table as a person sees it."""

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Vitctl, words
from tests.jobs.vtab_names import Catalog
from vitctl.data.datasets import vtab_images

GIVEN = words(
    "--task pets --task eurosat --set machine.device=cpu --set machine.workers=0 "
    "--set data.allow_partial=true --res 16 --precision float32 --out table"
)
FEW = words("--steps 2 --set schedule.warmup_steps=1 --set schedule.batch_size=4 --set vtab.seeds=[0]")


@pytest.fixture(autouse=True)
def names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vtab_images, "open_split", Catalog(whole_tests=False).open_split)


@pytest.mark.slow
def test_vtab__sweeps_unless_told_not_to(vitctl: Vitctl, pretrained: Path, tmp_path: Path) -> None:
    said = vitctl("vtab", "--from", pretrained, *FEW, *GIVEN)
    assert (said.code, said.err) == (0, "")
    assert "lr 0.003, 2 steps: mean on the validation images" in said.out
    assert sorted(path.name for path in (tmp_path / "table/sweep/pets").iterdir()) == [
        "lr_0.003_steps_2",
        "lr_0.01_steps_2",
    ]
    other = (*GIVEN[:-1], "other")
    said = vitctl("vtab", "--from", pretrained, "--no-sweep", *FEW, *other)
    assert (said.code, said.err) == (0, "")
    assert "validation images" not in said.out
    assert not (tmp_path / "other" / "sweep").exists()
    assert [path.name for path in (tmp_path / "other/tasks/pets").iterdir()] == ["lr_0.01_steps_2"]
    lines = [" ".join(line.split()) for line in said.out.splitlines()]
    metrics = json.loads((tmp_path / "other" / "result.json").read_text())["metrics"]
    row = metrics["tasks"]["eurosat"]
    beside = f"{row['mean']:.2%} {row['mean_per_class']:.2%} {row['majority_class']:.2%}"
    assert f"eurosat {beside} 96.7% 96.5% 95.6%" in lines
    label = "mean of 2 tasks (partial, 1 not as published)"
    assert metrics["label"] == label
    for begin in (
        f"{label} {metrics['mean']:.2%}",
        "note: pets: partial: 60 of 3,669 test images; other training images",
    ):
        assert any(line.startswith(begin) for line in lines)
    assert (tmp_path / "other" / "table.csv").read_text().count("\n") == 1 + 2 + 2 + 1
