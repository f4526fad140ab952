"""The wrong answers of a classifier, the most confident first, as blocks of the HTML report."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitctl.data.source.views import sample_key
from vitctl.errors import VitctlError
from vitctl.jobs.record.answer_table import SUSPECTS, answers_digest, is_right, read_answers
from vitctl.report.charts import Block
from vitctl.report.class_tables import Budget, thumbnail
from vitctl.report.result_tables import DASH, group, paragraph, share, table
from vitctl.report.run_records import RunRecords
from vitctl.system.text import count_text

if TYPE_CHECKING:  # needs torch
    from vitctl.report.answers import Answers

_NUM_SHOWN, _NUM_LISTED = 12, 200


def wrong_answers(run: RunRecords, answers: "Answers | None", budget: Budget) -> list[Block]:
    """Return the most confident wrong answers with their images, and a list of more.

    Args:
        run: its answers to all images are taken if it recorded them.
        answers: those that were computed for the page, and the images; None if there are none.
        budget: for pictures.
    """
    rows = _recorded(run)
    source, total = (answers.whole if answers else None), run.metrics.get("total", 0)
    if rows is None and answers is not None:
        rows, source, total = _computed(answers), answers.source, len(answers.labels)
    if not rows:
        return []
    rows.sort(key=lambda row: -row["probability"])
    items: list[Block] = []
    for row in rows[:_NUM_SHOWN] if source is not None else ():
        assert source is not None
        label, share_of_label = row["truth"], row["truth_probability"]
        picture = thumbnail(source, row["sample"], f"{row['path']}, of class {label}", budget)
        bars = [(row["answer"], row["probability"])]
        bars += [(label, share_of_label)] if share_of_label is not None else []
        if picture is not None:
            items.append({"picture": picture, "label": label, "is_right": False, "bars": bars})
    listed = [
        (
            *(row[name] for name in ("path", "truth", "answer")),
            *(share(row[name]) for name in ("probability", "truth_probability")),
            ("yes" if row["is_suspect"] else "") if "is_suspect" in row else DASH,
        )
        for row in rows[:_NUM_LISTED]
    ]
    header = ("image", "class", "answer", "probability", "of the class", "label suspected")
    title = f"{count_text(len(rows), 'wrong answer')} to {count_text(total, 'image')}"
    note = f"The most confident {_NUM_LISTED}." if len(rows) > _NUM_LISTED else ""
    listing = table("Wrong answers, the most confident first", header, listed, names=3, note=note)
    return [
        paragraph(f"{title}, the most confident first.", "note"),
        {"kind": "examples", "items": items},
        {"kind": "fold", "title": "List of wrong answers", "blocks": [group("listing", [listing])]},
    ]


def _recorded(run: RunRecords) -> list[dict[str, Any]] | None:
    """Return the wrong rows of the answers that an evaluation wrote; None if there are none, or they were
    changed.
    """
    file, suspects = Path(run.result.files.get("answers", "") if run.result else ""), run.folder / SUSPECTS
    try:
        if run.provenance.get("answers_sha256") != answers_digest(file):
            return None
        suspected = {row["path"] for row in read_answers(suspects)} if suspects.is_file() else set()
        rows = enumerate(read_answers(file))
    except VitctlError:
        return None
    more = (row | {"sample": n, "is_suspect": row["path"] in suspected} for n, row in rows)
    return [row for row in more if not is_right(row)]


def _computed(answers: "Answers") -> list[dict[str, Any]]:
    names, keys = answers.source.class_names, ("sample", "path", "truth", "answer", "probability")
    wrong = [n for n, is_right in enumerate(answers.is_right) if not is_right and answers.labels[n] >= 0]
    cells = (
        (
            n,
            sample_key(answers.source, n),
            names[answers.labels[n]],
            names[answers.best[n, 0]],
            float(answers.shares[n, 0]),
        )
        for n in wrong
    )
    return [dict(zip(keys, row, strict=True)) | {"truth_probability": None} for row in cells]
