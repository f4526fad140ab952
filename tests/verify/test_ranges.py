"""The steps that `--replay` names."""

from pathlib import Path

import pytest

from vitctl.engine.trace.steps import read_steps
from vitctl.verify import ranges
from vitctl.verify.ranges import chosen_ranges


def test_any__draws_no_step_twice(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints lie four steps apart, and five steps after each are replayed."""
    steps = read_steps(finished)
    assert steps is not None
    monkeypatch.setattr(
        ranges.random.SystemRandom, "sample", lambda _self, places, count: sorted(places)[:count]
    )
    drawn = chosen_ranges("any", steps, finished)
    assert len(drawn) >= 2
    covered = [step for first, last in drawn for step in range(first, last + 1)]
    assert covered == sorted(set(covered))
    assert all(last - first < 5 for first, last in drawn)
