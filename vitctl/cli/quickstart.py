"""`vitctl quickstart`: the complete workflow at a size for two CPU cores; and `vitctl doctor`."""

import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from vitctl.system.screen import ignore_output_errors
from vitctl.system.text import typed

SETS = ("glyphs", "digits", "shapes-location", "shapes-count")
TASKS = [name for name in SETS if name != "glyphs"]
PRECISION = "float32"  # so that the numbers in docs/results.md hold on every machine, with or without bf16
TWICE = ("fewshot", "finetune", "vtab")  # from trained, then from random weights
FOLDERS = ("pretrain", *(name + end for name in TWICE for end in ("", "_scratch")), "export")
PAGE = "report.html"
NEXT = """\
next, with your own images (one folder per class):
  vitctl data shards PHOTOS data/mine            shards with an index; PHOTOS may hold train/ and test/
  vitctl data check data/mine                    every byte, every image, images per class
  vitctl finetune --from {pretrain} --data data/mine
  vitctl fewshot --from {pretrain} --data data/mine --shots 5
  vitctl predict NEW_PHOTOS --from runs/NAME     classes and probabilities
  vitctl export --from runs/NAME --to onnx
  vitctl report runs/NAME -o report.html         a self-contained page: curves, examples, provenance
  vitctl recipes list                            the paper's experiments; --dry-run shows the cost"""


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
    """Check this installation and this machine, and show what training would use."""
    from vitctl.cli.show.console import say, show_table
    from vitctl.launch.doctor import run_checks

    findings = run_checks()
    show_table(("", "", ""), [("ok" if f.ok else "!!", f.what, f.said) for f in findings], left=None)
    bad = [f for f in findings if not f.ok]
    say(f"{len(bad)} of {len(findings)} need attention" if bad else "all is well")
    if bad:
        raise typer.Exit(2)


def quickstart(
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Folder for all output; resumes an interrupted quickstart")
    ] = Path("quickstart"),
    seed: Annotated[int, typer.Option("--seed", help="Random seed")] = 0,
) -> None:
    """Run every step on data that comes with vitctl: shards, pretrain, fewshot, finetune, vtab, export.

    Takes under 4 minutes on 2 cores.
    """
    ignore_output_errors()
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    busy = f"; this machine is busy (load {load:.1f} on {cores} cores), so it will take longer"
    print(f"quickstart: about 4 minutes on 2 cores{busy if load > cores else ''}", flush=True)
    try:
        run_quickstart(out, seed)
    except KeyboardInterrupt:
        again = f"vitctl quickstart --out {typed(out)}" + (f" --seed {seed}" if seed else "")
        print(f"vitctl: stopped; continue with: {again}", file=sys.stderr)
        raise typer.Exit(3) from None


def run_quickstart(out: Path, seed: int) -> list[Row]:
    """Run each step in a folder under `out`, resuming an interrupted quickstart, and print the final table.

    Args:
        out: folder for all output.
        seed: random seed.

    Returns:
        the rows of the table.

    Raises:
        KeyboardInterrupt: stopped by a signal; all finished steps are kept.
    """
    from vitctl.engine.journal import FEATURES
    from vitctl.launch.run_folder import check_not_foreign

    check_not_foreign(out, (*FOLDERS, FEATURES, PAGE), what="a quickstart")
    steps = _Steps(out, seed)
    weights = {"weights.source": str(out / "pretrain")}
    rows = [steps.shards()]
    result, seconds = steps.run("pretrain", "quickstart")
    accuracies = [float(result["metrics"]["accuracy"])]
    rows.append(Row("pretrain", "60 invented letters", seconds, accuracies, steps.majority("glyphs")))

    few = {"data.dataset": "digits", "fewshot.shots": (5,)}
    trained, scratch, seconds = steps.run_twice("fewshot", "fewshot", **weights, **few)
    accuracies = [float(next(iter(metrics["accuracy"].values()))) for metrics in (trained, scratch)]
    about = "5 digit scans a class, frozen"
    rows.append(Row("fewshot", about, seconds, accuracies, steps.majority("digits")))

    trained, scratch, seconds = steps.run_twice("finetune", "quickstart_finetune", **weights)
    accuracies = [float(metrics["accuracy"]) for metrics in (trained, scratch)]
    about = "digit scans, 1,437 of them"
    rows.append(Row("finetune", about, seconds, accuracies, steps.majority("digits")))

    trained, scratch, seconds = steps.run_twice(
        "vtab", "vtab_mini", **weights, **{"vtab.tasks": tuple(TASKS)}
    )
    for name in TASKS:
        means = [metrics["tasks"][name]["mean"] for metrics in (trained, scratch)]
        about = f"{name}, 1,000 images"
        rows.append(Row("vtab", about, seconds / len(TASKS), means, steps.majority(name)))

    result, seconds = steps.run("export", "export", **{"weights.source": str(out / "finetune")})
    worst = max(result["metrics"]["max_difference"].values())
    rows.append(Row("export", f"ONNX, safetensors, within {worst:.0e}", seconds))
    rows.append(steps.report())
    _print_end(rows, out)
    return rows


class _Steps:
    """Runs one recipe after the other, each in a folder, with one data folder for all."""

    def __init__(self, out: Path, seed: int) -> None:
        self.out, self.seed, self._number = out, seed, 0

    def _begin(self, what: str) -> float:
        from vitctl.cli.show.console import say

        self._number += 1
        say(f"step {self._number} of {len(FOLDERS) + 2}: {what}")
        return time.perf_counter()

    def shards(self) -> Row:
        """Write the shards of all data sets."""
        from vitctl.data.datasets.catalog import find_data_set, write_data_set
        from vitctl.errors import writing

        began, images = self._begin(f"shards of {', '.join(SETS)}"), 0
        for name in SETS:
            row, folder = find_data_set(name), self.out / "data" / name
            with writing(folder):
                write_data_set(row, folder)
            images += sum(row.sizes.values())
        return Row("shards", f"{images:,} images in {len(SETS)} sets", time.perf_counter() - began)

    def run(self, folder: str, recipe: str, **values: Any) -> tuple[Mapping[str, Any], float]:
        """Run a recipe with some values in a folder. Return its result and its seconds."""
        from vitctl.cli.show.render import Screen
        from vitctl.launch.launcher import launch
        from vitctl.launch.prepare_run import prepare_run
        from vitctl.recipe.load import Override, load_recipe

        began = self._begin(folder)
        run_dir = self.out / folder
        data = {"data.root": str(self.out / "data"), "seed": self.seed} if recipe != "export" else {}
        values = {"machine.precision": PRECISION, **data, **values}
        overrides = [Override(key, value, "quickstart") for key, value in values.items()]
        prepared = prepare_run(load_recipe(recipe, overrides), run_dir)
        with Screen(run_dir) as screen:
            result = launch(run_dir, screen.report, prepared=prepared)
        if result["status"] == "stopped":
            raise KeyboardInterrupt
        return result, time.perf_counter() - began

    def run_twice(
        self, folder: str, recipe: str, **values: Any
    ) -> tuple[Mapping[str, Any], Mapping[str, Any], float]:
        """Run a recipe from the trained weights, then from random weights. Return metrics and seconds."""
        trained, seconds = self.run(folder, recipe, **values)
        random = {"weights.initialise": "random"}
        scratch, more = self.run(f"{folder}_scratch", recipe, **values, **random)
        return trained["metrics"], scratch["metrics"], seconds + more

    def report(self) -> Row:
        """Write the report of all runs."""
        from vitctl.errors import writing
        from vitctl.report.html_report import write_report

        began, page = self._begin("report"), self.out / PAGE
        with writing(page):
            write_report([self.out / name for name in FOLDERS], page, title="vitctl quickstart")
        return Row("report", "one page of all runs", time.perf_counter() - began)

    def majority(self, dataset: str) -> float:
        """Return the accuracy of always predicting the most frequent class of the test split."""
        import numpy as np

        from vitctl.data.datasets.catalog import open_split

        labels = open_split("test", dataset=dataset, root=str(self.out / "data")).labels()
        return float(np.bincount(labels).max() / len(labels))


def _print_end(rows: list[Row], out: Path) -> None:
    from vitctl.cli.show.console import say, show_table

    cells = []
    for row in rows:
        trained, scratch = [*(f"{value:.1%}" for value in row.accuracies), "", ""][:2]
        majority = "" if row.majority is None else f"{row.majority:.1%}"
        cells.append((row.step, row.what, trained, scratch, majority, f"{row.seconds:.0f}"))
    header = ("step", "what it did", "accuracy", "scratch", "majority", "seconds")
    say("")
    show_table(header, cells, left=("what it did",))
    page = (out / PAGE).resolve()
    say(f"\n{sum(row.seconds for row in rows):.0f} seconds in all; files are under {out}/\n")
    say(
        f"report: {out / PAGE}; to look at it, open it in a browser: xdg-open {typed(page)}, or type "
        f"{page.as_uri()}\n"
    )
    say(NEXT.format(pretrain=out / "pretrain"))
