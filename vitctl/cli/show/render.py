"""What a job prints: progress on a terminal, plain lines elsewhere, and results as tables."""

import time
from collections.abc import Mapping
from contextlib import suppress
from copy import copy
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from vitctl.cli.show.console import CONSOLE, SHORT_NAME, say, show_table
from vitctl.engine.journal import RESULT
from vitctl.engine.metrics import METRICS, OF_LABEL_SETS, interval_text, verdict
from vitctl.recipe.known import known_in_words
from vitctl.system.screen import VIEW, raise_output_error
from vitctl.system.text import count_text, share_text

_OVERTAKEN_SECONDS = 5.0
_SILENT_SECONDS = 30.0  # without a terminal: longest time between two lines of a running training
_BRIEF = ("progress", "train", "now")  # kinds of records that a terminal shows in the view only


class Screen:
    """Shows log records while a job runs.

    On a terminal a view is redrawn every second: a bar with steps, time and time left, and below it loss,
    learning rate, images/s and the last accuracy. Elsewhere each record is one line.
    """

    def __init__(self, run_dir: Path, console: Console = CONSOLE) -> None:
        self.console = console
        self.began = time.monotonic()
        self.name, self.waiting_for = "", "starting"  # the training's name, what the run waits for
        self.training: Mapping[str, Any] = {}  # its newest record
        self.image_pass: Mapping[str, Any] = {}  # a pass over images; ends with any other record
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
            with suppress(Exception):  # a display error must not lose the result of a finished job
                self.live.stop()
                VIEW["lines"] = 0
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
        """Show a record that was read from a file, or nothing if the record is malformed."""
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
            if record["kind"] in _BRIEF:
                if record["kind"] == "train" and record["step"] == record["total_steps"]:
                    self._print(self._last_line())
                    self.training, self.has_unprinted = {}, False
                return
        if "loss" in record:  # a logged step, or the current one; not every current step is shown
            if record["kind"] == "now" and time.monotonic() - self.printed < _SILENT_SECONDS:
                return
            self.printed = time.monotonic()
        if record["kind"] == "now" and record.get("text", self.waiting_for) != self.waiting_for:
            self.waiting_for = record["text"]
            self._print(f"{self.waiting_for} ...")
        if text := _line(record):
            task = f"{record['task']}: " if "task" in record and record["kind"] != "task" else ""
            self._print(task + text)

    def view(self) -> RenderableType:
        """Return the current view: two lines, or three during a pass over images while training."""
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
        VIEW["lines"] = len(lines) if self.live is not None and self.live.is_started else 0
        return Group(*lines)

    def _print(self, text: str) -> None:
        self.console.print(escape(text), soft_wrap=True)

    def _update(self, record: Mapping[str, Any]) -> None:
        """Update the state of the view from a record."""
        if record["kind"] == "now" and 0 < self.latest - record.get("time", self.latest) < _OVERTAKEN_SECONDS:
            return  # the log is newer; a larger difference means that the clock was set back
        self.latest = record.get("time", self.latest)
        if "what" in record:
            is_same = (
                self.image_pass.get("what") == record["what"] and self.image_pass["done"] <= record["done"]
            )
            self.image_pass = {**record, "began": self.image_pass["began"] if is_same else time.monotonic()}
            self.changed, self.waiting_for = time.monotonic(), ""
            return
        self.image_pass = {}
        if "total_steps" in record and record["kind"] in ("train", "now"):
            self.name, self.training = record.get("task", "training"), record
            self.has_unprinted = "loss" in record
            self.changed, self.waiting_for = time.monotonic(), "" if "loss" in record else "the first images"
        elif record["kind"] == "now":
            self.waiting_for = record["text"]
        elif "accuracy" in record and record.get("step"):
            self.accuracy = f"accuracy {record['accuracy']:.2%} at {record['step']:,}{_known(record)}"

    def _bar(self, name: str, done: int, total: int, left: float | None, since: float) -> Table:
        row = Table.grid(padding=(0, 2, 0, 0), expand=True)
        row.add_column(max_width=SHORT_NAME, no_wrap=True, overflow="ellipsis")
        row.add_column(ratio=1)
        for _ in range(3):
            row.add_column(justify="right", no_wrap=True)
        times = "left " + (clock(max(0.0, left - since)) if left is not None else "-:--")
        bar = ProgressBar(total=total, completed=done)
        row.add_row(escape(name), bar, f"{done:,}/{total:,}", clock(time.monotonic() - self.began), times)
        return row

    def _numbers(self) -> str:
        """Return the training's numbers, the most important first: a narrow terminal cuts off the rest."""
        now = self.training
        if "loss" not in now:
            return self.accuracy
        rate = now["images_per_second"]
        parts = (
            f"loss {now['loss']:.4f}",
            f"lr {now['lr']:.3g}",
            f"{rate:,.0f} images/s" if rate >= 10 else f"{rate:.2g} images/s",
            _slowest(now),
            self.accuracy,
            f"bad {now['num_bad']}" if now["num_bad"] else "",
            f"data-wait {now['data_wait']:.0%}",
            f"MFU {share_text(now['mfu'])}" if now.get("mfu") else "",
        )
        return "  ".join(filter(None, parts))

    def _last_line(self) -> str:
        """Return the line that stays when the progress bar of a training ends."""
        now = self.training
        name = f"{self.name}: " if "task" in now else ""
        took = clock(time.monotonic() - self.began)
        numbers = f"loss {now['loss']:.4f}  lr {now['lr']:.3g}"
        return f"{name}step {now['step']:,}/{now['total_steps']:,}  {numbers}  after {took}"


def _seconds_left(record: Mapping[str, Any]) -> float | None:
    """Return the estimated time left of a training from its images/s; None before the first step."""
    rate, step = record.get("images_per_second"), record["step"]
    return (record["total_steps"] - step) * record["samples"] / step / rate if rate and step else None


def clock(seconds: float) -> str:
    """Format a duration: 1:02, 1:02:03 or 1 d 02:03."""
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    if hours >= 24:
        return f"{hours // 24} d {hours % 24:02d}:{minute:02d}"
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


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
    "compile": "compiled in {seconds:.1f} s",
    "data": "data: {text}",
    "head": "head {text}",
    "warning": "warning: {text}",
    "temperature": "temperature {temperature:.4f}: negative log likelihood "
    "{nll_after:.4f}, without it {nll_before:.4f}",
    "fewshot": "{shots}-shot accuracy {accuracy:.2%}",
    "probe": "{data_set}  {head}: {chosen}",
    "setting": "lr {lr:g}, {total_steps:,} steps: mean on the validation images {accuracy:.2%}",
    "task": "{task}  accuracy {accuracy:.2%}",
    "export": "{path}: verified, largest difference {difference:.1e} of the logits' deviation",
}
_LABELS = "{labels} labels: accuracy {accuracy:.2%} ({correct:,} of {total:,}), top-5 {top5_accuracy:.2%}"
_STEP = "loss {loss:.4f}  {images_per_second:,.0f} images/s  data-wait {data_wait:.0%}"


def _line(record: Mapping[str, Any]) -> str:
    """Return a record as one plain line; "" for records that are not shown."""
    kind = record.get("kind", "")
    if kind in ("train", "now") and "loss" in record:
        parts = (
            f"step {record['step']}/{record['total_steps']}",
            f"epoch {record['epoch']:.2f}" if "epoch" in record else "",
            f"lr {record['lr']:.3g}",
            _STEP.format(**record),
            _slowest(record),
            f"MFU {share_text(record['mfu'])}" if record.get("mfu") else "",
            f"bad {record['num_bad']}" if record["num_bad"] else "",
            f"left {_seconds_left(record) or 0.0:,.0f} s",
        )
        return "  ".join(filter(None, parts)) + _known(record, "\n  known: {}")
    step = f"step {record['step']}  " if kind == "fewshot" and record["step"] else ""
    notes = "".join(f"\n  note: {note}" for note in record["notes"]) if kind == "export" else ""
    line = _LABELS if kind == "evaluate" and "labels" in record else _LINES.get(kind, "")
    if record.get("chance", 0) >= 0.2:  # of five classes or fewer
        line = line.partition(", top-5")[0]
    if kind == "probe" and not record.get("chosen"):  # its accuracy is in the table
        line = "{data_set}  {head}: accuracy {accuracy:.2%}" if "known" in record else ""
    return step + line.format(**record) + _deciding(record) + _known(record) + notes


def _known(record: Mapping[str, Any], form: str = " (known: {})") -> str:
    """Return where numbers are beside [known], ` (known: inside 72.9..75.2)`; "" where nothing is known."""
    words = known_in_words(record)
    return form.format(words) if words else ""


def _slowest(record: Mapping[str, Any]) -> str:
    """Return the process that the others wait for; "" where there is none."""
    return (
        "slowest: process {rank}, {what} {share:.0%}".format(**record["slowest"])
        if "slowest" in record
        else ""
    )


def _deciding(numbers: Mapping[str, Any]) -> str:
    """Return the number that evaluation.metric chose instead of accuracy; "" where it chose none."""
    metric = numbers.get("metric")
    return f"  {METRICS[metric]} {numbers[metric]:.2%}" if metric else ""


def show_result(result: Mapping[str, Any], run_dir: Path) -> None:
    """Print the result of a job: its numbers, its files, and the path of result.json."""
    from vitctl.report.result_tables import result_tables

    job, metrics = result["job"], result["metrics"]
    for table in result_tables(job, metrics, result["provenance"]):
        show_table(table["header"], table["rows"], title=table["note"])
    if job in ("pretrain", "finetune") and "accuracy" in metrics:
        _show_accuracy(result, metrics)
    _print_baselines(metrics)
    for kind, path in result.get("files", {}).items():
        say(f"{kind}: {path}")
    say(f"result: {run_dir / RESULT}")


def _show_accuracy(result: Mapping[str, Any], metrics: Mapping[str, Any]) -> None:
    """Print the accuracy of a training, of the best checkpoint or the mean over seeds."""
    if "by_seed" in metrics:
        seeds, images = count_text(len(metrics["by_seed"]), "seed"), count_text(metrics["total"], "image")
        about = f"mean of {seeds}, {images} each"
        say(f"accuracy {metrics['accuracy']:.2%} ± {metrics['std']:.2%} ({about}){_deciding(metrics)}")
    else:
        counts = f"{metrics['correct']:,} of {metrics['total']:,}"
        interval = interval_text(metrics.get("accuracy_interval"))
        shown = f"  95 % interval {interval}" if interval else ""
        say(f"accuracy {metrics['accuracy']:.2%} ({counts}){shown}{_deciding(metrics)}")
    if "last" in metrics:
        last, step = metrics["last"], result["provenance"]["weights_step"]
        numbers = f"{last['accuracy']:.2%}{_deciding(last)}"
        say(f"of the best checkpoint, step {step}; the last, step {last['step']}: {numbers}")
    if "stopped_early" in metrics:
        stop = metrics["stopped_early"]
        say(f"stopped early at step {stop['step']:,} of {stop['total_steps']:,}: scores got no better")


def _print_baselines(metrics: Mapping[str, Any]) -> None:
    """Print the baselines of an accuracy, and a warning if it is no better than a constant prediction."""
    if "majority_class" not in metrics:
        return
    majority, mean = metrics["majority_class"], metrics.get("mean_per_class")
    shown = mean is None or metrics.get("metric") == "mean_per_class"  # beside the accuracy
    per_class = "" if shown else f"{METRICS['mean_per_class']} {mean:.2%}"
    if interval := interval_text(metrics.get("mean_per_class_interval")):
        per_class = f"{METRICS['mean_per_class']} {mean:.2%} ({interval})"
    per_class += ", " if per_class else ""
    if "map" in metrics:
        say(f"  {', '.join(f'{one.words} {metrics[key]:.2%}' for key, one in OF_LABEL_SETS.items())}")
    say(f"  {per_class}majority class alone {majority:.2%}, chance {metrics['chance']:.2%}")
    if "ece" in metrics:
        say(
            "  calibration error {ece:.2%}, negative log likelihood {nll:.4f}, Brier {brier:.4f}".format(
                **metrics
            )
        )
    if warning := verdict(metrics):
        CONSOLE.print(f"warning: {warning}", style="bold yellow", soft_wrap=True)
