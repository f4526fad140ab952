"""`vitctl recipes table`: the paper's tables on the screen, and four of its figures as plots."""

from pathlib import Path

from vitctl.cli.show.console import CONSOLE, say, show_table
from vitctl.errors import RecipeError, refuse
from vitctl.recipe.paper import OTHERS_SOURCES, RESULTS, VTAB_MODELS
from vitctl.report.our_results import OurResults, our_results
from vitctl.report.paper_plot import PLOTS
from vitctl.report.paper_table import (
    SETTINGS,
    Accuracy,
    Gpu,
    cost_text,
    find_gpu,
    result_rows,
    setting_rows,
    task_rows,
)
from vitctl.system.figures import NOT_INSTALLED, can_plot

TABLES = (*"123456789", "fig2", "fig3", "fig4", "fig5", "fig13", "4.6", "figures")
OF_TASKS = {
    "9": "Table 9: VTAB-1k by task",
    "fig2": "Figure 2: VTAB-1k by group, means of Table 9's tasks",
}
WIDE = 100
_SETTINGS_TITLES = {
    "1": "Table 1: the models, with exact parameters for 1,000 classes at 224 pixels",
    "3": "Table 3: pre-training, as the recipes have it",
    "4": "Table 4: fine-tuning, as the recipes have it",
}


def show_paper_tables(
    number: str | None, targets: tuple[str, ...], runs: Path, device: str, mfu: float, plot: Path | None
) -> None:
    """Print one table or all.

    Args:
        targets: columns; empty: each table's default columns.
        device, mfu: GPU of the GPU-days, and the share of its peak that training reaches.
        plot: .png for a figure; None: no plot.

    Raises RecipeError if there is no such table, column, GPU or plot.
    """
    gpu = find_gpu(device, mfu)
    if number is not None and number not in TABLES:
        raise RecipeError(f"no table is called '{number}'", fix=f"choose one of {', '.join(TABLES)}")
    numbers = [number] if number else list(TABLES)
    known = dict.fromkeys(column for n in numbers if n in RESULTS for column in RESULTS[n].columns)
    if wrong := [target for target in targets if target not in known]:
        raise RecipeError(f"--target {wrong[0]}", f"no such column; known: {', '.join(known) or 'none'}")
    if plot is not None:
        only = f"only {', '.join(PLOTS)} can be plotted, e.g. `vitctl recipes table fig5 --plot {plot}`"
        refuse(
            RecipeError,
            (number not in PLOTS, f"--plot {plot}", only),
            (plot.suffix.lower() != ".png", f"--plot {plot}", "should be the name of a .png file"),
            (not plot.absolute().parent.is_dir(), f"--plot {plot}", f"there is no folder {plot.parent}"),
            (not can_plot(), "--plot", NOT_INSTALLED),
        )
    ours, shown = our_results(runs), set[str]()
    for name in numbers:
        if name in SETTINGS:
            left = ("data", "decay", "rates")
            show_table(SETTINGS[name], setting_rows(name, gpu), title=_SETTINGS_TITLES[name], left=left)
            shown |= {*SETTINGS[name]}
        elif name in OF_TASKS:
            _show_tasks(name, ours)
        else:
            shown |= {*_show_results(name, targets, ours, gpu)}
        CONSOLE.print()
    legend = {
        "GPU-days": f"days of one {gpu.device} at {mfu:.0%} of its bf16 peak.",
        "TPU-days": "the paper's TPUv3-core-days.",
        "EFLOPs": "10^18 operations of the pre-training.",
    }
    if of_columns := [f"{name}: {text}" for name, text in legend.items() if name in shown]:
        say(" ".join(of_columns))
    if number not in SETTINGS:
        say(
            f"ours: finished runs of these recipes, unchanged and on all of their images, under {runs}/; ± "
            f"is the deviation over seeds, ours of the population; the paper does not say which."
        )
        for run in ours.left_out:
            say(f"left out: {run.run} ({run.recipe}): {run.reason}")
    if plot is not None and number is not None:
        say(f"plot: {PLOTS[number](ours, plot)}")


def _show_tasks(number: str, ours: OurResults) -> None:
    rows = task_rows(number, ours)
    columns = (name for column in VTAB_MODELS for name in (column, "ours"))
    cells = [(row.name, *(text for one in row.accuracies for text in _pair(one, 1))) for row in rows]
    title = f"{OF_TASKS[number]}; top-1 in percent"
    show_table(("task" if number == "9" else "group", *columns), cells, title=title)
    if others := rows[0].others:
        values = [(name, *(_percent(row.others[name], None, 1) for row in rows)) for name in others]
        show_table(("network", *(row.name for row in rows)), values)
        say(OTHERS_SOURCES)


def _show_results(number: str, targets: tuple[str, ...], ours: OurResults, gpu: Gpu) -> list[str]:
    """Print a table of results, and return its columns of costs."""
    table = RESULTS[number]
    shown = tuple(t for t in targets if t in table.columns) or table.shown or table.columns[:1]
    rows = result_rows(number, shown, ours, gpu)
    has_numbers = any(one.paper is not None for row in rows for one in row.accuracies)
    all_costs = [
        {
            "steps": f"{row.steps:,}" if CONSOLE.width >= WIDE else f"{row.steps / 1000:,.0f}k",
            "EFLOPs": cost_text(row.exaflops),
            "paper": cost_text(row.paper_exaflops),
            "TPU-days": cost_text(row.paper_core_days),
            "GPU-days": cost_text(row.gpu_days),
        }
        for row in rows
    ]
    costs = [name for name in all_costs[0] if name not in _OPTIONAL or any(c[name] != "-" for c in all_costs)]
    if has_numbers and len(shown) > 1 and CONSOLE.width < WIDE:
        costs = ["EFLOPs"]
    columns = (name for target in shown for name in ((target, "ours") if has_numbers else (target,)))
    cells: list[tuple[str, ...]] = []
    for row, cost in zip(rows, all_costs, strict=True):
        accuracies = (text for one in row.accuracies for text in _pair(one, 2)[0 if has_numbers else 1 :])
        cells.append((row.recipe, *accuracies, *(cost[name] for name in costs)))
    for name, values in table.others.items():
        known = dict(zip(table.columns, values, strict=True))
        texts = ("-" if known[target] is None else f"{known[target]:g}" for target in shown)
        accuracies = (text for paper in texts for text in (paper, "-"))
        known_costs = {"TPU-days": cost_text(table.core_days.get(name))}
        cells.append((name, *accuracies, *(known_costs.get(cost, "-") for cost in costs)))
    kinds = {"figures": "Figures", "4.6": "Section 4.6:"}
    kind = kinds.get(number) or (f"Figure {number[3:]}:" if number[0] == "f" else f"Table {number}:")
    title = f"{kind} {table.caption}; top-1 in percent"
    show_table(("recipe", *columns, *costs), cells, title=title)
    for row in rows:
        for target, one in zip(shown, row.accuracies, strict=True):
            if one.ours is not None and one.ours.remark:
                say(f"{row.recipe}, {target}: {one.ours.remark}")
    if hidden := [column for column in table.columns if column not in shown]:
        say(f"more columns, with --target NAME: {', '.join(hidden)}")
    return costs


_OPTIONAL = ("paper", "TPU-days")  # costs that the paper gives for some tables only


def _pair(one: Accuracy, digits: int) -> tuple[str, str]:
    paper = _percent(one.paper, one.deviation, digits)
    return paper, _percent(one.ours.mean, one.ours.std, digits) if one.ours else "not run"


def _percent(value: float | None, deviation: float | None, digits: int) -> str:
    if value is None:
        return "-"
    return f"{value:.{digits}f}" + (f"±{deviation:.{digits}f}" if deviation is not None else "")
