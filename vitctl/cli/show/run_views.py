"""Output of `vitctl runs` and `sweep`: lists, a run's curves, live records, sweeps."""

import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import numpy as np
import typer

from vitctl.cli.show.console import CONSOLE, say, show_table
from vitctl.cli.show.render import Screen, next_line, show_result
from vitctl.data.datasets.converted import Converted
from vitctl.engine.journal import LOG, RECIPE, RESULT, Record, Report, read_records
from vitctl.errors import CheckpointError, LaunchError, RecipeError, VitctlError
from vitctl.jobs.record.result import read_own_records, read_result
from vitctl.launch.cluster import Job
from vitctl.launch.jobset import JobSet
from vitctl.launch.launcher import Follower
from vitctl.launch.listing import RunLine, read_line, size_on_disk
from vitctl.launch.prepare_run import prepare_run
from vitctl.launch.run_folder import LOGS, NOW, is_running
from vitctl.launch.sweep_cells import is_done, run_cells
from vitctl.launch.worker import launch
from vitctl.models.flops import count_macs
from vitctl.recipe.known import standing
from vitctl.recipe.load import Loaded, Override, load_recipe
from vitctl.recipe.schema import Finetune, Pretrain
from vitctl.recipe.sweep import Sweep, SweepCell
from vitctl.report.charts import Unit, number_text, points
from vitctl.report.result_tables import number, rates_tried
from vitctl.report.sweep_table import Outcome, draw_sweep, groups, shared_words
from vitctl.system.figures import NOT_INSTALLED, can_plot
from vitctl.system.files import parsing
from vitctl.system.text import bytes_text, count_text, typed

_BARS, _WIDEST = "▁▂▃▄▅▆▇█", 60
_FIRST_RECORDS = 10  # records that `tail` starts with
_POLL_SECONDS = 0.5
_LAST_WARNINGS = 3
_LOST = ("data", "exchange", "rest")  # parts of a step that the plan's rate has not


def show_list(lines: Sequence[RunLine], root: Path) -> None:
    """Print a line for each run, the newest first, with its folder relative to `root`."""
    rows = [
        (
            str(line.folder.relative_to(root)),
            line.recipe or "-",
            line.state,
            _steps(line),
            "test " * line.what.startswith("test ") + _metric(line),
            _ago(line.when),
            bytes_text(line.num_bytes),
        )
        for line in lines
    ]
    header = ("run", "recipe", "state", "step", "result", "updated", "size")
    show_table(header, rows, left=("recipe", "state"))
    total = bytes_text(sum(line.num_bytes for line in lines))
    say(f"{count_text(len(lines), 'run')} in {root}, {total}")


def show_run(folder: Path) -> None:
    """Print one run: key facts, curves of loss and accuracy, and the last warnings."""
    line, records = _read(folder), read_own_records(folder)
    name = line.what or ("loss so far" if line.loss is not None else "accuracy")
    facts = [
        ("recipe", f"{line.recipe or 'unknown'} ({line.job})"),
        ("state", line.state + (f", step {_steps(line)}" if line.step else "")),
        *({name: _metric(line)} | {**line.chose}).items(),
        ("last update", time.strftime("%Y-%m-%d %H:%M", time.localtime(line.when))),
        ("size on disk", bytes_text(line.num_bytes)),
    ]
    with suppress(AttributeError, KeyError, TypeError, ValueError):  # the log was changed
        facts += [*_time_rows(records)]
    if found := standing(records):
        facts.append(("known result", found))
    show_table(("", ""), facts, title=str(folder), left=None)
    curves: tuple[tuple[str, str, Unit], ...] = (
        ("train", "loss", "number"),
        ("evaluate", "accuracy", "percent"),
    )
    for kind, field, unit in curves:
        values = [y for x, y in points(records, kind, field) if x > 0]
        if len(values) > 1:
            ends = [number_text(value, unit) for value in (values[0], values[-1])]
            say(f"{field}: {ends[0]} {sparkline(values)} {ends[1]}")
    warnings = [str(record.get("text")) for record in records if record.get("kind") == "warning"]
    for text in warnings[-_LAST_WARNINGS:]:
        say(f"warning: {text}")
    result = read_result(folder)
    for table in rates_tried(line.job, result.metrics, result.provenance) if result else ():
        rates = (f"{rate} {score}{' (chosen)' * bool(note)}" for rate, score, note in table["rows"])
        say(f"learning rates tried, {table['header'][1]}: {', '.join(rates)}")
    if result is not None and result.error:
        say(f"failed: {result.error}")
    say(f"HTML report: vitctl report {folder}")
    if line.state not in ("running", "done", "invalid"):
        job = next((one for one in (Job, JobSet) if (folder / one.file).is_file()), None)
        say(f"next: {job.line(folder) if job else f'vitctl resume {typed(folder)}'}")


def _time_rows(records: Sequence[Record]) -> Iterator[tuple[str, str]]:
    """Yield rows on where the time of the last logged steps went, a mean over processes, and on GPUs."""
    found = next((one for one in reversed(records) if one.get("kind") == "train" and "phases" in one), {})
    shares = {part: float(np.mean(each)) for part, each in found.get("phases", {}).items()}
    shares["rest"] = max(0.0, 1 - sum(shares.values()))
    text = ", ".join(f"{part} {share:.0%}" for part, share in shares.items() if share >= 0.005)
    if found:
        yield "time of a step", text
    if found.get("mfu"):
        expected = [f", expected {one['mfu']:.0%}" for one in records if one.get("kind") == "expected"]
        lost = ", ".join(f"{part} {shares[part]:.0%}" for part in _LOST if shares.get(part, 0) >= 0.01)
        plan = f"{expected[-1]}{': ' * bool(lost)}{lost}" if expected else ""
        yield "of the GPU's peak", f"{found['mfu']:.0%}{plan}"
    if "gpu_memory" in found:
        sizes = (f"{bytes_text(size)} {name}" for name, size in found["gpu_memory"].items())
        yield "GPU memory", ", ".join(sizes)


def tail(folder: Path) -> None:
    """Print a run's last records, then each new record until the run ends, then its result."""
    _read(folder)
    with Screen(folder) as screen:
        follower = Follower(folder / LOG, screen.report_foreign, folder / LOGS / NOW)
        for record in read_records(folder / LOG)[-_FIRST_RECORDS:]:
            screen.report_foreign(record)
        while is_running(folder):
            follower.poll()
            time.sleep(_POLL_SECONDS)
        follower.poll()
    result = read_result(folder)
    if result is None:
        say("not running; it has no result")
    elif result.status == "done":
        shown = {name: getattr(result, name) for name in ("job", "metrics", "provenance", "files")}
        with parsing(folder / RESULT, CheckpointError, "not a valid result of vitctl"):
            show_result(shown, folder)
    else:
        say(f"{result.status}{': ' * bool(result.error)}{result.error}")


def _read(folder: Path) -> RunLine:
    if not (folder / RECIPE).is_file():
        raise CheckpointError(folder, "not a run folder", "`vitctl runs` lists those under ./runs")
    return read_line(folder)


def _steps(line: RunLine) -> str:
    if not line.total_steps:
        return "-"
    return f"{line.step:,}" if line.step == line.total_steps else f"{line.step:,}/{line.total_steps:,}"


def _metric(line: RunLine) -> str:
    """Return the accuracy of a run, or its loss until it has one."""
    if line.number is not None:
        return f"{line.number:.2%}"
    return "-" if line.loss is None else f"loss {line.loss:.4g}"


def _ago(seconds: float) -> str:
    age = max(0.0, time.time() - seconds)
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if age >= size:
            return f"{age // size:.0f} {unit} ago"
    return "now"


def clean_runs(runs: Sequence[Path], converted: Sequence[Converted], *, yes: bool) -> None:
    """Print which checkpoints and converted data can be deleted, ask, and delete them.

    Raises:
        CheckpointError: there is nobody to ask, and `yes` was not given.
    """
    from vitctl.data.datasets.converted import delete
    from vitctl.launch.listing import all_removals, remove

    removals = all_removals(runs)
    for removal in removals:
        if removal.reason:
            say(f"not touched: {removal.reason}")
    removals = [removal for removal in removals if removal.folders]
    if not removals and not converted:
        say("nothing to delete: every checkpoint is the last or the best of its run")
        return
    rows = [
        (str(r.run), f"{len(r.folders)}", bytes_text(r.num_bytes), ", ".join(map(str, r.kept)))
        for r in removals
    ]
    header = ("run", "checkpoints to delete", "frees", "steps that stay")
    if rows:
        show_table(header, rows, left=("steps that stay",))
    sizes = {one: size_on_disk(one.folder) for one in converted}
    for one, size in sizes.items():
        say(f"{one.folder}, converted from {one.made_of}: {bytes_text(size)}, and no run here needs it")
    if sizes:
        say("runs of other folders were not looked at: one that needs such data makes it again, with --data")
    total = sum(removal.num_bytes for removal in removals) + sum(sizes.values())
    number = sum(len(removal.folders) for removal in removals)
    what = [count_text(number, "checkpoint")] * bool(rows)
    what += [count_text(len(sizes), "folder") + " of converted data"] * bool(sizes)
    question = f"delete {' and '.join(what)}, {bytes_text(total)}?"
    if not yes:
        if not sys.stdin.isatty():
            raise CheckpointError(f"{question} there is no terminal to answer on", fix="add --yes")
        typer.confirm(question, abort=True)
    freed = 0
    for removal in removals:
        try:
            freed += remove(removal)
        except LaunchError as error:
            say(f"not touched: {error}")
    for one, size in sizes.items():
        delete(one)
        freed += size
    say(f"freed {bytes_text(freed)}")


def sparkline(values: Sequence[float]) -> str:
    """Return a curve in one line: bars for the means of its parts; "..." if the terminal has no bars."""
    finite = np.array([value for value in values if math.isfinite(value)])
    if not len(finite) or CONSOLE.options.ascii_only:
        return "..."
    means = np.array([part.mean() for part in np.array_split(finite, min(_WIDEST, len(finite)))])
    shares = (means - means.min()) / (np.ptp(means) or 1)
    return "".join(_BARS[round(share * (len(_BARS) - 1))] for share in shares.tolist())


# Sweeps.


def run_and_show(sweep: Sweep, cells: Sequence[SweepCell], folder: Path, metric: str, test: str = "") -> None:
    """Run the cells, print their table, and draw their plot; exits with the command's exit code.

    The best of them is scored once on the split `test`, which chose nothing.
    """
    kept = sum(is_done(folder / cell.name) for cell in cells)
    finished = f", {kept} of them already finished" * bool(kept)
    say(f"{count_text(len(cells), 'run')} in {folder}{finished}")
    with ExitStack() as stack:

        def report(cell: SweepCell, number: int) -> Report:
            stack.close()
            say(f"\nrun {number + 1} of {len(cells)}: {cell.name}")
            return stack.enter_context(Screen(folder / cell.name)).report

        outcomes = run_cells(cells, folder, metric, report)
    show_outcomes(outcomes, metric)
    _draw_sweep(sweep, outcomes, folder, metric)
    say(f"table: {folder / 'sweep.csv'}")
    failed = [outcome for outcome in outcomes if outcome.error]
    if failed:
        raise VitctlError(f"{len(failed)} of {len(cells)} runs failed; {failed[0].run}: {failed[0].error}")
    if any(outcome.status != "done" for outcome in outcomes):
        print(f"stopped; resume with the same command and --out {folder}", file=sys.stderr)
        raise typer.Exit(3)
    if any(outcome.value is not None for outcome in outcomes):
        _show_best(outcomes, folder, metric, test)


def _show_best(outcomes: Sequence[Outcome], folder: Path, metric: str, test: str) -> None:
    sign = -1 if metric == "loss" else 1
    ranked = sorted(groups(outcomes), key=lambda group: -sign * group.mean)  # stable: the first of equals
    run = folder / next(o.run for o in outcomes if ranked[0].varied.items() <= o.varied.items())
    equal = sum(group.mean == ranked[0].mean for group in ranked)
    if len(ranked) > 1:
        say(f"best: {run.name}" + f", the first of {equal} equal ones" * (equal > 1))
    of_test = [Override("data.test_split", test, "the best of a sweep")] if test else []
    loaded = load_recipe(str(run / RECIPE), of_test)
    if test:
        prepared = prepare_run(loaded, run)
        with Screen(run) as screen:
            launch(run, screen.report, prepared=prepared)
    say(f"\n{next_line(loaded.recipe.job, run, {})}")


def show_outcomes(outcomes: Sequence[Outcome], metric: str) -> None:
    """Print a line for each run (varied values, metric, last loss, time), then the means over seeds."""
    are_shares = "loss" not in metric and all(0 <= (one.value or 0) <= 1 for one in outcomes)
    unit: Unit = "percent" if are_shares else "number"
    rows = [
        (
            name,
            outcome.status,
            number(outcome.value, unit),
            number(outcome.loss),
            f"{outcome.seconds:,.0f} s" if outcome.seconds else "-",
        )
        for name, outcome in zip(shared_words([o.run for o in outcomes]), outcomes, strict=True)
    ]
    compared = "eval_loss" if metric == "loss" else metric
    show_table(("run", "status", compared, "loss", "training"), rows, left=("status",))
    seeds = groups(outcomes)
    if any(len(group.values) > 1 for group in seeds):
        names = shared_words([group.name for group in seeds])
        means = [
            (name, number(group.mean, unit), number(group.std, unit), str(len(group.values)))
            for name, group in zip(names, seeds, strict=True)
        ]
        say("")
        show_table(("over seeds", "mean", "std", "runs"), means)


def show_costs(cells: Sequence[SweepCell], settled: Callable[[Loaded], Loaded]) -> None:
    """Print the cost of each run; `settled` fits a recipe to its data."""
    from vitctl.jobs.plan import plan_training

    rows = []
    for cell, name in zip(cells, shared_words([cell.name for cell in cells]), strict=True):
        recipe = settled(load_recipe(cell.recipe, cell.overrides)).recipe
        if not isinstance(recipe, Pretrain | Finetune):
            raise RecipeError(
                f"--dry-run plans training runs only; '{cell.recipe}' is for `vitctl {recipe.job}`"
            )
        plan = plan_training(recipe)
        macs, flops = count_macs(plan.config) / 1e9, plan.training_flops / 1e18
        parameters = f"{plan.parameters / 1e6:,.1f}M"
        rows.append((name, parameters, f"{macs:,.4g}", f"{plan.steps:,}", f"{flops:,.4g}"))
    show_table(("run", "parameters", "GMACs", "steps", "EFLOPs"), rows)


def _draw_sweep(sweep: Sweep, outcomes: Sequence[Outcome], folder: Path, metric: str) -> None:
    finished = groups(outcomes)
    if not finished:
        known = dict.fromkeys(name for outcome in outcomes for name in outcome.numbers)
        if known:
            raise VitctlError(f"--metric {metric}", f"no run has this metric; they have {', '.join(known)}")
    elif can_plot():
        say(f"plot: {draw_sweep(finished, metric, sweep.note or sweep.name, folder)}")
    else:
        say(f"no plot: {NOT_INSTALLED}")
