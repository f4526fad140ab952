"""`vitctl recipes`."""

import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Vitctl
from tests.report.conftest import finished
from vitctl.cli.show.console import CONSOLE
from vitctl.recipe.load import every_key, recipe_names
from vitctl.recipe.schema import Evaluate, Machine
from vitctl.recipe.sections import Section
from vitctl.recipe.sweep import sweep_names
from vitctl.recipe.write import explain


def test_list__every_recipe(vitctl: Vitctl) -> None:
    said = vitctl("recipes", "list", "--all")
    assert said.code == 0
    listed = [line.split()[0] for line in said.out.splitlines()[1:] if line[:1].strip()]
    assert listed == recipe_names() + sweep_names()


def test_list__has_a_line_a_group_and_words_that_find_every_recipe(
    vitctl: Vitctl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CONSOLE, "width", 80)
    lines = vitctl("recipes", "list").out.splitlines()
    assert len(lines) < 23 and max(map(len, lines)) <= 80
    column, rows = lines[0].index("words"), lines[1:-3]
    assert all(line[:1].strip() for line in rows) and "others" not in lines[-4]
    words = " ".join(line[column:] for line in rows).split()
    names = recipe_names() + sweep_names()
    assert sum(int(line[:column].split()[-1]) for line in rows) == len(names)
    assert [name for name in names if not name.startswith(tuple(words))] == []
    assert [word for word in words if not any(name.startswith(word) for name in names)] == []


def test_list__a_word_finds(vitctl: Vitctl) -> None:
    said = vitctl("recipes", "list", "PETS")
    assert [line.split()[0] for line in said.out.splitlines() if line[:1].strip()] == [
        "recipe", "augreg_b32_pets", "bit_pets", "bit_pets_480", "finetune_pets", "4"
    ]  # fmt: skip
    said = vitctl("recipes", "list", "fnord")
    assert (said.code, said.err.count("\n")) == (2, 1)


def test_show__is_toml_with_and_without_origins(vitctl: Vitctl) -> None:
    plain, origins = (
        vitctl("recipes", "show", "jft_h14").out,
        vitctl("recipes", "show", "jft_h14", "--origins").out,
    )
    assert tomllib.loads(plain) == tomllib.loads(origins)
    assert tomllib.loads(plain)["model"]["name"] == "H/14"
    assert all(
        line.startswith("# ") and line.endswith(" is unset") for line in plain.splitlines() if "#" in line
    )
    assert 'name = "H/14"                             # jft_h14.toml:5' in origins
    assert "0.25" in vitctl("recipes", "show", "jft_h14", "--set", "optimizer.lr=0.25").out


@pytest.mark.slow
def test_explain__names_the_commands_that_read_a_key(
    vitctl: Vitctl, tiny_data: Path, one_process: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys that are looked up while a command runs, as far as code outside vitctl/recipe/ does it."""
    sections = {field.annotation: name for name, field in Evaluate.model_fields.items() if name != "known"}
    sections[Machine] = "machine"  # of an export
    read, stored = set[str](), Section.__getattribute__

    def watched(self: Section, name: str) -> Any:
        if type(self) in sections and Path(sys._getframe(1).f_code.co_filename).parent.name != "recipe":
            read.add(f"{sections[type(self)]}.{name}")
        return stored(self, name)

    monkeypatch.setattr(Section, "__getattribute__", watched)
    keys = {key for key in every_key(Evaluate) if "." in key}
    explained = {
        name: {key for key in keys if any(name in line.split(", ") for line in explained_jobs(key))}
        for name in ("predict", "serve", "inspect", "evaluate")
    }
    place = ("--from", one_process, "--set", "machine.workers=0")
    assert vitctl("predict", tiny_data, "--split", "test", *place).code == 0
    replaced = {"data.path", "data.dataset", "data.root", "data.eval_split"}  # by the images that are typed
    assert read & keys - replaced == explained["predict"]
    read.clear()
    assert vitctl("inspect", "--data", tiny_data, *place, "--out", "figures").code == 0
    assert read & keys - {"machine.processes"} == explained["inspect"]
    assert explained["predict"] - explained["serve"] == {
        "evaluation.batch_size", "data.classes", "data.cache_gib", "data.group_by"
    }  # fmt: skip
    assert keys == explained["evaluate"]
    read.clear()
    assert vitctl("export", "--from", one_process, "--to", "onnx", "--out", "file").code == 0
    unread = {"machine.workers", "machine.precision", "machine.device"}
    assert not read & unread
    assert not any("export" in line for key in unread for line in explained_jobs(key))


def explained_jobs(key: str) -> list[str]:
    return [line.removeprefix("  jobs     ") for line in explain(key) if line.startswith("  jobs ")]


def test_explain_and_diff(vitctl: Vitctl) -> None:
    said = vitctl("recipes", "explain", "optimizer.weight_decay")
    assert said.code == 0
    assert "  source   Table 3; D.1; BiT\n" in said.out
    said = vitctl("recipes", "diff", "jft_l16", "jft_l16_14ep")
    assert [line.split()[0] for line in said.out.splitlines()] == ["key", "note", "schedule.total_epochs"]
    assert "set the same values" in vitctl("recipes", "diff", "smoke", "smoke").out


def test_check__all_shipped_and_a_file_of_ones_own(vitctl: Vitctl, tmp_path: Path) -> None:
    said = vitctl("recipes", "check")
    assert (said.code, said.out) == (0, f"{len(recipe_names())} recipes checked, no problem\n")
    (tmp_path / "a.toml").write_text('extends = "smoke"\nsead = 1\n')
    (tmp_path / "b.toml").write_text('extends = "smok"\n')
    said = vitctl("recipes", "check", "a.toml", "b.toml")
    assert said.code == 2
    assert said.err == (
        "vitctl: a.toml:2: unknown key sead; did you mean seed?\n"
        "no recipe is called 'smok'; did you mean smoke? `vitctl recipes list --all` shows them all\n"
    )


def test_a_path_works_wherever_a_name_does(vitctl: Vitctl, tmp_path: Path) -> None:
    (tmp_path / "my [b16].toml").write_text('extends = "smoke"\nseed = 9\n')
    assert "seed = 9" in vitctl("recipes", "show", "my [b16].toml").out
    said = vitctl("pretrain", "--recipe", "my [b16].toml", "--dry-run", "--all")
    assert said.code == 0
    assert "seed = 9                                  # my [b16].toml:2" in said.out
    assert "runs/my [b16]_2" in said.out


@pytest.mark.slow
def test_table__every_table_and_the_asked_column(vitctl: Vitctl) -> None:
    said = vitctl("recipes", "table")
    assert said.code == 0
    starts = (
        "Table 1:",
        "Table 2:",
        "Table 3:",
        "Table 8:",
        "Table 9:",
        "Figure 2:",
        "Figure 3:",
        "Figure 4:",
        "Figure 5:",
        "Figure 13:",
    )
    for start in (*starts, "Section 4.6:", "Figures 8,", "jft_r200x3", "fig4_b32_halved", "jft_r152x4"):
        assert any(line.startswith(start) for line in said.out.splitlines()), start
    six = vitctl("recipes", "table", "6", "--target", "Pets", "--mfu", "0.5", "--device", "a100").out
    (row,) = (line.split() for line in six.splitlines() if line.startswith("jft_h14"))
    assert "GPU-days: " in six and "TPU-days" not in six  # the legend of the columns that it has
    two = vitctl("recipes", "table", "2").out
    (student,) = (line.split() for line in two.splitlines() if line.startswith("Noisy"))
    assert student == ["Noisy", "Student", "88.4", "-", "-", "-", "-", "12,300", "-"]
    assert row == ["jft_h14", "97.11", "not", "run", "1,035,644", "4,259", "4,262", "2,500", "316"]
    assert "one A100 at 50% of its bf16 peak" in six


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ("10",),
            "no table is called '10'; choose one of 1, 2, 3, 4, 5, 6, 7, 8, 9, fig2, fig3, fig4, fig5, "
            "fig13, 4.6, figures",
        ),
        (("6", "--plot", "a.png"), "--plot a.png: only fig2, fig3, fig5, fig13 can be plotted"),
        (("fig5", "--plot", "a.pdf"), "--plot a.pdf: should be the name of a .png file"),
        (("fig5", "--plot", "no/a.png"), "--plot no/a.png: there is no folder no"),
        (("8", "--target", "Pets"), "--target Pets: no such column; known: 5-shot"),
        (("6", "--mfu", "40"), "--mfu 40: a share of the peak"),
    ],
)
def test_table__refuses(vitctl: Vitctl, arguments: tuple[str, ...], said: str) -> None:
    found = vitctl("recipes", "table", *arguments)
    assert found.code == 2
    assert said in found.err


@pytest.mark.slow
def test_table__says_which_runs_it_leaves_out_and_draws(vitctl: Vitctl, tmp_path: Path) -> None:
    finished(tmp_path / "runs", "short", "jft_b32", {}, {"schedule.total_epochs": 1.0})
    said = vitctl("recipes", "table", "fig5", "--plot", "fig5.png")
    assert said.code == 0
    assert "left out: short (jft_b32): schedule.total_epochs is 1.0, in the recipe 7.0" in said.out
    assert (tmp_path / "fig5.png").stat().st_size > 10_000
