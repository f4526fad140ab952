"""The plan of a small run tells the memory that its first process uses."""

from pathlib import Path

import pytest

from benchmarks.plan_memory import RUNS, measure


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_plan__memory_as_measured(name: str, tmp_path: Path) -> None:
    planned, peak = measure(name, tmp_path / "run")
    assert 0.85 < planned / peak < 1.15
