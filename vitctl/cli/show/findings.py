"""The screen of `vitctl verify`: a line for each finding, and on a terminal the progress of a replay."""

import time
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from vitctl.cli.show.console import CONSOLE
from vitctl.cli.show.render import clock
from vitctl.verify.finding import FAILS, Finding

_LABEL = 12


class FindingsScreen:
    """Prints findings; wrapped beside their label on a terminal, one line each elsewhere."""

    def __init__(self, console: Console = CONSOLE) -> None:
        self.console = console
        self.status, self.steps, self.began = "verifying ...", (0, 0), 0.0
        self.live: Live | None = None
        if console.is_terminal:
            self.live = Live(get_renderable=self.view, console=console, refresh_per_second=2, transient=True)

    def __enter__(self) -> "FindingsScreen":
        if self.live is not None:
            self.live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.live is not None:
            self.live.stop()

    def view(self) -> Text:
        """The line below the findings."""
        return Text(self.status, no_wrap=True, overflow="ellipsis")

    def replaying(self, first: int, last: int, step: int) -> None:
        """Show the progress of a replay of the steps from first to last."""
        now = time.monotonic()
        if self.steps != (first, last):
            self.steps, self.began = (first, last), now
        done = step - first  # steps since the first one, which began before the clock
        left = f", left {clock((last - step) * (now - self.began) / done)}" if done else ""
        self.status = f"replaying: step {step - first + 1:,} of {last - first + 1:,}{left}"

    def show(self, found: Finding, inside: str) -> None:
        """Print a finding.

        Args:
            found: the finding.
            inside: the training inside the run that it is about; "" for the run.
        """
        label = found.state.upper() if found.state in FAILS else found.state
        text = f"{inside}: " * bool(inside) + f"{found.what}: {found.text}"
        self.status = "verifying ..."
        if self.live is None:
            self.console.print(f"{label:<{_LABEL}}{text}", markup=False, highlight=False, soft_wrap=True)
            return
        row = Table.grid(padding=0)
        row.add_column(width=_LABEL, no_wrap=True)
        row.add_column(overflow="fold")
        row.add_row(Text(label), Text(text))
        self.console.print(row)
