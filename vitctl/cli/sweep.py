"""`vitctl sweep`."""

import shlex
import sys
from typing import Annotated

import typer

from vitctl.cli import completion
from vitctl.cli.common import (
    Data,
    Dataset,
    DryRun,
    Out,
    Processes,
    Set,
    Slurm,
    check_flags,
    processes_from_slurm,
    write_slurm_job,
)
from vitctl.system.screen import ignore_output_errors

What = Annotated[
    str,
    typer.Argument(
        help="A recipe, a shipped sweep (d2_depth, d4, ...), or a sweep's .toml.",
        autocompletion=completion.recipes_and_sweeps,
    ),
]
Grid = Annotated[
    list[str] | None,
    typer.Option(
        "--grid",
        "-g",
        help="Values of any key of the recipe: section.key=v1,v2. Repeatable.",
        autocompletion=completion.keys,
    ),
]


def sweep(
    what: What,
    grid: Grid = None,
    set_: Set = None,
    data: Data = None,
    dataset: Dataset = None,
    processes: Processes = None,
    metric: Annotated[
        str, typer.Option("--metric", help="Metric to compare, e.g. accuracy, best_accuracy, 5-shot.")
    ] = "accuracy",
    out: Out = None,
    print_: Annotated[
        bool,
        typer.Option(
            "--print", help="Make the run folders and print a command for each run, to start elsewhere."
        ),
    ] = False,
    dry_run: DryRun = False,
    slurm: Slurm = None,
) -> None:
    """Run a grid over any keys of a recipe. For example: vitctl sweep smoke --grid optimizer.lr=0.001,0.003
    --grid seed=0,1

    One run after the other, or with --slurm a job for each; finished runs are kept and unfinished ones resume
    when the same command is run again with the same --out. Ends with one table (sweep.csv, sweep.json) and
    one plot (sweep.png, where matplotlib is installed).
    """
    from vitctl.launch.run_folder import new_run_dir
    from vitctl.launch.sweep import is_done, prepare_cells
    from vitctl.recipe.load import Override, parse_override
    from vitctl.recipe.sweep import expand_sweep, find_sweep, parse_axis

    if not (print_ or dry_run or slurm):
        ignore_output_errors()
    check_flags({"--data": data, "--dataset": dataset})
    found = find_sweep(what)
    flags = (
        Override("data.path", data, "--data"),
        Override("data.dataset", dataset, "--dataset"),
        Override("machine.processes", processes, "--processes"),
    )
    sets = [parse_override(text) for text in set_ or ()] + [flag for flag in flags if flag.value is not None]
    sets += processes_from_slurm(slurm, sets)
    cells = expand_sweep(found, dict(parse_axis(text) for text in grid or ()), sets)
    if dry_run:
        from vitctl.cli.show.sweep import show_costs

        show_costs(cells)
        return
    folder = out or new_run_dir(f"sweep_{found.name}")
    prepare_cells(cells, folder)
    if print_ or slurm:
        for cell in cells:
            if not slurm:
                typer.echo(f"vitctl resume {shlex.quote(str(folder / cell.name))}")
            elif not is_done(folder / cell.name):
                write_slurm_job(slurm, folder / cell.name, cell.name)
        print(
            f"when they are done: the same command with --out {folder}, without "
            f"{'--slurm' if slurm else '--print'}, makes "
            "the table",
            file=sys.stderr,
        )
        return
    from vitctl.cli.show.sweep import run_and_show

    run_and_show(found, cells, folder, metric)
