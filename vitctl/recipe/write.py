"""Write a checked recipe as TOML, each value with its origin, and compare two recipes."""

import json
import re
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from vitctl.recipe.load import Loaded
from vitctl.recipe.schema import Recipe
from vitctl.system.text import escaped_json, one_line


def to_toml(loaded: Loaded, *, origins: bool = True, defaults: bool = True) -> str:
    """The whole recipe as TOML that `load_recipe` reads back to an equal recipe.

    Args:
        loaded: a checked recipe.
        origins: add the origin of each value as a comment.
        defaults: also values that no file and no flag set.
    """
    lines = [f"# {one_line(loaded.name)}, resolved; the origin of each value follows it"] if origins else []
    _table(loaded.recipe, "", loaded, origins, lines, defaults)
    return "\n".join(lines) + "\n"


def written_name(path: Path) -> str:
    """The name of the recipe that `to_toml` wrote to a file, from its first line; "" where there is none."""
    try:
        with path.open(encoding="utf-8") as file:
            match = re.match(r"# (.+), resolved;", file.readline())
    except FileNotFoundError:
        return ""
    return match[1] if match else ""


def flat(recipe: Recipe) -> dict[str, Any]:
    """All values of a recipe by dotted key."""
    values: dict[str, Any] = {}

    def walk(section: BaseModel, prefix: str) -> None:
        for name in type(section).model_fields:
            value = getattr(section, name)
            if isinstance(value, BaseModel):
                walk(value, f"{prefix}{name}.")
            else:
                values[prefix + name] = value

    walk(recipe, "")
    return values


def differences(first: Recipe, second: Recipe) -> list[tuple[str, Any, Any]]:
    """Dotted key and both values of everything in which two recipes differ; None stands for a key that one
    lacks.
    """
    one, two = flat(first), flat(second)
    return [
        (key, one.get(key), two.get(key))
        for key in dict.fromkeys([*one, *two])
        if one.get(key) != two.get(key)
    ]


def toml_value(value: Any) -> str:
    """One value as TOML; "" for None, which TOML lacks."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, BaseModel):
        return "{" + ", ".join(f"{name} = {toml_value(inner)}" for name, inner in value) + "}"
    if isinstance(value, tuple | list):
        return "[" + ", ".join(toml_value(item) for item in value) + "]"
    if isinstance(value, str):
        return escaped_json(json.dumps(value, ensure_ascii=False))
    return repr(value)


def _table(
    section: BaseModel, prefix: str, loaded: Loaded, origins: bool, lines: list[str], defaults: bool = True
) -> None:
    inner: list[str] = []
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            inner.append(name)
            continue
        is_unused = name == "dataset" and bool(getattr(section, "path", ""))  # which overrides it
        if not defaults and (is_unused or not _is_set(loaded, prefix + name)):
            continue
        text = f"{name} = {toml_value(value)}" if value is not None else f"# {name} is unset"
        lines.append(
            f"{text:<40}  # {one_line(loaded.origin(prefix + name))}"
            if origins and value is not None
            else text
        )
    for name in inner:
        if defaults or _is_set(loaded, prefix + name):
            lines += ["", f"[{prefix}{name}]"]
            _table(getattr(section, name), f"{prefix}{name}.", loaded, origins, lines, defaults)


def _is_set(loaded: Loaded, key: str) -> bool:
    """Whether a file or a flag set this key, or one inside this table."""
    return any(found == key or found.startswith(f"{key}.") for found in loaded.origins)
