"""Matrices of tests: the default run has a few cells of each, `pytest -m slow` the others."""

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from itertools import count
from pathlib import Path
from typing import Any

import pytest

Test = Callable[..., None]


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


def spread(kept: int, rows: Iterable[Any], first: int = 0) -> list[Any]:
    """Rows of `parametrize`, of which the default run has so many, at equal distances from `first` on."""
    rows = list(rows)
    places = {(first + n * len(rows) // kept) % len(rows) for n in range(kept)}
    return [row if n in places else slow(row)[0] for n, row in enumerate(rows)]


def each(names: str | tuple[str, ...], rows: Iterable[Any]) -> Callable[[Test], Test]:
    """`parametrize` as one test, for cells of a millisecond: pytest itself takes five for each test.

    Each row has a folder `tmp_path` of its own. The other fixtures are shared. All rows that fail are named.
    """
    several, rows = isinstance(names, tuple), list(rows)

    def wrap(test: Test) -> Test:
        signature, number = inspect.signature(test), count()
        given = {*names} if several else {names}

        @functools.wraps(test)
        def run(**fixtures: Any) -> None:
            failed, above = [], fixtures.get("tmp_path")
            for row in rows:
                values = dict(zip(names, row, strict=True)) if several else {names: row}
                if isinstance(above, Path):
                    fixtures["tmp_path"] = above / f"row{next(number)}"
                    fixtures["tmp_path"].mkdir()
                try:
                    test(**values, **fixtures)
                except Exception as error:
                    error.add_note(f"in the row {values}")
                    failed.append(error)
            if failed:
                raise ExceptionGroup(f"{len(failed)} rows failed", failed)

        own = [one for name, one in signature.parameters.items() if name not in given]
        run.__signature__ = signature.replace(parameters=own)  # type: ignore[attr-defined]
        return run

    return wrap
