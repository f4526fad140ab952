"""The tables in benchmarks/README.md and of results/ are what the scripts wrote."""

import json
from typing import Any

import pytest

from tests.benchmarks.conftest import script


def test_tables__are_those_of_the_results() -> None:
    table = script("table")
    pages = (
        (table.README, table.summary()),
        (table.FIGURES, table.table()),
        (table.SCRIPTS, table.scripts()),
    )
    for page, rows in pages:
        text = page.read_text()
        assert text.count(table.BEGIN) == text.count(table.END) == 1
        assert text.partition(table.BEGIN)[2].partition(table.END)[0].strip() == rows


@pytest.mark.parametrize(("goal", "words"), [(1.4, "1.40 **missed**"), (1.2, "1.20 reached"), (None, "-")])
def test_row__says_whether_the_goal_is_reached(goal: float | None, words: str) -> None:
    one: dict[str, Any] = {
        "figure": "a step",
        "number": "cpu",
        "ours": {"settings": "best", "median": {"cpu": 2.0}},
        "theirs": {"settings": "compiled", "median": {"cpu": 2.6}},
        "ratio": {"median": 1.3, "low": 1.25, "high": 1.3333},
        "goal": goal,
        "reached": goal is not None and goal <= 1.3,
    }
    expected = f"| a step, cpu | 2 CPU s: best | 2.6 CPU s: compiled | **1.30** (1.25 to 1.33) | {words} |"
    assert script("measure").row_text(json.loads(json.dumps(one))) == expected
