"""The numbers of a run as blocks of the HTML report: results by job, sweeps, and their provenance.

A block is a dict of text and numbers; the macro of its `kind` in the templates writes it as HTML. Imports no
torch, because `vitctl runs` takes its numbers from here.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vitctl.engine.journal import RECIPE
from vitctl.engine.metrics import METRICS, interval_text, verdict
from vitctl.jobs.record.result import unverified_bytes
from vitctl.recipe.known import standing
from vitctl.report.charts import Block, Line, Unit, dot_chart, line_chart, number_text
from vitctl.report.run_records import RunRecords, SweepRecords
from vitctl.report.sweep_table import shared_words
from vitctl.system.text import count_text, typed

DASH = "–"
_DIGEST = re.compile("[0-9a-f]{64}")
# A cell of a column of numbers, or one without a value.
_NUMBER = re.compile(r"[–]?|[±+-]?[\d.,]+(e[+-]?\d+)?%?")

# Groups of the provenance: title, and the prefixes of its keys. The last takes what no other names.
_PROVENANCE = {
    "Data": "split data_ num_images labels train_ num_train classes tasks images augment suite",
    "Pre-processing": "image_size eval_ resample exif_ mean std truncated crop flip",
    "Weights": "weights from network initialise",
    "Precision and device": "precision device processes threads attention compiled micro_batch",
    "Recipe and other": "",
}
_ENVIRONMENT = {"python": "Python", "platform": "platform", "cpus": "CPUs", "git_commit": "commit of vitctl"}


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
        caption: what the table shows.
        header: of the columns.
        rows: of cells.
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
    """Return whether a text is a SHA-256 digest."""
    return _DIGEST.fullmatch(text) is not None


# Numbers


def share(value: Any) -> str:
    """Write an accuracy in percent; a dash if it is missing."""
    number = _number(value)
    return DASH if number is None else number_text(number, "percent")


def number_of(job: str, metrics: Mapping[str, Any]) -> tuple[str, float | None]:
    """Return what the main number of a job's result is, and the number."""
    if job == "vtab":
        return "mean of the tasks", _number(metrics.get("mean"))
    accuracy = metrics.get("accuracy")
    if (metric := metrics.get("metric")) in METRICS:
        return METRICS[metric], _number(metrics.get(metric))
    if isinstance(accuracy, Mapping):
        first = next(iter(accuracy), "")
        return f"{first}-shot accuracy", _number(accuracy.get(first))
    return "accuracy", _number(accuracy)


def tiles(run: RunRecords) -> list[tuple[str, str, str]]:
    """Return the numbers that a reader looks for first: name, value, and a remark."""
    metrics, (what, main) = run.metrics, number_of(run.job, run.metrics)
    shown = []
    if main is not None:
        remark = f"± {share(metrics.get('std'))} over seeds" if _has_seeds(metrics) else ""
        if {"correct", "total"} <= metrics.keys():
            remark = f"{metrics['correct']:,} of {metrics['total']:,} images"
        if interval := interval_text(metrics.get(f"{metrics.get('metric', 'accuracy')}_interval")):
            remark += f", 95 % interval {interval}"
        shown.append((what, share(main), remark))
    for key, name in (
        ("top5_accuracy", "top-5 accuracy"),
        ("mean_per_class", "mean per class"),
        ("f1", "macro F1"),
        ("macro_precision", "macro precision"),
        ("macro_recall", "macro recall"),
        ("mean_of_groups", "mean of the groups"),
    ):
        if _number(metrics.get(key)) is not None:
            interval = interval_text(metrics.get(f"{key.removesuffix('_accuracy')}_interval"))
            shown.append((name, share(metrics[key]), f"95 % interval {interval}" if interval else ""))
    if _number(metrics.get("ece")) is not None:
        shown.append(("calibration error", share(metrics["ece"]), f"Brier score {metrics['brier']:.4f}"))
    baseline = (
        metrics if "majority_class" in metrics else next(iter(metrics.get("baselines", {}).values()), {})
    )
    if "majority_class" in baseline:
        remark = f"chance {share(baseline.get('chance'))}"
        shown.append(("majority class", share(baseline["majority_class"]), remark))
    trained = run.provenance.get("num_train")
    if isinstance(trained, int) and trained:
        shown.append(("training images", f"{trained:,}", ""))
    last = next((r for r in reversed(run.records) if r.get("kind") == "train"), {})
    if isinstance(last.get("step"), int):
        counts = f"{last.get('num_skipped', 0):,} skipped, {count_text(last.get('num_bad', 0), 'bad image')}"
        shown.append(("steps", f"{last['step']:,}", counts))
    if found := standing(run.records):
        where = "outside" if {"above", "below"} & set(found.split()) else "inside"
        shown.append(("known result", where, found))
    return shown


def warnings(run: RunRecords) -> list[str]:
    """Warn of accuracies that a constant prediction reaches, and of unverified images."""
    if run.status != "done" or run.result is None:
        return []
    unverified = unverified_bytes(run.result) if run.metrics else ""
    return [text for text in (verdict(run.metrics), unverified) if text]


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _plain(value: Any) -> str:
    number = _number(value)
    return DASH if number is None else number_text(number)


def _has_seeds(metrics: Mapping[str, Any]) -> bool:
    """Return whether a deviation is one over several seeds."""
    rows = [metrics, *(metrics.get("tasks") or {}).values()]
    return any(len(row.get("by_seed") or ()) > 1 for row in rows)


# Results


def run_table(runs: Sequence[RunRecords], links: Sequence[str]) -> Block:
    """Return a table of the page's runs with links to their sections."""
    rows = []
    for run in runs:
        what, value = number_of(run.job, run.metrics)
        loss = next((r["loss"] for r in reversed(run.records) if isinstance(r.get("loss"), float)), None)
        what = DASH if value is None else what
        recipe = run.recipe_name or DASH
        rows.append((run.name, share(value), what, _images(run), run.status, run.job, recipe, _plain(loss)))
    header = ("run", "result", "of", "images", "state", "job", "recipe", "last loss")
    return table("The runs of this page", header, rows, links=links)


def _images(run: RunRecords) -> str:
    """Name the images that the result of a run is about."""
    split = run.provenance.get("split")
    data = getattr(run.recipe.recipe, "data", None) if run.recipe is not None else None
    name = Path(getattr(data, "path", "")).name or getattr(data, "dataset", "")
    return f"{split} of {name}" if isinstance(split, str) and isinstance(name, str) and name else DASH


class ResultTable(NamedTuple):
    """A table of a result, as the terminal and the page show it."""

    caption: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]


def result_tables(
    job: str, metrics: Mapping[str, Any], provenance: Mapping[str, Any], missing: str = "-"
) -> list[ResultTable]:
    """Return the tables of a job's result; `missing` stands for a value that was not recorded."""

    def percent(value: Any) -> str:
        return share(value) if _number(value) is not None else missing

    if job == "vtab" and isinstance(metrics.get("tasks"), Mapping):
        return [_vtab_table(metrics, percent)]
    if isinstance(metrics.get("data_sets"), Mapping):
        return [_fewshot_table(job, metrics, percent)]
    if job == "evaluate":
        corruptions = [_corruption_table(metrics, percent)] if "corruption_errors" in metrics else []
        return [_label_table(metrics, provenance, percent), *corruptions]
    made = []
    if isinstance(metrics.get("sweep"), Mapping):
        chosen = _number(provenance.get("lr"))
        images = (provenance.get("sweep") or {}).get("split", "a part of the training images")
        rates = [
            (rate, percent(v), "chosen" * (float(rate) == chosen)) for rate, v in metrics["sweep"].items()
        ]
        made.append(
            ResultTable(
                "Learning rates tried", ("lr", f"{number_of(job, metrics)[0]} on {images}", ""), rates
            )
        )
    if isinstance(metrics.get("by_seed"), Mapping):
        seeds = [(seed, percent(value.get("accuracy"))) for seed, value in metrics["by_seed"].items()]
        made.append(ResultTable("Accuracy of each seed", ("seed", "accuracy"), seeds))
    return made


Percent = Callable[[Any], str]


def _corruption_table(metrics: Mapping[str, Any], percent: Percent) -> ResultTable:
    """A row for each corruption of ImageNet-C, and the mean relative to AlexNet."""
    rows = [(name, percent(error)) for name, error in metrics["corruption_errors"].items()]
    rows += [("mCE, relative to AlexNet", percent(metrics["mce"]))] if "mce" in metrics else []
    return ResultTable("Error by corruption", ("corruption", "error"), rows)


def _label_table(metrics: Mapping[str, Any], provenance: Mapping[str, Any], percent: Percent) -> ResultTable:
    """A row for each set of labels that the predictions were compared with."""
    sets = {str(provenance.get("labels", "original")): metrics}
    others = {name: numbers for name, numbers in metrics.items() if isinstance(numbers, Mapping)}
    sets |= {name: numbers for name, numbers in others.items() if "accuracy" in numbers}
    rows = [
        (
            name,
            percent(v.get("accuracy")),
            interval_text(v.get("accuracy_interval")),
            percent(v.get("top5_accuracy")),
            f"{v.get('correct', 0):,}",
            f"{v.get('total', 0):,}",
            percent(v.get("majority_class")),
        )
        for name, v in sets.items()
    ]
    header = ("labels", "accuracy", "95 %", "top-5", "correct", "images", "majority")
    return ResultTable("Accuracy by set of labels", header, rows)


def _fewshot_table(job: str, metrics: Mapping[str, Any], percent: Percent) -> ResultTable:
    """A row for each data set and number of shots, and the means over several data sets."""
    rows: list[Sequence[str]] = []
    for data_set, by_shots in metrics["data_sets"].items():
        majority = percent(metrics.get("baselines", {}).get(data_set, {}).get("majority_class"))
        rows += [
            (
                data_set,
                shots,
                *(percent(v.get(key)) for key in ("accuracy", "std", "mean_per_class")),
                majority,
                f"{v['l2']:g}" if "l2" in v else interval_text(v.get("accuracy_interval")),
            )
            for shots, v in by_shots.items()
        ]
    if (number := len(metrics["data_sets"])) > 1:
        means = metrics["accuracy"].items()
        rows += [(f"mean of {number}", shots, percent(value), "", "", "", "") for shots, value in means]
    if job == "probe":  # no draws, and no l2
        header: Sequence[str] = ("data set", "head", "accuracy", "95 %", "per class", "majority")
        shown, first = [(*r[:3], r[6], *r[4:6]) for r in rows], int(number == 1)  # one set needs no name
        return ResultTable("Accuracy of frozen features", header[first:], [r[first:] for r in shown])
    header = ("data set", "shots", "accuracy", "std", "per class", "majority", "l2")
    return ResultTable("Few-shot accuracy", header, rows)


def _vtab_table(metrics: Mapping[str, Any], percent: Percent) -> ResultTable:
    """A row for each task and group, and the means, beside the paper's on the same tasks.

    80 columns have no space for both standard deviations.
    """
    paper: Mapping[str, Any] = metrics.get("paper") or {}
    second = ("std", "std") if _has_seeds(metrics) else ("per class", "mean_per_class")

    def papers(part: str, name: str) -> list[str]:
        values = [_number(column[part].get(name)) for column in paper.values()]
        return ["" if value is None else f"{value:.1%}" for value in values]

    shown = ("mean", second[1], "majority_class")
    rows: list[Sequence[str]] = [
        (name, *(percent(row.get(key)) for key in shown), *papers("tasks", name))
        for name, row in metrics["tasks"].items()
    ]
    rows += [
        (f"group {name}", percent(value), "", "", *papers("groups", name))
        for name, value in (metrics.get("groups") or {}).items()
    ]
    std = percent(metrics.get("std")) if _has_seeds(metrics) else ""
    means = [f"{column['mean']:.1%}" for column in paper.values()]
    rows.append((metrics.get("label", "mean"), percent(metrics.get("mean")), std, "", *means))
    rows.append(("mean of the groups", percent(metrics.get("mean_of_groups")), "", "", *[""] * len(paper)))
    caption = "VTAB by task and group" + "; to the right, the paper's results (Table 9)" * bool(paper)
    return ResultTable(caption, ("task", "accuracy", second[0], "majority", *paper), rows)


def result_blocks(name: str, run: RunRecords) -> list[Block]:
    """Return the tables and charts of a result; `name` is the prefix of their ids."""
    metrics = run.metrics
    tables = result_tables(run.job, metrics, run.provenance, missing=DASH)
    if run.job == "vtab" and tables:
        return _vtab(name, metrics, tables[0])
    made = [table(one.caption, one.header, one.rows) for one in tables]
    if isinstance(metrics.get("data_sets"), Mapping):
        return [*(_fewshot_chart(name, metrics["data_sets"]) if run.job == "fewshot" else []), *made]
    if isinstance(metrics.get("max_difference"), Mapping):
        files = [(kind, f"{value:.1e}") for kind, value in metrics["max_difference"].items()]
        header = ("format", "largest difference, of the logits' deviation")
        made.append(table("Exported files, verified", header, files))
    if isinstance(metrics.get("calibration_bins"), list):
        made += _reliability(name, metrics["calibration_bins"])
    return made


def _reliability(name: str, bins: Sequence[Mapping[str, Any]]) -> list[Block]:
    """Return the accuracy of each bin of probabilities against its mean probability, with their table."""
    filled = [one for one in bins if one["images"]]
    found = tuple((100 * one["probability"], one["accuracy"]) for one in filled)
    lines = [
        Line("the answers", found, dots=True),
        Line("accuracy = probability", ((0.0, 0.0), (100.0, 1.0)), 1),
    ]
    x = "mean probability of the answers, %"
    drawn = line_chart(f"{name}-bins", "Reliability", lines, x=x, unit="percent", from_zero=True)
    rows = [(f"{one['images']:,}", share(one["probability"]), share(one["accuracy"])) for one in filled]
    listed = table("Answers by probability", ("images", "mean probability", "accuracy"), rows)
    return [drawn, listed] if drawn else []


def _fewshot_chart(name: str, data_sets: Mapping[str, Any]) -> list[Block]:
    """Return the accuracy of each data set against the number of shots, if there are several numbers."""
    curves = {
        data_set: tuple(sorted((float(shots), v["accuracy"]) for shots, v in by_shots.items()))
        for data_set, by_shots in data_sets.items()
    }
    lines = [Line(*curve, colour, dots=True) for colour, curve in enumerate(curves.items())]
    if all(len(line.points) < 2 for line in lines):
        return []
    x = "images per class"
    drawn = line_chart(f"{name}-shots", "Few-shot accuracy", lines, x=x, unit="percent", log_x=True)
    return [drawn] if drawn else []


def _vtab(name: str, metrics: Mapping[str, Any], scores: ResultTable) -> list[Block]:
    """Return the table of VTAB with a chart of its tasks and groups, and the settings that were tried."""
    paper, tasks = metrics.get("paper") or {}, metrics["tasks"]
    means = {task: ("tasks", task, row["mean"]) for task, row in tasks.items()}
    means |= {f"group {of}": ("groups", of, mean) for of, mean in (metrics.get("groups") or {}).items()}
    dots = [
        (
            row,
            {"this run": value}
            | {
                f"paper, {column}": number
                for column, numbers in paper.items()
                if (number := numbers[part].get(key)) is not None
            },
        )
        for row, (part, key, value) in means.items()
    ]
    source = (
        "" if paper else "The paper has no results on these tasks; Table 9 is about the 19 tasks of VTAB-1k."
    )
    copies = [f"{task}: {row['copy']}" for task, row in tasks.items() if row.get("copy")]
    note = " ".join([f"{metrics.get('protocol', '')}.", source, *copies])
    rows = [(name, tasks.get(name, {}).get("group", ""), *cells) for name, *cells in scores.rows]
    header = ("task", "group", *scores.header[1:])
    shown = table(scores.caption, header, rows, names=2, note=note)
    drawn = dot_chart(f"{name}-vtab", "Accuracy on each task", dots)
    made = [group("pair", [drawn, shown] if drawn else [shown])]
    if metrics.get("sweep"):
        tried = [
            (
                f"{row['lr']:g}",
                f"{row['total_steps']:,}",
                share(row["val200"]),
                "chosen" * bool(row.get("chosen")),
            )
            for row in metrics["sweep"]
        ]
        caption = "Settings tried on the validation images of all tasks"
        made.append(table(caption, ("lr", "steps", "mean accuracy", "note"), tried))
    return made


def sweep_blocks(name: str, sweep: SweepRecords) -> list[Block]:
    """Return the table of a sweep and a chart of its results; `name` is the prefix of their ids."""
    keys = list(dict.fromkeys(key for row in sweep.rows for key in row["varied"]))
    values = {row["run"]: value for row in sweep.rows if (value := _number(row.get("value"))) is not None}
    best = max(values, key=lambda run: values[run], default="")
    rows = [
        (
            row["run"],
            *(_setting(row["varied"].get(key)) for key in keys),
            row.get("status", ""),
            share(row.get("value")),
            _plain(row.get("loss")),
            _plain(row.get("seconds")),
            "highest" if row["run"] == best else "",
        )
        for row in sweep.rows
    ]
    header = ("run", *keys, "state", "result", "last loss", "seconds", "note")
    made = [table("Runs of this sweep", header, rows)]
    if len(values) > 1:
        unit: Unit = "percent" if all(0 <= value <= 1 for value in values.values()) else "number"
        dots = [(run, {"result": v}) for run, v in zip(shared_words([*values]), values.values(), strict=True)]
        drawn = dot_chart(f"{name}-dots", "Result of each run", dots, unit=unit)
        made += [drawn] if drawn else []
    return [group("pair", made)]


def _setting(value: Any) -> str:
    if value is None:
        return DASH
    return f"{value:g}" if isinstance(value, float) else str(value)


# Provenance


def provenance_tables(run: RunRecords) -> list[Block]:
    """Return tables of the provenance of a run's numbers, and of its environment."""
    made = _recorded(run.provenance)
    # Not the name of the machine, because pages are passed on.
    env = [(name, run.environment[key]) for key, name in _ENVIRONMENT.items() if run.environment.get(key)]
    versions = dict(run.environment.get("versions") or {}) | dict(run.provenance.get("versions") or {})
    if env or versions:
        made.append(_facts("Environment", [*env, *sorted(versions.items())]))
    return made


def repeating_command(run: RunRecords) -> str:
    """Return the command that repeats a run in a new folder."""
    job, recipe, again = run.job or "pretrain", run.folder / RECIPE, f"{run.folder}_again"
    return f"vitctl {job} --recipe {typed(recipe)} --out {typed(again)}"


def _facts(caption: str, rows: Iterable[tuple[str, Any]]) -> Block:
    """Return a table of names and values without a header."""
    return {"kind": "facts", "caption": caption, "rows": list(rows)}


def _recorded(provenance: Mapping[str, Any]) -> list[Block]:
    left = {key: value for key, value in provenance.items() if key != "versions"}
    made = []
    for title, prefixes in _PROVENANCE.items():
        named = {key: left.pop(key) for key in list(left) if key.startswith(tuple(prefixes.split(" ")))}
        plain = {key: value for key, value in named.items() if not isinstance(value, Mapping)}
        tables = {title: plain}
        for key, value in named.items():
            if key in plain:
                continue
            if all(isinstance(inner, Mapping) for inner in value.values()):
                tables |= {f"{_words(key)}: {name}": inner for name, inner in value.items()}
            else:
                tables[_words(key)] = value
        made += [
            _facts(caption, [(_words(key), value) for key, value in rows.items()])
            for caption, rows in tables.items()
            if rows
        ]
    return made


def _words(key: str) -> str:
    return key.replace("_", " ")


def value_text(value: Any) -> str:
    """Write a recorded value for a reader."""
    if value is None or value == "" or value == []:
        return DASH
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(value_text, value))
    if isinstance(value, Mapping):
        return "; ".join(f"{key}: {value_text(item)}" for key, item in value.items())
    return f"{value:g}" if isinstance(value, float) else str(value)
