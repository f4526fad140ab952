from collections.abc import Callable

import pytest
import torch

from vitctl.models.kernels import fastest as module
from vitctl.models.kernels.fastest import fastest

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ({"first": [9, 1.0, 1.2, 1.1, 3.0, 3.0], "second": [9, 0.9, 5.0, 0.8, 3.0, 3.0]}, "second"),
        (
            {"first": [9, 1.0, 1.2, 1.1, 3.0, 3.0], "second": [0, 0.95, 0.95, 0.95, 3.0, 3.0]},
            "first",
        ),  # not clearly faster
        (
            {"first": [9, 2.0, 2.0, 1.0, 3.0, 3.0], "second": [9, 1.5, 1.5, 1.5, 3.0, 3.0]},
            "first",
        ),  # the least time counts
        (
            {
                "first": [9, 2.0, 2.0, 2.0, 3.0, 3.0],
                "second": [9, 1.5, 1.5, 1.5, 3.0, 3.0],
                "third": [9, 1.6, 1.2, 1.4, 3.0, 3.0],
            },
            "third",
        ),
    ],
)
def test_fastest__the_least_time_after_the_first_round(
    monkeypatch: pytest.MonkeyPatch, seconds: dict[str, list[float]], expected: str
) -> None:
    turns: list[str] = []

    def measured(way: Callable[[], object], device: torch.device) -> float:
        assert device == CPU
        name = str(way())
        turns.append(name)
        return seconds[name][turns.count(name) - 1]

    monkeypatch.setattr(module, "_seconds", measured)
    assert fastest({name: (lambda name=name: name) for name in seconds}, CPU) == expected
    assert turns == [*seconds] * 6  # in turns


def test_fastest__a_way_that_fails_is_left_out_but_not_the_first() -> None:
    def fails() -> None:
        raise RuntimeError("not on this CPU")

    assert fastest({"first": lambda: sum(range(10_000)), "second": fails}, CPU) == "first"
    with pytest.raises(RuntimeError, match="not on this CPU"):
        fastest({"first": fails, "second": lambda: None}, CPU)
