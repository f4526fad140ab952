"""What the commands that run a job share: options, overrides, and the way from a recipe to a result."""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from vitctl.cluster import Member
    from vitctl.recipe.load import Override

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
Slurm = Annotated[
    str | None,
    typer.Option(
        "--slurm", help="Write a Slurm job, run nothing: nodes=4,gpus=8,time=24:00:00; with ,submit hand it in."
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print what would be done, needing no GPU and no data.")]


def run_job(
    job: str,
    recipe: str,
    flags: Mapping[str, tuple[str, Any]],
    sets: Sequence[str] | None,
    out: Path | None,
    *,
    dry_run: bool = False,
    slurm: str | None = None,
) -> None:
    """Resolve the recipe, then run it, print its plan, or write a Slurm job of it; ends with the command's exit code.

    Args:
        job: the command.
        recipe: name or path.
        flags: everyday flag -> (dotted key, value); None values were not given.
        sets: texts of --set.
        out: run folder; None makes a new one.
        dry_run: only plan.
        slurm: what to ask of Slurm; it also says how many processes there are.
    """
    from vitctl.recipe.load import Override, load_recipe, parse_override

    member = begin()
    overrides = [parse_override(text) for text in sets or ()]
    overrides += [Override(key, value, flag) for flag, (key, value) in flags.items() if value is not None]
    overrides += started_with(member) + asked_of(slurm)
    loaded = load_recipe(recipe, overrides, job=job)
    source = getattr(getattr(loaded.recipe, "weights", None), "source", "")
    if "://" in source:
        from vitctl.cli.download import fetch_weights

        fetch_weights(source)
    from vitctl.launch import new_run_dir, prepare

    run_dir = out or (member.run_dir(loaded.name) if member else new_run_dir(loaded.name))
    if dry_run:
        from vitctl.cli.plan import show_plan

        show_plan(loaded, run_dir)
        return
    prepare(loaded, run_dir)
    if slurm:
        hand_over(slurm, run_dir, loaded.name)
        return
    go(run_dir, member)


def hand_over(slurm: str, run_dir: Path, name: str) -> None:
    """Write the Slurm job of a prepared run, and submit it where that is asked for."""
    from vitctl.slurm import parse_job, submit, write_job

    job = parse_job(slurm)
    file = write_job(job, run_dir, Path(name).stem)
    print(submit(file) if job.submit else f"wrote {file}; submit it with: sbatch {file}")


def begin() -> "Member | None":
    """Before anything slow: a signal ends the command with code 3, and of several processes only the first speaks."""
    from vitctl.cluster import find_member
    from vitctl.engine.preemption import leave_on_signals

    leave_on_signals()
    member = find_member()
    if member is not None and member.rank > 0:
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
    return member


def started_with(member: "Member | None") -> "list[Override]":
    """The number of processes, where something else started them, is a fact and no choice."""
    from vitctl.recipe.load import Override

    return [Override("machine.processes", member.num_processes, member.starter)] if member else []


def asked_of(slurm: str | None) -> "list[Override]":
    """The number of processes that is asked of Slurm."""
    from vitctl.recipe.load import Override

    if not slurm:
        return []
    from vitctl.slurm import parse_job

    return [Override("machine.processes", parse_job(slurm).num_processes, "--slurm")]


def go(run_dir: Path, member: "Member | None" = None) -> None:
    """Run a prepared folder with progress on the screen, print its result, and exit with its code."""
    from vitctl.cli.render import Screen, show_result
    from vitctl.launch import launch

    if member is not None and member.rank > 0:
        from vitctl.worker import be_quiet

        be_quiet(run_dir)
    with Screen(run_dir) as screen:
        result = launch(run_dir, screen.report)
    if result["status"] == "stopped":
        print(f"stopped and saved in {run_dir}; go on with: vitctl resume {run_dir}", file=sys.stderr)
        raise typer.Exit(3)
    show_result(result, run_dir)
