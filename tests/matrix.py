"""Matrices of tests: the default run has a few cells of each, `pytest -m slow` the others."""

from collections.abc import Iterable, Mapping
from typing import Any

import pytest


def slow(*rows: Any) -> list[Any]:
    """Rows of `parametrize` that only `-m slow` runs; a tuple has a value for each name."""
    return [pytest.param(*(row if type(row) is tuple else (row,)), marks=pytest.mark.slow) for row in rows]


def few(rows: Mapping[str, Any] | Iterable[str], *kept: str) -> list[Any]:
    """Rows of `parametrize` by name, of which the default run has those to be kept; of words, the words."""
    named = rows if isinstance(rows, Mapping) else {word: word for word in rows}
    assert {*kept} <= {*named}
    cells = []
    for name, row in named.items():
        values = row if type(row) is tuple else (row,)
        cells.append(pytest.param(*values, id=name, marks=() if name in kept else pytest.mark.slow))
    return cells
