"""What a person sees: progress on a terminal, plain lines elsewhere, and results as tables."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

CONSOLE = Console(highlight=False)


class Screen:
    """Shows log records while a job runs: a bar with loss, images/s, data-wait and time left, or one line per record."""

    def __init__(self, run_dir: Path, console: Console = CONSOLE) -> None:
        self.console = console
        self.progress: Progress | None = None
        self.bars: dict[str, TaskID] = {}
        if console.is_terminal:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(bar_width=None),
                MofNCompleteColumn(),
                TextColumn("{task.fields[numbers]}"),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(elapsed_when_finished=False),
            )
            self.progress = Progress(*columns, console=console, transient=True)
        console.print(f"run folder: {escape(str(run_dir))}", soft_wrap=True)

    def __enter__(self) -> "Screen":
        if self.progress is not None:
            self.progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.progress is not None:
            self.progress.stop()

    def report(self, record: Mapping[str, Any]) -> None:
        """Show one log record."""
        name = str(record.get("task", "training"))
        if record["kind"] == "train" and self.progress is not None:
            bar = self.bars.setdefault(name, self.progress.add_task(name, total=record["total_steps"], numbers="")) \
                if name not in self.bars else self.bars[name]  # fmt: skip
            self.progress.update(bar, completed=record["step"], numbers=_numbers(record))
            if record["step"] == record["total_steps"]:
                self.progress.remove_task(self.bars.pop(name))
        elif text := _line(record):
            prefix = f"{name}: " if "task" in record and record["kind"] != "task" else ""
            self.console.print(escape(prefix + text), soft_wrap=True)


def _numbers(record: Mapping[str, Any]) -> str:
    return (
        f"loss {record['loss']:.4f}  {record['images_per_second']:,.0f} images/s  data-wait {record['data_wait']:.0%}"
        + (f"  MFU {record['mfu']:.0%}" if record.get("mfu") else "")
        + (f"  bad {record['num_bad']}" if record["num_bad"] else "")
    )  # fmt: skip


def _line(record: Mapping[str, Any]) -> str:
    """A record as one plain line; empty for those that nobody needs to see."""
    match record["kind"]:
        case "train":
            rate = record["images_per_second"]
            left = (record["total_steps"] - record["step"]) * record["samples"] / record["step"] / rate if rate else 0
            return (
                f"step {record['step']}/{record['total_steps']}  epoch {record['epoch']:.2f}  lr {record['lr']:.3g}  "
                f"{_numbers(record)}  left {left:,.0f} s"
            )
        case "evaluate":
            return f"step {record['step']}  accuracy {record['accuracy']:.2%} ({record['correct']:,} of {record['total']:,})"
        case "weights":
            return f"weights: {record['path']} ({record['text']})"
        case "resume":
            return f"going on from step {record['step']} of {record['total_steps']}"
        case "warning":
            return f"warning: {record['text']}"
        case "fewshot":
            return f"{record['shots']}-shot accuracy {record['accuracy']:.2%}"
        case "task":
            return f"{record['task']}  accuracy {record['accuracy']:.2%}"
        case "export":
            return (
                f"{record['path']}: verified, largest difference {record['difference']:.1e} of the logits' deviation"
                + "".join(f"\n  note: {note}" for note in record["notes"])
            )
        case _:
            return ""


def show_result(result: Mapping[str, Any], run_dir: Path) -> None:
    """The outcome of a job: its numbers, its files, where the rest is."""
    metrics = result["metrics"]
    if result["job"] == "vtab":
        show_table(*_vtab_rows(metrics))
    elif result["job"] == "fewshot":
        rows = [(shots, f"{value:.2%}") for shots, value in metrics["accuracy"].items()]
        show_table(("shots", "accuracy"), rows)
    elif "accuracy" in metrics:
        CONSOLE.print(f"accuracy {metrics['accuracy']:.2%} ({metrics['correct']:,} of {metrics['total']:,})")
    for kind, path in result.get("files", {}).items():
        CONSOLE.print(escape(f"{kind}: {path}"), soft_wrap=True)
    CONSOLE.print(escape(f"result: {run_dir / 'result.json'}"), soft_wrap=True)


def _vtab_rows(metrics: Mapping[str, Any]) -> tuple[Sequence[str], list[Sequence[str]]]:
    rows: list[Sequence[str]] = [(name, f"{v['mean']:.2%}", f"{v['std']:.2%}") for name, v in metrics["tasks"].items()]
    rows += [(f"group {name}", f"{value:.2%}", "") for name, value in metrics["groups"].items()]
    label = f"mean of {len(metrics['tasks'])} tasks" + (" (partial)" if metrics["partial"] else "")
    return ("task", "accuracy", "std"), [*rows, (label, f"{metrics['mean']:.2%}", "")]


def show_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], *, title: str = "", left: Sequence[str] | None = ()
) -> None:
    """A table whose first column and those named in `left` are text, all of them when it is None; the others are numbers."""
    if title:
        CONSOLE.print(escape(title), soft_wrap=True)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for i, name in enumerate(header):
        table.add_column(
            escape(name), justify="left" if i == 0 or left is None or name in left else "right", overflow="fold"
        )
    for row in rows:
        table.add_row(*(escape(str(cell)) for cell in row))
    CONSOLE.print(table)


def bytes_text(count: float) -> str:
    """A size in the largest unit that keeps it above one."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} TiB"
