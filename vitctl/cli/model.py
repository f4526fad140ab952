"""`vitctl fewshot`, `vtab`, `evaluate`, `export`."""

from pathlib import Path
from typing import Annotated

import typer

from vitctl.cli import completion
from vitctl.cli.common import (
    Dataset,
    From,
    Images,
    Model,
    Out,
    Precision,
    Processes,
    RecipeName,
    Res,
    Set,
    Slurm,
    WhichWeights,
    run_job,
    schedule_flags,
    weights_flags,
)
from vitctl.export.export_formats import FORMATS, formats_in_words


def _numbers(flag: str, text: str) -> tuple[int, ...]:
    from vitctl.errors import RecipeError

    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise RecipeError(
            f"{flag} {text}: write numbers with commas between them, e.g. {flag} 1,5,10,25"
        ) from None


def fewshot(
    from_: From = None,
    weights: WhichWeights = None,
    shots: Annotated[
        str | None, typer.Option("--shots", help="Training images per class: 5 or 1,5,10,25.")
    ] = None,
    data: Images = None,
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
    """Few-shot accuracy: a linear classifier on frozen features, in closed form.

    For example: vitctl fewshot --shots 5
    """
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
        list[str] | None,
        typer.Option("--task", help="Only this task. Repeatable.", autocompletion=completion.tasks),
    ] = None,
    data: Images = None,
    res: Res = None,
    steps: Annotated[
        int | None,
        typer.Option("--steps", help="Length of each run in updates, with no sweep over schedules."),
    ] = None,
    sweep: Annotated[
        bool,
        typer.Option(
            "--sweep/--no-sweep", help="Choose learning rate and schedule on the validation images first."
        ),
    ] = True,
    light: Annotated[
        bool,
        typer.Option(
            "--light", help="A linear classifier on frozen features: a quick estimate, not the protocol."
        ),
    ] = False,
    recipe: RecipeName = "vtab",
    out: Out = None,
    set_: Set = None,
    processes: Processes = None,
    precision: Precision = None,
    slurm: Slurm = None,
) -> None:
    """VTAB-1k: fine-tune on each of 19 tasks with one setting; compare with Table 9.

    For example: vitctl vtab --suite mini
    """
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
    data: Images = None,
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
    """Compute the accuracy on a split, every image counted once.

    For example: vitctl evaluate --from RUN --dataset pets
    """
    from vitctl.data.datasets.catalog import find_data_set

    if dataset and not data:
        row = find_data_set(dataset)
        split = split or (
            "test" if "test" in row.sizes else "validation" if "validation" in row.sizes else None
        )
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


def export(
    from_: From = None,
    to: Annotated[
        list[str] | None,
        typer.Option(
            "--to",
            help=f"{formats_in_words()}. Repeatable.",
            autocompletion=completion.one_of(FORMATS),
        ),
    ] = None,
    include_preprocess: Annotated[
        bool,
        typer.Option(
            "--include-preprocess",
            help="onnx, pt2: resize and crop inside the graph; input: uint8 [B, H, W, 3].",
        ),
    ] = False,
    features: Annotated[
        bool, typer.Option("--features", help="onnx, pt2: also give the representation before the head.")
    ] = False,
    fp16: Annotated[bool, typer.Option("--fp16", help="onnx: in float16; needs --check-data.")] = False,
    int8: Annotated[bool, typer.Option("--int8", help="onnx: in int8; needs --check-data.")] = False,
    check_data: Annotated[
        str | None,
        typer.Option(
            "--check-data", help="Shards of images; a file must keep the accuracy of the model on them."
        ),
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
        Path | None,
        typer.Option("--out", "-o", help="Run folder, or with one --to the weights file to write."),
    ] = None,
    model: Model = None,
    set_: Set = None,
) -> None:
    """Export weights for other programs, each file verified against the model.

    For example: vitctl export --from RUN --to onnx
    """
    from vitctl.errors import RecipeError

    fitting = [row.name for row in FORMATS.values() if out and out.suffix == row.ending]
    if fitting and to and not set(to) & set(fitting):
        raise RecipeError(
            f"--out {out}: a {out.suffix if out else ''} file is for --to {', '.join(fitting)}, not for --to {', '.join(to)}"
        )
    if fp16 and int8:
        raise RecipeError("--fp16 and --int8: a file has one precision; leave one of them out")
    flags = {
        **weights_flags(from_, weights, model),
        "--out": ("export.file", str(out) if fitting else None),
        "--to": ("export.to", to or None),
        "--include-preprocess": ("export.include_preprocess", include_preprocess or None),
        "--features": ("export.features", features or None),
        "--fp16, --int8": ("export.precision", "float16" if fp16 else "int8" if int8 else None),
        "--check-data": ("data.path", check_data),
        "--split": ("data.eval_split", split),
    }
    run_job("export", recipe, flags, set_, None if fitting else out)
