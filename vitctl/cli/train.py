"""`vitctl pretrain`, `finetune`, `resume`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from vitctl.cli import completion
from vitctl.cli.common import (
    All,
    BatchSize,
    Dataset,
    DryRun,
    Epochs,
    From,
    Images,
    Lr,
    Model,
    Nodes,
    Out,
    Precision,
    Processes,
    RecipeName,
    Res,
    Restarts,
    Seed,
    Set,
    Slurm,
    Steps,
    WhichWeights,
    launch_config,
    processes_from_launcher,
    processes_from_slurm,
    run_job,
    run_prepared,
    schedule_flags,
    start_command,
    weights_flags,
    write_slurm_job,
)
from vitctl.engine.run_files import RECIPE
from vitctl.system.screen import ignore_output_errors
from vitctl.system.text import typed

Synthetic = Annotated[
    bool, typer.Option("--synthetic", help="Train on generated noise images: needs no data, measures speed.")
]
Seeds = Annotated[
    int | None,
    typer.Option(
        "--seeds",
        min=1,
        help="Number of runs with different seeds; gives mean and population standard deviation.",
    ),
]
SYNTHETIC_IMAGES = 1_281_167


def pretrain(
    recipe: RecipeName,
    data: Images = None,
    dataset: Dataset = None,
    res: Res = None,
    lr: Lr = None,
    steps: Steps = None,
    epochs: Epochs = None,
    batch_size: BatchSize = None,
    out: Out = None,
    set_: Set = None,
    seed: Seed = None,
    processes: Processes = None,
    precision: Precision = None,
    synthetic: Synthetic = False,
    dry_run: DryRun = False,
    all_: All = False,
    slurm: Slurm = None,
    nodes: Nodes = None,
    restarts: Restarts = 0,
) -> None:
    """Pre-train a ViT from scratch (Table 3). For example: vitctl pretrain --recipe jft_h14 --data SHARDS"""
    flags = {
        "--data": ("data.path", data),
        "--dataset": ("data.dataset", dataset),
        "--res": ("data.image_size", res),
        "--lr": ("optimizer.lr", lr),
        **schedule_flags(set_, steps=steps, epochs=epochs, batch_size=batch_size),
        "--seed": ("seed", seed),
        "--processes": ("machine.processes", processes),
        "--precision": ("machine.precision", precision),
        "--synthetic": ("data.synthetic", SYNTHETIC_IMAGES if synthetic else None),
    }
    run_job(
        "pretrain",
        recipe,
        flags,
        set_,
        out,
        dry_run=dry_run,
        everything=all_,
        slurm=slurm,
        nodes=nodes,
        restarts=restarts,
    )


def lr_flags(lr: float | None) -> dict[str, tuple[str, Any]]:
    """A learning rate that is given switches off the sweep."""
    return {"--lr": ("optimizer.lr", lr), "--lr alone": ("sweep.lrs", () if lr is not None else None)}


def finetune(
    recipe: Annotated[
        str | None,
        typer.Option(
            "--recipe",
            "-r",
            help="Default: finetune_DATASET where there is one, else finetune.",
            autocompletion=completion.recipes,
        ),
    ] = None,
    from_: From = None,
    weights: WhichWeights = None,
    model: Model = None,
    data: Images = None,
    dataset: Dataset = None,
    res: Res = None,
    lr: Lr = None,
    steps: Steps = None,
    epochs: Epochs = None,
    batch_size: BatchSize = None,
    out: Out = None,
    set_: Set = None,
    seed: Seed = None,
    seeds: Seeds = None,
    processes: Processes = None,
    precision: Precision = None,
    dry_run: DryRun = False,
    all_: All = False,
    slurm: Slurm = None,
    nodes: Nodes = None,
    restarts: Restarts = 0,
) -> None:
    """Fine-tune on a data set (Table 4). For example: vitctl finetune --dataset pets --res 384"""
    from vitctl.data.datasets.catalog import find_data_set
    from vitctl.recipe.load import recipe_names

    flags = {
        **weights_flags(from_, weights, model),
        "--data": ("data.path", data),
        "--dataset": ("data.dataset", dataset),
        "--res": ("data.image_size", res),
        **lr_flags(lr),
        **schedule_flags(set_, steps=steps, epochs=epochs, batch_size=batch_size),
        "--seed": ("seed", seed),
        "--seeds": ("finetune.seeds", tuple(range(seed or 0, (seed or 0) + seeds)) if seeds else None),
        "--processes": ("machine.processes", processes),
        "--precision": ("machine.precision", precision),
    }
    own = f"finetune_{find_data_set(dataset).name}" if dataset else ""
    run_job(
        "finetune",
        recipe or (own if own in recipe_names() else "finetune"),
        flags,
        set_,
        out,
        dry_run=dry_run,
        everything=all_,
        slurm=slurm,
        nodes=nodes,
        restarts=restarts,
    )


def resume(
    run: Annotated[
        Path, typer.Argument(help="Folder of a run that was stopped.", autocompletion=completion.runs)
    ],
    set_: Set = None,
    allow: Annotated[
        list[str] | None,
        typer.Option(
            "--allow",
            help="What may differ from the start of the run: a key of the recipe; data; weights; "
            "computation. Repeatable.",
            autocompletion=completion.bare_keys,
        ),
    ] = None,
    processes: Processes = None,
    slurm: Slurm = None,
    nodes: Nodes = None,
    restarts: Restarts = 0,
) -> None:
    """Resume a stopped run from its newest complete checkpoint.

    For example: vitctl resume runs/smoke_20260101-120000
    """
    from vitctl.cli.show.render import waiting
    from vitctl.errors import CheckpointError
    from vitctl.launch.command import check_processes
    from vitctl.launch.prepare import prepare_run
    from vitctl.recipe.load import Override, load_recipe, parse_override

    member = start_command()
    if not slurm:
        ignore_output_errors()
    config = launch_config(member, nodes, restarts, run, slurm)
    if not (run / RECIPE).is_file():
        raise CheckpointError(
            f"{run}: not a run folder, it has no recipe.toml; `vitctl pretrain --out {typed(run)}` would "
            f"start one"
        )
    overrides = [parse_override(text) for text in set_ or ()]
    overrides += [Override("machine.processes", processes, "--processes")] if processes else []
    overrides += processes_from_launcher(member) + processes_from_slurm(slurm, overrides)
    loaded = load_recipe(str(run / RECIPE), overrides)
    check_processes(config, loaded.recipe.machine.processes)
    with waiting("checking data and weights"):
        prepared = prepare_run(loaded, run, allow or (), config)
    if slurm:
        write_slurm_job(slurm, run, run.name)
        return
    run_prepared(run, prepared, member, config)
