"""`vitctl quickstart`: the complete workflow at a size for two CPU cores; and `vitctl doctor`."""

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from vitctl.engine.journal import RESULT, read_run_json
from vitctl.errors import writing
from vitctl.system.process import usable_cores
from vitctl.system.screen import ignore_output_errors
from vitctl.system.text import typed

SETS = ("glyphs", "digits", "shapes-location", "shapes-count")
TASKS = [name for name in SETS if name != "glyphs"]
PRECISION = "float32"  # so that the numbers in docs/results.md hold on every machine, with or without bf16
TWICE = ("fewshot", "finetune", "vtab")  # run from trained, then from random weights
FOLDERS = ("pretrain", *(name + end for name in TWICE for end in ("", "_scratch")), "export")
PAGE = "report.html"
NEXT = """\
next, with your own images (one folder per class):
  vitctl finetune --from {pretrain} --data PHOTOS --out runs/photos
  vitctl predict NEW_PHOTOS --from runs/photos
  vitctl export --from runs/photos --to onnx
  vitctl report runs/photos
  vitctl recipes list                 the paper's experiments"""


class Row(NamedTuple):
    """A line of the final table.

    Args:
        accuracies: shares, from the trained and from random weights.
        majority: accuracy of always predicting the most frequent class.
    """

    step: str
    what: str
    seconds: float
    accuracies: Sequence[float] = ()
    majority: float | None = None


def doctor() -> None:
    """Check this installation and machine; show what runs would use.

    For example: vitctl doctor
    Guide: docs/troubleshooting.md
    """
    from vitctl.cli.show.console import CONSOLE, say, show_table

    states = list[bool]()
    with CONSOLE.status("checking", spinner="line"):
        from vitctl.launch.doctor import run_checks

        for found in run_checks():
            states.append(found.ok)
            show_table(
                ("", "", ""), [("ok" if found.ok else "!!", f"{found.what:<12}", found.said)], left=None
            )
    say("all is well" if all(states) else f"{states.count(False)} of {len(states)} need attention")
    if not all(states):
        raise typer.Exit(2)


def quickstart(
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Folder for all output; resumes an interrupted quickstart")
    ] = Path("quickstart"),
    seed: Annotated[int, typer.Option("--seed", help="Random seed")] = 0,
) -> None:
    """Run every step on bundled data, in under 4 minutes.

    The steps are shards, pretrain, fewshot, finetune, vtab and export. The time is that of 2 idle cores.

    For example: vitctl quickstart
    Guide: docs/results.md
    """
    ignore_output_errors()
    load, cores = os.getloadavg()[0], usable_cores()
    busy = f"; this machine is busy (load {load:.1f} on {cores} cores), so it will take longer"
    print(f"quickstart: about 4 minutes on 2 idle cores{busy if load > cores else ''}", flush=True)
    try:
        run_quickstart(out, seed)
    except KeyboardInterrupt:
        again = f"vitctl quickstart --out {typed(out)}" + (f" --seed {seed}" if seed else "")
        print(f"vitctl: stopped; continue with: {again}", file=sys.stderr)
        raise typer.Exit(3) from None


def run_quickstart(out: Path, seed: int) -> list[Row]:
    """Run each step in a folder under `out`, resuming an interrupted quickstart; print and return the table.

    A signal raises KeyboardInterrupt; all finished steps are kept.
    """
    from vitctl.engine.journal import FEATURES
    from vitctl.launch.run_folder import check_not_foreign

    check_not_foreign(out, (*FOLDERS, FEATURES, PAGE), what="a quickstart")
    steps = _Steps(out, seed)
    weights = {"weights.source": str(out / "pretrain")}
    rows = [steps.shards()]
    result, seconds = steps.run("pretrain", "quickstart")
    scores = result["metrics"]
    rows.append(
        Row("pretrain", "60 invented letters", seconds, [scores["accuracy"]], scores["majority_class"])
    )

    few = {"data.dataset": "digits", "fewshot.shots": (5,)}
    both, seconds = steps.run_twice("fewshot", "fewshot", **weights, **few)
    accuracies = [float(next(iter(metrics["accuracy"].values()))) for metrics in both]
    majority = both[0]["baselines"]["digits"]["majority_class"]
    rows.append(Row("fewshot", "5 digit scans a class, frozen", seconds, accuracies, majority))

    both, seconds = steps.run_twice("finetune", "quickstart_finetune", **weights)
    shares = [float(metrics["accuracy"]) for metrics in both]
    rows.append(Row("finetune", "digit scans, 1,437 of them", seconds, shares, majority))

    both, seconds = steps.run_twice("vtab", "vtab_mini", **weights, **{"vtab.tasks": tuple(TASKS)})
    for name in TASKS:
        accuracies, majorities = (
            [one["tasks"][name][key] for one in both] for key in ("mean", "majority_class")
        )
        rows.append(Row("vtab", f"{name}, 1,000 images", seconds / len(TASKS), accuracies, majorities[0]))

    result, seconds = steps.run("export", "export", **{"weights.source": str(out / "finetune")})
    worst = max(result["metrics"]["max_difference"].values())
    rows.append(Row("export", f"ONNX, safetensors, within {worst:.0e}", seconds))
    rows.append(steps.report())
    _print_end(rows, out)
    return rows


class _Steps:
    def __init__(self, out: Path, seed: int) -> None:
        self.out, self.seed, self._number = out, seed, 0

    @contextmanager
    def _step(self, what: str) -> Iterator[Callable[[], float]]:
        """Print the name of a step, and yield a clock of its seconds."""
        from vitctl.cli.show.console import say

        self._number += 1
        say(f"step {self._number} of {len(FOLDERS) + 2}: {what}")
        began = time.perf_counter()
        with writing(self.out):
            yield lambda: time.perf_counter() - began

    def shards(self) -> Row:
        from vitctl.data.datasets.catalog import find_data_set, write_data_set

        with self._step(f"shards of {', '.join(SETS)}") as seconds:
            folders = {self.out / "data" / name: find_data_set(name) for name in SETS}
            for folder, row in folders.items():
                write_data_set(row, folder)
        images = sum(sum(row.sizes.values()) for row in folders.values())
        return Row("shards", f"{images:,} images in {len(SETS)} sets", seconds())

    def run(self, folder: str, recipe: str, **values: Any) -> tuple[Mapping[str, Any], float]:
        from vitctl.cli.show.console import say
        from vitctl.cli.show.render import Screen
        from vitctl.launch.prepare_run import prepare_run
        from vitctl.launch.run_folder import read_status
        from vitctl.launch.worker import launch
        from vitctl.recipe.load import Override, load_recipe

        run_dir = self.out / folder
        data = {"data.root": str(self.out / "data"), "seed": self.seed} if recipe != "export" else {}
        values = {"machine.precision": PRECISION, **data, **values}
        loaded = load_recipe(recipe, [Override(key, value, "quickstart") for key, value in values.items()])
        with self._step(folder) as seconds:
            is_done = read_status(run_dir) == "done"
            prepared = prepare_run(loaded, run_dir)  # refuses another seed
            if is_done:
                say("finished earlier")
                return dict(read_run_json(run_dir / RESULT)), seconds()
            with Screen(run_dir) as screen:
                result = launch(run_dir, screen.report, prepared=prepared)
        if result["status"] == "stopped":
            raise KeyboardInterrupt
        return result, seconds()

    def run_twice(self, folder: str, recipe: str, **values: Any) -> tuple[list[Mapping[str, Any]], float]:
        trained, seconds = self.run(folder, recipe, **values)
        scratch, more = self.run(f"{folder}_scratch", recipe, **values, **{"weights.initialise": "random"})
        return [trained["metrics"], scratch["metrics"]], seconds + more

    def report(self) -> Row:
        from vitctl.report.html_report import write_report

        with self._step("report") as seconds:
            write_report([self.out / name for name in FOLDERS], self.out / PAGE, title="vitctl quickstart")
        return Row("report", "one page of all runs", seconds())


def _print_end(rows: list[Row], out: Path) -> None:
    from vitctl.cli.show.console import say, show_table

    cells = [
        (
            row.step,
            row.what,
            *[*(f"{value:.1%}" for value in row.accuracies), "", ""][:2],
            "" if row.majority is None else f"{row.majority:.1%}",
            f"{row.seconds:.0f}",
        )
        for row in rows
    ]
    say("")
    show_table(
        ("step", "what it did", "accuracy", "scratch", "majority", "seconds"), cells, left=("what it did",)
    )
    say(f"\n{sum(row.seconds for row in rows):.0f} seconds in all; files are under {out}/")
    say(f"report, for a browser: {(out / PAGE).resolve().as_uri()}\n")
    say(NEXT.format(pretrain=out / "pretrain"))
