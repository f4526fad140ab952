"""A recipe written and read again is the same recipe."""

import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.matrix import slow
from vitctl.recipe.load import Override, load_recipe, recipe_names
from vitctl.recipe.write import differences, flat, to_toml, toml_value


@pytest.mark.parametrize("origins", [True, *slow(False)])
def test_to_toml__reads_back_equal_for_every_shipped_recipe(tmp_path: Path, origins: bool) -> None:
    names = recipe_names()
    assert len(names) >= 28
    for name in names:
        loaded = load_recipe(name)
        path = tmp_path / f"{name}.toml"
        path.write_text(to_toml(loaded, origins=origins))
        assert load_recipe(str(path)).recipe == loaded.recipe, name


def test_to_toml__says_where_each_value_comes_from() -> None:
    lines = to_toml(load_recipe("jft_h14", [Override("data.path", "x", "--data")])).splitlines()
    said = {line.split(" = ")[0]: line.rsplit("# ", 1)[1] for line in reversed(lines) if " = " in line}
    assert said["lr"] == "jft_h14.toml:8"
    assert said["weight_decay"].startswith("jft_b16.toml:")
    assert said["path"] == "--data"
    assert said["beta2"] == "default"
    assert len([line for line in lines if " = " in line]) > 50


@given(st.text(st.characters(codec="utf-8")))
def test_toml_value__any_text_survives(text: str) -> None:
    assert tomllib.loads(f"x = {toml_value(text)}")["x"] == text


@given(
    st.one_of(
        st.floats(allow_nan=False),
        st.integers(-(2**63), 2**63 - 1),
        st.booleans(),
        st.lists(st.integers(0, 9)),
    )
)
def test_toml_value__any_value_survives(value: object) -> None:
    again = tomllib.loads(f"x = {toml_value(value)}")["x"]
    assert (again, type(again)) == (value, type(value))


def test_differences__names_what_differs_and_nothing_else() -> None:
    one, two = load_recipe("jft_l16").recipe, load_recipe("jft_l16_14ep").recipe
    changed = {key: (a, b) for key, a, b in differences(one, two)}
    assert changed.pop("note") == (flat(one)["note"], flat(two)["note"])
    assert changed == {"schedule.total_epochs": (7.0, 14.0)}
    assert differences(one, one) == []


def test_to_toml__a_data_set_that_the_path_overrides_is_not_shown_as_set() -> None:
    loaded = load_recipe("finetune", [Override("data.path", "x", "--data"), Override("weights.source", "y")])
    assert "dataset" not in to_toml(loaded, defaults=False)
    assert 'dataset = "digits"' in to_toml(loaded)
