"""What other programs compute while something is measured."""

import pytest

from vitctl.bench import machine
from vitctl.bench.machine import OtherWork


@pytest.mark.parametrize(("others", "said"), [(0.0, 0), (0.2, 0), (1.5, 1)])
def test_other_work__planted_seconds(monkeypatch: pytest.MonkeyPatch, others: float, said: int) -> None:
    """10 seconds in which this process computed 12 and others as many cores as planted."""
    clock, own, every = iter([0.0, 10.0]), iter([5.0, 17.0]), iter([100.0, 112.0 + 10 * others])
    monkeypatch.setattr(machine.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(machine, "cpu_seconds", lambda: next(own))
    monkeypatch.setattr(machine, "_all_seconds", lambda: next(every))
    notes = OtherWork().notes()
    assert len(notes) == said
    assert all(note.startswith("other programs kept 1.5 of ") for note in notes)
