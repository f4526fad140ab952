"""`vitctl predict` and `vitctl inspect`: weights applied to given images."""

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TextIO

import typer

from vitctl.cli.flags import MORE, Flags, Set, check_flags, image_recipe, overrides_of, takes_flags
from vitctl.system.files import atomic_write, check_free
from vitctl.system.text import count_text, one_line, typed

if TYPE_CHECKING:
    from vitctl.jobs.inspection import Row
    from vitctl.jobs.predict import Prediction

Format = Literal["table", "csv", "jsonl"]
CSV_HEADER = ("image", "rank", "class", "probability", "error")
_WIDEST_NAME = 40  # a longer name gets a separate line
_NAMES_MEASURED = 1000


@takes_flags
def predict(
    *,
    images: Annotated[
        list[str],
        typer.Argument(
            metavar="IMAGES",
            help="Images, folders, patterns, https addresses or shards (FOLDER:SPLIT); - reads a list from "
            "standard input",
        ),
    ],
    top: Annotated[int, typer.Option("--top", help="Number of classes to print per image", min=1)] = 5,
    threshold: Annotated[
        float,
        typer.Option(
            "--threshold",
            help="Hide classes below this probability, 0 to 1",
            min=0,
            max=1,
            rich_help_panel=MORE,
        ),
    ] = 0.0,
    format_: Annotated[
        Format,
        typer.Option("--format", help="table, csv or jsonl"),
    ] = "table",
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Write the predictions to this .csv or .jsonl file"),
    ] = None,
    features: Annotated[
        Path | None,
        typer.Option(
            "--features",
            help="Also write features, names and SHA-256 of all images to this .safetensors",
            rich_help_panel=MORE,
        ),
    ] = None,
    split: Annotated[
        str,
        typer.Option(
            "--split",
            help="Split to use, if IMAGES are shards",
            rich_help_panel=MORE,
        ),
    ] = "",
    strict: Annotated[
        bool,
        typer.Option("--strict", help="Exit with code 2 if any image cannot be used", rich_help_panel=MORE),
    ] = False,
    flags: Flags,
    set_: Set = None,
) -> None:
    """Predict the classes of images.

    --from also takes an exported .onnx file. Preprocessing and class names come with the weights.

    For example: vitctl predict photos/ --from RUN
                 vitctl predict photos/ --from RUN --top 1 -o classes.csv
    Guide: docs/own-data.md
    """
    starting: AbstractContextManager[None] = nullcontext()
    if sys.stderr.isatty():  # standard output is for the predictions
        from vitctl.cli.show.console import PlainConsole, waiting

        starting = waiting("starting", PlainConsole(stderr=True))
    with starting:
        from vitctl.data.source.splits import ROLES, TRAIN
        from vitctl.jobs.inputs.checks import was_trained_on
        from vitctl.jobs.inputs.given_images import find_images, place_of, some_names
        from vitctl.jobs.predict import predict as predictions
        from vitctl.recipe.schema import Evaluate

    if out is not None:
        format_ = _format_of(out, format_)
        check_free("--out", out, [path for one in images if (path := Path(one)).is_file()])

    def note(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    recipe = image_recipe("predict", flags, set_).recipe
    assert isinstance(recipe, Evaluate)
    missing: list[str] = []
    sources = find_images(
        images, place_of(recipe, images), split=split, stdin=sys.stdin.buffer, note=note, missing=missing
    )
    total = sum(map(len, sources))
    if "://" in recipe.weights.source:
        from vitctl.cli.show.console import fetch_weights

        fetch_weights(recipe.weights.source, on_stderr=True)
    batches = predictions(recipe, sources, top=top, threshold=threshold, features=features, note=note)
    names = some_names(sources, _NAMES_MEASURED)
    if out is None:
        errors, right = _print_predictions(batches, format_, names, total, sys.stdout)
    else:
        out.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(out) as aside, aside.open("w", encoding="utf-8", errors="backslashreplace") as file:
            errors, right = _print_predictions(batches, format_, names, total, file)
        note(f"predictions of {count_text(total, 'image')}: {out}")
    source = recipe.weights.source
    weights = f" --from {typed(source)}" * (source != "newest")
    then = f"export{weights} --to onnx"
    if right.total():
        note(_accuracy_line(right[True], right.total()))
    if right.total() == total:  # `evaluate` refuses images of other classes, and broken ones
        folders = {one.name.lower() for one in Path(images[0]).glob("*") if len(images) == 1 and one.is_dir()}
        chosen = TRAIN if folders and not folders & {*ROLES} else ""
        chosen = split if split.partition("[")[0] in folders else chosen
        place = f"{typed(images[0])} --split {typed(chosen)}" if chosen else "DATA"
        is_trained = chosen == TRAIN and not split and was_trained_on(source, images[0])
        then = f"evaluate{weights}" + f" --data {place}" * (not is_trained)  # else its held-out images
    if errors:
        reasons = ", ".join(f"{count:,} {one_line(reason)}" for reason, count in errors.most_common())
        note(f"{errors.total():,} of {total:,} images cannot be used: {reasons}")
    if features is not None:
        note(f"features of {count_text(total - errors.total(), 'image')}: {features}")
    for text in missing:
        note(f"vitctl: {text}")
    if missing or (strict and errors) or errors.total() == total:
        raise typer.Exit(2)
    if format_ == "table" and not source.endswith(".onnx"):
        note(f"\nnext: vitctl {then}")


def _format_of(out: Path, format_: Format) -> Format:
    """Return the format that the name of a file asks for."""
    from vitctl.errors import RecipeError, refuse

    endings: dict[str, Format] = {".csv": "csv", ".jsonl": "jsonl"}
    found = endings.get(out.suffix.lower())
    refuse(
        RecipeError,
        (
            found is None or out.is_dir(),
            f"--out {out}",
            "should be the name of a .csv or .jsonl file",
        ),
        (
            format_ not in ("table", found),
            f"--format {format_}",
            f"--out {out} is {found}",
            "leave one of them out",
        ),
    )
    return found or format_


def _accuracy_line(correct: int, total: int) -> str:
    """Return the accuracy on labelled images."""
    from vitctl.engine.metrics import interval_text, wilson

    counts = f"{correct:,} of {count_text(total, 'labelled image')}"
    return f"accuracy {correct / total:.2%} ({counts})  95 % interval {interval_text(wilson(correct, total))}"


def _print_predictions(
    batches: "Iterable[Sequence[Prediction]]", format_: Format, names: Sequence[str], total: int, to: TextIO
) -> tuple[Counter[str], Counter[bool]]:
    """Print predictions batch by batch, so that they can be piped.

    Args:
        names: some of the images, for the width of the table's first column.
        total: number of images.
        to: standard output, or a file.

    Returns:
        how many images had which error, and how many answers to labelled images are right and wrong.

    """
    from vitctl.system.files import csv_text

    width = max(len("image"), min(_WIDEST_NAME, max((_width(name) for name in names), default=0)))
    header = {"table": f"{'image':{width}}  probability  class\n", "csv": csv_text([CSV_HEADER]), "jsonl": ""}
    text = header[format_]
    written: dict[str, Callable[[Prediction], str]] = {
        "table": lambda prediction: _table_lines(prediction, width),
        "csv": lambda prediction: csv_text(_csv_rows(prediction)),
        "jsonl": lambda prediction: f"{prediction.json()}\n",
    }
    errors, right = Counter[str](), Counter[bool]()
    for batch in _with_bar(batches, total, to):
        errors.update(prediction.error for prediction in batch if prediction.error)
        right.update(prediction.is_right for prediction in batch if prediction.is_right is not None)
        to.write(text + "".join(map(written[format_], batch)))
        to.flush()
        text = ""
    return errors, right


def _with_bar(
    batches: "Iterable[Sequence[Prediction]]", total: int, to: TextIO
) -> "Iterator[Sequence[Prediction]]":
    """Show a progress bar, unless the terminal shows the predictions themselves."""
    if not sys.stderr.isatty() or to.isatty():
        yield from batches
        return
    from vitctl.cli.show.console import PlainConsole, counting

    with counting("predicting", total, PlainConsole(stderr=True)) as done:
        for batch in batches:
            done(len(batch))
            yield batch


def _width(name: str) -> int:
    from rich.cells import cell_len

    return cell_len(one_line(name))


def _table_lines(prediction: "Prediction", width: int) -> str:
    """Return the lines of an image; its name is printed once, above them if too long for its column."""
    name = one_line(prediction.name)
    above, name = (f"{name}\n", "") if _width(name) > width else ("", name)
    rows = [f"{probability:>11.2%}  {one_line(label)}" for label, probability in prediction.classes]
    if prediction.error:
        rows = [f"{'-':>11}  cannot be used: {one_line(prediction.error)}"]
    rows = rows or [f"{'-':>11}"]
    names = [name + " " * (width - _width(name)), *[" " * width] * (len(rows) - 1)]
    return above + "".join(f"{first}  {row}\n" for first, row in zip(names, rows, strict=True))


def _csv_rows(prediction: "Prediction") -> list[Sequence[object]]:
    if not prediction.classes:
        return [(prediction.name, "", "", "", prediction.error)]
    return [(prediction.name, rank, label, p, "") for rank, (label, p) in enumerate(prediction.classes, 1)]


@takes_flags
def inspect(
    *,
    images: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="IMAGES", help="Images as for predict; or name a split with --data or --dataset"
        ),
    ] = None,
    from_: Annotated[
        list[str] | None,
        typer.Option(
            "--from",
            help="Run folder, checkpoint, weights file or address; repeat to compare side by side; default: "
            "newest finished run",
        ),
    ] = None,
    flags: Flags,
    num_images: Annotated[
        int, typer.Option("--num-images", help="Number of images, chosen at random", min=1, max=10_000)
    ] = 128,
    seed: Annotated[int, typer.Option("--seed", help="Random seed of the sample", min=0)] = 0,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for figures and numbers")] = Path(
        "inspect"
    ),
    set_: Set = None,
) -> None:
    """Draw filters, position embeddings and attention (Section 4.5).

    Writes each figure as PNG and SVG, and inspect.json.

    For example: vitctl inspect --from RUN photo.jpg --out figures
    Guide: docs/own-data.md
    """
    from vitctl.cli.run_job import fitted
    from vitctl.cli.show.console import fetch_weights, progress_bar, waiting
    from vitctl.errors import RecipeError, writing

    check_free("--out", out, ())
    with waiting("starting"):
        from vitctl.jobs.inspection import inspect as draw
        from vitctl.recipe.load import Override, load_recipe
        from vitctl.recipe.schema import Evaluate

    sources = from_ or []
    check_flags({"--from": ("weights.source", "")} if "" in sources else {})
    if images and (named := [flag for flag in ("--data", "--dataset", "--split") if flag in flags]):
        raise RecipeError(f"{images[0]} and {named[0]}", "both name images", "leave one of them out")
    overrides = [Override("machine.precision", "float32", "vitctl inspect"), *overrides_of(flags, set_)]
    overrides += [Override("weights.source", source, "--from") for source in sources[:1]]
    loaded = load_recipe("evaluate", overrides, job="evaluate")
    recipe = (loaded if images else fitted(loaded, with_timeout=False)).recipe
    assert isinstance(recipe, Evaluate)
    for source in sources:
        if "://" in source:
            fetch_weights(source)
    with writing(out), progress_bar("reading images") as progress:
        rows = draw(
            recipe,
            sources or (recipe.weights.source,),
            images or (),
            out,
            num_images=num_images,
            seed=seed,
            done=progress,
        )
    _print_figures(rows, out, (sources or [recipe.weights.source])[0])


def _print_figures(rows: "Sequence[Row]", out: Path, source: str) -> None:
    from vitctl.cli.show.console import say, show_table
    from vitctl.engine.journal import RECIPE, run_of
    from vitctl.jobs.inspection import NUMBERS

    for name in dict.fromkeys(row.weights for row in rows):
        parts = [(row.part.replace("_", " "), row.text) for row in rows if row.weights == name]
        show_table((name, ""), parts, left=None)
    figures = len({file.with_suffix("") for row in rows for file in row.files})
    run = run_of(Path(source))
    shown = f"`vitctl report {typed(run)}` shows those of --out {typed(run / 'inspect')}"
    text = f"; {shown}" if (run / RECIPE).is_file() else ""
    say(f"{count_text(figures, 'figure')}, each as .png and .svg, and {NUMBERS} in {typed(out)}{text}")
