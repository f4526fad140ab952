"""Download weights from an address with a progress bar; the job then reads them from the cache."""

from functools import partial

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from vitctl.cli.show.console import PlainConsole
from vitctl.cli.show.render import CONSOLE
from vitctl.models.weights.download import fetch
from vitctl.models.weights.sources import locate


def fetch_weights(source: str, *, on_stderr: bool = False) -> None:
    """Download `source` (https://, hf://, gs://) into the cache, resuming an interrupted download.

    Args:
        source: the address.
        on_stderr: show progress and path there, where standard output is for results.

    Raises:
        CheckpointError: as `fetch` raises.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    console = PlainConsole(stderr=True, highlight=False) if on_stderr else CONSOLE
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task(source, total=None)

        def show(done: int, total: int | None) -> None:
            progress.update(bar, completed=done, total=total)

        path = locate(source, partial(fetch, progress=show))
    console.print(f"{source}: {path}", markup=False, soft_wrap=True)
