"""`vitctl recipes table`: the paper's tables on the screen."""

from pathlib import Path

from vitctl.cli.render import CONSOLE, show_table
from vitctl.errors import RecipeError
from vitctl.jobs.paper_table import SETTINGS, Machine, ResultRow, machine, result_rows, setting_rows
from vitctl.recipe.paper import RESULTS

TABLES = ("2", "3", "4", "5", "6", "7", "8", "4.6", "figures")
WIDE = 100


def show_paper_tables(number: str | None, targets: tuple[str, ...], runs: Path, device: str, mfu: float) -> None:
    """Print one table or all.

    Args:
        number: of a table, None for all.
        targets: columns; none: the first of each table.
        runs: folder of our runs.
        device, mfu: GPU that days are counted for, and the share of its peak that is reached.

    Raises:
        RecipeError: there is no such table, column or GPU.
    """
    gpu = machine(device, mfu)
    if number is not None and number not in TABLES:
        raise RecipeError(f"there is no table '{number}' here; there are {', '.join(TABLES)}")
    known = [column for n in ([number] if number else RESULTS) if n in RESULTS for column in RESULTS[n].columns]
    if wrong := [target for target in targets if target not in known]:
        raise RecipeError(f"--target {wrong[0]}: no such column; there are {', '.join(dict.fromkeys(known)) or 'none'}")
    for name in [number] if number else TABLES:
        if name in SETTINGS:
            _show_settings(name, gpu)
        else:
            _show_results(name, targets, runs, gpu)
    CONSOLE.print(
        f"GPU-days: days of one {gpu.device} at {mfu:.0%} of its bf16 peak. TPU-days: the paper's TPUv3-core-days. EFLOPs: 10^18 "
        f"operations of the pre-training. ours: finished runs of these recipes, unchanged, under {runs}/.",
        markup=False,
    )


def _show_settings(number: str, gpu: Machine) -> None:
    rows = setting_rows(number, gpu)
    cost = ("GPU-days",) if rows[0].cost else ()
    cells = [(r.recipe, *r.values, *((_short(r.cost.gpu_days),) if r.cost else ())) for r in rows]
    title = f"Table {number}: {'pre-training' if number == '3' else 'fine-tuning'}, as the recipes have it"
    show_table(("recipe", *SETTINGS[number], *cost), cells, title=title, left=("data", "decay", "rates"))
    CONSOLE.print()


def _show_results(number: str, targets: tuple[str, ...], runs: Path, gpu: Machine) -> None:
    table = RESULTS[number]
    shown = tuple(t for t in targets if t in table.columns) or table.columns[:1]
    rows = result_rows(number, shown, runs, gpu)
    has_exaflops = any(row.paper_exaflops for row in rows)
    has_days = any(row.paper_core_days for row in rows)
    header = (
        "recipe",
        *(name for target in shown for name in (target, "ours")),
        "steps",
        "EFLOPs",
        *(("paper",) if has_exaflops else ()),
        *(("TPU-days",) if has_days else ()),
        "GPU-days",
    )
    kind = "Figures" if number == "figures" else f"{'Section' if '.' in number else 'Table'} {number}:"
    title = f"{kind} {table.caption}; top-1 in percent"
    show_table(header, [_cells(row, has_exaflops, has_days) for row in rows], title=title)
    CONSOLE.print()


def _cells(row: ResultRow, has_exaflops: bool, has_days: bool) -> tuple[str, ...]:
    accuracies = [
        text
        for paper, ours in row.accuracies
        for text in (f"{paper:.2f}" if paper is not None else "-", f"{ours:.2f}" if ours is not None else "not run")
    ]
    steps = row.cost.steps
    costs = [f"{steps:,}" if CONSOLE.width >= WIDE else f"{steps / 1000:,.0f}k", _short(row.cost.exaflops)]
    costs += [_short(row.paper_exaflops)] if has_exaflops else []
    costs += [_short(row.paper_core_days)] if has_days else []
    return (row.recipe, *accuracies, *costs, _short(row.cost.gpu_days))


def _short(value: float | None) -> str:
    """Three digits, and no exponent."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
