"""A tiny recipe to measure, and its prepared training."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import TINY
from vitctl.bench import measuring, resolutions
from vitctl.bench.timed_steps import with_training, without_extras
from vitctl.engine.trainer import Trainer
from vitctl.recipe.load import load_recipe
from vitctl.recipe.schema import Pretrain


def tiny_recipe(**values: Any) -> Pretrain:
    """Return the tiny recipe with some values, without scores."""
    return without_extras(load_recipe(str(TINY), list(values.items())).recipe)


@pytest.fixture(autouse=True)
def small_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure small matrix products, and no longer than one takes."""
    monkeypatch.setattr(resolutions, "_MATRIX_SECONDS", 0.0)
    monkeypatch.setitem(measuring._SHAPES, "cpu", ((64, 128, 256), (128, 128, 128)))


@pytest.fixture
def prepared(tiny_data: Path, tmp_path: Path) -> Callable[..., Any]:
    """prepared(measure, **{"a.b": value}) returns what `measure` makes of the prepared training."""

    def do(measure: Callable[[Trainer], Any], **values: Any) -> Any:
        results: list[Any] = []
        recipe = tiny_recipe(**{"data.path": str(tiny_data), **values})
        with_training(recipe, tmp_path, lambda one: results.append(measure(one)))
        return results[0]

    return do
