"""What all measurements share: time, other programs, the rate of matrix products."""

from dataclasses import replace
from typing import get_args

import pytest
import torch

from vitctl.bench import measuring
from vitctl.bench.measuring import Budget, OtherWork, matrix_rate
from vitctl.recipe.schema import TrainMachine


def test_budget__parts_end_with_the_whole() -> None:
    budget = Budget(100.0)
    assert 99 < budget.left <= 100
    assert budget.part(0.25).seconds == 25.0
    assert replace(budget, began=budget.began - 90).part(0.25).seconds == pytest.approx(10, abs=1)
    budget.stop.raise_(2)
    assert budget.left == budget.part(0.5).seconds == 0


@pytest.mark.parametrize(("others", "notes"), [(0.0, 0), (0.2, 0), (1.5, 1)])
def test_other_work__planted_seconds(monkeypatch: pytest.MonkeyPatch, others: float, notes: int) -> None:
    """10 seconds in which this process computed 12 and others as many cores as planted."""
    clock, mine, all_of_it = iter([0.0, 10.0]), iter([5.0, 17.0]), iter([100.0, 112.0 + 10 * others])
    monkeypatch.setattr(measuring.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(measuring, "cpu_seconds", lambda: next(mine))
    monkeypatch.setattr(measuring, "_machine_seconds", lambda: next(all_of_it))
    lines = OtherWork().notes()
    assert len(lines) == notes
    assert all(line.startswith("other programs kept 1.5 of ") for line in lines)


def test_matrix_rate__of_every_precision() -> None:
    for precision in get_args(TrainMachine.model_fields["precision"].annotation):
        if precision != "auto":
            assert matrix_rate(torch.device("cpu"), precision, 0.0) > 1e6
