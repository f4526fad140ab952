"""How many images go through a network at once, measured with what training holds beside them."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.conftest import TINY
from tests.engine.conftest import Tiny, batch
from vitctl.engine.distributed import micro_batch as trials
from vitctl.jobs.record.kernels import choose_micro_batch
from vitctl.recipe.load import Override, load_recipe

SHARE, MOST = 8, 3
ADAM, AVERAGE = 2, 1  # copies of the weights


@pytest.mark.parametrize("processes", [1, 2])
def test_choose_micro_batch__holds_gradients_once(
    processes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DDP's gradients lie in its buckets before the forward pass, and sums of earlier micro-batches do; no further copy is held."""
    recipe: Any = load_recipe(str(TINY), [Override("machine.micro_batch", -1)]).recipe
    model, seen = Tiny(), dict[int, bool]()
    weights = sum(p.numel() * p.element_size() for p in model.parameters())

    def objective(tried: nn.Module, given: Any, _step: int) -> torch.Tensor:
        seen[len(given)] = all(p.grad is not None for p in tried.parameters())
        if len(given) > MOST:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return torch.as_tensor(tried(given.images.double()).sum())

    reserves: set[int] = set()

    def reserve(size: int, **_: object) -> torch.Tensor:
        reserves.add(size)
        return torch.zeros(0)

    monkeypatch.setattr(trials.torch, "empty", reserve)
    runtime: Any = SimpleNamespace(
        device=torch.device("cpu"),
        precision="float64",
        is_main=True,
        num_processes=processes,
        broadcast=lambda text: text,
        autocast=lambda: torch.autocast("cpu", enabled=False),
        sum=lambda values: values,
    )
    assert choose_micro_batch(recipe, runtime, tmp_path, model, objective, batch, SHARE) == MOST
    assert seen == {SHARE: processes > 1, 4: True, 2: True, MOST: True}
    assert reserves == {(ADAM + AVERAGE) * weights}
