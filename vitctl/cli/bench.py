"""`vitctl bench model`, `bench data`."""

from pathlib import Path
from typing import Annotated

import typer

from vitctl.cli.flags import Flags, Set, takes_flags

app = typer.Typer(
    no_args_is_help=True,
    help="Measure the speed of training and of data loading.",
)
_SECONDS = 60.0

Recipe = Annotated[
    str | None,
    typer.Option(
        "--recipe",
        "-r",
        help="Recipe of pretrain or finetune, or path of a .toml file; default: in1k_b16",
    ),
]
Seconds = Annotated[
    float | None,
    typer.Option(
        "--seconds",
        help="Approximate measuring time, without setup; Ctrl-C keeps the measurements; default: 60, "
        "for `bench model --resolutions` 8 per model and size",
        min=1,
        max=10**7,
    ),
]
Json = Annotated[
    Path | None,
    typer.Option("--json", help="Also write all numbers and their provenance to this .json file"),
]


@app.command("model")
@takes_flags
def bench_model(
    *,
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME",
            help="Model such as S/16 instead of the recipe's; several with --resolutions",
        ),
    ] = None,
    recipe: Recipe = None,
    flags: Flags,
    batch_size: Annotated[
        int | None,
        typer.Option(
            "--batch-size",
            help="Images per update; default: the recipe's, or fewer if it is too slow",
            min=1,
            max=2**30 - 1,
        ),
    ] = None,
    seconds: Seconds = None,
    resolutions: Annotated[
        str | None,
        typer.Option(
            "--resolutions",
            help="Measure forward passes at several image sizes instead (Fig. 12): 64..512, or 64,224",
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            "--plot",
            help="With --resolutions: .png or .svg file; default: speed.png, and speed.json beside it",
        ),
    ] = None,
    json: Json = None,
    set_: Set = None,
) -> None:
    """Measure a recipe's training step: images/s, MFU, memory, time of each part.

    Runs the training step of pretrain or finetune: forward, backward, optimizer, logging. Noise replaces
    missing images. Also tries larger micro-batches. --resolutions 64..512 draws Fig. 12.

    For example: vitctl bench model S/16
    Guide: docs/speed.md
    """
    from vitctl.cli.show.measurements import BenchOptions, run_model, run_resolutions

    options = BenchOptions(tuple(names or ()), recipe, seconds or _SECONDS, json, tuple(set_ or ()))
    if resolutions is not None or plot is not None:
        run_resolutions(options, resolutions, flags, plot, seconds)
    else:
        run_model(options, flags, batch_size=batch_size)


@app.command("data")
@takes_flags
def bench_data(
    *,
    recipe: Recipe = None,
    flags: Flags,
    seconds: Seconds = None,
    json: Json = None,
    set_: Set = None,
) -> None:
    """Measure a recipe's data loader: images/s, also of a worker and of a CPU second.

    For example: vitctl bench data --recipe in1k_b16 --data SHARDS
    Guide: docs/speed.md
    """
    from vitctl.cli.show.measurements import BenchOptions, run_data

    run_data(BenchOptions((), recipe, seconds or _SECONDS, json, tuple(set_ or ())), flags)
