"""One line of `vitctl verify`: what was checked, the verdict, and what was compared."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

# Called after each replayed step, with the first and the last step of its range and the step.
Progress = Callable[[int, int, int], None]
# "not checked" was not asked for, or has no consequence; "not proven" was asked for, or is missing, and could
# not be compared.
State = Literal["ok", "differs", "not proven", "not checked"]
FAILS = ("differs", "not proven")


@dataclass(frozen=True)
class Finding:
    """The verdict on one thing, and what was compared."""

    what: str
    state: State
    text: str


def ok(what: str, text: str) -> Finding:
    """It is as recorded."""
    return Finding(what, "ok", text)


def differs(what: str, text: str) -> Finding:
    """It is not as recorded."""
    return Finding(what, "differs", text)


def unproven(what: str, text: str) -> Finding:
    """It could not be compared; the text says why."""
    return Finding(what, "not proven", text)


def unchecked(what: str, text: str) -> Finding:
    """It was not compared; the text says why."""
    return Finding(what, "not checked", text)


def no_progress(first: int, last: int, step: int) -> None:
    """Show nothing."""
