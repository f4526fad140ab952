"""`vitctl recipes`."""

import tomllib
from pathlib import Path

from tests.cli.conftest import Vitctl
from vitctl.recipe.load import recipe_names


def test_list__every_recipe(vitctl: Vitctl) -> None:
    said = vitctl("recipes", "list")
    assert said.code == 0
    assert [line.split()[0] for line in said.out.splitlines()[1:] if line[:1].strip()] == recipe_names()


def test_show__is_toml_with_and_without_origins(vitctl: Vitctl) -> None:
    plain, origins = vitctl("recipes", "show", "jft_h14").out, vitctl("recipes", "show", "jft_h14", "--origins").out
    assert tomllib.loads(plain) == tomllib.loads(origins)
    assert tomllib.loads(plain)["model"]["name"] == "H/14"
    assert all(line.startswith("# ") and line.endswith(" is unset") for line in plain.splitlines() if "#" in line)
    assert 'name = "H/14"                             # jft_h14.toml:5' in origins
    assert "0.25" in vitctl("recipes", "show", "jft_h14", "--set", "optimizer.lr=0.25").out


def test_explain_and_diff(vitctl: Vitctl) -> None:
    said = vitctl("recipes", "explain", "optimizer.weight_decay")
    assert said.code == 0
    assert "  source   Table 3\n" in said.out
    said = vitctl("recipes", "diff", "jft_l16", "jft_l16_14ep")
    assert [line.split()[0] for line in said.out.splitlines()] == ["key", "note", "schedule.total_epochs"]
    assert "set the same values" in vitctl("recipes", "diff", "smoke", "smoke").out


def test_check__all_shipped_and_a_file_of_ones_own(vitctl: Vitctl, tmp_path: Path) -> None:
    said = vitctl("recipes", "check")
    assert (said.code, said.out) == (0, f"{len(recipe_names())} recipe(s) checked, no problem\n")
    (tmp_path / "a.toml").write_text('extends = "smoke"\nsead = 1\n')
    (tmp_path / "b.toml").write_text('extends = "smok"\n')
    said = vitctl("recipes", "check", "a.toml", "b.toml")
    assert said.code == 2
    assert said.err == "vitctl: a.toml:2: unknown key sead; did you mean seed?\nno recipe is called 'smok'; did you mean smoke?; " \
        "`vitctl recipes list` shows them all\n"  # fmt: skip


def test_a_path_works_wherever_a_name_does(vitctl: Vitctl, tmp_path: Path) -> None:
    (tmp_path / "my [b16].toml").write_text('extends = "smoke"\nseed = 9\n')
    assert "seed = 9" in vitctl("recipes", "show", "my [b16].toml").out
    said = vitctl("pretrain", "--recipe", "my [b16].toml", "--dry-run")
    assert said.code == 0
    assert "seed = 9                                  # my [b16].toml:2" in said.out
    assert "runs/my [b16]_2" in said.out
