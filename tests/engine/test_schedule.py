"""Learning rates against closed forms and against the formulas of the authors' code, written out anew."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from vitctl.engine.schedule import checked_steps, learning_rate, lr_at, total_steps, warmup_of
from vitctl.errors import RecipeError
from vitctl.recipe.load import load_recipe
from vitctl.recipe.schema import Finetune
from vitctl.recipe.sections import Schedule


def authors(step: int, base: float, total: int, warmup: int, decay: str, end: float) -> float:
    progress = (step - warmup) / float(total - warmup)
    progress = min(max(progress, 0.0), 1.0)
    lr = base
    if decay == "linear":
        lr = end + (lr - end) * (1.0 - progress)
    elif decay == "cosine":
        lr = lr * 0.5 * (1.0 + math.cos(math.pi * progress))  # the authors' has no last rate
    if warmup:
        lr = lr * min(1.0, step / warmup)
    return lr


@given(
    st.integers(0, 999),
    st.integers(0, 900),
    st.floats(1e-5, 1.0),
    st.sampled_from(["linear", "cosine", "constant"]),
    st.sampled_from([0.0, 1e-5]),
)
def test_lr_at__equals_the_authors_formula(
    step: int, warmup: int, base: float, decay: str, end: float
) -> None:
    end = 0.0 if decay == "cosine" else end
    got = lr_at(step, base_lr=base, total=1000, warmup=warmup, decay=decay, end_lr=end)
    assert got == authors(step, base, 1000, warmup, decay, end)


@pytest.mark.parametrize(("warmup", "start", "end"), [(0, 0.0, 1e-6), (20, 0.0, 1e-6), (25, 1e-6, 1e-5)])
def test_lr_at__the_cosine_is_that_of_timm(warmup: int, start: float, end: float) -> None:
    """With --warmup-prefix --sched-on-updates; MAE's and BEiT's have the same floor, without a start rate."""
    from timm.scheduler import CosineLRScheduler

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2e-3)
    scheduler = CosineLRScheduler(
        optimizer, 100, end, warmup_t=warmup, warmup_lr_init=start, warmup_prefix=True
    )
    total = 100 + warmup
    for step in range(total):
        scheduler.step(step)
        got = lr_at(
            step, base_lr=2e-3, total=total, warmup=warmup, decay="cosine", end_lr=end, warmup_lr=start
        )
        assert got == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-12, abs=1e-18)


def test_lr_at__mae_warms_up_in_epochs() -> None:
    """MAE, util/lr_sched.py, for its 1,251 steps an epoch."""
    recipe = load_recipe("mae_b16").recipe
    assert isinstance(recipe, Finetune)
    images, batch = 1_281_167, 1024
    assert warmup_of(recipe.schedule, images) == 5 * images // batch == 6_255
    rate = learning_rate(recipe, 125_100, images)
    for step in (0, 1, 3_000, 6_254, 6_255, 60_000, 125_099):
        epoch = step / 1_251
        cosine = 1e-6 + (2e-3 - 1e-6) * 0.5 * (1 + math.cos(math.pi * (epoch - 5) / 95))
        assert rate(step) == pytest.approx(2e-3 * epoch / 5 if epoch < 5 else cosine, rel=1e-9)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"warmup_steps": 3, "warmup_epochs": 1.0},
            "warmup_steps = 3 and warmup_epochs = 1 both set the warm-up",
        ),
        ({"warmup_lr": 1e-6}, "warmup_lr = 1e-06 does nothing without a warm-up"),
    ],
)
def test_schedule__refuses_what_would_do_nothing(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        Schedule(batch_size=8, total_steps=10, **changes)


def test_checked_steps__names_the_key_of_the_warm_up() -> None:
    for changes, key in (
        ({"warmup_steps": 50}, "warmup_steps = 50"),
        ({"warmup_epochs": 5.0}, "warmup_epochs = 5.0"),
    ):
        with pytest.raises(RecipeError, match=f"end within schedule.{key}; lower it"):
            checked_steps(80, Schedule(batch_size=8, total_epochs=5.0, **changes), 1)


def test_lr_at__the_first_update_has_rate_0_and_the_warm_up_is_a_line() -> None:
    rates = [lr_at(s, base_lr=0.5, total=100, warmup=10, decay="linear") for s in range(11)]
    assert rates == pytest.approx([0.05 * s for s in range(11)], abs=1e-15)
    assert rates[0] == 0.0
    assert rates[10] == 0.5
    assert lr_at(0, base_lr=0.5, total=100, warmup=0, decay="linear") == 0.5


def test_lr_at__linear_ends_at_the_last_rate() -> None:
    """Table 3 at its real length: 10,000 steps up to 8e-4, then a line towards 1e-5."""
    total = 517_822
    at = {
        s: lr_at(s, base_lr=8e-4, total=total, warmup=10_000, decay="linear", end_lr=1e-5)
        for s in (10_000, total - 1, total)
    }
    assert at[10_000] == 8e-4
    assert at[total] == 1e-5
    assert at[total - 1] - at[total] == pytest.approx((8e-4 - 1e-5) / (total - 10_000), rel=1e-6)


@pytest.mark.parametrize(
    ("images", "batch", "epochs", "expected"),
    [
        (303_000_000, 4096, 7.0, 517_822),
        (303_000_000, 4096, 14.0, 1_035_644),
        (14_094_722, 4096, 90.0, 309_698),
        (1_281_167, 4096, 300.0, 93_835),
        (70, 16, 1.0, 4),
        (64, 16, 0.5, 2),
    ],
)
def test_total_steps__whole_batches_rounded_down(
    images: int, batch: int, epochs: float, expected: int
) -> None:
    assert total_steps(images, batch, steps=0, epochs=epochs) == expected


def test_total_steps__given_steps_win() -> None:
    assert total_steps(10**9, 1, steps=7, epochs=0.0) == 7


def test_lr_at__steps_falls_to_a_tenth_at_each_drop() -> None:
    """BiT's rule of 30, 60 and 90 % over a hundred steps, after its warm-up."""
    rates = [
        lr_at(s, base_lr=3.0, total=100, warmup=5, decay="steps", drops=(0.3, 0.6, 0.9)) for s in range(100)
    ]
    assert rates[:5] == pytest.approx([0.0, 0.6, 1.2, 1.8, 2.4])
    whole = [round(rate, 9) for rate in rates[5:]]
    assert whole == [3.0] * 25 + [0.3] * 30 + [0.03] * 30 + [0.003] * 10
