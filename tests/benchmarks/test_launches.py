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
@pytest.mark.parametrize("precision", ["bf16", "float32"])
@pytest.mark.parametrize(("optimizer", "spare"), [("adam", 0), ("lamb", 0), ("sgd", 2)])
def test_step_of_s16__starts_no_more_kernels_than_timms(optimizer: str, spare: int, precision: str) -> None:
    """Though ours sums and guards what timm does not; SGD of timm does so little that two are left over."""
    whole = script("launches").whole
    ours, timms = (whole(side, "S/16", precision, optimizer=optimizer) for side in ("ours", "timm"))
    assert sum(ours.values()) <= sum(timms.values()) + spare
    assert (ours["clip"], ours["average"]) == (11, 4) and ours["optimizer"] <= 24
    # Three gradients of a block are put together by one kernel; timm's are then copied into another order.
    assert ours["backward"] < timms["backward"]


@pytest.mark.slow
def test_step__by_lanes_clips_and_averages_as_without() -> None:
    lanes = script("launches").of("ours", "S/16", 2, "float32", optimizer="adam", lanes=True).totals()
    assert (lanes["clip"], lanes["average"]) == (11, 4)
