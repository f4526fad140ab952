"""What the commands that run a job share: options, overrides, and the way from a recipe to a result."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

RecipeName = Annotated[str, typer.Option("--recipe", "-r", help="Name of a shipped recipe or path of a .toml file.")]
From = Annotated[
    str | None,
    typer.Option(
        "--from",
        help="Run, checkpoint, weights file or https, hf, gs address; default: newest finished pre-training run.",
    ),
]
Model = Annotated[
    str | None, typer.Option("--model", help="Name of the model, for what a foreign weights file does not tell.")
]
Data = Annotated[str | None, typer.Option("--data", help="Folder of shards made by `vitctl data shards`.")]
Dataset = Annotated[str | None, typer.Option("--dataset", help="A known data set: digits, shapes, cifar10, pets, ...")]
Res = Annotated[int | None, typer.Option("--res", help="Image size in pixels.")]
Out = Annotated[
    Path | None, typer.Option("--out", "-o", help="Run folder; a run that is there goes on. Default: runs/NAME_TIME.")
]
Set = Annotated[
    list[str] | None, typer.Option("--set", "-s", help="Any value of the recipe: section.key=value. Repeatable.")
]
Seed = Annotated[int | None, typer.Option("--seed", help="Of weights, order, augmentation and dropout.")]
Processes = Annotated[int | None, typer.Option("--processes", "-n", help="Processes, one per GPU.")]
Precision = Annotated[str | None, typer.Option("--precision", help="auto, bf16, float32 or float64.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print what would be done, needing no GPU and no data.")]


def run_job(
    job: str,
    recipe: str,
    flags: Mapping[str, tuple[str, Any]],
    sets: Sequence[str] | None,
    out: Path | None,
    *,
    dry_run: bool = False,
) -> None:
    """Resolve the recipe, then run it or print its plan; ends with the command's exit code.

    Args:
        job: the command.
        recipe: name or path.
        flags: everyday flag -> (dotted key, value); None values were not given.
        sets: texts of --set.
        out: run folder; None makes a new one.
        dry_run: only plan.
    """
    from vitctl.recipe.load import Override, load_recipe, parse_override

    overrides = [parse_override(text) for text in sets or ()]
    overrides += [Override(key, value, flag) for flag, (key, value) in flags.items() if value is not None]
    loaded = load_recipe(recipe, overrides, job=job)
    source = getattr(getattr(loaded.recipe, "weights", None), "source", "")
    if "://" in source:
        from vitctl.cli.download import fetch_weights

        fetch_weights(source)
    from vitctl.launch import new_run_dir, prepare

    run_dir = out or new_run_dir(loaded.name)
    if dry_run:
        from vitctl.cli.plan import show_plan

        show_plan(loaded, run_dir)
        return
    prepare(loaded, run_dir)
    go(run_dir)


def go(run_dir: Path) -> None:
    """Run a prepared folder with progress on the screen, print its result, and exit with its code."""
    from vitctl.cli.render import Screen, show_result
    from vitctl.launch import launch

    with Screen(run_dir) as screen:
        result = launch(run_dir, screen.report)
    if result["status"] == "stopped":
        print(f"stopped and saved in {run_dir}; go on with: vitctl resume {run_dir}", file=sys.stderr)
        raise typer.Exit(3)
    show_result(result, run_dir)
