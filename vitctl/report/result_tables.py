"""The numbers of a run as blocks of the HTML report: results by job, sweeps, and their provenance.

A block is a dict of text and numbers; the macro of its `kind` in the templates writes it as HTML, and the
terminal shows tables. Imports no torch, because `vitctl runs` takes its numbers from here.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vitctl.engine.journal import RECIPE, Record
from vitctl.engine.metrics import METRICS, OF_LABEL_SETS, interval_text, verdict
from vitctl.jobs.record.result import unverified_bytes
from vitctl.recipe.known import standing
from vitctl.recipe.load import leaves
from vitctl.report.charts import Block, Line, Unit, line_chart, number_text
from vitctl.report.run_records import RunRecords, SweepRecords
from vitctl.system.text import count_text, typed

MISSING = "-"  # for a value that was not recorded; a page shows a dash
_DIGEST = re.compile("[0-9a-f]{64}")
# A number's cell, or one without a value.
_NUMBER = re.compile(r"-?|[±+-]?[\d.,]+(e[+-]?\d+)?%?")

# Groups of the provenance: title, and the prefixes of its keys. The last group gets the remaining keys.
_PROVENANCE = {
    "Data": "split data_ num_images labels train_ num_train classes tasks images augment suite",
    "Pre-processing": "image_size eval_ resample exif_ mean std truncated crop flip",
    "Weights": "weights from network initialise",
    "Precision and device": "precision device processes threads attention compiled micro_batch",
    "Recipe and other": "",
}
_ENVIRONMENT = {"python": "Python", "platform": "platform", "cpus": "CPUs", "git_commit": "commit of vitctl"}
_TILES = {
    "top5_accuracy": "top-5 accuracy",
    "mean_per_class": "mean per class",
    "f1": "macro F1",
    "macro_precision": "macro precision",
    "macro_recall": "macro recall",
    "mean_of_groups": "mean of the groups",
    **{name: metric.words for name, metric in OF_LABEL_SETS.items()},
}


# Blocks


def table(
    caption: str,
    header: Sequence[str],
    rows: Sequence[Sequence[object]],
    *,
    names: int = 1,
    note: str = "",
    links: Sequence[str] = (),
) -> Block:
    """Return a table. The first cell heads its row; columns of numbers are right-aligned.

    Args:
        names: number of leading columns that hold names, even if they look like numbers.
        note: a line below.
        links: for each row, the id in the page that its first cell links to.
    """
    columns = range(len(header))
    numeric = [n >= names and all(_NUMBER.fullmatch(str(row[n])) for row in rows) for n in columns]
    return {
        "kind": "table", "caption": caption, "header": header, "rows": rows, "numeric": numeric, "note": note,
        "links": links,
    }  # fmt: skip


def group(style: str, blocks: Sequence[Block]) -> Block:
    """Return blocks that are laid out together; `style` is a class of report.css."""
    return {"kind": "group", "style": style, "blocks": blocks}


def paragraph(text: str, style: str = "") -> Block:
    """Return a paragraph; `style` is a class of report.css."""
    return {"kind": "paragraph", "text": text, "style": style}


def is_digest(text: str) -> bool:
    return _DIGEST.fullmatch(text) is not None


# Numbers


def share(value: Any) -> str:
    return number(value, "percent")


def number(value: Any, unit: Unit = "number") -> str:
    found = _number(value)
    return MISSING if found is None else number_text(found, unit)


def number_of(job: str, metrics: Mapping[str, Any]) -> tuple[str, float | None]:
    """Return the name of a job's main number, and the number."""
    if job == "vtab":
        return "mean of the tasks", _number(metrics.get("mean"))
    accuracy = metrics.get("accuracy")
    if (metric := metrics.get("metric")) in METRICS and metric != "loss":
        return METRICS[metric], _number(metrics.get(metric))
    if isinstance(accuracy, Mapping):
        first = next(iter(accuracy), "")
        return f"{first}{'-shot' * (job == 'fewshot')} accuracy", _number(accuracy.get(first))
    return "accuracy", _number(accuracy)


def tiles(
    job: str, metrics: Mapping[str, Any], provenance: Mapping[str, Any], records: Sequence[Record] = ()
) -> list[tuple[str, str, str]]:
    """Return the numbers that a reader looks for first: name, value, and a remark."""
    what, main = number_of(job, metrics)
    remark = f"± {share(metrics.get('std'))} over seeds" if "std" in metrics and _has_seeds(metrics) else ""
    if {"correct", "total"} <= metrics.keys():
        remark = f"{metrics['correct']:,} of {metrics['total']:,} images"
    interval = _interval(metrics, "accuracy" if "loss" in metrics else metrics.get("metric", "accuracy"))
    shown = [(what, share(main), f"{remark}, {interval}" if interval else remark)]
    if isinstance(test := metrics.get("test"), Mapping):
        counts = (
            f"{test.get('correct', 0):,} of {test.get('total', 0):,} images, {_interval(test, 'accuracy')}"
        )
        shown.append(("test accuracy", share(test.get("accuracy")), counts))
    if "loss" in metrics:
        shown.append(("loss", number(metrics["loss"]), "evaluation.metric"))
    elif metrics.get("metric", "accuracy") != "accuracy":
        shown.append(("accuracy", share(metrics.get("accuracy")), _interval(metrics, "accuracy")))
    shown += [
        (name, share(metrics.get(key)), _interval(metrics, key))
        for key, name in _TILES.items()
        if key != metrics.get("metric")
        and not (key == "top5_accuracy" and metrics.get("chance", 0) >= 0.2)
        and not (key == "macro_recall" and share(metrics.get(key)) == share(metrics.get("mean_per_class")))
        and not (key == "mean_per_class" and share(metrics.get(key)) == share(main))  # classes of one size
    ]
    if trained_on := provenance.get("trained_on"):
        shown.append(("trained on", number(trained_on, "steps"), "of these images: see the warning"))
    if "ece" in metrics:
        losses = f"negative log likelihood {metrics['nll']:.4f}, Brier score {metrics['brier']:.4f}"
        shown.append(("calibration error", share(metrics["ece"]), losses))
    of_data_set = [*metrics.get("baselines", {}).values(), {}][0]
    constant = metrics if "majority_class" in metrics else of_data_set
    chance = f"chance {share(constant.get('chance'))}"
    shown.append(("majority class", share(constant.get("majority_class")), chance))
    shown.append(("training images", number(provenance.get("num_train") or None, "steps"), ""))
    last = next((r for r in reversed(records) if r.get("kind") == "train"), {})
    counts = f"{last.get('num_skipped', 0):,} skipped, {count_text(last.get('num_bad', 0), 'bad image')}"
    shown.append(("steps", number(last.get("step"), "steps"), counts))
    if found := standing(records):
        where = "outside" if {"above", "below"} & set(found.split()) else "inside"
        shown.append(("known result", where, found))
    return [tile for tile in shown if tile[1] != MISSING]


def warnings(run: RunRecords) -> list[str]:
    """Warn about accuracies that a constant prediction reaches, and about unverified images."""
    if run.status != "done" or run.result is None:
        return []
    unverified = unverified_bytes(run.result) if run.metrics and run.job != "export" else ""
    return [text for text in (verdict(run.metrics), unverified) if text]


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _interval(metrics: Mapping[str, Any], key: str) -> str:
    interval = interval_text(metrics.get(f"{key.removesuffix('_accuracy')}_interval"))
    return f"95 % interval {interval}" if interval else ""


def _has_seeds(metrics: Mapping[str, Any]) -> bool:
    """Return whether the deviation is over several seeds."""
    rows = [metrics, *(metrics.get("tasks") or {}).values()]
    return any(len(row.get("by_seed") or ()) > 1 for row in rows)


# Results


def run_table(runs: Sequence[RunRecords], links: Sequence[str]) -> Block:
    """Return a table of the page's runs with links to their sections."""
    rows = []
    for run in runs:
        what, value = number_of(run.job, run.metrics)
        loss = next((r["loss"] for r in reversed(run.records) if isinstance(r.get("loss"), float)), None)
        what = MISSING if value is None else what
        recipe = run.recipe_name or MISSING
        rows.append((run.name, share(value), what, _images(run), run.status, run.job, recipe, number(loss)))
    header = ("run", "result", "of", "images", "state", "job", "recipe", "last loss")
    return table("The runs of this page", header, rows, links=links)


def _images(run: RunRecords) -> str:
    split = run.provenance.get("split")
    data = getattr(run.recipe.recipe, "data", None) if run.recipe is not None else None
    name = Path(getattr(data, "path", "")).name or getattr(data, "dataset", "")
    return f"{split} of {name}" if isinstance(split, str) and isinstance(name, str) and name else MISSING


def result_tables(job: str, metrics: Mapping[str, Any], provenance: Mapping[str, Any]) -> list[Block]:
    """Return the tables of a job's result, for the terminal and the page."""
    if job == "vtab" and isinstance(metrics.get("tasks"), Mapping):
        return _vtab_tables(metrics)
    if isinstance(metrics.get("data_sets"), Mapping):
        return [_fewshot_table(job, metrics)]
    made = []
    if job == "evaluate" and (others := _label_table(metrics)):
        made.append(others)
    if "corruption_errors" in metrics:
        rows = [(name, share(error)) for name, error in metrics["corruption_errors"].items()]
        rows += [("mCE, relative to AlexNet", share(metrics["mce"]))] if "mce" in metrics else []
        made.append(table("Error by corruption", ("corruption", "error"), rows))
    made += rates_tried(job, metrics, provenance)
    if isinstance(metrics.get("by_seed"), Mapping):
        seeds = [(seed, share(value.get("accuracy"))) for seed, value in metrics["by_seed"].items()]
        made.append(table("Accuracy of each seed", ("seed", "accuracy"), seeds))
    return made


def rates_tried(job: str, metrics: Mapping[str, Any], provenance: Mapping[str, Any]) -> list[Block]:
    """Return the table of the learning rates that a fine-tuning chose among, if it did."""
    if not isinstance(metrics.get("sweep"), Mapping):
        return []
    chosen = _number(provenance.get("lr"))
    images = (provenance.get("sweep") or {}).get("split", "a part of the training images")
    what, shown = ("loss", number) if metrics.get("metric") == "loss" else (number_of(job, metrics)[0], share)
    rates = [(rate, shown(v), "chosen" * (float(rate) == chosen)) for rate, v in metrics["sweep"].items()]
    header = ("lr", f"{what} on {images}", "")
    return [table("Learning rates tried", header, rates)]


def _label_table(metrics: Mapping[str, Any]) -> Block | None:
    """A row for each further set of labels that the predictions were compared with; None if there is none."""
    others = {name: numbers for name, numbers in metrics.items() if isinstance(numbers, Mapping)}
    rows = [
        (
            name,
            share(v["accuracy"]),
            interval_text(v.get("accuracy_interval")),
            share(v.get("top5_accuracy")),
            f"{v.get('correct', 0):,}",
            f"{v.get('total', 0):,}",
            share(v.get("majority_class")),
        )
        for name, v in others.items()
        if "accuracy" in v
    ]
    header = ("labels", "accuracy", "95 %", "top-5", "correct", "images", "majority")
    return table("Accuracy by other labels", header, rows) if rows else None


def _fewshot_table(job: str, metrics: Mapping[str, Any]) -> Block:
    """Return a row for each data set and number of shots, and the means over several data sets."""
    rows: list[Sequence[str]] = []
    for data_set, by_shots in metrics["data_sets"].items():
        majority = share(metrics.get("baselines", {}).get(data_set, {}).get("majority_class"))
        rows += [
            (
                data_set,
                shots,
                *(share(v.get(key)) for key in ("accuracy", "std", "mean_per_class")),
                majority,
                f"{v['l2']:g}" if "l2" in v else interval_text(v.get("accuracy_interval")),
            )
            for shots, v in by_shots.items()
        ]
    if (count := len(metrics["data_sets"])) > 1:
        means = metrics["accuracy"].items()
        rows += [(f"mean of {count}", shots, share(value), "", "", "", "") for shots, value in means]
    if job == "probe":  # no draws, and no l2
        header: Sequence[str] = ("data set", "head", "accuracy", "95 %", "per class", "majority")
        shown, first = [(*r[:3], r[6], *r[4:6]) for r in rows], int(count == 1)  # a single set needs no name
        return table("Accuracy of frozen features", header[first:], [r[first:] for r in shown])
    header = ("data set", "shots", "accuracy", "std", "per class", "majority", "l2")
    return table("Few-shot accuracy", header, rows)


def _vtab_tables(metrics: Mapping[str, Any]) -> list[Block]:
    """Return a row for each task and group, and the means, next to the paper's on the same tasks.

    80 columns have no space for both standard deviations. A second table has the settings that were tried.
    """
    paper: Mapping[str, Any] = metrics.get("paper") or {}
    tasks, second = metrics["tasks"], "std" if _has_seeds(metrics) else "mean_per_class"

    def papers(part: str, name: str) -> list[str]:
        values = [_number(column[part].get(name)) for column in paper.values()]
        return ["" if value is None else f"{value:.1%}" for value in values]

    shown = ("mean", second, "majority_class")
    rows: list[Sequence[str]] = [
        (name, *(share(row.get(key)) for key in shown), *papers("tasks", name)) for name, row in tasks.items()
    ]
    rows += [
        (f"group {name}", share(value), "", "", *papers("groups", name))
        for name, value in (metrics.get("groups") or {}).items()
    ]
    std = share(metrics.get("std")) if second == "std" else ""
    means = [f"{column['mean']:.1%}" for column in paper.values()]
    rows.append((metrics.get("label", "mean"), share(metrics.get("mean")), std, "", *means))
    rows.append(("mean of the groups", share(metrics.get("mean_of_groups")), "", "", *[""] * len(paper)))
    of_paper = "To the right, the paper's results on the same tasks (Table 9)."
    of_paper = of_paper if paper else "The paper has no results on these tasks."
    copies = [f"note: {task}: {row['copy']}." for task, row in tasks.items() if row.get("copy")]
    note = "\n".join([f"{metrics.get('protocol', '')}.", of_paper, *copies])
    header = ("task", "accuracy", second.replace("mean_per_class", "per class"), "majority", *paper)
    made = [table("VTAB by task and group", header, rows, note=note)]
    if tried := metrics.get("sweep"):
        cells = [
            (
                f"{row['lr']:g}",
                f"{row['total_steps']:,}",
                share(row["val200"]),
                "chosen" * bool(row.get("chosen")),
            )
            for row in tried
        ]
        caption = "Settings tried on the validation images of all tasks"
        made.append(table(caption, ("lr", "steps", "mean accuracy", "note"), cells))
    return made


def result_blocks(name: str, run: RunRecords) -> list[Block]:
    """Return the charts and tables of a result; `name` is the prefix of their ids."""
    metrics = run.metrics
    blocks: list[Block | None] = [*result_tables(run.job, metrics, run.provenance)]
    if run.job == "fewshot" and isinstance(metrics.get("data_sets"), Mapping):
        curves = {
            data_set: tuple(sorted((float(shots), v["accuracy"]) for shots, v in by_shots.items()))
            for data_set, by_shots in metrics["data_sets"].items()
        }
        lines = [Line(*curve, colour, dots=True) for colour, curve in enumerate(curves.items())]
        style: Mapping[str, Any] = {"x": "images per class", "unit": "percent", "log_x": True}
        blocks.insert(0, line_chart(f"{name}-shots", "Few-shot accuracy", lines, **style))
    if isinstance(metrics.get("max_difference"), Mapping):
        files = [(kind, f"{value:.1e}") for kind, value in metrics["max_difference"].items()]
        columns = ("format", "largest difference, of the logits' deviation")
        blocks.append(table("Exported files, verified", columns, files))
    if isinstance(metrics.get("calibration_bins"), list):
        filled = [one for one in metrics["calibration_bins"] if one["images"]]
        found = tuple((100 * one["probability"], one["accuracy"]) for one in filled)
        exact = Line("accuracy = probability", ((0.0, 0.0), (100.0, 1.0)), 1)
        style = {"x": "mean probability of the answers, %", "unit": "percent", "from_zero": True}
        lines = [Line("the answers", found, dots=True), exact]
        bins = [(f"{one['images']:,}", share(one["probability"]), share(one["accuracy"])) for one in filled]
        header = ("images", "mean probability", "accuracy")
        blocks += [
            line_chart(f"{name}-bins", "Reliability", lines, **style),
            table("Answers by probability", header, bins),
        ]
    made = [block for block in blocks if block is not None]
    return [group("pair", made)] if made else []


def sweep_table(sweep: SweepRecords) -> Block:
    """Return the table of a sweep; the highest result is marked."""
    keys = list(dict.fromkeys(key for row in sweep.rows for key in row["varied"]))
    values = [_number(row.get("value")) for row in sweep.rows]
    best = max((value for value in values if value is not None), default=None)
    rows = [
        (
            row["run"],
            *(value_text(row["varied"].get(key)) for key in keys),
            row.get("status", ""),
            share(value),
            number(row.get("loss")),
            number(row.get("seconds")),
            "highest" * (value is not None and value == best),
        )
        for row, value in zip(sweep.rows, values, strict=True)
    ]
    header = ("run", *keys, "state", "result", "last loss", "seconds", "note")
    return table("Runs of this sweep", header, rows)


# Provenance


def provenance_tables(run: RunRecords) -> list[Block]:
    """Return tables of the provenance of a run's numbers, and of its environment."""
    groups: dict[str, list[tuple[str, Any]]] = {title: [] for title in _PROVENANCE}
    for path, value in leaves(run.provenance):
        key = path[0]
        title = next(one for one, known in _PROVENANCE.items() if key.startswith(tuple(known.split(" "))))
        if key != "versions":
            groups[title].append((" ".join(path).replace("_", " "), value))
    # Without the machine's name, because pages are shared.
    env = [(name, run.environment[key]) for key, name in _ENVIRONMENT.items() if run.environment.get(key)]
    versions = dict(run.environment.get("versions") or {}) | dict(run.provenance.get("versions") or {})
    groups["Environment"] = [*env, *sorted(versions.items())]
    return [{"kind": "facts", "caption": title, "rows": rows} for title, rows in groups.items() if rows]


def repeating_command(run: RunRecords) -> str:
    job, recipe, again = run.job or "pretrain", run.folder / RECIPE, f"{run.folder}_again"
    return f"vitctl {job} --recipe {typed(recipe)} --out {typed(again)}"


def value_text(value: Any) -> str:
    if value is None or value == "" or value == []:
        return MISSING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(value_text, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
