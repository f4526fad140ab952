"""What the shell offers after TAB, through the machinery of Typer for bash and zsh."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.matrix import each
from vitctl.cli.app import app
from vitctl.data.datasets.known_sets import DATA_SETS
from vitctl.recipe.export_formats import FORMATS
from vitctl.recipe.load import every_key, load_recipe, recipe_names
from vitctl.recipe.schema import Pretrain


def offered(line: str, shell: str = "bash") -> list[str]:
    """What is offered for the last word of a line."""
    words = line.split(" ")
    given = {
        "bash": {"COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)},
        "zsh": {"_TYPER_COMPLETE_ARGS": line},
    }
    env = {"_VITCTL_COMPLETE": f"complete_{shell}", **given[shell]}
    return CliRunner().invoke(app, [], env=env, prog_name="vitctl").stdout.split()


@each(
    ("line", "values"),
    [
        ("vitctl pretrain --recipe jft_h", ["jft_h14"]),
        ("vitctl evaluate --dataset cifar", ["cifar10", "cifar100"]),
        ("vitctl fewshot --dataset pet", ["pets"]),
        ("vitctl finetune --model R50+L", ["R50+L/32", "R50+L/16"]),
        ("vitctl export --to s", ["safetensors"]),
        ("vitctl finetune --set optimizer.weight", ["optimizer.weight_decay="]),
        ("vitctl resume run --allow schedule.total_s", ["schedule.total_steps"]),
        ("vitctl recipes explain masked", ["masked_patch", "masked_patch.target", "masked_patch.corrupted"]),
        ("vitctl vtab --task dsp", ["dsprites-loc", "dsprites-ori"]),
        ("vitctl sweep d2_d", ["d2_depth"]),
        ("vitctl data prepare cal", ["caltech101"]),
        ("vitctl pretrain --recipe no_such", []),
    ],
)
def test_complete__values(line: str, values: list[str]) -> None:
    assert offered(line) == values


def test_complete__zsh() -> None:
    assert '(("jft_h14"))' in " ".join(offered("vitctl pretrain --recipe jft_h", "zsh"))


def test_complete__only_recipes_of_the_command() -> None:
    wanted = [name for name in recipe_names() if load_recipe(name).recipe.job == "finetune"]
    assert offered("vitctl finetune -r ") == wanted
    assert offered("vitctl recipes show ") == recipe_names()


def test_complete__what_is_offered_is_what_is_taken() -> None:
    assert offered("vitctl export --to ") == list(FORMATS)
    assert offered("vitctl evaluate --dataset ") == list(DATA_SETS)
    assert offered("vitctl pretrain --set ") == [f"{key}=" for key in every_key(Pretrain)]


def test_complete__runs_newest_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for age, name in enumerate(("b", "a")):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "recipe.toml").touch()
        os.utime(tmp_path / "runs" / name, (100 - age, 100 - age))
    (tmp_path / "runs" / "none").mkdir()
    monkeypatch.chdir(tmp_path)
    assert offered("vitctl evaluate --from ") == ["runs/b", "runs/a"]
    assert offered("vitctl resume runs/a") == ["runs/a"]


@pytest.mark.slow
def test_complete__imports_no_torch() -> None:
    """It is paid at every TAB."""
    calls = "c.recipes(x, ''); c.keys(x, ''); c.data_sets(''); c.models(''); c.tasks(''); c.runs('')"
    code = (
        "import sys, types; from vitctl.cli import completion as c; "
        f"x = types.SimpleNamespace(info_name='vtab'); {calls}"
    )
    subprocess.run([sys.executable, "-c", f"{code}; assert 'torch' not in sys.modules"], check=True)
