"""Every key of every recipe: a value that it cannot take, and its name misspelt, are answered in one line."""

from typing import Any

import pytest
from pydantic import BaseModel

from vitctl.errors import RecipeError
from vitctl.recipe.load import Override, every_key, load_recipe
from vitctl.recipe.schema import JOBS

# One job for each key: the rules of a key are those of its section.
KEYS = {key: job for job, schema in JOBS.items() for key in every_key(schema) if key != "job"}
_PAST = {"ge": -1, "gt": 0, "le": 1, "lt": 0}  # added to a bound: the nearest number that is not allowed


def limits_of(key: str) -> dict[str, Any]:
    schema: type[BaseModel] = JOBS[KEYS[key]]
    *tables, name = key.split(".")
    for table in tables:
        inner = schema.model_fields[table].annotation
        assert isinstance(inner, type) and issubclass(inner, BaseModel)
        schema = inner
    found = schema.model_fields[name].metadata
    return {word: getattr(one, word) for one in found for word in _PAST if hasattr(one, word)}


def unanswered(key: str, typed: str, value: object) -> str:
    """Return what is wrong with the answer; "" if it is one line with where, what, and how to fix it."""
    try:
        load_recipe({"pretrain": "smoke"}.get(KEYS[key], KEYS[key]), [Override(typed, value, "--set")])
    except RecipeError as error:
        is_told = bool(error.what) and bool(error.fix or "should" in error.what)
        named = key.rpartition(".")[2] in str(error)
        is_line = error.where == "--set" and "\n" not in str(error)
        return "" if is_told and named and is_line else str(error)
    return f"{typed} = {value!r} is taken"


@pytest.mark.parametrize("mistake", ["wrong type", "misspelt", "out of range"])
def test_every_key__answers_a_mistake_with_where_what_and_a_fix(mistake: str) -> None:
    found = {}
    for key in KEYS:
        typed, values = key, [{"no": ["such"]}]
        if mistake == "misspelt":
            typed, values = f"{key[:-1]}{key[-1] * 2}", [1]
        elif mistake == "out of range":
            values = [bound + _PAST[word] for word, bound in limits_of(key).items()]
        for value in values:
            if text := unanswered(key, typed, value):
                found[key] = text
    assert not found, "\n".join(f"{key}: {text}" for key, text in found.items())
