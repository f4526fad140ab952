"""Runs that are resumed, verified and read from other folders, or that were moved."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.cli.conftest import Vitctl
from tests.cli.conftest import vitctl as vitctl  # a fixture
from tests.trained import TINY
from vitctl.jobs.record.start_folder import at_start, from_folder, start_folder
from vitctl.recipe.load import load_recipe

SHORT = ("--set", "schedule.total_steps=2", "--set", "schedule.warmup_steps=1", "--set", "machine.workers=0")
LONGER = ("--set", "schedule.total_steps=4", "--allow", "schedule.total_steps")


@pytest.fixture
def project(tmp_path: Path, tiny_data: Path, vitctl: Vitctl, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with shards and a run of them, by relative paths."""
    folder = tmp_path / "project"
    shutil.copytree(tiny_data, folder / "shards")
    monkeypatch.chdir(folder)
    assert vitctl("pretrain", "-r", TINY, "--data", "shards", "--out", "runs/a", *SHORT).code == 0
    monkeypatch.chdir(tmp_path)
    return folder


@pytest.mark.slow
def test_resume_and_verify__from_another_folder(
    vitctl: Vitctl, project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shards").mkdir()  # another folder of this name
    said = vitctl("resume", "project/runs/a", *LONGER)
    assert (said.code, said.err) == (0, "") and f"paths of the recipe start from {project}\n" in said.out
    assert 'path = "shards"' in (project / "runs/a/recipe.toml").read_text()
    for place in (tmp_path, project, Path("/")):
        monkeypatch.chdir(place)
        said = vitctl("verify", project / "runs/a", "--replay", "4")
        assert (said.code, "as recorded" in said.out) == (0, True), said.out
        assert ("paths of the recipe start" in said.out) == (place != project)


def test_resume__after_a_move(vitctl: Vitctl, project: Path, tmp_path: Path) -> None:
    project.rename(tmp_path / "elsewhere")
    said = vitctl("resume", "elsewhere/runs/a", *LONGER)
    assert (said.code, said.err) == (0, ""), said
    assert f"paths of the recipe start from {tmp_path}/elsewhere" in said.out


def test_resume__other_paths_of_the_same_inputs_are_no_change(
    vitctl: Vitctl, project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tune = ("finetune", "--from", "runs/a", "--data", "shards", "--out", "runs/b", *SHORT)
    monkeypatch.chdir(project)
    assert vitctl(*tune, "--set", "sweep.lrs=[]").code == 0
    shutil.copytree(project / "runs", tmp_path / "copied")
    shutil.move(project / "shards", tmp_path / "moved")
    shutil.rmtree(project / "runs")
    monkeypatch.chdir(tmp_path)
    said = vitctl("resume", "copied/b", "--from", "copied/a", "--data", "moved", *LONGER)
    assert (said.code, said.err) == (0, ""), said


def test_resume__other_images_are_refused(vitctl: Vitctl, project: Path, tmp_path: Path) -> None:
    shutil.copytree(project / "shards" / "test", tmp_path / "other" / "train")
    shutil.copytree(project / "shards" / "test", tmp_path / "other" / "test")
    said = vitctl("resume", "project/runs/a", "--data", "other", *LONGER)
    assert (said.code, said.err.count("\n")) == (2, 1)
    assert "trained with other inputs" in said.err and "--set 'data.path=" in said.err, said.err


@pytest.mark.slow
def test_resume__of_photographs_that_moved(vitctl: Vitctl, tmp_path: Path) -> None:
    """Their shards, made again, are the same."""
    for seed, name in enumerate(("cat", "dog")):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(10):
            pixels = np.random.default_rng(10 * seed + number).integers(0, 256, (16, 16, 3), np.uint8)
            Image.fromarray(pixels).save(tmp_path / "photos" / name / f"{number}.png")
    assert vitctl("pretrain", "-r", TINY, "--data", "photos", "--out", "runs/a", *SHORT).code == 0
    shutil.rmtree("runs/shards")
    Path("photos").rename("elsewhere")
    said = vitctl("resume", "runs/a", *LONGER)
    assert said.code == 2 and said.err.endswith("vitctl resume runs/a --data PLACE\n"), said.err
    said = vitctl("resume", "runs/a", "--data", "elsewhere", *LONGER)
    assert said.code == 0, said.err
    assert vitctl("verify", "runs/a").code == 0


def test_at_start__every_place(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = project / "runs" / "a"
    recipe = load_recipe(run / "recipe.toml").recipe
    assert start_folder(run, lambda: recipe) == project
    assert getattr(at_start(recipe, run), "data").path == str(project / "shards")  # noqa: B009 - of any job
    monkeypatch.chdir(project)
    assert at_start(recipe, run) == recipe
    monkeypatch.chdir("/")
    for content in ("[]", "{}", '{"folder": 3, "run": 4}', "nonsense"):
        (run / "env.json").write_text(content)
        assert start_folder(run, lambda: recipe) == Path("/")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("shards", "{}/shards"),
        ("shards/{000..127}.tar", "{}/shards/{{000..127}}.tar"),
        ("shards/a.tar,shards/b.tar", "{}/shards/a.tar,{}/shards/b.tar"),
        ("@list.txt", "@{}/list.txt"),
        ("nowhere", "nowhere"),
        ("newest", "newest"),
        ("", ""),
        ("https://example.org/shards", "https://example.org/shards"),
        ("/shards", "/shards"),
    ],
)
def test_from_folder(tmp_path: Path, text: str, found: str) -> None:
    (tmp_path / "shards").mkdir()
    (tmp_path / "list.txt").touch()
    assert from_folder(text, tmp_path) == found.format(tmp_path, tmp_path)
