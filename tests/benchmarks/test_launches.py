"""benchmarks/launches.py: kernels of a step, ours beside timm's."""

from typing import Any

import pytest
import torch

from tests.benchmarks.conftest import script

_W, _B = torch.zeros(2, 3), torch.zeros(3)


@pytest.mark.parametrize(
    ("name", "args", "count"),
    [
        ("add", (_W, _W), 1),
        ("_foreach_mul_", ([_W, _B], torch.ones(())), 1),
        ("_foreach_mul_", ([_W, _B], torch.ones((), dtype=torch.float64)), 2),
        ("_foreach_lerp_", ([_W, _B], [_W, _B], 0.1), 1),
        ("_foreach_lerp_", ([_W, _B], [_W, _B], [torch.ones(())] * 2), 2),
        ("_foreach_add_", ([_W], [torch.zeros(3, 2).T]), 1),
        ("_foreach_add_", ([_W, _B], [torch.zeros(3, 2).T, _B]), 2),
        ("_foreach_copy_", ([_W.bfloat16()], [_W]), 1),
    ],
)
def test_launches__one_for_many_tensors_by_the_conditions_of_torch(name: str, args: Any, count: int) -> None:
    assert script("launches").launches(name, args) == count


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adam", pytest.param("lamb", marks=pytest.mark.slow)])
def test_step_of_s16__starts_no_more_kernels_than_timms(optimizer: str) -> None:
    """In bf16. In float32 a block starts as many; beyond blocks, ours sums and guards what timm does not."""
    whole = script("launches").whole
    ours, timms = (whole(side, "S/16", "bf16", optimizer=optimizer) for side in ("ours", "timm"))
    assert sum(ours.values()) <= sum(timms.values())
    assert (ours["clip"], ours["average"]) == (13, 8) and ours["optimizer"] <= 24
    if optimizer == "lamb":
        return
    assert sum(ours.values()) == 609


@pytest.mark.slow
def test_step__in_float32_and_by_lanes() -> None:
    launches = script("launches")
    few, more = (launches.of("ours", "S/16", depth, "float32", optimizer="adam") for depth in (2, 3))
    theirs = [launches.of("timm", "S/16", depth, "float32", optimizer="adam") for depth in (2, 3)]
    blocks = [sum(b.totals().values()) - sum(a.totals().values()) for a, b in ((few, more), theirs)]
    assert blocks[0] == blocks[1]
    assert sum(few.totals().values()) - sum(theirs[0].totals().values()) <= 35
    lanes = launches.of("ours", "S/16", 2, "float32", optimizer="adam", lanes=True).totals()
    assert (lanes["clip"], lanes["average"]) == (13, 8)
