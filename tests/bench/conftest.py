"""A tiny recipe to measure, and its prepared training."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import TINY
from vitctl.bench.training import Prepared, reach, without_extras
from vitctl.recipe.load import load_recipe
from vitctl.recipe.schema import Pretrain

Measure = Callable[[Callable[[Prepared], Any]], Any]


def tiny_recipe(**values: Any) -> Pretrain:
    """The tiny recipe with some values, without scores."""
    recipe = load_recipe(str(TINY), list(values.items())).recipe
    assert isinstance(recipe, Pretrain)
    recipe = without_extras(recipe)  # type: ignore[assignment]
    assert isinstance(recipe, Pretrain)
    return recipe


@pytest.fixture
def prepared(tiny_data: Path, tmp_path: Path) -> Callable[..., Any]:
    """prepared(measure, **{"a.b": value}) gives what `measure` makes of the prepared training."""

    def do(measure: Callable[[Prepared], Any], **values: Any) -> Any:
        found: list[Any] = []
        recipe = tiny_recipe(**{"data.path": str(tiny_data), **values})
        reach(recipe, tmp_path, lambda one: found.append(measure(one)))
        return found[0]

    return do
