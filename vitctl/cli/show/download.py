"""Download weights from an address with a progress bar; the job then reads them from the cache."""

from functools import partial

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from vitctl.cli.show.render import CONSOLE
from vitctl.models.weights.download import fetch
from vitctl.models.weights.sources import locate


def fetch_weights(source: str) -> None:
    """Download `source` (https://, hf://, gs://) into the cache, resuming an interrupted download.

    Raises:
        CheckpointError: as `fetch` raises.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=CONSOLE, transient=True, disable=not CONSOLE.is_terminal) as progress:
        bar = progress.add_task(source, total=None)

        def show(done: int, total: int | None) -> None:
            progress.update(bar, completed=done, total=total)

        path = locate(source, partial(fetch, progress=show))
    CONSOLE.print(f"{source}: {path}", markup=False, soft_wrap=True)
