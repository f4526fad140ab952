"""What `vitctl verify` says of one thing."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

# Called after each step that is replayed, with the first and the last of its range and the step.
Progress = Callable[[int, int, int], None]
REST = "the rest"  # what a line is about that names what nothing is compared with
# "not checked" was not asked for, or is of no consequence; "not proven" was asked for, or is missing, and
# could not be compared.
State = Literal["ok", "differs", "not proven", "not checked"]
FAILS = ("differs", "not proven")


@dataclass(frozen=True)
class Finding:
    """One line: what was looked at, whether it is as recorded, and what was compared."""

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
    """It could not be compared, and why."""
    return Finding(what, "not proven", text)


def unchecked(what: str, text: str) -> Finding:
    """It was not compared, and why."""
    return Finding(what, "not checked", text)


def no_progress(first: int, last: int, step: int) -> None:
    """Show nothing."""
