"""What a recipe key means, from the schema."""

from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from vitctl.errors import RecipeError
from vitctl.recipe.load import every_key
from vitctl.recipe.schema import JOBS, Recipe
from vitctl.recipe.write import toml_value
from vitctl.system.text import did_you_mean, nearest


def explain(key: str) -> list[str]:
    """Lines that explain a dotted key, or all keys of a section.

    Raises:
        RecipeError: no recipe has such a key; the nearest ones are suggested.
    """
    known = list(dict.fromkeys(name for schema in JOBS.values() for name in every_key(schema)))
    asked = [key] if key in known else [name for name in known if name.startswith(key + ".")]
    if asked:
        return [line for name in asked for line in _entries(name)]
    ends = [name for name in known if name.endswith("." + key)]
    near = ends or nearest(key, known)
    raise RecipeError(f"no recipe has a key '{key}'" + (f"; {did_you_mean(near)}" if near else ""))


def _entries(key: str) -> list[str]:
    """One entry, or one for each group of jobs for which the key has a different default or meaning."""
    jobs: dict[tuple[str, ...], list[str]] = {}
    for job, schema in JOBS.items():
        if key in every_key(schema):
            field = _field(Recipe if key == "job" else schema, key)
            jobs.setdefault(_entry(key, field), []).append(job)
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
    if annotation in (int, float, str, bool):
        return {int: "whole number", float: "number", str: "text", bool: "true or false"}[annotation]
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return f"table of {' and '.join(annotation.model_fields)}"
    if str(annotation).startswith("typing.Literal"):
        return ("one of " if len(args) > 1 else "") + ", ".join(toml_value(a) for a in args)
    if str(annotation).startswith("tuple"):
        return f"list of {_name(args[0])}s" if args[-1] is Ellipsis else f"{len(args)} {_name(args[0])}s"
    return " or ".join(_name(a) for a in args)


def _limit(item: object) -> str:
    words = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    return next((f"{word} {getattr(item, name)}" for name, word in words.items() if hasattr(item, name)), "")
