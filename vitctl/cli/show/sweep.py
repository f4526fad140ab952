"""The output of a sweep: its runs one after the other, its table, and the path of the plot."""

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import typer

from vitctl.cli.show.render import CONSOLE, Screen, show_table
from vitctl.engine.journal import Report
from vitctl.errors import RecipeError, VitctlError
from vitctl.jobs.plan import plan_training
from vitctl.launch.sweep import is_done, run_cells
from vitctl.recipe.load import load_recipe
from vitctl.recipe.schema import Finetune, Pretrain
from vitctl.recipe.sweep import Sweep, SweepCell
from vitctl.report.sweep_table import Outcome, draw_sweep, groups, shared_words
from vitctl.system.figures import NOT_INSTALLED, can_plot


def run_and_show(found: Sweep, cells: Sequence[SweepCell], folder: Path, metric: str) -> None:
    """Run the cells, print their table, draw their plot; ends with the command's exit code.

    Raises:
        VitctlError: runs failed, or none has the requested metric.
    """
    kept = sum(is_done(folder / cell.name) for cell in cells)
    before = f", {kept} of them finished before" if kept else ""
    CONSOLE.print(f"{len(cells)} runs in {folder}{before}", markup=False, soft_wrap=True)
    with ExitStack() as stack:

        def report(cell: SweepCell, number: int) -> Report:
            stack.close()
            CONSOLE.print(f"\nrun {number + 1} of {len(cells)}: {cell.name}", markup=False)
            return stack.enter_context(Screen(folder / cell.name)).report

        outcomes = run_cells(cells, folder, metric, report)
    show_outcomes(outcomes, metric)
    _draw(found, outcomes, folder, metric)
    CONSOLE.print(f"table: {folder / 'sweep.csv'}", markup=False, soft_wrap=True)
    failed = [one for one in outcomes if one.error]
    if failed:
        raise VitctlError(f"{len(failed)} of {len(cells)} runs failed; {failed[0].run}: {failed[0].error}")
    if any(one.status != "done" for one in outcomes):
        print(f"stopped and saved; resume with the same command and --out {folder}", file=sys.stderr)
        raise typer.Exit(3)


def show_outcomes(outcomes: Sequence[Outcome], metric: str) -> None:
    """A line for each run: its varied values, the metric, the last loss, the time."""
    names = shared_words([one.run for one in outcomes])
    rows = [
        (
            name,
            one.status,
            _number(one.value),
            _plain(one.loss),
            f"{one.seconds:,.0f} s" if one.seconds else "-",
        )
        for name, one in zip(names, outcomes, strict=True)
    ]
    show_table(("run", "status", metric, "loss", "training"), rows, left=("status",))
    seeds = groups(outcomes)
    if any(len(group.values) > 1 for group in seeds):
        words = shared_words([group.name for group in seeds])
        means = [
            (word, _number(group.mean), _number(group.std), str(len(group.values)))
            for word, group in zip(words, seeds, strict=True)
        ]
        CONSOLE.print()
        show_table(("over seeds", "mean", "std", "runs"), means)


def show_costs(cells: Sequence[SweepCell]) -> None:
    """The cost of each run, from its recipe alone."""
    rows = []
    for cell, name in zip(cells, shared_words([cell.name for cell in cells]), strict=True):
        recipe = load_recipe(cell.recipe, cell.overrides).recipe
        if not isinstance(recipe, Pretrain | Finetune):
            raise RecipeError(
                f"--dry-run plans training runs only; '{cell.recipe}' is for `vitctl {recipe.job}`"
            )
        plan = plan_training(recipe)
        macs, flops = plan.macs_per_image / 1e9, plan.training_flops / 1e18
        rows.append(
            (name, f"{plan.parameters / 1e6:,.1f}M", f"{macs:,.4g}", f"{plan.steps:,}", f"{flops:,.4g}")
        )
    show_table(("run", "parameters", "GMACs", "steps", "EFLOPs"), rows)


def _draw(found: Sweep, outcomes: Sequence[Outcome], folder: Path, metric: str) -> None:
    finished = groups(outcomes)
    if not finished:
        known = list(dict.fromkeys(name for one in outcomes for name in one.numbers))
        if known:
            raise VitctlError(f"--metric {metric}: no run has this metric; they have {', '.join(known)}")
    elif can_plot():
        CONSOLE.print(
            f"plot: {draw_sweep(finished, metric, found.note or found.name, folder)}",
            markup=False,
            soft_wrap=True,
        )
    else:
        CONSOLE.print(f"no plot: {NOT_INSTALLED}", markup=False)


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2%}" if 0 <= value <= 1 else f"{value:,.4g}"


def _plain(value: float | None) -> str:
    return f"{value:.4g}" if value is not None else "-"
