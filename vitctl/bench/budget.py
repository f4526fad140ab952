"""The time that a measurement may take: so many seconds, or until Ctrl-C.

What was measured until then is kept.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from vitctl.engine.preemption import StopFlag

Say = Callable[[str], None]  # what is measured now, for the screen


def unheard(_text: str) -> None:
    """A `Say` that shows nothing."""


@dataclass
class Budget:
    """Seconds for all measurements together.

    Args:
        seconds: bound of the whole; each part says what share of them it takes.
        stop: set by signals.
        say: told what is measured now.
    """

    seconds: float
    stop: StopFlag = field(default_factory=StopFlag)
    say: Say = unheard
    began: float = field(default_factory=time.monotonic)

    @property
    def left(self) -> float:
        """Seconds left, 0 after a signal."""
        return 0.0 if self.stop.raised else max(0.0, self.began + self.seconds - time.monotonic())

    def part(self, share: float) -> "Budget":
        """A budget for a part: a share of the whole, and no more than what is left; it starts now."""
        return Budget(min(share * self.seconds, self.left), self.stop, self.say)

    def restarted(self) -> "Budget":
        """The whole budget from now on: what came before, such as building the network, is not counted."""
        return Budget(self.seconds, self.stop, self.say)
