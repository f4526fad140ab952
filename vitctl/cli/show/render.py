"""The output of a job: progress on a terminal, plain lines elsewhere, and results as tables."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console, RenderableType
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text

from vitctl.cli.show.console import CONSOLE, say, show_table
from vitctl.engine.journal import RESULT
from vitctl.engine.metrics import METRICS, metric_text, verdict
from vitctl.recipe.known import known_in_words
from vitctl.system.screen import VIEW, raise_output_error
from vitctl.system.text import rate_text, share_text, typed

_OVERTAKEN_SECONDS = 5.0
_SILENT_SECONDS = 30.0  # without a terminal: longest time between two lines of a running training
_RATE_SECONDS = 3600.0  # window of the time-left estimate; long enough for slow steps
_VIEWERS = {".gz": "https://ui.perfetto.dev", ".pickle": "https://pytorch.org/memory_viz"}
_NEXT = {  # job -> the command that often follows
    "pretrain": "finetune --data PHOTOS --from {}",
    "finetune": "predict IMAGES --from {}",
    **dict.fromkeys(("fewshot", "probe", "vtab", "evaluate", "export"), "report {} -o {}.html"),
}
_READ = ("safetensors", "onnx", "hf", "timm", "torchvision", "google")  # exports that --from takes
_BRIEF = ("progress", "train", "now")  # kinds of records that a terminal shows in the view only


class _View(Progress):
    """Bars, and lines of text below them."""

    lines: Sequence[str] = ()

    def get_renderables(self) -> Iterator[RenderableType]:
        """Yield the bars, then the lines, cut off at the width of the terminal."""
        VIEW["lines"] = len(self.tasks) + len(self.lines)
        yield self.make_tasks_table(self.tasks)
        for line in self.lines:
            yield Text(line, no_wrap=True, overflow="ellipsis")


class Screen:
    """Shows log records while a job runs.

    On a terminal a view is redrawn every second: a bar for the training, one for a pass over images, and
    below them the newest numbers and the last accuracy. Elsewhere each record is one line.
    """

    def __init__(self, run_dir: Path, console: Console = CONSOLE) -> None:
        self.console = console
        name = TextColumn("{task.description}", table_column=Column(no_wrap=True, overflow="ellipsis"))
        self.view = _View(
            name,
            BarColumn(None),
            TextColumn("{task.fields[count]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            refresh_per_second=1,
            speed_estimate_period=_RATE_SECONDS,
            transient=True,
            disable=not console.is_terminal,
            expand=True,
        )
        self.bars: dict[str, TaskID] = {}  # keys: "training" and "pass"
        self.accuracy, self.waiting_for = "", "starting"
        self.unprinted: Mapping[str, Any] = {}  # the newest step, if only the view shows it
        self.latest = 0.0
        self.printed = -_SILENT_SECONDS  # when a line of a step was last printed, by `time.monotonic()`
        console.print(f"run folder: {escape(str(run_dir))}", soft_wrap=True)

    def __enter__(self) -> "Screen":
        self.view.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(Exception):  # a display error must not lose the result of a finished job
            self.view.stop()
            VIEW["lines"] = 0
            if self.unprinted:
                self.console.print(escape(_line(self.unprinted)), soft_wrap=True)

    def report(self, record: Mapping[str, Any]) -> None:
        """Show one log record. A write error raises OSError once; later output is dropped."""
        try:
            kind, line = record["kind"], _line(record)
            if self.console.is_terminal:
                self._update(record)
                is_end = kind == "train" and record["step"] == record["total_steps"]
                if kind in _BRIEF and not is_end:
                    return
            elif "loss" in record:  # a logged step, or the current one, which is shown only at intervals
                if kind == "now" and time.monotonic() - self.printed < _SILENT_SECONDS:
                    return
                self.printed = time.monotonic()
            elif kind == "now" and record.get("text", self.waiting_for) != self.waiting_for:
                self.waiting_for = record["text"]
                line = f"{self.waiting_for} ..."
            task = f"{record['task']}: " if "task" in record and kind != "task" else ""
            if line:
                self.console.print(escape(task + line), soft_wrap=True)
        finally:
            raise_output_error()

    def report_foreign(self, record: Mapping[str, Any]) -> None:
        """Show a record that was read from a file; ignore a malformed one."""
        with suppress(ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
            self.report(record)

    def _update(self, record: Mapping[str, Any]) -> None:
        kind = record["kind"]
        if kind == "now" and 0 < self.latest - record.get("time", self.latest) < _OVERTAKEN_SECONDS:
            return  # the log is newer; a larger difference means that the clock was set back
        self.latest = record.get("time", self.latest)
        if "what" in record:
            self._move("pass", record["what"], record["done"], record["total"])
            return
        if "total_steps" in record and kind in ("train", "now"):
            self._move("training", record.get("task", "training"), record["step"], record["total_steps"])
            self.unprinted = record if "loss" in record else {}
        if kind == "train" and record["step"] == record["total_steps"]:
            self._end("training")
            self.unprinted = {}
        if kind == "now" and "text" in record:
            self._move("pass", record["text"], 0, None)
        else:
            self._end("pass")
        if "accuracy" in record and record.get("step"):
            self.accuracy = f"accuracy {record['accuracy']:.2%} at {record['step']:,}{_known(record)}"
        numbers = _numbers(self.unprinted) if self.unprinted else ""
        self.view.lines = [*filter(None, (numbers, self.accuracy))] if "training" in self.bars else []

    def _move(self, bar: str, text: object, done: float, total: float | None) -> None:
        """Move a bar to `done` of `total`; another text, or going back, restarts it."""
        done, total = int(float(done)), None if total is None else int(float(total))
        count = "" if total is None else f"{done:,}/{total:,}"
        name = escape(str(text))
        old = next((task for task in self.view.tasks if task.id == self.bars.get(bar)), None)
        if old is not None and old.description == name and old.completed <= done:
            self.view.update(old.id, completed=done, total=total, count=count)
            return
        self._end(bar)
        self.bars[bar] = self.view.add_task(name, completed=done, total=total, count=count)

    def _end(self, bar: str) -> None:
        if bar in self.bars:
            self.view.remove_task(self.bars.pop(bar))


# Kind of a record -> its line; other kinds are not shown.
_LINES = {
    "progress": "{what}: {done:,} of {total:,} images",
    "evaluate": "step {step}  accuracy {accuracy:.2%} ({correct:,} of {total:,})",
    "early_stop": "stopped early at step {step} of {total_steps}: no score since step {best} is "
    "better ({patience} in a row)",
    "weights": "weights: {path} ({text})",
    "teacher": "teacher: {path} ({text})",
    "resume": "resuming from step {step} of {total_steps}",
    "node": "{text}",
    "compile": "compiled in {seconds:.1f} s, {graphs} graphs",
    "data": "data: {text}",
    "head": "head {text}",
    "warning": "warning: {text}",
    "temperature": "temperature {temperature:.4f}: negative log likelihood "
    "{nll_after:.4f}, without it {nll_before:.4f}",
    "test": "the chosen weights, of step {step}, scored once on the test images: {accuracy:.2%}",
    "fewshot": "{shots}-shot accuracy {accuracy:.2%}",
    "probe": "{data_set}  {head}: {chosen}",
    "expected": "the plan expects {images_per_second:,.0f} images/s, {mfu:.0%} of the GPU's peak",
    "setting": "lr {lr:g}, {total_steps:,} steps: mean on the validation images {accuracy:.2%}",
    "task": "{task}  accuracy {accuracy:.2%}",
    "push": "{text}",
    "export": "{path}: verified, largest difference {difference:.1e} of the logits' deviation",
}


def _line(record: Mapping[str, Any]) -> str:
    """Return a record as one plain line; "" for records that are not shown."""
    kind = record.get("kind", "")
    if kind in ("train", "now") and "loss" in record:
        epoch = f"epoch {record['epoch']:.2f}  " if "epoch" in record else ""
        done, total, rate = record["step"], record["total_steps"], record["images_per_second"]
        left = (total - done) * record["samples"] / done / rate if rate and done else 0.0
        step = f"step {done}/{total}  {epoch}{_numbers(record)}  left {left:,.0f} s"
        return step + _known(record, "\n  known: {}")
    step = f"step {record['step']}  " if kind == "fewshot" and record["step"] else ""
    notes = "".join(f"\n  note: {note}" for note in record["notes"]) if kind == "export" else ""
    line = _LINES.get(kind, "")
    if not line or "labels" in record:  # the result has those
        return ""
    if kind == "probe" and not record.get("chosen"):  # its accuracy is in the table
        line = "{data_set}  {head}: accuracy {accuracy:.2%}" if "known" in record else ""
    return step + line.format(**{"graphs": "some", **record}) + _deciding(record) + _known(record) + notes


def _numbers(record: Mapping[str, Any]) -> str:
    slowest = "slowest: process {rank}, {what} {share:.0%}"
    parts = (
        f"lr {record['lr']:.3g}",
        f"loss {record['loss']:.4f}",
        f"{rate_text(record['images_per_second'])} images/s",
        f"data-wait {record['data_wait']:.0%}",
        slowest.format(**record["slowest"]) if "slowest" in record else "",
        f"MFU {share_text(record['mfu'])}" if record.get("mfu") else "",
        f"bad {record['num_bad']}" if record["num_bad"] else "",
    )
    return "  ".join(filter(None, parts))


def _known(record: Mapping[str, Any], form: str = " (known: {})") -> str:
    """Return how numbers compare with [known], ` (known: inside 72.9..75.2)`; "" without known values."""
    words = known_in_words(record)
    return form.format(words) if words else ""


def _deciding(numbers: Mapping[str, Any]) -> str:
    """Return the number of evaluation.metric; "" if that is accuracy."""
    metric = numbers.get("metric")
    return f"  {METRICS[metric]} {metric_text(metric, numbers[metric])}" if metric else ""


def show_result(result: Mapping[str, Any], run_dir: Path) -> None:
    """Print the result of a job: its numbers, its files, and the path of result.json."""
    from vitctl.report.result_tables import result_tables, tiles

    job, metrics, used = result["job"], result["metrics"], result["provenance"]
    for table in result_tables(job, metrics, used):
        _heading(table["caption"])
        show_table(table["header"], table["rows"], title=table["note"])
    # The tables of the others have all scores.
    if job not in ("fewshot", "probe", "vtab") and (rows := tiles(job, metrics, used)):
        tested = f", test accuracy on {used['test']['split']}" if "test" in metrics else ""
        _heading(f"Scores on {used['split']}{tested}" if "split" in used else "Scores")
        show_table(("", "", ""), rows, left=None)
    if "last" in metrics:
        last = metrics["last"]
        numbers = f"{last['accuracy']:.2%}{_deciding(last)}"
        say(f"of the best checkpoint, step {used['weights_step']}; the last, step {last['step']}: {numbers}")
    if "stopped_early" in metrics:
        stop = metrics["stopped_early"]
        say(f"stopped early at step {stop['step']:,} of {stop['total_steps']:,}: scores got no better")
    if warning := verdict(metrics):
        CONSOLE.print(f"warning: {warning}", style="bold yellow", soft_wrap=True)
    _heading("Files")
    files = result.get("files", {})
    for kind, path in files.items():
        say(f"{kind}: {path}")
    say(f"result: {run_dir / RESULT}")
    for path in sorted(run_dir.glob("**/profile/*")):
        if path.suffix in _VIEWERS:
            say(f"profile: {path}; open it at {_VIEWERS[path.suffix]}")
    say(f"\n{next_line(job, run_dir, files if used.get('classes') else {})}")


def next_line(job: str, run_dir: Path, files: Mapping[str, str]) -> str:
    """Return the line that ends a job: the command that often follows it. `files` answer with classes."""
    if job == "export" and (file := next((path for kind, path in files.items() if kind in _READ), None)):
        return f"next: vitctl predict IMAGES --from {typed(file)}"
    return f"next: vitctl {_NEXT[job].format(typed(run_dir), typed(run_dir.name))}"


def _heading(text: str) -> None:
    CONSOLE.print(f"\n{escape(text)}", style="bold", soft_wrap=True)
