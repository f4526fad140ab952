"""Shared by all measurements: time, and the rate of matrix products."""

from dataclasses import replace
from typing import get_args

import pytest
import torch

from vitctl.bench.measuring import Budget, matrix_rate
from vitctl.recipe.schema import TrainMachine


def test_budget__parts_end_with_the_whole() -> None:
    budget = Budget(100.0)
    assert 99 < budget.left <= 100
    assert budget.part(0.25).seconds == 25.0
    assert replace(budget, began=budget.began - 90).part(0.25).seconds == pytest.approx(10, abs=1)
    budget.stop.raise_(2)
    assert budget.left == budget.part(0.5).seconds == 0


def test_matrix_rate__of_every_precision() -> None:
    for precision in get_args(TrainMachine.model_fields["precision"].annotation):
        if precision != "auto":
            assert matrix_rate(torch.device("cpu"), precision, 0.0) > 1e6
