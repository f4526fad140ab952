"""Predictions as a table, as CSV or as JSON lines, printed batch by batch so that they can be piped."""

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from vitctl.cli.show.console import PlainConsole
from vitctl.errors import RecipeError
from vitctl.jobs.predict import Prediction
from vitctl.system.tables import csv_text
from vitctl.system.text import escaped_json, one_line

_WIDEST = 40  # column of names; a longer name has a line of its own
CSV_HEADER = ("image", "rank", "class", "probability", "error")
Lines = Callable[[Sequence[Prediction]], str]


def show_predictions(
    batches: Iterable[Sequence[Prediction]], format_: str, names: Sequence[str], total: int
) -> Counter[str]:
    """Print predictions on standard output as they come, flushed after each batch, with progress on a
    terminal's standard error.

    Args:
        batches: of predictions.
        format_: "table", "csv" or "jsonl".
        names: some of the images, for the width of the table's first column.
        total: images.

    Returns:
        how many images had which error; their sum is the number of images that could not be used.

    Raises:
        RecipeError: there is no such format.
        BrokenPipeError: nobody reads the output any more.
    """
    header, lines = _format(format_, names)
    errors: Counter[str] = Counter()
    for number, batch in enumerate(_with_bar(batches, total)):
        errors.update(one.error for one in batch if one.error)
        sys.stdout.write((header if number == 0 else "") + lines(batch))
        sys.stdout.flush()
    return errors


def show_errors(errors: Counter[str], total: int) -> None:
    """One line on standard error with the number of images that could not be used, and the reasons; nothing
    without any.
    """
    if errors:
        reasons = ", ".join(f"{count:,} {one_line(reason)}" for reason, count in errors.most_common())
        print(f"{errors.total():,} of {total:,} images cannot be used: {reasons}", file=sys.stderr)


def _with_bar(batches: Iterable[Sequence[Prediction]], total: int) -> Iterator[Sequence[Prediction]]:
    """A bar where the predictions go elsewhere; on the terminal they are the progress themselves."""
    console: Console = PlainConsole(stderr=True)
    if not console.is_terminal or sys.stdout.isatty():
        yield from batches
        return
    columns = (TextColumn("predicting"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    progress = Progress(*columns, console=console, transient=True, redirect_stdout=False)
    task = progress.add_task("", total=total)
    try:
        for batch in batches:
            progress.start()  # after loader processes were forked
            progress.advance(task, len(batch))
            yield batch
    finally:
        progress.stop()


def _format(format_: str, names: Sequence[str]) -> tuple[str, Lines]:
    """The header, and what makes the lines of a batch."""
    if format_ == "csv":
        return csv_text([CSV_HEADER]), _csv
    if format_ == "jsonl":
        return "", _jsonl
    if format_ != "table":
        raise RecipeError(f"--format {format_}: choose table, csv or jsonl")
    width = min(_WIDEST, max([cell_len(one_line(name)) for name in names], default=0))
    width = max(width, len("image"))
    return f"{'image':{width}}  probability  class\n", lambda batch: "".join(
        _block(one, width) for one in batch
    )


def _block(one: Prediction, width: int) -> str:
    """The lines of an image: its name stands once, above them where it is too long for its column."""
    name = one_line(one.name)
    above, name = (f"{name}\n", "") if cell_len(name) > width else ("", name)
    if one.error:
        rows = [f"{'-':>11}  cannot be used: {one_line(one.error)}"]
    else:
        rows = [f"{probability:>11.2%}  {one_line(label)}" for label, probability in one.classes] or [
            f"{'-':>11}"
        ]
    firsts = [name + " " * (width - cell_len(name)), *[" " * width] * (len(rows) - 1)]
    return above + "".join(f"{first}  {row}\n" for first, row in zip(firsts, rows, strict=True))


def _csv(batch: Sequence[Prediction]) -> str:
    rows: list[Sequence[object]] = []
    for one in batch:
        rows += [(one.name, rank, label, p, "") for rank, (label, p) in enumerate(one.classes, 1)]
        rows += [(one.name, "", "", "", one.error)] if not one.classes else []
    return csv_text(rows)


def _jsonl(batch: Sequence[Prediction]) -> str:
    return "".join(f"{escaped_json(json.dumps(_record(one), ensure_ascii=False))}\n" for one in batch)


def _record(one: Prediction) -> dict[str, object]:
    classes = [{"class": label, "probability": p} for label, p in one.classes]
    error = {"error": one.error} if one.error else {}
    return {"image": one.name, "classes": classes, **error}
