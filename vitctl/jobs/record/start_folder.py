"""The folder that relative paths of a run's recipe start from."""

import os
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from vitctl.engine.journal import ENVIRONMENT, read_run_json
from vitctl.errors import LaunchError
from vitctl.recipe.schema import Recipe
from vitctl.system.remote import is_remote

_KEYS = ("data.path", "data.root", "data.mixture", "weights.source", "distillation.teacher")
_PATTERN = re.compile(r"[{*?\[,]")  # shard patterns; only the folder before the pattern must exist
R = TypeVar("R", bound=Recipe)


def start_folder(run: Path, read: Callable[[], Recipe]) -> Path:
    """Return the folder that a run was started in; if none was recorded, the working folder.

    For a run that was moved or copied with its data, it is the folder's new place: the one with most of the
    recipe's paths. `read` returns the recipe.
    """
    folders = []
    with suppress(LaunchError, OSError, ValueError, TypeError, KeyError):
        noted = read_run_json(run / ENVIRONMENT)
        inside, now = os.path.relpath(noted["run"], noted["folder"]), str(run.resolve())
        folders = [Path(now.removesuffix(inside))] if now.endswith(f"/{inside}") else []
        folders.append(Path(noted["folder"]))
    here = Path.cwd()
    if all(folder.resolve() == here for folder in folders):
        return here
    recipe = read()
    texts = [text for key in _KEYS for text in _texts(recipe, key)]

    def num_found(folder: Path) -> int:
        return sum(from_folder(text, folder) != text for text in texts)

    return max(filter(num_found, [*folders, here]), key=num_found, default=here)


def at_start(recipe: R, run: Path) -> R:
    """Return the recipe of a run with its relative paths resolved for the working folder."""
    folder = start_folder(run, lambda: recipe)
    for section, _, key in (name.partition(".") for name in _KEYS):
        if folder.resolve() != Path.cwd() and any(_texts(recipe, f"{section}.{key}")):
            table: Any = getattr(recipe, section)
            value = getattr(table, key)
            if isinstance(value, str):
                value = from_folder(value, folder)
            else:
                value = tuple(p.model_copy(update={"path": from_folder(p.path, folder)}) for p in value)
            recipe = recipe.model_copy(update={section: table.model_copy(update={key: value})})
    return recipe


def from_folder(text: str, folder: Path) -> str:
    """Return a relative path, shard pattern or list in a folder as absolute; unchanged if not there."""
    path = text.removeprefix("@")
    first = _PATTERN.split(path)[0]
    first = first if first == path else os.path.dirname(first)
    if is_remote(text) or not path or not (folder / first).exists():
        return text
    return text[: len(text) - len(path)] + ",".join(
        str(folder / one) for one in re.split(r",(?![^{]*})", path)
    )


def _texts(recipe: Recipe, name: str) -> list[str]:
    section, _, key = name.partition(".")
    value = getattr(getattr(recipe, section, None), key, "")
    return [value] if isinstance(value, str) else [part.path for part in value]
