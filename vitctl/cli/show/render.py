"""Output for the user: progress on a terminal, plain lines elsewhere, and results as tables."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from rich.console import Console, Group, RenderableType
from rich.control import Control
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.segment import ControlType
from rich.table import Table
from rich.text import Text

from vitctl.cli.show.console import PlainConsole
from vitctl.engine.metrics import verdict
from vitctl.engine.run_files import RESULT
from vitctl.system.screen import raise_output_error

CONSOLE = PlainConsole(highlight=False)


class Screen:
    """Shows log records while a job runs: on a terminal a view redrawn every second, elsewhere one line per
    record.

    The view has a bar with steps, time and time left, and below it loss, learning rate, images/s and the last
    accuracy.
    """

    def __init__(self, run_dir: Path, console: Console = CONSOLE) -> None:
        self.console = console
        self.began = time.monotonic()
        self.name, self.waiting_for = "", "starting"  # what is trained, what the run waits for
        self.training: Mapping[str, Any] = {}  # its newest record
        self.image_pass: Mapping[
            str, Any
        ] = {}  # a pass over images; the next record of another kind is its result
        self.accuracy = ""
        self.has_unprinted = False  # whether the view shows numbers that were not printed as a line
        self.changed = self.latest = 0.0
        self.printed = -_SILENT_SECONDS  # when a line of a step was last printed, by `time.monotonic()`
        self.live: Live | None = None
        if console.is_terminal:
            self.live = Live(get_renderable=self.view, console=console, refresh_per_second=1, transient=True)
        console.print(f"run folder: {escape(str(run_dir))}", soft_wrap=True)

    def __enter__(self) -> "Screen":
        if self.live is not None:
            self.live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.live is not None:
            with suppress(
                Exception
            ):  # the job has finished: an error of the display must not lose its result
                self.live.stop()
                if self.has_unprinted:
                    self._print(self._last_line())

    def report(self, record: Mapping[str, Any]) -> None:
        """Show one log record.

        Raises:
            OSError: the screen cannot be written; raised once, later output is dropped.
        """
        self._show(record)
        raise_output_error()

    def report_foreign(self, record: Mapping[str, Any]) -> None:
        """Show a record that was read from a file; nothing of one that lacks what its kind has, or has it of
        another type.
        """
        trial = copy(self)
        try:
            _line(record)
            trial._update(record)
            trial.view()
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
            return
        self.report(record)

    def _show(self, record: Mapping[str, Any]) -> None:
        if self.live is not None:
            self._update(record)
            if record["kind"] in ("progress", "train", "now"):
                if record["kind"] == "train" and record["step"] == record["total_steps"]:
                    self._print(self._last_line())
                    self.training, self.has_unprinted = {}, False
                return
        if "loss" in record:  # a logged step, or the current one, of which some are shown
            if record["kind"] == "now" and time.monotonic() - self.printed < _SILENT_SECONDS:
                return
            self.printed = time.monotonic()
        if text := _line(record):
            self._print(
                (f"{record['task']}: " if "task" in record and record["kind"] != "task" else "") + text
            )

    def view(self) -> RenderableType:
        """The current view: two lines, or three during a pass over images while training."""
        since = time.monotonic() - self.changed
        lines: list[RenderableType] = []
        if self.training:
            done, total = self.training["step"], self.training["total_steps"]
            lines.append(self._bar(self.name, done, total, _seconds_left(self.training), since))
            lines.append(Text(self._numbers(), no_wrap=True, overflow="ellipsis"))
        if self.image_pass:
            done, total = self.image_pass["done"], self.image_pass["total"]
            spent = time.monotonic() - self.image_pass["began"] - since
            left = (total - done) * spent / done if done and spent > 0 else None
            lines.append(self._bar(self.image_pass["what"], done, total, left, since))
        elif self.waiting_for:
            lines.append(Text(f"{self.waiting_for}  {clock(time.monotonic() - self.began)}", no_wrap=True))
        return Group(*lines)

    def _print(self, text: str) -> None:
        self.console.print(escape(text), soft_wrap=True)

    def _update(self, record: Mapping[str, Any]) -> None:
        """Update the state of the view from a record."""
        if record["kind"] == "now" and 0 < self.latest - record.get("time", self.latest) < _OVERTAKEN_SECONDS:
            return  # the log is newer; a larger difference means that the clock was set back
        self.latest = record.get("time", self.latest)
        if "what" in record:
            own = self.image_pass.get("what") == record["what"] and self.image_pass["done"] <= record["done"]
            self.image_pass = {**record, "began": self.image_pass["began"] if own else time.monotonic()}
            self.changed, self.waiting_for = time.monotonic(), ""
            return
        self.image_pass = {}
        if "total_steps" in record and record["kind"] in ("train", "now"):
            self.name, self.training, self.has_unprinted = (
                record.get("task", "training"),
                record,
                "loss" in record,
            )
            self.changed, self.waiting_for = time.monotonic(), "" if "loss" in record else "the first images"
        elif record["kind"] == "now":
            self.waiting_for = record["text"]
        elif "accuracy" in record and record.get("step"):
            self.accuracy = f"accuracy {record['accuracy']:.2%} at {record['step']:,}"

    def _bar(self, name: str, done: int, total: int, left: float | None, since: float) -> Table:
        row = Table.grid(padding=(0, 2, 0, 0), expand=True)
        row.add_column(max_width=_SHORT_NAME, no_wrap=True, overflow="ellipsis")
        row.add_column(ratio=1)
        for _ in range(3):
            row.add_column(justify="right", no_wrap=True)
        times = "left " + (clock(max(0.0, left - since)) if left is not None else "-:--")
        bar = ProgressBar(total=total, completed=done)
        row.add_row(escape(name), bar, f"{done:,}/{total:,}", clock(time.monotonic() - self.began), times)
        return row

    def _numbers(self) -> str:
        """Numbers of the training, the most important first: a narrow terminal cuts off the rest."""
        now = self.training
        if "loss" not in now:
            return self.accuracy
        parts = [
            f"loss {now['loss']:.4f}",
            f"lr {now['lr']:.3g}",
            f"{_rate(now['images_per_second'])} images/s",
        ]
        parts += [self.accuracy] if self.accuracy else []
        parts += [f"bad {now['num_bad']}"] if now["num_bad"] else []
        parts += [f"data-wait {now['data_wait']:.0%}"]
        parts += [f"MFU {now['mfu']:.0%}"] if now.get("mfu") else []
        return "  ".join(parts)

    def _last_line(self) -> str:
        """The line that is printed when the progress bar of a training ends."""
        now = self.training
        name = f"{self.name}: " if "task" in now else ""
        took = clock(time.monotonic() - self.began)
        return f"{name}step {now['step']:,}/{now['total_steps']:,}  loss {now['loss']:.4f}  lr {now['lr']:.3g}  after {took}"


@contextmanager
def waiting(text: str, console: Console = CONSOLE) -> Iterator[None]:
    """Show a line on a terminal during work before there is a `Screen`.

    The cursor stays visible, also after an error.
    """
    if not console.is_terminal:
        yield
        return
    console.print(escape(f"{text} ..."), end="\r")
    try:
        yield
    finally:
        console.control(Control((ControlType.ERASE_IN_LINE, 2)))


def _seconds_left(record: Mapping[str, Any]) -> float | None:
    """Estimated time left of a training, from its images/s; None before the first."""
    rate, step = record.get("images_per_second"), record["step"]
    return (record["total_steps"] - step) * record["samples"] / step / rate if rate and step else None


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def clock(seconds: float) -> str:
    """1:02, 1:02:03 or 1 d 02:03."""
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    if hours >= 24:
        return f"{hours // 24} d {hours % 24:02d}:{minute:02d}"
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


_SHORT_NAME = 22
_OVERTAKEN_SECONDS = 5.0
_SILENT_SECONDS = 30.0  # without a terminal: at most this long between two lines of a training that computes


def _numbers(record: Mapping[str, Any]) -> str:
    return (
        f"loss {record['loss']:.4f}  {record['images_per_second']:,.0f} images/s  data-wait "
        f"{record['data_wait']:.0%}"
        + (f"  MFU {record['mfu']:.0%}" if record.get("mfu") else "")
        + (f"  bad {record['num_bad']}" if record["num_bad"] else "")
    )  # fmt: skip


def _line(record: Mapping[str, Any]) -> str:
    """A record as one plain line; "" for records that are not shown."""
    match record.get("kind", ""):
        case "train" | "now" if "loss" in record:
            left = _seconds_left(record) or 0.0
            epoch = f"epoch {record['epoch']:.2f}  " if "epoch" in record else ""
            return (
                f"step {record['step']}/{record['total_steps']}  {epoch}lr {record['lr']:.3g}  "
                f"{_numbers(record)}  left {left:,.0f} s"
            )
        case "evaluate" if "labels" in record:
            return f"{record['labels']} labels: {_hits(record)}"
        case "evaluate":
            return f"step {record['step']}  accuracy {record['accuracy']:.2%} ({record['correct']:,} of {record['total']:,})"
        case "progress":
            return f"{record['what']}: {record['done']:,} of {record['total']:,} images"
        case "weights":
            return f"weights: {record['path']} ({record['text']})"
        case "resume":
            return f"resuming from step {record['step']} of {record['total_steps']}"
        case "node":
            return str(record["text"])
        case "compile":
            return f"compiled in {record['seconds']:.1f} s"
        case "data":
            return f"data: {record['text']}"
        case "warning":
            return f"warning: {record['text']}"
        case "fewshot":
            at = f"step {record['step']}  " if record["step"] else ""
            return f"{at}{record['shots']}-shot accuracy {record['accuracy']:.2%}"
        case "setting":
            return f"lr {record['lr']:g}, {record['total_steps']:,} steps: mean on the validation images {record['accuracy']:.2%}"
        case "task":
            return f"{record['task']}  accuracy {record['accuracy']:.2%}"
        case "export":
            return (
                f"{record['path']}: verified, largest difference {record['difference']:.1e} of the logits' "
                f"deviation" + "".join(f"\n  note: {note}" for note in record["notes"])
            )
        case _:
            return ""


def show_result(result: Mapping[str, Any], run_dir: Path) -> None:
    """Print the result of a job: its numbers, its files, and the path of result.json."""
    metrics = result["metrics"]
    if result["job"] == "vtab":
        beside = "; to the right, the paper's own of the same tasks (Table 9)" if metrics["paper"] else ""
        show_table(*_vtab_rows(metrics), title=metrics["protocol"] + beside)
        for name, row in metrics["tasks"].items():
            if row["copy"]:
                CONSOLE.print(escape(f"note: {name}: {row['copy']}"), soft_wrap=True)
    elif result["job"] == "fewshot":
        show_table(*_fewshot_rows(metrics))
    elif result["job"] == "evaluate":
        show_table(*_label_rows(result))
        _print_baselines(metrics)
    elif "accuracy" in metrics:
        if "sweep" in metrics:
            split, lr = result["provenance"]["sweep"]["split"], result["provenance"]["lr"]
            tried = [
                (rate, f"{value:.2%}", "chosen" * (float(rate) == lr))
                for rate, value in metrics["sweep"].items()
            ]
            show_table(("lr", f"accuracy on {split}", ""), tried)
        if "by_seed" in metrics:
            show_table(
                ("seed", "accuracy"),
                [(seed, f"{v['accuracy']:.2%}") for seed, v in metrics["by_seed"].items()],
            )
            runs, images = len(metrics["by_seed"]), f"{metrics['total']:,} images"
            CONSOLE.print(
                f"accuracy {metrics['accuracy']:.2%} ± {metrics['std']:.2%} (mean of {runs} seeds, "
                f"{images} each)"
            )
        else:
            CONSOLE.print(
                f"accuracy {metrics['accuracy']:.2%} ({metrics['correct']:,} of {metrics['total']:,})"
            )
        if "last" in metrics:
            last, step = metrics["last"], result["provenance"]["weights_step"]
            CONSOLE.print(
                f"of the best checkpoint, step {step}; the last, step {last['step']}: {last['accuracy']:.2%}"
            )
        _print_baselines(metrics)
    for kind, path in result.get("files", {}).items():
        CONSOLE.print(escape(f"{kind}: {path}"), soft_wrap=True)
    CONSOLE.print(escape(f"result: {run_dir / RESULT}"), soft_wrap=True)


def _print_baselines(metrics: Mapping[str, Any]) -> None:
    """Print the baselines of an accuracy, and a warning where it is no better than a constant prediction."""
    if "majority_class" not in metrics:
        return
    mean = (
        f"mean over classes {metrics['mean_per_class']:.2%}, "
        if metrics.get("mean_per_class") is not None
        else ""
    )
    majority = metrics["majority_class"]
    CONSOLE.print(
        f"  {mean}majority class alone {majority:.2%}, chance {metrics['chance']:.2%}", soft_wrap=True
    )
    if warning := verdict(metrics):
        CONSOLE.print(f"warning: {warning}", style="bold yellow", soft_wrap=True)


def _hits(numbers: Mapping[str, Any]) -> str:
    return (
        f"accuracy {numbers['accuracy']:.2%} ({numbers['correct']:,} of {numbers['total']:,}), "
        f"top-5 {numbers['top5_accuracy']:.2%}"
    )


def _label_rows(result: Mapping[str, Any]) -> tuple[Sequence[str], list[Sequence[str]]]:
    """A line for each set of labels that the predictions were compared with."""
    sets = {result["provenance"]["labels"]: result["metrics"]}
    sets |= {name: numbers for name, numbers in result["metrics"].items() if isinstance(numbers, Mapping)}
    rows = [
        (
            name,
            f"{v['accuracy']:.2%}",
            f"{v['top5_accuracy']:.2%}",
            f"{v['correct']:,}",
            f"{v['total']:,}",
            _share(v.get("majority_class")),
        )
        for name, v in sets.items()
    ]
    return ("labels", "accuracy", "top-5", "correct", "images", "majority"), list(rows)


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.2%}"


def _fewshot_rows(metrics: Mapping[str, Any]) -> tuple[Sequence[str], list[Sequence[str]]]:
    """Accuracy of each data set and number of shots, and the means over several data sets."""
    sets, beside = metrics["data_sets"], metrics.get("baselines", {})
    majority = {name: _share(beside.get(name, {}).get("majority_class")) for name in sets}
    rows: list[Sequence[str]] = [
        (
            *(name, shots, f"{v['accuracy']:.2%}", f"{v['std']:.2%}"),
            *(_share(v.get("mean_per_class")), majority[name], f"{v['l2']:g}"),
        )
        for name, table in sets.items()
        for shots, v in table.items()
    ]
    if len(sets) > 1:
        rows += [
            (f"mean of {len(sets)}", shots, f"{v:.2%}", "", "", "", "")
            for shots, v in metrics["accuracy"].items()
        ]
    return ("data set", "shots", "accuracy", "std", "per class", "majority", "l2"), rows


def _vtab_rows(metrics: Mapping[str, Any]) -> tuple[Sequence[str], list[Sequence[str]]]:
    """Accuracy of each task, group and all, and the paper's of the same tasks; 80 columns have no space for
    the deviation of both.
    """
    paper = metrics["paper"]
    has_seeds = any(len(row["by_seed"]) > 1 for row in metrics["tasks"].values())

    def second(row: Mapping[str, Any]) -> str:
        return f"{row['std']:.2%}" if has_seeds else _share(row.get("mean_per_class"))

    rows: list[Sequence[str]] = [
        (
            *(name, f"{row['mean']:.2%}", second(row), _share(row.get("majority_class"))),
            *_percent(paper, "tasks", name),
        )
        for name, row in metrics["tasks"].items()
    ]
    rows += [
        (f"group {name}", f"{value:.2%}", "", "", *_percent(paper, "groups", name))
        for name, value in metrics["groups"].items()
    ]
    whole = [f"{column['mean']:.2%}" for column in paper.values()]
    rows.append(
        (metrics["label"], f"{metrics['mean']:.2%}", second(metrics) if has_seeds else "", "", *whole)
    )
    rows.append(("mean of the groups", f"{metrics['mean_of_groups']:.2%}", "", ""))
    return ("task", "accuracy", "std" if has_seeds else "per class", "majority", *paper), rows


def _percent(paper: Mapping[str, Any], part: str, name: str) -> list[str]:
    return [f"{column[part][name]:.1%}" for column in paper.values()]


def show_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], *, title: str = "", left: Sequence[str] | None = ()
) -> None:
    """A table whose first column and those named in `left` are text, all of them when it is None; the others
    are numbers.
    """
    if title:
        CONSOLE.print(escape(title), soft_wrap=True)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for i, name in enumerate(header):
        side: Literal["left", "right"] = "left" if i == 0 or left is None or name in left else "right"
        whole = side == "right" or (
            i == 0 and all(len(str(row[0])) <= _SHORT_NAME for row in rows)
        )  # to be copied
        table.add_column(escape(name), justify=side, overflow="fold", no_wrap=whole)
    for row in rows:
        table.add_row(*(escape(str(cell)) for cell in row))
    CONSOLE.print(table)
