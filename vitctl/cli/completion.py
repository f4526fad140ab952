"""Shell completion: recipes, data sets, models, formats, keys, runs. It imports no torch, because it must be
fast.

Where nothing matches, the shell completes file names.
"""

import tomllib
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import typer

from vitctl.engine.run_files import RECIPE

RECIPE_OF = {
    "predict": "evaluate",
    "inspect": "evaluate",
}  # commands that take the values of another command's recipe
SPLITS = ("train", "validation", "test")
LABELS = ("original", "real", "objectnet", "objectnet_restricted")
SUITES = ("vtab", "mini")
PREDICTION_FORMATS = ("table", "csv", "jsonl")
DEVICES = ("auto", "cpu", "cuda")
PRECISIONS = ("auto", "bf16", "float32", "tf32", "float64")


def _matching(values: Iterable[str], incomplete: str) -> list[str]:
    return [value for value in values if value.startswith(incomplete)]


def one_of(values: Iterable[str]) -> Callable[[str], list[str]]:
    """Offers fixed values."""
    known = tuple(values)

    def offer(incomplete: str) -> list[str]:
        return _matching(known, incomplete)

    return offer


def recipes(context: typer.Context, incomplete: str) -> list[str]:
    """Shipped recipes of the typed command; all of them for commands that take any recipe."""
    from vitctl.recipe.load import recipe_names
    from vitctl.recipe.schema import JOBS

    command = context.info_name
    names = _matching(recipe_names(), incomplete)
    return [name for name in names if _job(name) == command] if command in JOBS else names


@cache
def _job(name: str) -> str:
    """The job of a shipped recipe, its own or that of the one it extends."""
    from vitctl.recipe.load import recipe_folder

    values: dict[str, Any] = tomllib.loads((recipe_folder() / f"{name}.toml").read_text(encoding="utf-8"))
    return str(values["job"]) if "job" in values else _job(str(values["extends"]))


def recipes_and_sweeps(context: typer.Context, incomplete: str) -> list[str]:
    """Shipped sweeps, then recipes."""
    from vitctl.recipe.sweep import sweep_names

    return [*_matching(sweep_names(), incomplete), *recipes(context, incomplete)]


def keys(context: typer.Context, incomplete: str) -> list[str]:
    """Dotted keys of the recipes of the typed command, with the equals sign: optimizer.lr="""
    return [f"{key}=" for key in bare_keys(context, incomplete)]


def bare_keys(context: typer.Context, incomplete: str) -> list[str]:
    """The same without the equals sign."""
    from vitctl.recipe.load import every_key
    from vitctl.recipe.schema import JOBS

    job = RECIPE_OF.get(context.info_name or "", context.info_name)
    chosen = [JOBS[job]] if job in JOBS else list(JOBS.values())
    return _matching(dict.fromkeys(key for schema in chosen for key in every_key(schema)), incomplete)


def keys_and_sections(context: typer.Context, incomplete: str) -> list[str]:
    """Sections, then keys, of all recipes."""
    found = bare_keys(context, "")
    sections = dict.fromkeys(key.partition(".")[0] for key in found if "." in key)
    return _matching([*sections, *found], incomplete)


def data_sets(incomplete: str) -> list[str]:
    """Known data sets."""
    from vitctl.data.datasets.known_sets import DATA_SETS

    return _matching(DATA_SETS, incomplete)


def tasks(incomplete: str) -> list[str]:
    """Tasks of VTAB."""
    from vitctl.data.datasets.vtab import VTAB

    return _matching((task.name for task in VTAB), incomplete)


def models(incomplete: str) -> list[str]:
    """Rows of the table of models."""
    from vitctl.models.variants import names

    return _matching(names(), incomplete)


def runs(incomplete: str) -> list[str]:
    """Run folders that start with the typed text, the newest first; those under ./runs where nothing is typed
    yet.
    """
    begun = Path(incomplete or "runs/")
    folder = begun if not incomplete or incomplete.endswith("/") else begun.parent
    found = [path.parent for path in folder.glob(f"*/{RECIPE}")]
    found.sort(key=lambda path: path.stat().st_mtime, reverse=True)
    return _matching(map(str, found), incomplete.removeprefix("./"))
