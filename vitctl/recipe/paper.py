"""The paper's printed results, by recipe, as transcribed in recipes/paper/results.toml.

Paper: Tables 1 to 9, Figures 2 to 5 and 13
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vitctl.recipe.load import recipe_folder

AVERAGE = "Average-5"  # the mean of the columns FIVE
_NOT_PRINTED = "-"

Row = tuple[float | None, ...]


@dataclass(frozen=True)
class PaperTable:
    """A table of results: accuracies in percent by pre-training recipe; None: not printed.

    Args:
        rows: for each recipe a number for each column.
        deviations: over three fine-tuning runs.
        exaflops, core_days: the paper's cost of a pre-training, in TPUv3-core-days.
        shown: columns to show by default; the first if empty.
        others: rows of networks without a recipe, by name.
    """

    caption: str
    columns: tuple[str, ...]
    rows: Mapping[str, Row]
    deviations: Mapping[str, Row] = field(default_factory=dict)
    exaflops: Mapping[str, float] = field(default_factory=dict)
    core_days: Mapping[str, float] = field(default_factory=dict)
    shown: tuple[str, ...] = ()
    others: Mapping[str, Row] = field(default_factory=dict)

    def value(self, recipe: str, column: str) -> float | None:
        """Return the paper's accuracy in percent; None if it prints none."""
        return self.rows[recipe][self.columns.index(column)]

    def deviation(self, recipe: str, column: str) -> float | None:
        """Return the deviation over three fine-tuning runs; None if the paper prints none."""
        row = self.deviations.get(recipe)
        return row[self.columns.index(column)] if row else None


def _rows(values: Mapping[str, Any]) -> dict[str, Row]:
    return {name: tuple(None if one == _NOT_PRINTED else one for one in row) for name, row in values.items()}


def _table(values: Mapping[str, Any]) -> PaperTable:
    columns = tuple(values["columns"])
    rows = _rows(values.get("rows", {}))
    source = RESULTS[values["numbers_of"]] if "numbers_of" in values else None
    for name in values.get("recipes", source.rows if source else ()):
        rows[name] = rows.pop(name, tuple(_number(source, name, column) for column in columns))
    costs = {key: values.get(key, {}) for key in ("exaflops", "core_days")}
    deviations, others = (_rows(values.get(key, {})) for key in ("deviations", "others"))
    shown = tuple(values.get("shown", ()))
    return PaperTable(values["caption"], columns, rows, deviations, **costs, shown=shown, others=others)


def _number(source: PaperTable | None, name: str, column: str) -> float | None:
    if source is None or name not in source.rows:
        return None
    if column == AVERAGE:
        return round(sum(source.value(name, one) or 0 for one in FIVE) / len(FIVE), 2)
    return source.value(name, column)


_FILE = tomllib.loads((recipe_folder() / "paper" / "results.toml").read_text(encoding="utf-8"))
FIVE: tuple[str, ...] = tuple(_FILE["five"])
RESULTS: dict[str, PaperTable] = {}
for _number_of_table, _values in _FILE["tables"].items():
    RESULTS[_number_of_table] = _table(_values)
FIGURE_4_SIZES: Mapping[str, int] = _FILE["tables"]["fig4"]["images"]

# Table 9 and Figure 2: accuracy of each model on a task of VTAB-1k; other networks on all and on each group.
VTAB_MODELS: Mapping[str, str] = dict(zip(_FILE["vtab"]["models"], _FILE["vtab"]["recipes"], strict=True))
TABLE_9: Mapping[str, tuple[float, ...]] = {task: tuple(row) for task, row in _FILE["vtab"]["tasks"].items()}
OTHERS = _rows(_FILE["vtab"]["others"])
OTHERS_SOURCES: str = _FILE["vtab"]["others_sources"]

# Rows of the tables of settings: parameters of each model in millions; recipes.
TABLE_1: Mapping[str, int] = _FILE["settings"]["table_1"]
TABLE_3: tuple[str, ...] = tuple(_FILE["settings"]["table_3"])
TABLE_4: tuple[str, ...] = tuple(_FILE["settings"]["table_4"])
