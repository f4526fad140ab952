"""Learning rates against closed forms and against the formulas of the authors' code, written out anew."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitctl.engine.schedule import lr_at, total_steps


def authors(step: int, base: float, total: int, warmup: int, decay: str, end: float) -> float:
    progress = (step - warmup) / float(total - warmup)
    progress = min(max(progress, 0.0), 1.0)
    lr = base
    if decay == "linear":
        lr = end + (lr - end) * (1.0 - progress)
    elif decay == "cosine":
        lr = lr * 0.5 * (1.0 + math.cos(math.pi * progress))
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
    got = lr_at(step, base_lr=base, total=1000, warmup=warmup, decay=decay, end_lr=end)
    assert got == authors(step, base, 1000, warmup, decay, end)


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
