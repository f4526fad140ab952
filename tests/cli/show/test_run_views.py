"""Curves in a terminal."""

import pytest

from vitctl.cli.show.console import CONSOLE
from vitctl.cli.show.run_views import sparkline


def test_sparkline__a_bar_for_each_value_or_for_the_mean_of_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(CONSOLE.options), "ascii_only", False)
    assert sparkline([0.0, 1.0, float("nan"), 7.0]) == "▁▂█"
    assert sparkline([3.0, 3.0]) == "▁▁"
    assert sparkline([float("inf")]) == "..."
    line = sparkline([n // 100 for n in range(1000)])
    assert len(line) == 60 and line == "".join(sorted(line))
