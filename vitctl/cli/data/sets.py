"""`vitctl data list | prepare | export-vtab1k`, and `data check` of a known data set."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from vitctl.cli import completion
from vitctl.system.screen import ignore_output_errors

if TYPE_CHECKING:
    from vitctl.data.datasets.inventory import TaskCheck
    from vitctl.data.datasets.vtab import VtabTask

Root = Annotated[Path, typer.Option("--root", help="Folder of known data sets, one folder each.")]
VTAB, REAL = "vtab", "imagenet_real"
DATA = Path("data")


def list_sets(
    root: Root = DATA,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON list instead of a table.")] = False,
) -> None:
    """List every known data set: use, classes, sizes, and whether it is here.

    For example: vitctl data list --root data
    """
    import json
    from dataclasses import asdict

    from vitctl.cli.show.render import show_table
    from vitctl.data.datasets.inventory import list_inventory

    held = list_inventory(root)
    if as_json:
        typer.echo(json.dumps([asdict(holding) for holding in held], indent=1))
        return
    splits = ("train", "validation", "test")
    rows = [
        (
            h.name,
            ", ".join(h.uses),
            f"{h.num_classes:,}",
            *(f"{h.sizes[s]:,}" if s in h.sizes else "" for s in splits),
            h.state,
        )
        for h in held
    ]
    show_table(
        ("name", "used for", "classes", "train", "val", "test", "here"), rows, left=("used for", "here")
    )


def prepare(
    name: Annotated[
        str,
        typer.Argument(
            help="A known data set; vtab: all of its data sets whose files are here; imagenet_real.",
            autocompletion=completion.data_sets,
        ),
    ],
    root: Root = DATA,
    from_: Annotated[
        Path | None,
        typer.Option(
            "--from", help="Original files, a community VTAB-1k folder, or Hugging Face's parquet files."
        ),
    ] = None,
    no_download: Annotated[bool, typer.Option("--no-download", help="Download nothing.")] = False,
    workers: Annotated[
        int,
        typer.Option("--workers", help="Processes that write; 0: this one; default: one per core.", min=-1),
    ] = -1,
    allow_partial: Annotated[
        bool,
        typer.Option("--allow-partial", help="Accept splits that lack images; every result then says so."),
    ] = False,
) -> None:
    """Download a known data set where that is allowed, and write its shards.

    For example: vitctl data prepare pets
    """
    from vitctl.cli.show.render import CONSOLE
    from vitctl.errors import writing
    from vitctl.jobs.prepare import prepare_data_set as make
    from vitctl.jobs.prepare import prepare_real
    from vitctl.system.pool import default_workers

    ignore_output_errors()
    workers = default_workers() if workers < 0 else workers
    with writing(root), _bars() as progress:
        if name == REAL:
            CONSOLE.print(f"ready: {prepare_real(root, progress)}", markup=False, soft_wrap=True)
            return
        if name == VTAB:
            _prepare_vtab(root, from_, workers, progress)
            return
        sizes = make(
            name, root, source=from_, download=not no_download, allow_partial=allow_partial, progress=progress
        )
    _say_ready(name, sizes)


def _prepare_vtab(
    root: Path, source: Path | None, workers: int, progress: Callable[[str, int, int], None]
) -> None:
    """Prepare all tasks whose files are there; print the names of the others."""
    from vitctl.cli.show.render import CONSOLE
    from vitctl.data.datasets.vtab import VTAB as TASKS
    from vitctl.errors import DataError
    from vitctl.jobs.prepare import is_present, prepare_data_set

    missing = []
    for task in TASKS:
        if is_present(task, root, source):
            sizes = prepare_data_set(
                task.data_set, root, source=source, download=False, workers=workers, progress=progress
            )
            _say_ready(task.name, sizes)
        else:
            missing.append(task.name)
    if missing:
        place = source or root / "originals"
        summary = f"{len(missing)} of {len(TASKS)} tasks are not in {place}: {', '.join(missing)}"
        CONSOLE.print(f"{summary}; each: vitctl data prepare NAME", markup=False, soft_wrap=True)
    if len(missing) == len(TASKS):
        raise DataError(f"nothing of VTAB is in {source or root / 'originals'}; see `vitctl data list`")


def _say_ready(name: str, sizes: dict[str, int]) -> None:
    from vitctl.cli.show.render import CONSOLE

    summary = ", ".join(f"{size:,} {split}" for split, size in sizes.items())
    CONSOLE.print(f"ready: {name}, {summary}", markup=False, soft_wrap=True)


def export_vtab1k(
    out: Annotated[
        Path, typer.Argument(help="Folder for the output: one folder for each task whose data set is here.")
    ],
    root: Root = DATA,
    form: Annotated[
        Literal["files", "shards"],
        typer.Option("--form", help="files: the community's layout; shards: for `vtab --data`."),
    ] = "files",
    task: Annotated[
        list[str] | None,
        typer.Option("--task", help="Only this task. Repeatable.", autocompletion=completion.tasks),
    ] = None,
) -> None:
    """Copy VTAB-1k, lossless, in the layout that other programs read.

    For example: vitctl data export-vtab1k vtab-1k
    """
    from vitctl.cli.show.render import CONSOLE
    from vitctl.data.datasets.inventory import ABSENT, list_inventory
    from vitctl.data.datasets.vtab import VTAB as TASKS
    from vitctl.data.datasets.vtab_images import export_shards, export_task
    from vitctl.errors import DataError, writing

    ignore_output_errors()
    unknown = sorted(set(task or ()) - {row.name for row in TASKS})
    if unknown:
        raise DataError(
            f"--task {unknown[0]}: not a task of VTAB; known: {', '.join(row.name for row in TASKS)}"
        )
    here = {holding.name for holding in list_inventory(root) if holding.state != ABSENT}
    chosen = [row for row in TASKS if row.name in (task or here)]
    if not chosen:
        raise DataError(
            f"{root}: holds none of VTAB's data sets; make them with `vitctl data prepare NAME --root {root}`"
        )
    export = export_task if form == "files" else export_shards
    out.mkdir(parents=True, exist_ok=True)
    with writing(out), _bars() as progress:
        for row in chosen:
            folder = export(row, root, out, partial(progress, f"copying {row.name}"))
            CONSOLE.print(f"{row.name}: {folder}", markup=False, soft_wrap=True)


def check_known(name: str, root: Path) -> Path:
    """Check a known set's split against the published digests, or all of VTAB; returns the folder of a set to
    check further.

    Raises:
        DataError: there is no such folder and no such data set, or images are not the benchmark's.
    """
    from vitctl.data.datasets.catalog import find_data_set
    from vitctl.data.datasets.vtab import VTAB as TASKS
    from vitctl.errors import DataError

    if "/" in name:
        raise DataError(
            f"{name}: no such folder; should be a folder of shards, or a known data set, see `vitctl "
            f"data list`"
        )
    if name == VTAB:
        _check_tasks(TASKS, root)
        raise typer.Exit
    try:
        row = find_data_set(name)
    except DataError as error:
        raise DataError(f"{name}: no such folder; {error}") from None
    tasks = [task for task in TASKS if task.data_set == row.name]
    if tasks:
        _check_tasks(tasks, root)
    return root / row.name


def _check_tasks(tasks: "Iterable[VtabTask]", root: Path) -> None:
    from vitctl.cli.show.render import show_table
    from vitctl.data.datasets.inventory import check_task
    from vitctl.errors import DataError

    with _bars() as progress:
        found = [check_task(task, root, partial(progress, f"checking {task.name}")) for task in tasks]
    rows = [(row.task, str(row.num_classes), *_cells(row), row.verdict) for row in found]
    header = ("task", "classes", "train800", "val200", "test", "verdict")
    show_table(header, rows, left=header[2:])
    wrong = [row.task for row in found if row.is_wrong]
    if wrong:
        raise DataError(
            f"{root}: not the benchmark's images: {', '.join(wrong)}; make them again from the original files"
        )


def _cells(row: "TaskCheck") -> tuple[str, ...]:
    """Number and digest of the images of each of the three splits."""
    if not row.sizes:
        return ("", "", "")
    return tuple(f"{size:,} {digest}" for size, digest in zip(row.sizes, row.digests, strict=True))


@contextmanager
def _bars() -> Iterator[Callable[[str, int, int], None]]:
    """A progress bar on a terminal; elsewhere a line for each new step."""
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    from vitctl.cli.show.render import CONSOLE

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=CONSOLE, transient=True, disable=not CONSOLE.is_terminal) as progress:
        bar, shown = progress.add_task("", total=None), ""

        def show(what: str, done: int, total: int) -> None:
            nonlocal shown
            if what != shown and not CONSOLE.is_terminal and not what.startswith("checking"):
                CONSOLE.print(what, markup=False, soft_wrap=True)
            shown = what
            progress.update(bar, description=what, completed=done, total=total or None)

        yield show
