"""`vitctl vtab`: its switches, and its table as a person sees it."""

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Vitctl, words
from tests.jobs.vtab_names import Catalog
from vitctl.data.datasets import vtab_images
from vitctl.report.compare import compare_runs

GIVEN = words(
    "--task pets --task eurosat --set machine.device=cpu --set machine.workers=0 "
    "--set data.allow_partial=true --res 16 --precision float32 --out table"
)
FEW = words("--steps 2 --set schedule.warmup_steps=1 --set schedule.batch_size=4 --set vtab.seeds=[0]")


@pytest.fixture(autouse=True)
def names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vtab_images, "open_split", Catalog(whole_tests=False).open_split)


@pytest.mark.slow
def test_vtab__light_says_that_it_is_not_the_protocol(
    vitctl: Vitctl, pretrained: Path, tmp_path: Path
) -> None:
    said = vitctl("vtab", "--from", pretrained, "--light", *GIVEN)
    assert (said.code, said.err) == (0, "")
    lines = [" ".join(line.split()) for line in said.out.splitlines()]
    assert any(
        line.startswith("light: a linear classifier on frozen features, not the protocol of VTAB.")
        for line in lines
    )
    metrics = json.loads((tmp_path / "table" / "result.json").read_text())["metrics"]
    row = metrics["tasks"]["eurosat"]
    beside = f"{row['mean']:.2%} {row['mean_per_class']:.2%} {row['majority_class']:.2%}"
    assert f"eurosat {beside} 96.7% 96.5% 95.6%" in lines
    assert metrics["label"] == "mean of 2 tasks (partial, 1 not as published)"
    assert any(
        line.startswith(f"mean of 2 tasks (partial, 1 not as published) {metrics['mean']:.2%}")
        for line in lines
    )
    assert any(
        line.startswith("note: pets: partial: 60 of 3,669 test images; other training images")
        for line in lines
    )
    assert (tmp_path / "table" / "table.csv").read_text().count("\n") == 1 + 2 + 2 + 1
    assert "light:" in (tmp_path / "table" / "table.csv").read_text()


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


@pytest.mark.slow
def test_vtab__a_quick_look_is_not_compared_with_the_protocol(
    vitctl: Vitctl, pretrained: Path, tmp_path: Path
) -> None:
    assert vitctl("vtab", "--from", pretrained, "--light", *GIVEN).code == 0
    other = (*GIVEN[:-1], "other")
    assert vitctl("vtab", "--from", pretrained, "--no-sweep", *FEW, *other).code == 0
    folders = [tmp_path / "table", tmp_path / "other"]
    comparison = compare_runs(folders)
    assert comparison.reasons == [
        f"{folders[1]}: protocol is fine-tuning, but light in {folders[0]}: the protocols differ"
    ]
    names = [name for name, _ in comparison.numbers]
    assert {"mean", "tasks pets mean", "groups natural"} < set(names)
    assert not any(name.startswith("paper") for name in names)
    assert {"schedule.batch_size", "vtab.light"} <= {name for name, _ in comparison.differences}
    assert "recipe" not in {name for name, _ in comparison.differences}
