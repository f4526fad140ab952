"""`vitctl bench model`, `bench data`."""

from pathlib import Path
from typing import Annotated

import typer

from vitctl.cli import completion
from vitctl.cli.flags import Data, Dataset, From, Precision, Processes, Res, Set, Synthetic

app = typer.Typer(
    no_args_is_help=True,
    help="Measure training speed on this machine, and where the time goes",
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
        help="Approximate time to measure, without building the network. Ctrl-C stops early and keeps the "
        "numbers so far. Default: 60; with --resolutions 8 for each network and size",
        min=1,
        max=10**7,
    ),
]
Threads = Annotated[
    int | None,
    typer.Option("--threads", help="CPU threads; default: OMP_NUM_THREADS, as in a run", min=1),
]
Json = Annotated[
    Path | None,
    typer.Option("--json", help="Also write all numbers and settings to this .json file"),
]


@app.command("model")
def model(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME",
            help="Model such as S/16 instead of the recipe's; with --resolutions several are allowed",
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
            help="Images per update; default: the recipe's, or as many as the time allows",
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
            "--resolutions",
            help="Measure Fig. 12 instead: forward passes at 64..512, or at a list of sizes such as 64,224",
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            "--plot",
            help="With --resolutions: .png or .svg file; default: speed.png, with speed.json beside it",
        ),
    ] = None,
    json: Json = None,
    set_: Set = None,
    processes: Processes = None,
    precision: Precision = None,
) -> None:
    """Measure a recipe's training step: images/s, MFU, memory, where its time goes. For example: vitctl bench
    model S/16

    The step is that of pretrain or finetune: forward, backward, optimizer, records. Missing images are
    replaced by noise. Larger micro-batches are tried too. vitctl bench model --resolutions 64..512 draws
    Fig. 12.
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
        int | None, typer.Option("--workers", help="Loader workers; default: the recipe's", min=0)
    ] = None,
    step_rate: Annotated[
        float | None,
        typer.Option(
            "--step-rate",
            help="Images/s of the training step; 0 skips the comparison; default: measured here",
            min=0,
        ),
    ] = None,
    seconds: Seconds = None,
    threads: Threads = None,
    json: Json = None,
    set_: Set = None,
    precision: Precision = None,
) -> None:
    """Measure a recipe's loader: images/s, the time of reading, decoding and augmenting, and whether the
    loader keeps up with the training step.

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
