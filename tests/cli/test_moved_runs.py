"""Every command on a run works from any folder, and after the run, its data and its weights were moved."""

import json
import re
import shutil
from pathlib import Path

import pytest

from tests.cli.conftest import Vitctl
from vitctl import open_split

QUICK = ("--set", "schedule.batch_size=8", "--steps", 2)


@pytest.mark.slow
def test_commands__after_run_data_and_weights_were_moved(
    vitctl: Vitctl, pretrained: Path, tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(tiny_data, "data")
    shutil.copytree(pretrained, "start")
    line = ("finetune", "--data", "data", "--from", "start", "--res", 16, "--lr", 0.01, *QUICK)
    assert vitctl(*line, "--out", "run").code == 0
    before = json.loads(Path("run/result.json").read_text())["metrics"]
    (tmp_path / "new").mkdir()
    for name, place in (("run", "new/moved"), ("data", "new/photos"), ("start", "new/weights")):
        Path(name).rename(place)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    run, data, weights = (tmp_path / "new" / name for name in ("moved", "photos", "weights"))
    said = vitctl("evaluate", "--from", run, "--data", data, "--split", "train", "--out", "score")
    assert said.code == 0 and "was trained on 70 of these 70 images" in said.out
    (run / "result.json").unlink()
    said = vitctl("verify", run, "--data", data, "--from", weights)
    assert said.code == 2 and "missing, though the last step is done" in said.out
    assert vitctl("resume", run, "--data", data, "--from", weights).code == 0
    assert json.loads((run / "result.json").read_text())["metrics"] == before
    image = f"{data}:test"
    assert vitctl("predict", image, "--from", run, "--out", "answers.csv").code == 0
    assert len(Path("answers.csv").read_text().splitlines()) > 23
    assert vitctl("export", "--from", run, "--to", "safetensors", "--out", "x.safetensors").code == 0
    assert vitctl("verify", run, "--data", data, "--from", weights).code == 0
    assert vitctl("runs", "rm", run).code == 0 and not run.exists()


@pytest.mark.slow
def test_rm__a_run_that_another_started_from_stays(vitctl: Vitctl, pretrained: Path, tiny_data: Path) -> None:
    shutil.copytree(pretrained, "runs/start")
    line = ("finetune", "--data", tiny_data, "--from", "runs/start", "--res", 16, "--steps", 2, "--lr", 0.01)
    said = vitctl(*line, "--batch-size", 71, "--dry-run")
    assert said.err.endswith("there are 70 training images; give --batch-size 70 or less\n")
    Path("file").touch()
    assert "is a file" in vitctl(*line, "--out", "file").err
    assert vitctl(*line, "--batch-size", 8, "--out", "runs/a").code == 0
    Path("link").symlink_to("runs/start")
    assert (
        "a link to a run; name its folder" in vitctl("runs", "rm", "link").err and Path("link").is_symlink()
    )
    assert vitctl("runs", "rm", "runs/start").err.startswith(
        "vitctl: runs/start: runs/a started from it, and "
    )
    shutil.copytree("runs/a", "runs/sweep/a")
    recipe = Path("runs/sweep/a/recipe.toml")
    recipe.write_text(recipe.read_text().replace('"runs/start"', '"start"'))
    shutil.copytree("runs/start", "start")
    assert "runs/sweep/a started from it" in vitctl("runs", "rm", "start").err
    shutil.rmtree("runs/sweep")
    image = f"{tiny_data}:train"
    said = vitctl("predict", image, "--from", "runs/a", "--top", 1, "--out", "answers.jsonl")
    assert (said.code, said.out) == (0, "") and "was trained on 70 of these 70 images" in said.err
    assert len(Path("answers.jsonl").read_text().splitlines()) == 70
    assert vitctl("predict", image, "--from", "runs/a", "--out", "answers.txt").code == 2
    train = open_split("train", path=tiny_data)
    for number, label in enumerate(train.labels().tolist()):  # the same bytes as files
        place = Path("files", train.class_names[label], f"{number}.png")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(train.read(number))
    said = vitctl("evaluate", "--from", "runs/a", "--data", "files", "--out", "e")
    assert said.code == 0, said.err
    assert re.search(r"was trained on (\d+) of these \1 images", said.out + said.err)
    assert vitctl("runs", "rm", "runs/a", "runs/start").code == 0 and not any(Path("runs").iterdir())
