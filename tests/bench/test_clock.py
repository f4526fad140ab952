"""The clock, with planted times."""

import pytest
import torch

from vitctl.bench import clock as module
from vitctl.bench.clock import BACKWARD, DATA, FORWARD, LOG, OPTIMIZER, Clock, total


def test_steps__every_moment_belongs_to_one_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps, the second with two micro-batches; the third has begun and not ended."""
    clock = Clock(torch.device("cpu"))
    now = iter([0.0, 1.0, 3.0, 6.0, 10.0, 15.0, 16.0, 18.0, 19.0, 21.0, 24.0, 25.0, 31.0, 31.5])
    monkeypatch.setattr(module.time, "perf_counter", lambda: next(now))
    clock.begin_step()
    for phase in (FORWARD, BACKWARD, OPTIMIZER, LOG):
        clock.switch(phase)
    clock.begin_step()
    for phase in (FORWARD, BACKWARD, FORWARD, BACKWARD, OPTIMIZER, LOG):
        clock.switch(phase)
    clock.begin_step()
    first = {DATA: 1.0, FORWARD: 2.0, BACKWARD: 3.0, OPTIMIZER: 4.0, LOG: 5.0}
    second = {DATA: 1.0, FORWARD: 2.0 + 2.0, BACKWARD: 1.0 + 3.0, OPTIMIZER: 1.0, LOG: 6.0}
    assert clock.steps() == [first, second]
    assert sum(map(sum, (one.values() for one in clock.steps()))) == 31.0
    assert total(clock.steps()) == {name: first[name] + second[name] for name in first}
    clock.restart()
    assert clock.steps() == []
