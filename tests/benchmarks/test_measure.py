"""benchmarks/measure.py: turns, ratios and goals of planted numbers, what is chosen, and fresh processes."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.conftest import script


@pytest.fixture
def measure() -> Any:
    return script("measure")


def planted(measure: Any, own: list[float], other: list[float], better: str, goal: float | None) -> Any:
    sides = [measure.Side("planted", [{"number": value} for value in values]) for values in (own, other)]
    return measure.Row("figure", "number", better, *sides, goal)


@pytest.mark.parametrize(
    ("better", "goal", "ratio", "low", "high", "reached"),
    [
        ("less", 1.4, 1.5, 1.2, 2.0, True),  # 3 / 2, 2.4 / 2, 8 / 4
        ("less", 1.6, 1.5, 1.2, 2.0, False),
        ("less", None, 1.5, 1.2, 2.0, None),
        ("more", 1.4, 1 / 1.5, 0.5, 1 / 1.2, False),
    ],
)
def test_row__ratio_is_taken_within_a_round(
    measure: Any, better: str, goal: float | None, ratio: float, low: float, high: float, reached: bool | None
) -> None:
    record = planted(measure, [2.0, 2.0, 4.0], [3.0, 2.4, 8.0], better, goal).record()
    assert record["ratio"] == pytest.approx({"median": ratio, "low": low, "high": high})
    assert record["reached"] is reached
    assert record["ours"]["median"] == {"number": 2.0} and record["theirs"]["median"] == {"number": 3.0}


def test_take_turns__each_round_begins_with_another_side(measure: Any) -> None:
    order: list[str] = []
    sides = {name: lambda name=name: order.append(name) or {"number": len(order)} for name in "abc"}
    found = measure.take_turns(sides, 3)
    assert "".join(order) == "abcbcacab"
    assert [numbers["number"] for numbers in found["a"]] == [1, 6, 8]


def test_report__has_both_sides_machine_and_limits(
    measure: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = planted(measure, [2.0], [3.0], "less", 1.4)
    path = measure.report(
        "planted", [row], measure.Machine(), {"bf16_tflops": 1.25}, ("numpy", "no-such"), tmp_path
    )
    found = json.loads(path.read_text())
    assert path == tmp_path / "planted.json"
    assert found["limits"] == {"bf16_tflops": 1.25}
    assert found["machine"]["versions"]["no-such"] == "not installed"
    assert found["machine"]["cores_busy_with_other_work"] >= 0
    assert [found["rows"][0][side]["rounds"] for side in ("ours", "theirs")] == [
        [{"number": 2.0}],
        [{"number": 3.0}],
    ]
    assert (
        "| figure, number | 2: planted | 3: planted | **1.50** (1.50 to 1.50) | 1.40 reached |"
        in capsys.readouterr().out
    )


SIDE = """
import os, sys
from measure import answer_turns, question

asked = question()
if asked["settings"].get("fails"):
    sys.exit(4)
turns = iter(asked["settings"]["seconds"])
answer_turns(lambda: print("noise of a library") or (lambda: {"cpu": next(turns), "pid": os.getpid()}))
"""


@pytest.fixture
def side(tmp_path: Path) -> str:
    path = tmp_path / "side.py"
    path.write_text(
        f"import sys\nsys.path.insert(0, {str(Path(script('measure').__file__).parent)!r})\n{SIDE}"
    )
    return str(path)


def test_compare__the_best_settings_and_the_default_ones_take_turns(measure: Any, side: str) -> None:
    choices = {
        "ours": {measure.DEFAULT: {"seconds": [4] * 5}, "quick": {"seconds": [9, 9, 2, 2, 2]}},
        "timm": {
            measure.DEFAULT: {"seconds": [3] * 5},
            "slow": {"seconds": [9] * 3},
            "fails": {"fails": True},
        },
    }
    found = measure.compare(side, {}, choices, "cpu", 2)
    assert found.best == {"ours": "quick", "timm": measure.DEFAULT}
    assert set(found.rounds) == {("ours", measure.DEFAULT), ("ours", "quick"), ("timm", measure.DEFAULT)}
    assert len({numbers["pid"] for rounds in found.rounds.values() for numbers in rounds}) == 3
    assert found.row("figure", "cpu", 1.4).ratio == 1.5
    assert found.row("figure", "cpu", None, best=False).ratio == 0.75
    assert "ended with code 4" in found.tried["timm"]["fails"]
    assert set(found.narrowed("ours", choices["ours"])) == {measure.DEFAULT, "quick"}
    assert set(found.narrowed("timm", choices["timm"])) == {measure.DEFAULT}


def test_compare__a_side_that_does_not_run_at_all_ends_it(measure: Any, side: str) -> None:
    with pytest.raises(measure.SideError, match="ended with code 4") as caught:
        measure.compare(side, {}, {"ours": {measure.DEFAULT: {"fails": True}}}, "cpu", 1)
    assert caught.value.code == 4


@pytest.mark.slow
def test_rates__are_of_what_was_computed(measure: Any, tmp_path: Path) -> None:
    calls: list[int] = []
    assert measure.rate(lambda: calls.append(1), 5.0, seconds=0.0) > 0 and len(calls) == 2
    rates = measure.matrix_rates("cpu", (8, 16, 32)) | measure.disk_rates(tmp_path, 2 * measure.MIB)
    assert {"bf16_tflops", "float32_tflops", "write_mb_per_second", "read_mb_per_second"} <= set(rates)
    assert all(value > 0 for value in rates.values())
    assert not list(tmp_path.iterdir())


PEAKS = """
from measure import MIB, peak_mib

before = peak_mib(reset=True)
held = bytearray(b"1") * (64 * MIB)
del held
peak = peak_mib()
print(before, peak, peak_mib(reset=True))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_peak_mib__counts_what_was_held_since_the_reset(measure: Any) -> None:
    folder = str(Path(measure.__file__).parent)
    done = subprocess.run(
        [sys.executable, "-c", PEAKS], capture_output=True, text=True, check=True, cwd=folder
    )
    before, peak, after = map(float, done.stdout.split())
    assert peak >= before + 63
    assert after < before + 32
