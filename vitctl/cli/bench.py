"""`vitctl bench model`, `bench data`."""

from pathlib import Path
from typing import Annotated

import typer

from vitctl.cli import completion
from vitctl.cli.flags import Data, Dataset, From, Precision, Processes, Res, Set, Synthetic

app = typer.Typer(
    no_args_is_help=True,
    help="Measure on this machine how fast a training is, and where its time goes.",
)
_SECONDS = 60.0

Recipe = Annotated[
    str | None,
    typer.Option(
        "--recipe",
        "-r",
        help="Recipe of pretrain or finetune: name, or path of a .toml file. Default: in1k_b16, Table 3's "
        "ImageNet",
        autocompletion=completion.recipes,
    ),
]
Seconds = Annotated[
    float | None,
    typer.Option(
        "--seconds",
        help="Time to measure, about; building the network comes on top. Ctrl-C ends earlier and keeps what "
        "was measured. Default: 60; with --resolutions 8 for each network and size",
        min=1,
        max=10**7,
    ),
]
Threads = Annotated[
    int | None,
    typer.Option("--threads", help="CPU threads; default: as in a run, OMP_NUM_THREADS", min=1),
]
Json = Annotated[
    Path | None,
    typer.Option("--json", help="Also write all numbers, and all that decides them, to this .json file"),
]


@app.command("model")
def model(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME",
            help="A model such as S/16, instead of the recipe's; with --resolutions one or more",
            autocompletion=completion.models,
        ),
    ] = None,
    recipe: Recipe = None,
    from_: From = None,
    data: Data = None,
    dataset: Dataset = None,
    res: Res = None,
    batch_size: Annotated[
        int | None,
        typer.Option(
            "--batch-size",
            help="Images of an update; default: the recipe's, or as many as there is time for",
            min=1,
            max=2**30 - 1,
        ),
    ] = None,
    synthetic: Synthetic = False,
    seconds: Seconds = None,
    threads: Threads = None,
    resolutions: Annotated[
        str | None,
        typer.Option(
            "--resolutions", help="Fig. 12 instead: forward passes at 64..512, or a list of sizes as 64,224"
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            "--plot",
            help="With --resolutions: the .png or .svg; default: speed.png, with speed.json beside it",
        ),
    ] = None,
    json: Json = None,
    set_: Set = None,
    processes: Processes = None,
    precision: Precision = None,
) -> None:
    """Measure a recipe's training step: images/s, MFU, memory, where its time goes. For example: vitctl bench
    model S/16

    The step is the one that pretrain or finetune makes: forward, backward, optimizer, records. Noise stands
    in for images that are not here. Larger micro-batches are tried too. vitctl bench model --resolutions
    64..512 draws Fig. 12.
    """
    from vitctl.cli.show.measurements import BenchOptions, run_model, run_resolutions

    options = BenchOptions(tuple(names or ()), recipe, seconds or _SECONDS, threads, json, tuple(set_ or ()))
    flags = {
        "--from": ("weights.source", from_),
        "--data": ("data.path", data),
        "--dataset": ("data.dataset", dataset),
        "--res": ("data.image_size", res),
        "--processes": ("machine.processes", processes),
        "--precision": ("machine.precision", precision),
    }
    if resolutions is not None or plot is not None:
        run_resolutions(options, resolutions, flags, plot, seconds)
    else:
        run_model(options, flags, batch_size=batch_size, synthetic=synthetic)


@app.command("data")
def data(
    recipes: Annotated[
        list[str] | None,
        typer.Option(
            "--recipe",
            "-r",
            help="Recipe of pretrain or finetune; repeatable",
            autocompletion=completion.recipes,
        ),
    ] = None,
    data: Data = None,
    dataset: Dataset = None,
    res: Res = None,
    workers: Annotated[
        int | None, typer.Option("--workers", help="Loader workers; default: those of the recipe", min=0)
    ] = None,
    step_rate: Annotated[
        float | None,
        typer.Option(
            "--step-rate",
            help="Images/s that the step takes; 0 leaves it out; default: measured here",
            min=0,
        ),
    ] = None,
    seconds: Seconds = None,
    threads: Threads = None,
    json: Json = None,
    set_: Set = None,
    precision: Precision = None,
) -> None:
    """Measure a recipe's loader: images/s, CPU time of decoding and augmenting, and what the training step
    needs.

    For example: vitctl bench data --recipe smoke, or: vitctl bench data --recipe in1k_b16 --data SHARDS
    """
    from vitctl.cli.show.measurements import BenchOptions, run_data

    flags = {
        "--data": ("data.path", data),
        "--dataset": ("data.dataset", dataset),
        "--res": ("data.image_size", res),
        "--workers": ("machine.workers", workers),
        "--precision": ("machine.precision", precision),
    }
    common = seconds or _SECONDS, threads, json, tuple(set_ or ())
    run_data([BenchOptions((), name, *common) for name in recipes or ["in1k_b16"]], flags, step_rate)
