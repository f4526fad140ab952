"""What the drivers share with the tests of data."""

import pytest

from tests.data.conftest import make_split, tiny_png
from tests.fuzz.mutate import TALLY

__all__ = ["make_split", "tiny_png"]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How many inputs were made, and what came of them; of several processes (-n) nothing is known here."""
    for what, number in sorted(TALLY.items()):
        terminalreporter.write_line(f"{number:7,} {what}")
    if TALLY:
        terminalreporter.write_line(f"{TALLY.total():7,} fuzzed inputs")
