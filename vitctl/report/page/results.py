"""The numbers of a result as tables and charts: accuracy and its baselines, seeds, rates, few-shot, VTAB
beside Table 9.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vitctl.engine.metrics import verdict
from vitctl.jobs.record.result import unverified_bytes
from vitctl.report.page.chart import Line, dot_chart, line_chart
from vitctl.report.page.found import FoundRun, FoundSweep
from vitctl.report.page.markup import Html, table, tag
from vitctl.report.page.scale import Unit, written
from vitctl.report.sweep_table import shared_words


def share(value: Any) -> str:
    """An accuracy in percent; a dash where there is none."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return written(float(value), "percent") if is_number else "–"


def main_number(run: FoundRun) -> tuple[str, float | None]:
    """The number that stands for a run, and what it is."""
    return number_of(run.job, run.metrics)


def number_of(job: str, metrics: Mapping[str, Any]) -> tuple[str, float | None]:
    """The number that stands for the result of a job, and what it is."""
    if job == "vtab":
        return "mean of the tasks", _number(metrics.get("mean"))
    accuracy = metrics.get("accuracy")
    if isinstance(accuracy, Mapping):
        first = next(iter(accuracy), "")
        return f"{first}-shot accuracy", _number(accuracy.get(first))
    return "accuracy", _number(accuracy)


def tiles(run: FoundRun) -> Html:
    """The numbers that a reader looks for first, large."""
    metrics, what = run.metrics, main_number(run)
    shown: list[tuple[str, str, str]] = []
    if what[1] is not None:
        of = (
            f"{metrics['correct']:,} of {metrics['total']:,} images"
            if {"correct", "total"} <= metrics.keys()
            else ""
        )
        of = f"± {share(metrics['std'])} over seeds" if _has_seeds(metrics) and not of else of
        shown.append((share(what[1]), what[0], of))
    beside = metrics if "majority_class" in metrics else next(iter(metrics.get("baselines", {}).values()), {})
    if "top5_accuracy" in metrics:
        shown.append((share(metrics["top5_accuracy"]), "top-5 accuracy", ""))
    if _number(metrics.get("mean_per_class")) is not None:
        shown.append((share(metrics["mean_per_class"]), "mean per class", ""))
    if _number(metrics.get("mean_of_groups")) is not None:
        shown.append((share(metrics["mean_of_groups"]), "mean of the groups", ""))
    if "majority_class" in beside:
        shown.append(
            (share(beside["majority_class"]), "majority class", f"chance {share(beside.get('chance'))}")
        )
    trained = run.provenance.get("num_train")
    if isinstance(trained, int) and trained:
        shown.append((f"{trained:,}", "training images", ""))
    last = next((r for r in reversed(run.records) if r.get("kind") == "train"), {})
    if isinstance(last.get("step"), int):
        bad, skipped = last.get("num_bad", 0), last.get("num_skipped", 0)
        shown.append((f"{last['step']:,}", "steps", f"{skipped:,} skipped, {bad:,} bad images"))
    items = [
        tag("div", tag("dt", name), tag("dd", tag("strong", value), tag("span", more) if more else None))
        for value, name, more in shown
    ]
    return tag("dl", *items, class_="tiles") if items else Html("")


def warnings(run: FoundRun) -> list[str]:
    """What a reader must know before the numbers: accuracies that a constant prediction reaches, and
    unverified images.
    """
    if run.status != "done":
        return []
    found = [
        verdict(run.metrics),
        unverified_bytes(run.result) if run.result is not None and run.metrics else "",
    ]
    return [text for text in found if text]


def result_tables(name: str, run: FoundRun) -> list[Html]:
    """The tables and charts of a result, by its job."""
    metrics = run.metrics
    if run.job == "vtab" and isinstance(metrics.get("tasks"), Mapping):
        return _vtab(name, metrics)
    if isinstance(metrics.get("data_sets"), Mapping):
        return _fewshot(name, metrics)
    made = [_labels(run)] if run.job == "evaluate" else []
    if isinstance(metrics.get("sweep"), Mapping):
        made.append(_rates(run))
    if isinstance(metrics.get("by_seed"), Mapping):
        rows = [(seed, share(value.get("accuracy"))) for seed, value in metrics["by_seed"].items()]
        made.append(table("Accuracy of each seed", ("seed", "accuracy"), rows))
    if isinstance(metrics.get("max_difference"), Mapping):
        rows = [(kind, f"{value:.1e}") for kind, value in metrics["max_difference"].items()]
        made.append(
            table(
                "Exported files, verified", ("format", "largest difference, of the logits' deviation"), rows
            )
        )
    return made


def run_table(runs: Sequence[FoundRun], links: Sequence[str]) -> Html:
    """One line for each run of the page, with a link to its section."""
    rows = []
    for run, link in zip(runs, links, strict=True):
        what, value = main_number(run)
        last = next((r["loss"] for r in reversed(run.records) if isinstance(r.get("loss"), float)), None)
        name = tag("a", run.name, href=f"#{link}")
        of = what if value is not None else "–"
        loss = "–" if last is None else written(last)
        rows.append((name, share(value), of, _images(run), run.status, run.job, run.recipe_name or "–", loss))
    header = ("run", "result", "of", "images", "state", "job", "recipe", "last loss")
    return table("The runs of this page", header, rows)


def _images(run: FoundRun) -> str:
    """Which images the result of a run is about, in short."""
    split = run.provenance.get("split")
    data = getattr(run.recipe.recipe, "data", None) if run.recipe is not None else None
    name = Path(getattr(data, "path", "")).name or getattr(data, "dataset", "")
    return f"{split} of {name}" if isinstance(split, str) and isinstance(name, str) and name else "–"


def sweep_section(name: str, sweep: FoundSweep) -> list[Html]:
    """The table of a sweep and the chart of its results."""
    keys = list(dict.fromkeys(key for row in sweep.rows for key in row["varied"]))
    values = {row["run"]: value for row in sweep.rows if (value := _number(row.get("value"))) is not None}
    best = max(values, key=lambda run: values[run]) if values else ""
    rows = [
        (
            *(row["run"], *(_value(row["varied"].get(key)) for key in keys), row.get("status", "")),
            *(share(_number(row.get("value"))), _plain(row.get("loss")), _plain(row.get("seconds"))),
            "highest" if row["run"] == best else "",
        )
        for row in sweep.rows
    ]
    header = ("run", *keys, "state", "result", "last loss", "seconds", "note")
    made = [table("Runs of this sweep", header, rows)]
    if len(values) > 1:
        unit: Unit = "percent" if all(0 <= value <= 1 for value in values.values()) else "number"
        short = shared_words(list(values))
        points = [(name, {"result": value}) for name, value in zip(short, values.values(), strict=True)]
        made += [
            chart for chart in [dot_chart(f"{name}-dots", "Result of each run", points, unit=unit)] if chart
        ]
    return [tag("div", *made, class_="pair")]


def _vtab(name: str, metrics: Mapping[str, Any]) -> list[Html]:
    paper, has_seeds = metrics.get("paper") or {}, _has_seeds(metrics)

    def std(row: Mapping[str, Any]) -> str:
        return share(row.get("std")) if has_seeds else "–"

    rows: list[Sequence[object]] = [
        (task, row.get("group", ""), share(row.get("mean")), std(row), share(row.get("majority_class")),
         *(share(column["tasks"].get(task)) for column in paper.values()))
        for task, row in metrics["tasks"].items()
    ]  # fmt: skip
    rows += [
        (
            f"group {group}",
            group,
            share(value),
            "–",
            "–",
            *(share(column["groups"].get(group)) for column in paper.values()),
        )
        for group, value in (metrics.get("groups") or {}).items()
    ]
    rows.append((metrics.get("label", "mean"), "", share(metrics.get("mean")), std(metrics), "–",
                 *(share(column.get("mean")) for column in paper.values())))  # fmt: skip
    columns = [f"paper, {column}" for column in paper]
    header = ("task", "group", "accuracy", "std over seeds", "majority class", *columns)
    beside = (
        "The paper's columns are Table 9 (Appendix D.10), over the same tasks."
        if paper
        else "The paper has no results on these tasks; Table 9 is about the 19 tasks of VTAB-1k."
    )
    copies = [f"{task}: {row['copy']}" for task, row in metrics["tasks"].items() if row.get("copy")]
    note = " ".join([f"{metrics.get('protocol', '')}.", beside, *copies])
    dots = [
        (
            task,
            {
                "this run": row["mean"],
                **{f"paper, {key}": column["tasks"][task] for key, column in paper.items()},
            },
        )
        for task, row in metrics["tasks"].items()
    ] + [
        (
            f"group {group}",
            {"this run": value, **{f"paper, {key}": c["groups"][group] for key, c in paper.items()}},
        )
        for group, value in (metrics.get("groups") or {}).items()
    ]
    drawn = dot_chart(
        f"{name}-vtab", "Accuracy on each task" + " beside the paper's (Table 9)" * bool(paper), dots
    )
    pair = [] if drawn is None else [drawn]
    pair.append(table("VTAB by task and group", header, rows, names=2, note=note))
    made = [tag("div", *pair, class_="pair")]
    if metrics.get("sweep"):
        tried = [(f"{row['lr']:g}", f"{row['total_steps']:,}", share(row["val200"]), "chosen" if row.get("chosen") else "")
                 for row in metrics["sweep"]]  # fmt: skip
        made.append(
            table(
                "Settings tried on the validation images of all tasks",
                ("lr", "steps", "mean accuracy", "note"),
                tried,
            )
        )
    return made


def _fewshot(name: str, metrics: Mapping[str, Any]) -> list[Html]:
    beside = metrics.get("baselines", {})
    rows = [
        (key, shots, share(v.get("accuracy")), share(v.get("std")), share(v.get("mean_per_class")),
         share(beside.get(key, {}).get("majority_class")), f"{v['l2']:g}" if "l2" in v else "–")
        for key, by_shots in metrics["data_sets"].items() for shots, v in by_shots.items()
    ]  # fmt: skip
    header = (
        "data set",
        "images per class",
        "accuracy",
        "std over draws",
        "mean per class",
        "majority class",
        "L2",
    )
    lines = [
        Line(
            key, tuple(sorted((float(shots), v["accuracy"]) for shots, v in by_shots.items())), at, dots=True
        )
        for at, (key, by_shots) in enumerate(metrics["data_sets"].items())
    ]
    several = any(len(line.points) > 1 for line in lines)
    drawn = line_chart(
        f"{name}-shots", "Few-shot accuracy", lines, x="images per class", unit="percent", log_x=True
    )
    return ([drawn] if drawn and several else []) + [table("Few-shot accuracy", header, rows)]


def _labels(run: FoundRun) -> Html:
    sets = {str(run.provenance.get("labels", "original")): run.metrics}
    sets |= {name: numbers for name, numbers in run.metrics.items() if isinstance(numbers, Mapping)}
    rows = [
        (name, share(v.get("accuracy")), share(v.get("top5_accuracy")), f"{v.get('correct', 0):,}", f"{v.get('total', 0):,}",
         share(v.get("majority_class")))
        for name, v in sets.items()
    ]  # fmt: skip
    return table(
        "Accuracy by set of labels",
        ("labels", "accuracy", "top-5", "correct", "images", "majority class"),
        rows,
    )


def _rates(run: FoundRun) -> Html:
    used, chosen = run.provenance.get("sweep") or {}, run.provenance.get("lr")
    rows = [
        (rate, share(value), "chosen" if _number(chosen) == float(rate) else "")
        for rate, value in run.metrics["sweep"].items()
    ]
    return table(
        f"Learning rates tried on {used.get('split', 'a part of the training images')}",
        ("lr", "accuracy", "note"),
        rows,
    )


def _has_seeds(metrics: Mapping[str, Any]) -> bool:
    """Whether a deviation is one of several seeds."""
    seeds = [metrics, *(metrics.get("tasks") or {}).values()]
    return any(len(one.get("by_seed") or ()) > 1 for one in seeds)


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _value(value: Any) -> str:
    return "–" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _plain(value: Any) -> str:
    number = _number(value)
    return "–" if number is None else written(number)
