"""One line of `vitctl verify`: what was checked, the verdict, and what was compared."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

# Called after each replayed step, with the first and the last step of its range and the step.
Progress = Callable[[int, int, int], None]
# "not checked" was not asked for, or has no consequence; "not proven" was asked for, or is missing, and could
# not be compared.
State = Literal["ok", "differs", "not proven", "not checked"]
FAILS = ("differs", "not proven")


@dataclass(frozen=True)
class Finding:
    """The verdict on `what`; `text` says what was compared, or why it could not be."""

    state: State
    what: str
    text: str


ok = partial(Finding, "ok")
differs = partial(Finding, "differs")
unproven = partial(Finding, "not proven")
unchecked = partial(Finding, "not checked")
