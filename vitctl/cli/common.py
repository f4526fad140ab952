"""Shared by the commands that run a job: options, overrides, and the steps from a recipe to a result."""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitctl.cli import completion
from vitctl.engine.run_files import RECIPE
from vitctl.system.screen import ignore_output_errors
from vitctl.system.text import typed

if TYPE_CHECKING:
    from vitctl.launch.command import LaunchConfig
    from vitctl.launch.environment import Member
    from vitctl.launch.prepare import Prepared
    from vitctl.recipe.load import Loaded, Override

RecipeName = Annotated[
    str,
    typer.Option(
        "--recipe",
        "-r",
        help="Name of a shipped recipe or path of a .toml file.",
        autocompletion=completion.recipes,
    ),
]
WEIGHTS = "Weights"  # help panel: which weights a job starts from
From = Annotated[
    str | None,
    typer.Option(
        "--from",
        help="Run folder, checkpoint, weights file or address (https, hf, gs); default: the newest "
        "finished run.",
        autocompletion=completion.runs,
        rich_help_panel=WEIGHTS,
    ),
]
WhichWeights = Annotated[
    str | None,
    typer.Option(
        "--weights",
        help="Which checkpoint of a run: last, best or a step; ema (Polyak average) or model (not averaged). "
        "Default: the last, or the best with evaluation.select_best; averaged where the run has an average.",
        rich_help_panel=WEIGHTS,
    ),
]
Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="Name of the model, e.g. B/16, if the weights file of another program does not say it.",
        autocompletion=completion.models,
        rich_help_panel=WEIGHTS,
    ),
]
Data = Annotated[
    str | None, typer.Option("--data", help="Folder or address of shards, see `vitctl data shards`.")
]
Images = Annotated[
    str | None,
    typer.Option(
        "--data", help="Folder of photographs (a folder per class), or folder or address of shards."
    ),
]
Dataset = Annotated[
    str | None,
    typer.Option(
        "--dataset",
        help="A known data set: digits, shapes, cifar10, pets, ...; see `vitctl data list`.",
        autocompletion=completion.data_sets,
    ),
]
Res = Annotated[int | None, typer.Option("--res", help="Image size in pixels.")]
Out = Annotated[
    Path | None,
    typer.Option("--out", "-o", help="Run folder; a run that is there is resumed. Default: runs/NAME_TIME."),
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        "-s",
        help="Set any value of the recipe: section.key=value. Repeatable.",
        autocompletion=completion.keys,
    ),
]
Lr = Annotated[float | None, typer.Option("--lr", help="Base learning rate; no other one is tried.")]
Steps = Annotated[
    int | None,
    typer.Option(
        "--steps", help="Length in updates, instead of the recipe's; a shorter run gets a shorter warm-up."
    ),
]
Epochs = Annotated[
    float | None,
    typer.Option("--epochs", help="Length in passes over the images; a shorter run gets a shorter warm-up."),
]
BatchSize = Annotated[int | None, typer.Option("--batch-size", help="Global batch size, over all processes.")]
Seed = Annotated[
    int | None, typer.Option("--seed", help="Random seed of weights, sample order, augmentation and dropout.")
]
_MAY_BE_EMPTY = ("--split", "--labels")
MACHINE = "Machine"  # help panel: where a job runs; the same options for all commands that train
Processes = Annotated[
    int | None,
    typer.Option(
        "--processes",
        "-n",
        help="Number of processes over all machines, one per GPU.",
        rich_help_panel=MACHINE,
    ),
]
Precision = Annotated[
    str | None,
    typer.Option(
        "--precision",
        help="auto (bf16 where the device is fast at it), bf16, tf32 (NVIDIA GPUs), float32 or float64.",
        autocompletion=completion.one_of(completion.PRECISIONS),
        rich_help_panel=MACHINE,
    ),
]
Slurm = Annotated[
    str | None,
    typer.Option(
        "--slurm",
        help="Write a Slurm job instead of running: nodes=4,gpus=8,time=24:00:00; add ,submit to submit it.",
        rich_help_panel=MACHINE,
    ),
]
Nodes = Annotated[
    str | None,
    typer.Option(
        "--nodes",
        help="Number of machines and the rendezvous address on one of them: 2@gpu01:29400. Run the same "
        "command on each, with "
        "--out on a shared disk.",
        rich_help_panel=MACHINE,
    ),
]
Restarts = Annotated[
    int,
    typer.Option(
        "--restarts",
        help="How often the processes are restarted when one is lost.",
        rich_help_panel=MACHINE,
    ),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Print the plan and its cost; needs no GPU and no data.")
]
All = Annotated[bool, typer.Option("--all", help="With --dry-run: also print default values.")]


def schedule_flags(
    sets: Sequence[str] | None,
    *,
    steps: int | None = None,
    epochs: float | None = None,
    batch_size: int | None = None,
) -> dict[str, tuple[str, Any]]:
    """The flags of length and batch size: --steps or --epochs replaces the recipe's length, whichever it has,
    and its warm-up.

    Raises:
        RecipeError: both lengths are given.
    """
    from vitctl.errors import RecipeError
    from vitctl.jobs.inputs.length import IN_PROPORTION

    if steps is not None and epochs is not None:
        raise RecipeError(f"--steps {steps} and --epochs {epochs:g} both set the length; give one of them")
    warmup_is_set = any(text.partition("=")[0].strip() == "schedule.warmup_steps" for text in sets or ())
    flags: dict[str, tuple[str, Any]] = {"--batch-size": ("schedule.batch_size", batch_size)}
    for flag, own, value, other, none in (
        ("--steps", "total_steps", steps, "total_epochs", 0.0),
        ("--epochs", "total_epochs", epochs, "total_steps", 0),
    ):
        if value is not None:
            flags |= {flag: (f"schedule.{own}", value), f"{flag} alone": (f"schedule.{other}", none)}
            flags |= {} if warmup_is_set else {flag + IN_PROPORTION: ("schedule.warmup_steps", -1)}
    return flags


def run_job(
    job: str,
    recipe: str,
    flags: Mapping[str, tuple[str, Any]],
    sets: Sequence[str] | None,
    out: Path | None,
    *,
    dry_run: bool = False,
    everything: bool = False,
    slurm: str | None = None,
    nodes: str | None = None,
    restarts: int = 0,
) -> None:
    """Resolve the recipe, then run it, print its plan, or write a Slurm job of it; ends with the command's
    exit code.

    Args:
        job: the command.
        recipe: name or path.
        flags: everyday flag -> (dotted key, value); None values were not given.
        sets: texts of --set.
        out: run folder; None makes a new one.
        dry_run: only plan.
        everything: print default values in the plan.
        slurm: resources of a Slurm job, and with them the number of processes.
        nodes: the machines, and the rendezvous address.
        restarts: how often the processes may be restarted after one was lost.
    """
    from vitctl.errors import RecipeError
    from vitctl.recipe.load import Override, load_recipe, parse_override

    if everything and not dry_run:
        raise RecipeError("--all prints more of a plan; give it with --dry-run")
    check_flags({flag: value for flag, (_, value) in flags.items()})
    member = start_command()
    if not (dry_run or slurm):
        ignore_output_errors()
    config = launch_config(member, nodes, restarts, out, slurm)
    overrides = [parse_override(text) for text in sets or ()]
    overrides += [Override(key, value, flag) for flag, (key, value) in flags.items() if value is not None]
    overrides += processes_from_launcher(member) + processes_from_slurm(slurm, overrides)
    alone = config.nodes == 1 and (member is None or member.num_processes == 1)
    loaded = with_shards(
        load_recipe(recipe, overrides, job=job), out.parent if out else Path("runs"), dry_run, alone
    )
    loaded = fitted(loaded, in_time=dry_run)
    source = getattr(getattr(loaded.recipe, "weights", None), "source", "")
    if "://" in source and not dry_run:
        from vitctl.cli.show.download import fetch_weights

        fetch_weights(source)
    from vitctl.launch.command import check_processes
    from vitctl.launch.prepare import prepare_run
    from vitctl.launch.run_folder import new_run_dir

    run_dir = out or (member.run_dir(loaded.name) if member else new_run_dir(loaded.name))
    if dry_run:
        from vitctl.cli.show.plan import show_plan

        show_plan(loaded, run_dir, config, everything=everything)
        return
    check_processes(config, loaded.recipe.machine.processes)
    from vitctl.cli.show.render import CONSOLE, waiting

    with waiting("checking data and weights"):
        prepared = prepare_run(loaded, run_dir, config=config)
    if prepared.taken:
        CONSOLE.print(prepared.taken, style="bold yellow", markup=False, soft_wrap=True)
    if slurm:
        write_slurm_job(slurm, run_dir, loaded.name)
        return
    run_prepared(run_dir, prepared, member, config)


def with_shards(loaded: "Loaded", runs: Path, dry_run: bool, alone: bool) -> "Loaded":
    """The recipe with shards for its data where that is a folder of photographs, and a line that says where
    they are.

    Args:
        loaded: of any job.
        runs: folder of run folders, which gets the shards.
        dry_run: only say what would be made.
        alone: whether no other process runs the same command.

    Raises:
        DataError: as `vitctl data shards`; or several processes would write the same shards.
    """
    from vitctl.jobs.inputs.photographs import fingerprint, is_photographs, shards_folder
    from vitctl.recipe.images import Place
    from vitctl.recipe.load import Override, with_overrides

    data = getattr(loaded.recipe, "data", None)
    if not isinstance(data, Place) or not is_photographs(data.path):
        return loaded
    if dry_run:
        print(
            f"{data.path}: photographs, their shards would be made in "
            f"{shards_folder(data.path, runs, fingerprint(data.path))}"
        )
        return loaded
    if not alone:
        from vitctl.errors import DataError

        raise DataError(
            f"{data.path}: photographs, and several processes would make their shards; make them first with "
            f"`vitctl data shards {typed(data.path)} FOLDER`, and give --data FOLDER"
        )
    from vitctl.cli.data.shards import shards_of

    return with_overrides(
        loaded, [Override("data.path", str(shards_of(data.path, runs)), "shards of photographs")]
    )


def fitted(loaded: "Loaded", *, in_time: bool) -> "Loaded":
    """The recipe with the splits that --data has; prints a line that says which they are.

    Args:
        loaded: of any job.
        in_time: with a timeout; the plan then reports an address that does not answer.
    """
    from vitctl.recipe.load import with_overrides

    path = getattr(getattr(loaded.recipe, "data", None), "path", "")
    if not path:
        return loaded
    from vitctl.cli.show.render import CONSOLE
    from vitctl.data.shards.remote import is_remote
    from vitctl.jobs.inputs.own_splits import FittedSplits, fit_splits
    from vitctl.jobs.plan import LOOKUP_SECONDS, call_with_timeout

    found = (
        call_with_timeout(LOOKUP_SECONDS, lambda: fit_splits(loaded))
        if in_time and is_remote(path)
        else fit_splits(loaded)
    )
    fitted = found if isinstance(found, FittedSplits) else FittedSplits([], "")
    if fitted.note:
        CONSOLE.print(fitted.note, markup=False, highlight=False, soft_wrap=True)
    return with_overrides(loaded, fitted.overrides) if fitted.overrides else loaded


def weights_flags(source: str | None, which: str | None, model: str | None) -> dict[str, tuple[str, Any]]:
    """The flags of the panel "Weights", as `run_job` takes them."""
    return {
        "--from": ("weights.source", source),
        "--weights": ("weights.which", which),
        "--model": ("weights.model", model),
    }


def check_flags(flags: Mapping[str, Any]) -> None:
    """Refuse empty flags, e.g. from an unset shell variable, and two flags that both name the source of the
    images.

    Args:
        flags: flag -> value; None: not given.

    Raises:
        RecipeError: there are such flags.
    """
    from vitctl.errors import RecipeError

    for flag, value in flags.items():
        if flag not in _MAY_BE_EMPTY and value == "":
            raise RecipeError(f"{flag} '': is empty; give a value, or leave {flag} out")
    given = [flag for flag in ("--data", "--dataset", "--synthetic") if flags.get(flag) is not None]
    if len(given) > 1 and given != ["--dataset", "--synthetic"]:
        raise RecipeError(
            f"{given[0]} and {given[1]}: both name the source of the images; leave one of them out"
        )


def write_slurm_job(slurm: str, run_dir: Path, name: str) -> None:
    """Write the Slurm job of a prepared run, and submit it if that is requested."""
    from vitctl.launch.slurm import parse_job, submit, write_job

    job = parse_job(slurm)
    file = write_job(job, run_dir, Path(name).stem)
    print(submit(file) if job.submit else f"wrote {file}; submit it with: sbatch {typed(file)}")


def start_command() -> "Member | None":
    """Before anything slow: let a signal end the command with code 3, and silence all processes but rank 0."""
    from vitctl.engine.preemption import exit_on_signals
    from vitctl.launch.environment import find_member

    member = find_member()
    exit_on_signals(while_waiting=member is not None)
    if member is not None and member.rank > 0:
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
    return member


def processes_from_launcher(member: "Member | None") -> "list[Override]":
    """The number of processes, if a launcher such as srun or torchrun started them."""
    from vitctl.recipe.load import Override

    return [Override("machine.processes", member.num_processes, member.launcher)] if member else []


def processes_from_slurm(slurm: str | None, given: "Sequence[Override]") -> "list[Override]":
    """The number of processes of --slurm.

    Raises:
        LaunchError: `given` holds another number.
    """
    from vitctl.errors import LaunchError
    from vitctl.recipe.load import Override

    if slurm is None:
        return []
    from vitctl.launch.slurm import parse_job

    processes = parse_job(slurm).num_processes
    for other in given:
        if other.key == "machine.processes" and other.value != processes:
            raise LaunchError(
                f"{other.flag} says {other.value} processes, --slurm {slurm} starts {processes}: leave "
                f"{other.flag} out"
            )
    return [Override("machine.processes", processes, "--slurm")]


def launch_config(
    member: "Member | None", nodes: str | None, restarts: int, out: Path | None, slurm: str | None
) -> "LaunchConfig":
    """The configuration of --nodes and --restarts.

    Raises:
        LaunchError: a launcher or --slurm starts the processes already, or --out is missing.
    """
    from vitctl.errors import LaunchError
    from vitctl.launch.command import parse_nodes

    config = parse_nodes(nodes or "1", restarts)
    if (nodes or restarts) and (member is not None or slurm):
        other = member.launcher if member is not None else "--slurm"
        raise LaunchError(
            f"--nodes and --restarts start processes, and so does {other}: leave one of them out"
        )
    if config.nodes > 1 and out is None:
        raise LaunchError(f"--nodes {nodes}: give all machines the same run folder with --out")
    return config


def exit_if_stopped(result: Mapping[str, Any], run_dir: Path) -> None:
    """Exit with code 3 where a run was stopped."""
    if result["status"] == "stopped":
        has_run = (run_dir / RECIPE).exists()
        said = result.get("error") or f"stopped and saved in {run_dir}"
        saved = f"{said}; resume with: vitctl resume {typed(run_dir)}"
        print(saved if has_run else "vitctl: stopped", file=sys.stderr)
        raise typer.Exit(3)


def run_prepared(
    run_dir: Path, prepared: "Prepared", member: "Member | None", config: "LaunchConfig"
) -> None:
    """Run a prepared folder with progress on the screen, print its result, and exit with its code."""
    from vitctl.cli.show.render import Screen, show_result
    from vitctl.launch.launcher import launch

    if config.nodes > 1:
        print(
            f"{config.nodes} machines: waiting for all to join at {config.host}:{config.port}",
            file=sys.stderr,
        )
    if member is not None and member.rank > 0:
        from vitctl.launch.worker import redirect_output

        redirect_output(run_dir)
    with Screen(run_dir) as screen:
        result = launch(run_dir, screen.report, config, prepared)
    exit_if_stopped(result, run_dir)
    show_result(result, run_dir)
