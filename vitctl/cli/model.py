"""`vitctl fewshot`, `vtab`, `evaluate`, `predict`, `inspect`, `export`."""

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
    Out,
    Precision,
    Processes,
    RecipeName,
    Res,
    Set,
    Slurm,
    WhichWeights,
    check_flags,
    run_job,
    schedule_flags,
    weights_flags,
)

if TYPE_CHECKING:
    from vitctl.recipe.schema import Evaluate

# File extensions of weights files, and the formats that use them.
WEIGHTS_FILES = {
    ".safetensors": ("safetensors", "timm", "hf", "torchvision"),
    ".npz": ("google",),
    ".onnx": ("onnx",),
    ".pt2": ("pt2",),
}


def _numbers(flag: str, text: str) -> tuple[int, ...]:
    from vitctl.errors import RecipeError

    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise RecipeError(f"{flag} {text}: write numbers with commas between them, e.g. {flag} 1,5,10,25") from None


def fewshot(
    from_: From = None,
    weights: WhichWeights = None,
    shots: Annotated[str | None, typer.Option("--shots", help="Training images per class: 5 or 1,5,10,25.")] = None,
    data: Data = None,
    dataset: Annotated[
        str | None,
        typer.Option(
            "--dataset",
            help="A known data set, or several scored together: pets,dtd,uc_merced.",
            autocompletion=completion.data_sets,
        ),
    ] = None,
    model: Model = None,
    res: Res = None,
    recipe: RecipeName = "fewshot",
    out: Out = None,
    set_: Set = None,
    processes: Processes = None,
    precision: Precision = None,
    slurm: Slurm = None,
) -> None:
    """Few-shot accuracy: a linear classifier on frozen features, in closed form. For example: vitctl fewshot --shots 5"""
    several = tuple(dataset.split(",")) if dataset and "," in dataset else None
    flags = {
        **weights_flags(from_, weights, model),
        "--shots": ("fewshot.shots", _numbers("--shots", shots) if shots else None),
        "--data": ("data.path", data),
        "--dataset": ("data.datasets", several) if several else ("data.dataset", dataset),
        "--res": ("data.image_size", res),
        "--processes": ("machine.processes", processes),
        "--precision": ("machine.precision", precision),
    }
    run_job("fewshot", recipe, flags, set_, out, slurm=slurm)


def vtab(
    from_: From = None,
    weights: WhichWeights = None,
    suite: Annotated[
        str | None,
        typer.Option(
            "--suite",
            help="vtab: the 19 tasks; mini: tasks that need no download.",
            autocompletion=completion.one_of(completion.SUITES),
        ),
    ] = None,
    task: Annotated[
        list[str] | None, typer.Option("--task", help="Only this task. Repeatable.", autocompletion=completion.tasks)
    ] = None,
    data: Data = None,
    res: Res = None,
    steps: Annotated[
        int | None, typer.Option("--steps", help="Length of each run in updates, with no sweep over schedules.")
    ] = None,
    sweep: Annotated[
        bool,
        typer.Option("--sweep/--no-sweep", help="Choose learning rate and schedule on the validation images first."),
    ] = True,
    light: Annotated[
        bool,
        typer.Option("--light", help="A linear classifier on frozen features: a quick estimate, not the protocol."),
    ] = False,
    recipe: RecipeName = "vtab",
    out: Out = None,
    set_: Set = None,
    processes: Processes = None,
    precision: Precision = None,
    slurm: Slurm = None,
) -> None:
    """VTAB-1k: fine-tune on each of 19 tasks with one setting; compare with Table 9. For example: vitctl vtab --suite mini"""
    from vitctl.recipe.load import recipe_names

    own = f"vtab_{suite}"
    flags = {
        "--from": ("weights.source", from_),
        "--weights": ("weights.which", weights),
        "--suite": ("vtab.suite", suite),
        "--task": ("vtab.tasks", task or None),
        "--data": ("data.path", data),
        "--res": ("data.image_size", res),
        **schedule_flags(set_, steps=steps),
        "--no-sweep": ("vtab.sweep_lrs", None if sweep else ()),
        "--steps, --no-sweep": ("vtab.sweep_steps", () if steps or not sweep else None),
        "--light": ("vtab.light", light or None),
        "--processes": ("machine.processes", processes),
        "--precision": ("machine.precision", precision),
    }
    name = own if recipe == "vtab" and own in recipe_names() else recipe
    run_job("vtab", name, flags, set_, out, slurm=slurm)


def evaluate(
    from_: From = None,
    weights: WhichWeights = None,
    data: Data = None,
    dataset: Dataset = None,
    split: Annotated[
        str | None,
        typer.Option(
            "--split",
            help="Split to score, e.g. test or train[:10%].",
            autocompletion=completion.one_of(completion.SPLITS),
        ),
    ] = None,
    labels: Annotated[
        str | None,
        typer.Option(
            "--labels",
            autocompletion=completion.one_of(completion.LABELS),
            help="original, real, objectnet or objectnet_restricted; default: those of the data set.",
        ),
    ] = None,
    model: Model = None,
    res: Res = None,
    recipe: RecipeName = "evaluate",
    out: Out = None,
    set_: Set = None,
    processes: Processes = None,
    precision: Precision = None,
) -> None:
    """Compute the accuracy on a split, every image counted once. For example: vitctl evaluate --from RUN --dataset pets"""
    from vitctl.data.datasets.catalog import find_data_set

    if dataset and not data:
        row = find_data_set(dataset)
        split = split or ("test" if "test" in row.sizes else "validation" if "validation" in row.sizes else None)
        labels = labels or ("objectnet" if row.name == "objectnet" else None)
    flags = {
        **weights_flags(from_, weights, model),
        "--data": ("data.path", data),
        "--dataset": ("data.dataset", dataset),
        "--split": ("data.eval_split", split),
        "--labels": ("evaluation.labels", labels),
        "--res": ("data.image_size", res),
        "--processes": ("machine.processes", processes),
        "--precision": ("machine.precision", precision),
    }
    run_job("evaluate", recipe, flags, set_, out)


ToPredict = Annotated[
    list[str],
    typer.Argument(
        metavar="IMAGES",
        help="Images, folders, patterns, https addresses of images, shards (FOLDER:SPLIT); - for a list on standard input.",
    ),
]
Format = Annotated[
    str,
    typer.Option(
        "--format", help="table, csv or jsonl.", autocompletion=completion.one_of(completion.PREDICTION_FORMATS)
    ),
]
SplitOfShards = Annotated[
    str | None,
    typer.Option("--split", help="Of shards: which split.", autocompletion=completion.one_of(completion.SPLITS)),
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
        float, typer.Option("--threshold", help="Leave out classes that are less probable, 0 to 1.", min=0, max=1)
    ] = 0.0,
    format_: Format = "table",
    features: Annotated[
        Path | None,
        typer.Option("--features", help="Also write features, names and SHA-256 of all images to this .safetensors."),
    ] = None,
    split: SplitOfShards = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit with code 2 when an image cannot be used; else it is only reported.")
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
    has_errors = _predict(_evaluate_recipe(flags, set_), images, split or "", format_, top, threshold, features)
    if strict and has_errors:
        raise typer.Exit(2)


def _predict(
    recipe: "Evaluate", images: list[str], split: str, format_: str, top: int, threshold: float, features: Path | None
) -> bool:
    """Predict and print; everything but the predictions goes to standard error. Returns whether an image cannot be used."""
    from vitctl.cli.show.predictions import show_errors, show_predictions
    from vitctl.jobs.inputs.images import find_images, some_names
    from vitctl.jobs.predict import predict as predictions

    def note(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    sources = find_images(images, recipe.data, split=split, stdin=sys.stdin.buffer, note=note)
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
            help="Run folder, checkpoint, weights file or address; default: the newest finished run. Repeatable: side by side.",
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
        typer.Option("--split", help="Split to take images of.", autocompletion=completion.one_of(completion.SPLITS)),
    ] = None,
    num_images: Annotated[
        int, typer.Option("--num-images", help="How many images, chosen at random.", min=1, max=10_000)
    ] = 128,
    seed: Annotated[int, typer.Option("--seed", help="Random seed of the choice.", min=0)] = 0,
    res: Res = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for pictures and numbers.")] = Path("inspect"),
    set_: Set = None,
    precision: Precision = None,
) -> None:
    """Draw what is inside a network, as in Section 4.5: filters, positions, attention distance, rollout, class token.

    Writes PNG and SVG of each picture, and inspect.json. For example: vitctl inspect --from RUN photo.jpg --out pictures
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
    run_inspect(tuple(from_ or ()), tuple(images or ()), flags, set_ or (), out, num_images=num_images, seed=seed)


def export(
    from_: From = None,
    to: Annotated[
        list[str] | None,
        typer.Option(
            "--to",
            help="onnx, pt2, safetensors, google, timm, hf or torchvision. Repeatable.",
            autocompletion=completion.one_of(completion.FORMATS),
        ),
    ] = None,
    include_preprocess: Annotated[
        bool,
        typer.Option(
            "--include-preprocess", help="onnx, pt2: resize and crop inside the graph; input: uint8 [B, H, W, 3]."
        ),
    ] = False,
    features: Annotated[
        bool, typer.Option("--features", help="onnx, pt2: also give the representation before the head.")
    ] = False,
    fp16: Annotated[bool, typer.Option("--fp16", help="onnx: in float16; needs --check-data.")] = False,
    int8: Annotated[bool, typer.Option("--int8", help="onnx: in int8; needs --check-data.")] = False,
    check_data: Annotated[
        str | None,
        typer.Option("--check-data", help="Shards of images; a file must keep the accuracy of the model on them."),
    ] = None,
    split: Annotated[
        str | None,
        typer.Option(
            "--split",
            help="Split of --check-data, e.g. test or 'test[:500]'.",
            autocompletion=completion.one_of(completion.SPLITS),
        ),
    ] = None,
    weights: WhichWeights = None,
    recipe: RecipeName = "export",
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Run folder, or with one --to the weights file to write.")
    ] = None,
    model: Model = None,
    set_: Set = None,
) -> None:
    """Export weights for other programs, each file verified against the model. For example: vitctl export --from RUN --to onnx"""
    from vitctl.errors import RecipeError

    if out and out.suffix in WEIGHTS_FILES and to and not set(to) & set(WEIGHTS_FILES[out.suffix]):
        formats = ", ".join(WEIGHTS_FILES[out.suffix])
        raise RecipeError(f"--out {out}: a {out.suffix} file is for --to {formats}, not for --to {', '.join(to)}")
    if fp16 and int8:
        raise RecipeError("--fp16 and --int8: a file has one precision; leave one of them out")
    flags = {
        **weights_flags(from_, weights, model),
        "--out": ("export.file", str(out) if out and out.suffix in WEIGHTS_FILES else None),
        "--to": ("export.to", to or None),
        "--include-preprocess": ("export.include_preprocess", include_preprocess or None),
        "--features": ("export.features", features or None),
        "--fp16, --int8": ("export.precision", "float16" if fp16 else "int8" if int8 else None),
        "--check-data": ("data.path", check_data),
        "--split": ("data.eval_split", split),
    }
    run_job("export", recipe, flags, set_, None if flags["--out"][1] else out)
