"""Shell completion: recipes, data sets, models, formats, keys, runs.

If nothing matches, the shell completes file names. Imports no torch, because it must be fast.
"""

import tomllib
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any, get_args

import typer

from vitctl.engine.journal import RECIPE

RECIPE_OF = {
    "predict": "evaluate",
    "serve": "evaluate",
    "inspect": "evaluate",
}  # commands that read another command's recipe
SPLITS = ("train", "validation", "test")
LABELS = ("original", "real", "objectnet", "objectnet_restricted")


def _matching(values: Iterable[str], incomplete: str) -> list[str]:
    return [value for value in values if value.startswith(incomplete)]


def one_of(values: Iterable[str]) -> Callable[[str], list[str]]:
    known = tuple(values)
    return lambda incomplete: _matching(known, incomplete)


def allowed(key: str) -> Callable[[str], list[str]]:
    """Offer the values that recipes allow for a key."""

    def offer(incomplete: str) -> list[str]:
        from vitctl.recipe.load import every_key
        from vitctl.recipe.schema import JOBS

        values: Any = next(schema for schema in JOBS.values() if key in every_key(schema))
        for part in key.split("."):
            values = values.model_fields[part].annotation
        return _matching([value for value in get_args(values) if isinstance(value, str)], incomplete)

    return offer


def weights(incomplete: str) -> list[str]:
    from vitctl.models.weights.names import PUBLISHED

    return _matching(PUBLISHED, incomplete)


def recipes(context: typer.Context, incomplete: str) -> list[str]:
    """Offer the shipped recipes of the typed command, or all if the command takes any recipe."""
    from vitctl.recipe.load import recipe_names
    from vitctl.recipe.schema import JOBS

    command = context.info_name
    names = _matching(recipe_names(), incomplete)
    return [name for name in names if _job(name) == command] if command in JOBS else names


@cache
def _job(name: str) -> str:
    """Return the job of a shipped recipe, or of the recipe that it extends."""
    from vitctl.recipe.load import recipe_folder

    values: dict[str, Any] = tomllib.loads((recipe_folder() / f"{name}.toml").read_text(encoding="utf-8"))
    return str(values["job"]) if "job" in values else _job(str(values["extends"]))


def recipes_and_sweeps(context: typer.Context, incomplete: str) -> list[str]:
    from vitctl.recipe.sweep import sweep_names

    return [*_matching(sweep_names(), incomplete), *recipes(context, incomplete)]


def keys(context: typer.Context, incomplete: str) -> list[str]:
    """Offer the keys of the typed command's recipes, with the equals sign: optimizer.lr="""
    return [f"{key}=" for key in bare_keys(context, incomplete)]


def bare_keys(context: typer.Context, incomplete: str) -> list[str]:
    """Offer the keys of the typed command's recipes."""
    from vitctl.recipe.load import every_key
    from vitctl.recipe.schema import JOBS

    job = RECIPE_OF.get(context.info_name or "", context.info_name)
    chosen = [JOBS[job]] if job in JOBS else list(JOBS.values())
    return _matching(dict.fromkeys(key for schema in chosen for key in every_key(schema)), incomplete)


def keys_and_sections(context: typer.Context, incomplete: str) -> list[str]:
    """Offer sections, then keys, of all recipes."""
    known = bare_keys(context, "")
    sections = dict.fromkeys(key.partition(".")[0] for key in known if "." in key)
    return _matching([*sections, *known], incomplete)


def data_sets(incomplete: str) -> list[str]:
    from vitctl.data.datasets.known_sets import DATA_SETS

    return _matching(DATA_SETS, incomplete)


def tasks(incomplete: str) -> list[str]:
    from vitctl.data.datasets.vtab import VTAB

    return _matching((task.name for task in VTAB), incomplete)


def models(incomplete: str) -> list[str]:
    from vitctl.models.variants import names

    return _matching(names(), incomplete)


def runs(incomplete: str) -> list[str]:
    """Offer run folders, the newest first; those under ./runs if nothing is typed yet."""
    begun = Path(incomplete or "runs/")
    folder = begun if not incomplete or incomplete.endswith("/") else begun.parent
    folders = [path.parent for path in folder.glob(f"*/{RECIPE}")]
    folders.sort(key=lambda path: path.stat().st_mtime, reverse=True)
    return _matching(map(str, folders), incomplete.removeprefix("./"))
