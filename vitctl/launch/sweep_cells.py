"""A sweep on this machine: a folder for each run, one run after the other, and a table of the results."""

from collections.abc import Callable, Sequence
from pathlib import Path

from vitctl.data.datasets.catalog import find_data_set, open_split
from vitctl.data.shards.index import find_splits
from vitctl.engine.journal import Report
from vitctl.errors import VitctlError
from vitctl.jobs.record.result import read_result
from vitctl.launch.cluster import Resources
from vitctl.launch.prepare_run import prepare_run
from vitctl.launch.run_folder import leaving_nothing
from vitctl.launch.worker import launch
from vitctl.recipe.load import Loaded, Override, load_recipe, with_overrides
from vitctl.recipe.sweep import SweepCell
from vitctl.report.sweep_table import Outcome, outcome, write_sweep_table

DATA = "data"


def prepare_cells(
    cells: Sequence[SweepCell],
    out: Path,
    batch: Resources | None = None,
    settled: Callable[[Loaded], Loaded] = lambda loaded: loaded,
) -> None:
    """Check every run before the first one starts, and write the recipes of their folders, for `batch`
    to start; `settled` fits a recipe to its data.

    Raises VitctlError with every problem and its runs in one line; nothing was written.
    """
    problems: dict[str, list[str]] = {}
    with leaving_nothing(out):
        for cell in cells:
            try:
                prepare_run(settled(_load(cell, out)), out / cell.name, batch=batch)
            except VitctlError as error:
                problems.setdefault(str(error), []).append(cell.name)
        if problems:
            raise VitctlError(
                "\n".join(_problem(text, names, len(cells)) for text, names in problems.items())
            )


def run_cells(
    cells: Sequence[SweepCell], out: Path, metric: str, report: Callable[[SweepCell, int], Report]
) -> list[Outcome]:
    """Run or resume what is not finished, and write the table after each run.

    A failed run does not stop the others; after a signal the rest is not run.

    Args:
        metric: dotted name of the number that is compared, e.g. "accuracy".
        report: called with a run and its number; returns the function that gets each of its log records.
    """
    errors: dict[str, str] = {}
    for number, cell in enumerate(cells):
        folder = out / cell.name
        if is_done(folder):
            continue
        try:
            result = launch(folder, report(cell, number))
        except VitctlError as error:
            errors[cell.name] = str(error)
            continue
        if result["status"] == "stopped":
            break
        write_sweep_table(out, outcomes(cells, out, metric, errors))
    rows = outcomes(cells, out, metric, errors)
    write_sweep_table(out, rows)
    return rows


def _load(cell: SweepCell, out: Path) -> Loaded:
    """Return the recipe of a cell. Data sets that vitctl generates are generated once, for all runs."""
    loaded = load_recipe(cell.recipe, cell.overrides)
    place = getattr(loaded.recipe, "data", None)
    if getattr(place, "path", "") or getattr(place, "synthetic", 0) or not getattr(place, "dataset", ""):
        return loaded
    assert place is not None
    row = find_data_set(place.dataset)
    if row.make is None or find_splits(Path(place.root) / row.name):
        return loaded
    open_split(place.eval_split or "test", dataset=row.name, root=place.root, scratch=out / DATA)
    return with_overrides(loaded, [Override("data.root", str(out / DATA), "sweep")])


def _problem(text: str, names: Sequence[str], num_cells: int) -> str:
    if len(names) == num_cells:
        return text
    return f"{names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}: {text}"


def is_done(folder: Path) -> bool:
    result = read_result(folder)
    return result is not None and result.status == "done"


def outcomes(cells: Sequence[SweepCell], out: Path, metric: str, errors: dict[str, str]) -> list[Outcome]:
    return [
        outcome(out / cell.name, cell.recipe, cell.varied, metric, errors.get(cell.name, ""))
        for cell in cells
    ]
