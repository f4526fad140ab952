"""The complete workflow at a size for two CPU cores, on data that comes with vitctl."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.markup import escape

from vitctl.cli.show.render import CONSOLE, Screen, show_table
from vitctl.data.datasets.catalog import find_data_set, open_split, write_data_set
from vitctl.engine.run_files import FEATURES
from vitctl.errors import writing
from vitctl.launch.launcher import launch
from vitctl.launch.prepare import prepare_run
from vitctl.launch.run_folder import check_not_foreign
from vitctl.recipe.load import Override, load_recipe
from vitctl.report.html_report import write_report
from vitctl.system.text import typed

SETS = ("glyphs", "digits", "shapes-location", "shapes-count")
TASKS = [name for name in SETS if name != "glyphs"]
PRECISION = (
    "float32"  # fixed, so that the numbers in docs/results.md hold on every machine, with or without bf16
)
FOLDERS = (
    "pretrain",
    "fewshot",
    "fewshot_scratch",
    "finetune",
    "finetune_scratch",
    "vtab",
    "vtab_scratch",
    "export",
)
PAGE = "report.html"
NEXT = """\
next, with your own images (one folder per class):
  vitctl data shards PHOTOS data/mine            shards with an index; PHOTOS may hold train/ and test/
  vitctl data check data/mine                    every byte, every image, images per class
  vitctl finetune --from {pretrain} --data data/mine
  vitctl fewshot --from {pretrain} --data data/mine --shots 5
  vitctl predict NEW_PHOTOS --from runs/NAME     classes and probabilities
  vitctl export --from runs/NAME --to onnx
  vitctl report runs/NAME -o report.html         one page: curves, examples, what every number belongs to
  vitctl recipes list                            the paper's experiments; add --dry-run to any to see its cost"""


@dataclass(frozen=True)
class Row:
    """A line of the final table; accuracies are shares, None where there is none."""

    step: str
    what: str
    accuracy: float | None
    scratch: float | None
    majority: float | None
    seconds: float


def run_quickstart(out: Path, seed: int) -> list[Row]:
    """Run every step in its own folder under `out`, resuming a stopped quickstart, and print the final table.

    Args:
        out: folder for all output.
        seed: random seed.

    Returns:
        the rows of the table.

    Raises:
        KeyboardInterrupt: stopped by a signal; every step so far is kept.
    """
    check_not_foreign(out, (*FOLDERS, FEATURES, PAGE), what="a quickstart")
    step = _Steps(out, seed)
    pretrained = {"weights.source": str(out / "pretrain")}
    scratch = {**pretrained, "weights.initialise": "random"}
    rows = [step.shards()]

    result, seconds = step("pretrain", "quickstart")
    rows.append(
        Row("pretrain", "60 invented letters", _accuracy(result), None, step.majority("glyphs"), seconds)
    )  # fmt: skip
    five = {"data.dataset": "digits", "fewshot.shots": (5,)}
    few, seconds = step("fewshot", "fewshot", **five, **pretrained)
    base, more = step("fewshot_scratch", "fewshot", **five, **scratch)
    rows.append(
        Row("fewshot", "5 digit scans a class, frozen", _mean(few), _mean(base), step.majority("digits"), seconds + more)
    )  # fmt: skip
    fine, seconds = step("finetune", "quickstart_finetune", **pretrained)
    base, more = step("finetune_scratch", "quickstart_finetune", **scratch)
    rows.append(
        Row("finetune", "digit scans, 1,437 of them", _accuracy(fine), _accuracy(base), step.majority("digits"),
            seconds + more)
    )  # fmt: skip
    tasks = {"vtab.tasks": tuple(TASKS)}
    table, seconds = step("vtab", "vtab_mini", **tasks, **pretrained)
    base, more = step("vtab_scratch", "vtab_mini", **tasks, **scratch)
    for name in TASKS:
        got, start = (r["metrics"]["tasks"][name]["mean"] for r in (table, base))
        rows.append(
            Row(
                "vtab",
                f"{name}, 1,000 images",
                got,
                start,
                step.majority(name),
                (seconds + more) / len(TASKS),
            )
        )
    exported, seconds = step("export", "export", **{"weights.source": str(out / "finetune")})
    worst = max(exported["metrics"]["max_difference"].values())
    rows.append(Row("export", f"ONNX, safetensors, within {worst:.0e}", None, None, None, seconds))
    rows.append(step.page())
    _close(rows, out)
    return rows


class _Steps:
    """Runs one recipe after the other in folders of their own, with one data folder for all."""

    def __init__(self, out: Path, seed: int) -> None:
        self.out, self.seed, self._begun = out, seed, 0

    def _begin(self, what: str) -> None:
        self._begun += 1
        CONSOLE.print(f"step {self._begun} of {len(FOLDERS) + 2}: {what}", highlight=False)

    def shards(self) -> Row:
        began, images = time.perf_counter(), 0
        self._begin(f"shards of {', '.join(SETS)}")
        for name in SETS:
            row, folder = find_data_set(name), self.out / "data" / name
            with writing(folder):
                write_data_set(row, folder)
            images += sum(row.sizes.values())
        return Row(
            "shards", f"{images:,} images in {len(SETS)} sets", None, None, None, time.perf_counter() - began
        )

    def __call__(self, folder: str, recipe: str, **values: Any) -> tuple[Mapping[str, Any], float]:
        """Run `recipe` with `values` in `folder`; its result and its seconds."""
        began = time.perf_counter()
        self._begin(folder)
        run_dir = self.out / folder
        data = {"data.root": str(self.out / "data"), "seed": self.seed} if recipe != "export" else {}
        given = {"machine.precision": PRECISION, **data, **values}
        overrides = [Override(key, value, "quickstart") for key, value in given.items()]
        prepared = prepare_run(load_recipe(recipe, overrides), run_dir)
        with Screen(run_dir) as screen:
            result = launch(run_dir, screen.report, prepared=prepared)
        if result["status"] == "stopped":
            raise KeyboardInterrupt
        return result, time.perf_counter() - began

    def page(self) -> Row:
        """One page of all runs."""
        began = time.perf_counter()
        self._begin("report")
        with writing(self.out / PAGE):
            write_report([self.out / name for name in FOLDERS], self.out / PAGE, title="vitctl quickstart")
        return Row("report", "one page of all runs", None, None, None, time.perf_counter() - began)

    def majority(self, dataset: str) -> float:
        """Accuracy of always predicting the most frequent class of the test split."""
        labels = open_split("test", dataset=dataset, root=str(self.out / "data")).labels()
        return float(np.bincount(labels).max() / len(labels))


def _accuracy(result: Mapping[str, Any]) -> float:
    return float(result["metrics"]["accuracy"])


def _mean(result: Mapping[str, Any]) -> float:
    return float(next(iter(result["metrics"]["accuracy"].values())))


def _close(rows: list[Row], out: Path) -> None:
    def share(value: float | None) -> str:
        return "" if value is None else f"{value:.1%}"

    cells = [
        (r.step, r.what, share(r.accuracy), share(r.scratch), share(r.majority), f"{r.seconds:.0f}")
        for r in rows
    ]
    CONSOLE.print()
    show_table(
        ("step", "what it did", "accuracy", "scratch", "majority", "seconds"), cells, left=("what it did",)
    )
    CONSOLE.print(
        escape(f"\n{sum(r.seconds for r in rows):.0f} seconds in all; files are under {out}/\n"),
        soft_wrap=True,
    )
    page = (out / PAGE).resolve()
    CONSOLE.print(
        escape(
            f"report: {out / PAGE}; to look at it, open it in a browser: xdg-open {typed(page)}, or type "
            f"{page.as_uri()}\n"
        ),
        soft_wrap=True,
    )
    CONSOLE.print(escape(NEXT.format(pretrain=out / "pretrain")), soft_wrap=True)
