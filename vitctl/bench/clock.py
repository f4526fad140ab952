"""Where the time of training steps goes: every moment of a step belongs to exactly one phase.

On a GPU the stamps are events in its stream, read after the last step: the split waits for nothing, and a
wait of the host shows only where the device had no work meanwhile.
"""

import time
from collections import defaultdict
from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from vitctl.data.loader.batches import Batch
from vitctl.engine.distributed.gradients import Backward, Gradients, Sums
from vitctl.engine.step import Update

DATA, FORWARD, BACKWARD, OPTIMIZER, LOG = "data", "forward", "backward", "optimizer", "log"
PHASES = (DATA, FORWARD, BACKWARD, OPTIMIZER, LOG)


@dataclass
class Clock:
    """Stamps between phases; the phases of a step add up to the time of the step."""

    device: torch.device
    _stamps: list[tuple[str, Any]] = field(default_factory=list)
    _steps: list[int] = field(default_factory=list)  # where each step begins among the stamps
    _computed: list[float] = field(default_factory=list)  # seconds of CPU of this process when it does

    def begin_step(self) -> None:
        """A step begins: the phase before it ends, and the wait for its images begins."""
        self._steps.append(len(self._stamps))
        self._computed.append(time.process_time())
        self.switch(DATA)

    def switch(self, phase: str) -> None:
        """From here on the time belongs to `phase`."""
        self._stamps.append((phase, self._now()))

    def restart(self) -> None:
        """Forget the steps so far."""
        self._stamps.clear()
        self._steps.clear()
        self._computed.clear()

    def cpu_seconds(self) -> float:
        """Of this process, over all steps that have ended."""
        return self._computed[-1] - self._computed[0]

    def steps(self) -> list[dict[str, float]]:
        """Seconds of each phase, for each step that has ended: those that another one follows."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        found = []
        for first, last in pairwise(self._steps):
            split: dict[str, float] = dict.fromkeys(PHASES, 0.0)
            for (phase, begin), (_, end) in pairwise(self._stamps[first : last + 1]):
                split[phase] += self._between(begin, end)
            found.append(split)
        return found

    def _now(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        make: Any = torch.cuda.Event
        event = make(enable_timing=True)
        event.record()
        return event

    def _between(self, begin: Any, end: Any) -> float:
        return float(begin.elapsed_time(end)) / 1e3 if self.device.type == "cuda" else float(end - begin)


def total(steps: list[dict[str, float]]) -> dict[str, float]:
    """Seconds of each phase over all steps."""
    sums: dict[str, float] = defaultdict(float)
    for step in steps:
        for phase, seconds in step.items():
            sums[phase] += seconds
    return dict(sums)


@dataclass
class TimedTrainer(Trainer):
    """A trainer whose own update stamps its phases.

    The update is the one of every run; only the clock is added.
    """

    clock: Clock = field(kw_only=True)

    @classmethod
    def of(cls, trainer: Trainer, clock: Clock) -> "TimedTrainer":
        """The same model, loss, gradients and optimizer, with a clock.

        Forward is the loss, with the copy of the images to the device and their normalisation; backward ends
        when the gradients of all micro-batches are added up, on all processes; the optimizer has clipping,
        the update and the average.
        """
        values = {own.name: getattr(trainer, own.name) for own in fields(trainer) if own.init}
        objective = values["objective"]

        def timed(model: nn.Module, batch: Batch, step: int) -> Tensor:
            clock.switch(FORWARD)
            loss: Tensor = objective(model, batch, step)
            clock.switch(BACKWARD)
            return loss

        return cls(
            **{**values, "objective": timed, "gradients": _TimedGradients(trainer.gradients, clock)},
            clock=clock,
        )

    def update(self, step: int, micro_batches: list[Batch]) -> Update:
        """See `Trainer`; what follows until the next step is its record."""
        result = super().update(step, micro_batches)
        self.clock.switch(LOG)
        return result


@dataclass(frozen=True)
class _TimedGradients:
    """`Gradients` after which the optimizer begins."""

    inner: Gradients
    clock: Clock

    @property
    def norm_dtype(self) -> torch.dtype | None:
        """See `Gradients`."""
        return self.inner.norm_dtype

    def __call__(self, backward: Backward, step: int, micro_batches: list[Batch], stopped: bool) -> Sums:
        """See `Gradients`."""
        sums = self.inner(backward, step, micro_batches, stopped)
        self.clock.switch(OPTIMIZER)
        return sums
