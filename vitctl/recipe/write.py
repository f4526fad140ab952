"""Recipes as TOML with the origin of each value, and explanations of keys."""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from vitctl.errors import RecipeError
from vitctl.recipe.load import RESOLVED, Loaded, every_key, recipe_names
from vitctl.recipe.schema import JOBS, Recipe
from vitctl.recipe.sections import UNSET
from vitctl.recipe.synonyms import synonym
from vitctl.system.text import did_you_mean, escaped_json, one_edit_away, one_line, typed

_OF_NETWORK = (
    r"machine\.(precision|device|attention)|weights\..*|evaluation\.labels"
    r"|data\.(exif_orientation|truncated|eval_method|eval_resize|eval_resample|image_size)"
)
# The keys that each command with a recipe for this job reads; for other jobs all.
_COMMANDS = {
    "evaluate": {
        "evaluate": r".*",
        "predict": rf"{_OF_NETWORK}|machine\.workers|evaluation\.(batch_size|flip_average)"
        r"|data\.(classes|cache_gib|columns|group_by)",
        "serve": rf"{_OF_NETWORK}|machine\.workers|evaluation\.flip_average",
        "inspect": rf"{_OF_NETWORK}|data\.(?!image_size).*|evaluation\.batch_size",
    },
    "export": {"export": r"(?!machine\.(workers|precision|device)).*"},
}


def to_toml(loaded: Loaded, *, origins: bool = True, defaults: bool = True) -> str:
    """Return the complete recipe as TOML that `load_recipe` reads back to an equal recipe."""
    lines = [f"# {one_line(loaded.name)}, resolved; the origin of each value follows it"] if origins else []
    _table(loaded.recipe, "", loaded, origins, lines, defaults)
    return "\n".join(lines) + "\n"


def written_name(path: Path) -> str:
    """Return the name of the recipe that `to_toml` wrote to a file, from its first line; "" if none."""
    try:
        with path.open(encoding="utf-8") as file:
            match = RESOLVED.match(file.readline())
    except FileNotFoundError:
        return ""
    return match[1] if match else ""


def flat(section: BaseModel, prefix: str = "") -> dict[str, Any]:
    """Return all values of a recipe, or of a section whose keys get a prefix, by dotted key."""
    values: dict[str, Any] = {}
    for name, value in section:
        if isinstance(value, BaseModel):
            values |= flat(value, f"{prefix}{name}.")
        else:
            values[prefix + name] = value
    return values


def differences(first: Recipe, second: Recipe) -> list[tuple[str, Any, Any]]:
    """Return dotted key and both values wherever two recipes differ; None for a key that one lacks."""
    one, two = flat(first), flat(second)
    return [
        (key, one.get(key), two.get(key))
        for key in dict.fromkeys([*one, *two])
        if one.get(key) != two.get(key)
    ]


def toml_value(value: Any) -> str:
    """Return one value as TOML; "" for None, which TOML lacks."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, BaseModel):
        return "{" + ", ".join([f"{name} = {toml_value(inner)}" for name, inner in value]) + "}"
    if isinstance(value, dict):
        pairs = [f"{toml_value(key)} = {toml_value(inner)}" for key, inner in value.items()]
        return "{" + ", ".join(pairs) + "}"
    if isinstance(value, tuple | list) and {*map(type, value)} <= {int, float}:
        return repr([*value])
    if isinstance(value, tuple | list):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    if isinstance(value, str):
        text = json.dumps(value, ensure_ascii=False)
        return text if text.isprintable() else escaped_json(text)
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
        is_unused = name == "dataset" and bool(getattr(section, "path", ""))  # path overrides dataset
        if not defaults and (is_unused or not _is_set(loaded, prefix + name)):
            continue
        text = f"{name} = {toml_value(value)}" if value is not None else f"# {name} is unset"
        lines.append(
            f"{text:<40}  # {loaded.origin(prefix + name)}" if origins and value is not None else text
        )
    for name in inner:
        if defaults or _is_set(loaded, prefix + name):
            lines += ["", f"[{prefix}{name}]"]
            _table(getattr(section, name), f"{prefix}{name}.", loaded, origins, lines, defaults)


def _is_set(loaded: Loaded, key: str) -> bool:
    """Return whether a file or a flag set this key, or one inside this table."""
    return any(found == key or found.startswith(f"{key}.") for found in loaded.origins)


def explain(key: str) -> list[str]:
    """Explain a dotted key, or all keys of a section, in lines. Raises RecipeError with the nearest keys."""
    known = list(dict.fromkeys(name for schema in JOBS.values() for name in every_key(schema)))
    asked = [key] if key in known else [name for name in known if name.startswith(key + ".")]
    if asked:
        return [line for name in asked for line in _entries(name)]
    ends = [name for name in known if name.endswith("." + key)]
    if row := synonym(key):
        here = " and ".join(row.places) or "nothing in vitctl"
        said = f"{key} of other programs is {here}{row.remark}"
        keys = dict.fromkeys(place.partition("=")[0] for place in row.places)
        return [said, *(line for name in keys if name in known for line in _entries(name))]
    near = ends or one_edit_away(key, known)
    name = key if key in recipe_names() else "smoke"
    then = did_you_mean(near) if near else f"`vitctl recipes show {name}` lists the keys of a recipe"
    raise RecipeError(f"no recipe has a key '{key}'", fix=then)


def _entries(key: str) -> list[str]:
    """Return an entry for each distinct default or meaning of a key, with the commands that read it."""
    jobs: dict[tuple[str, ...], list[str]] = {}
    for job, schema in JOBS.items():
        if key in every_key(schema):
            field = _field(Recipe if key == "job" else schema, key)
            readers = _COMMANDS.get(job, {job: ".*"}).items()
            users = [name for name, keys in readers if re.fullmatch(keys, key)]
            jobs.setdefault(_entry(key, field), []).extend(users)
    return [line for entry, names in jobs.items() for line in (*entry, f"  jobs     {', '.join(names)}")]


def _entry(key: str, field: FieldInfo) -> tuple[str, ...]:
    extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
    default = "none, it is required" if field.is_required() else toml_value(field.default) or "unset"
    unit = f" [{extra['unit']}]" if extra.get("unit") else ""
    return (
        key,
        f"  {field.description or 'which command the recipe is for'}",
        f"  type     {_type(field)}{unit}",
        f"  default  {default}",
        f"  source   {extra.get('source') or 'a choice of vitctl'}",
    )


def _field(schema: type[BaseModel], key: str) -> FieldInfo:
    *tables, leaf = key.split(".")
    for table in tables:
        annotation = schema.model_fields[table].annotation
        assert isinstance(annotation, type)
        schema = annotation
    return schema.model_fields[leaf]


def _type(field: FieldInfo) -> str:
    limits = [text for item in field.metadata if (text := _limit(item))]
    return _name(field.annotation) + (f", {' and '.join(limits)}" if limits else "")


def _name(annotation: Any) -> str:
    args = [a for a in get_args(annotation) if a is not type(None)]
    if get_origin(annotation) is Annotated:
        return _name(args[0])
    if annotation in (int, float, str, bool):
        return {int: "whole number", float: "number", str: "text", bool: "true or false"}[annotation]
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return f"table of {' and '.join(annotation.model_fields)}"
    if str(annotation).startswith("typing.Literal"):
        return ("one of " if len(args) > 1 else "") + ", ".join(toml_value(a) for a in args)
    if str(annotation).startswith("dict"):
        return "table of numbers"
    if str(annotation).startswith("tuple"):
        return f"list of {_name(args[0])}s" if args[-1] is Ellipsis else f"{len(args)} {_name(args[0])}s"
    return " or ".join(filter(None, map(_name, args)))


def _limit(item: object) -> str:
    words = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    return next((f"{word} {getattr(item, name)}" for name, word in words.items() if hasattr(item, name)), "")


def as_flags(changes: Iterable[tuple[str, Any, Any]]) -> str:
    """Return flags that make changes, in the form of `differences`; each follows a space."""
    return "".join(f" --set {typed(f'{key}={toml_value(value) or UNSET}')}" for key, _, value in changes)
