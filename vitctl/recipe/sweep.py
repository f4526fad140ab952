"""A sweep over a grid of recipe values. Each combination is a cell, with a name and overrides."""

import itertools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitctl.errors import RecipeError, refuse
from vitctl.recipe.load import Override, leaves, parse_override, recipe_folder, recipe_names
from vitctl.system.files import parse_toml, read_toml

MAX_CELLS = 1000
_MAX_NAME = 120
_TABLES = ("note", "recipes", "set", "grid", "cells")
Setting = dict[str, Any]


@dataclass(frozen=True)
class SweepCell:
    """One run of a sweep: its folder name, its recipe, what it varies, and all overrides of the recipe."""

    name: str
    recipe: str
    varied: Setting
    overrides: tuple[Override, ...]


@dataclass(frozen=True)
class Sweep:
    """A sweep: every recipe with every cell of `cells` and every combination of `axes`.

    `cells` are single combinations outside the grid, `axes` maps dotted keys to values.
    """

    name: str
    note: str
    recipes: tuple[str, ...]
    fixed: Setting
    cells: tuple[Setting, ...]
    axes: dict[str, tuple[Any, ...]]


def sweep_names() -> list[str]:
    return sorted(path.stem for path in _folder().glob("*.toml"))


def find_sweep(name: str) -> Sweep:
    """Return a shipped sweep, a .toml file of a sweep, or a recipe that is varied by --grid alone."""
    path = Path(name)
    if name in sweep_names():
        path = _folder() / f"{name}.toml"
    if path.is_file() and name not in recipe_names():
        values = read_toml(path, error=RecipeError)[0]
        if not {"job", "extends"} & values.keys():
            return _from_table(path, values)
    return Sweep(path.stem if path.suffix else name, "", (name,), {}, (), {})


def parse_axis(text: str) -> tuple[str, tuple[Any, ...]]:
    """Parse `key=v1,v2` as typed after --grid: as TOML if all values are TOML, else all are strings."""
    key, found, values = text.partition("=")
    if not found or not key.strip() or not values.strip():
        raise RecipeError(
            f"--grid {text}", "write it as section.key=v1,v2, e.g. --grid optimizer.lr=0.001,0.003"
        )
    try:
        listed = parse_toml(f"v = [{values}]")
        axis = tuple(listed["v"]) if list(listed) == ["v"] else ()
    except ValueError:
        axis = ()
    axis = axis or tuple(parse_override(f"{key}={value.strip()}").value for value in values.split(","))
    return key.strip(), _axis(f"--grid {text}", axis)


def parse_axes(texts: Iterable[str]) -> dict[str, tuple[Any, ...]]:
    """Parse several axes.

    Raises:
        RecipeError: as `parse_axis`; or a key is varied twice.
    """
    axes: dict[str, tuple[Any, ...]] = {}
    for key, values in map(parse_axis, texts):
        if key in axes:
            raise RecipeError(key, "is varied twice", "give all its values once")
        axes[key] = values
    return axes


def expand_sweep(
    sweep: Sweep, axes: Mapping[str, tuple[Any, ...]], sets: Iterable[Override]
) -> list[SweepCell]:
    """Return all cells of a sweep, in run order: the last axis changes fastest.

    Args:
        axes: from --grid, in addition to the sweep's; the same key replaces it.
        sets: from --set, which take precedence over everything.

    Raises:
        RecipeError: nothing varies, a key is varied and set, or two cells are the same.
    """
    sets = tuple(sets)
    every = {**sweep.axes, **axes}
    varied_keys = {*every, *(key for cell in sweep.cells for key in cell)}
    if both := sorted(varied_keys & {override.key for override in sets}):
        raise RecipeError(f"{both[0]} is varied by the sweep and set by --set", fix="leave one of them out")
    if both := sorted({*every} & {key for cell in sweep.cells for key in cell}):
        raise RecipeError(
            f"{both[0]} is varied by the grid and by the cells of '{sweep.name}'", fix="leave one of them out"
        )
    combinations = list(itertools.product(sweep.recipes, sweep.cells or ({},), *every.values()))
    refuse(
        RecipeError,
        (len(combinations) < 2, "", f"'{sweep.name}' varies nothing", "give --grid section.key=v1,v2"),
        (
            len(combinations) > MAX_CELLS,
            "",
            f"'{sweep.name}' has {len(combinations):,} runs, more than {MAX_CELLS:,}",
            "use fewer values",
        ),
    )
    fixed = [Override(key, value, sweep.name) for key, value in sweep.fixed.items()]
    words = _words(varied_keys)
    cells = []
    for recipe, own, *values in combinations:
        varied = {**own, **dict(zip(every, values, strict=True))}
        parts = [Path(recipe).stem] * (len(sweep.recipes) > 1) + [
            f"{_word(words[key])}_{_word(value)}" for key, value in varied.items()
        ]
        name = "__".join(parts)[:_MAX_NAME] or "recipe"
        cells.append(
            SweepCell(
                name, recipe, varied, (*fixed, *(Override(k, v, "--grid") for k, v in varied.items()), *sets)
            )
        )
    names = [cell.name for cell in cells]
    if twice := [name for name in names if names.count(name) > 1]:
        raise RecipeError(f"'{sweep.name}' has two runs called '{twice[0]}'", fix="leave one of them out")
    return cells


def _folder() -> Path:
    return recipe_folder() / "sweeps"


def _from_table(path: Path, values: Mapping[str, Any]) -> Sweep:
    if unknown := [key for key in values if key not in _TABLES]:
        raise RecipeError(path.name, f"unknown key {unknown[0]}; a sweep has {', '.join(_TABLES)}")
    recipes = values.get("recipes")
    if not isinstance(recipes, list) or not recipes or not all(isinstance(name, str) for name in recipes):
        raise RecipeError(path.name, 'recipes should name one recipe or more, e.g. recipes = ["jft_b16"]')
    cells = values.get("cells", [])
    tables = [values[key] for key in ("set", "grid") if key in values]
    if not isinstance(cells, list) or not all(isinstance(table, dict) for table in (*cells, *tables)):
        raise RecipeError(
            path.name, "set and grid are tables, cells is a list of tables: [set], [grid], [[cells]]"
        )
    beside = [str(path.parent / name) if (path.parent / name).is_file() else name for name in recipes]
    axes = {
        key: value if isinstance(value, list) else [value]
        for key, value in _flat(values.get("grid", {})).items()
    }
    return Sweep(
        path.stem,
        str(values.get("note", "")),
        tuple(beside),
        _flat(values.get("set", {})),
        tuple(_flat(cell) for cell in cells),
        {key: _axis(f"{path.name}: grid.{key}", tuple(value)) for key, value in axes.items()},
    )


def _axis(where: str, values: tuple[Any, ...]) -> tuple[Any, ...]:
    if len({repr(value) for value in values}) < len(values):
        raise RecipeError(where, "has duplicate values", "remove one")
    return values


def _flat(table: Mapping[str, Any]) -> Setting:
    return {".".join(path): value for path, value in leaves(table)}


def _words(keys: Iterable[str]) -> dict[str, str]:
    """Return the short form of each key in run names: its last part if unique, else the full key."""
    keys = list(keys)
    ends = [key.rpartition(".")[2] for key in keys]
    return {
        key: end if ends.count(end) == 1 else key.replace(".", "_")
        for key, end in zip(keys, ends, strict=True)
    }


def _word(value: Any) -> str:
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return re.sub(r"[^\w.+-]+", "-", text).strip("-.") or "none"
