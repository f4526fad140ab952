"""`vitctl predict`, `inspect`: weights shown images."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitctl.cli import completion
from vitctl.cli.common import (
    WEIGHTS,
    Data,
    Dataset,
    From,
    Model,
    Precision,
    Res,
    Set,
    WhichWeights,
    check_flags,
    weights_flags,
)

if TYPE_CHECKING:
    from vitctl.recipe.schema import Evaluate

ToPredict = Annotated[
    list[str],
    typer.Argument(
        metavar="IMAGES",
        help="Images, folders, patterns, https addresses of images, shards (FOLDER:SPLIT); - for a list on "
        "standard input.",
    ),
]
Format = Annotated[
    str,
    typer.Option(
        "--format",
        help="table, csv or jsonl.",
        autocompletion=completion.one_of(completion.PREDICTION_FORMATS),
    ),
]
SplitOfShards = Annotated[
    str | None,
    typer.Option(
        "--split", help="Of shards: which split.", autocompletion=completion.one_of(completion.SPLITS)
    ),
]
Device = Annotated[
    str | None,
    typer.Option("--device", help="auto, cpu or cuda.", autocompletion=completion.one_of(completion.DEVICES)),
]


def predict(
    images: ToPredict,
    from_: From = None,
    weights: WhichWeights = None,
    top: Annotated[int, typer.Option("--top", help="How many classes of each image.", min=1)] = 5,
    threshold: Annotated[
        float,
        typer.Option("--threshold", help="Leave out classes that are less probable, 0 to 1.", min=0, max=1),
    ] = 0.0,
    format_: Format = "table",
    features: Annotated[
        Path | None,
        typer.Option(
            "--features", help="Also write features, names and SHA-256 of all images to this .safetensors."
        ),
    ] = None,
    split: SplitOfShards = None,
    strict: Annotated[
        bool,
        typer.Option(
            "--strict", help="Exit with code 2 when an image cannot be used; else it is only reported."
        ),
    ] = False,
    batch: Annotated[int | None, typer.Option("--batch", help="Images in one forward pass.")] = None,
    device: Device = None,
    res: Res = None,
    model: Model = None,
    set_: Set = None,
    precision: Precision = None,
) -> None:
    """Predict the classes of images. For example: vitctl predict photos/ --from RUN

    --from also takes an exported .onnx file. Pre-processing and class names come with the weights.
    """
    flags = {
        **weights_flags(from_, weights, model),
        "--batch": ("evaluation.batch_size", batch),
        "--device": ("machine.device", device),
        "--res": ("data.image_size", res),
        "--precision": ("machine.precision", precision),
    }
    missing: list[str] = []
    recipe = _evaluate_recipe(flags, set_)
    has_errors = _predict(recipe, images, split or "", format_, top, threshold, features, missing)
    for text in missing:
        print(f"vitctl: {text}", file=sys.stderr)
    if missing or (strict and has_errors):
        raise typer.Exit(2)


def _predict(
    recipe: "Evaluate",
    images: list[str],
    split: str,
    format_: str,
    top: int,
    threshold: float,
    features: Path | None,
    missing: list[str],
) -> bool:
    """Predict and print; everything but the predictions goes to standard error.

    Returns whether an image cannot be used.
    """
    from vitctl.cli.show.predictions import show_errors, show_predictions
    from vitctl.jobs.inputs.images import find_images, some_names
    from vitctl.jobs.predict import predict as predictions

    def note(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    sources = find_images(
        images, recipe.data, split=split, stdin=sys.stdin.buffer, note=note, missing=missing
    )
    total = sum(map(len, sources))
    if "://" in recipe.weights.source:
        from vitctl.cli.show.download import fetch_weights

        fetch_weights(recipe.weights.source, on_stderr=True)
    batches = predictions(recipe, sources, top=top, threshold=threshold, features=features, note=note)
    errors = show_predictions(batches, format_, some_names(sources, 1000), total)
    show_errors(errors, total)
    if features is not None:
        note(f"features of {total - errors.total():,} images: {features}")
    return bool(errors)


def _evaluate_recipe(flags: Mapping[str, tuple[str, Any]], sets: Sequence[str] | None) -> "Evaluate":
    """The recipe of `vitctl evaluate` with the values of some flags."""
    from vitctl.recipe.load import Override, load_recipe, parse_override
    from vitctl.recipe.schema import Evaluate

    check_flags({flag: value for flag, (_, value) in flags.items()})
    overrides = [parse_override(text) for text in sets or ()]
    overrides += [Override(key, value, flag) for flag, (key, value) in flags.items() if value is not None]
    recipe = load_recipe("evaluate", overrides, job="evaluate").recipe
    assert isinstance(recipe, Evaluate)
    return recipe


def inspect(
    images: Annotated[
        list[str] | None,
        typer.Argument(help="Images as predict takes them; or name a split with --data or --dataset."),
    ] = None,
    from_: Annotated[
        list[str] | None,
        typer.Option(
            "--from",
            help="Run folder, checkpoint, weights file or address; default: the newest finished run. "
            "Repeatable: side by side.",
            autocompletion=completion.runs,
            rich_help_panel=WEIGHTS,
        ),
    ] = None,
    weights: WhichWeights = None,
    model: Model = None,
    data: Data = None,
    dataset: Dataset = None,
    split: Annotated[
        str | None,
        typer.Option(
            "--split", help="Split to take images of.", autocompletion=completion.one_of(completion.SPLITS)
        ),
    ] = None,
    num_images: Annotated[
        int, typer.Option("--num-images", help="How many images, chosen at random.", min=1, max=10_000)
    ] = 128,
    seed: Annotated[int, typer.Option("--seed", help="Random seed of the choice.", min=0)] = 0,
    res: Res = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for pictures and numbers.")] = Path(
        "inspect"
    ),
    set_: Set = None,
    precision: Precision = None,
) -> None:
    """Draw what is inside a network, as in Section 4.5: filters, positions, attention distance, rollout,
    class token.

    Writes PNG and SVG of each picture, and inspect.json. For example: vitctl inspect --from RUN photo.jpg
    --out pictures
    """
    from vitctl.cli.show.inspect import run_inspect

    flags = {
        **weights_flags(None, weights, model),
        "--data": ("data.path", data),
        "--dataset": ("data.dataset", dataset),
        "--split": ("data.eval_split", split),
        "--res": ("data.image_size", res),
        "--precision": ("machine.precision", precision),
    }
    run_inspect(
        tuple(from_ or ()), tuple(images or ()), flags, set_ or (), out, num_images=num_images, seed=seed
    )
