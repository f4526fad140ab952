"""A classifier's answers, as blocks of a page: confusions, worst classes, wrong answers, examples.

Pictures are embedded in the page, within its `Budget` of bytes.
"""

import base64
import csv
import io
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from vitctl.data.images.decode import BadSample, decode, encode
from vitctl.data.source.views import Source
from vitctl.errors import CheckpointError, VitctlError
from vitctl.jobs.record.answer_table import SUSPECTS, answers_digest, is_right, read_answers
from vitctl.report.charts import Block
from vitctl.report.result_tables import MISSING, group, paragraph, share, table
from vitctl.report.run_records import RunRecords
from vitctl.system.files import read_bytes
from vitctl.system.text import count_text

if TYPE_CHECKING:  # needs torch
    from vitctl.report.answers import Answers

CONFUSION, INSPECT = "confusion.csv", "inspect"
_MAX_CONFUSION_BYTES, _MAX_PICTURE_BYTES = 64 * 2**20, 16 * 2**20
_MAX_CLASSES_IN_NUMBERS, _MAX_CLASSES_IN_COLOURS = 12, 60  # limits for a confusion matrix
_NUM_CONFUSIONS, _NUM_WORST, _NUM_WRONG, _NUM_EXAMPLES, _NUM_LISTED = 12, 5, 4, 12, 200
_THUMBNAIL = 112  # longer side in pixels
_MAX_WIDTH, _MAX_PICTURES = 1400, 40
_ABOUT = {  # pictures of `vitctl inspect`
    "filters": "the patterns that the first layer looks for, the strongest first",
    "position_similarity": "how alike two places of the image are to the network",
    "attention_distance": "how far a head looks from a patch, on average",
    "rollout": "how much of each patch reaches the answer, through the attention of all blocks",
    "rollout_sheet": "the images, and beside each the patches that reach the answer",
}

Counts = Counter[tuple[str, str]]  # images by class and answer


@dataclass
class Budget:
    """The bytes of pictures that still fit in the page."""

    left: int

    def picture(
        self, content: bytes, kind: str, alt: str, size: tuple[int, int] | None = None
    ) -> Block | None:
        """Return an embedded picture, or None if it does not fit."""
        address = f"data:{kind};base64,{base64.b64encode(content).decode()}"
        if len(address) > self.left:
            return None
        self.left -= len(address)
        return {"kind": "picture", "address": address, "alt": alt, "size": size}


# Confusions


def read_counts(folder: Path, answers: "Answers | None") -> Counts:
    """Return the confusions that an evaluation counted (confusion.csv), else those of the answers."""
    if (folder / CONFUSION).is_file():
        content = read_bytes(folder / CONFUSION, _MAX_CONFUSION_BYTES, error=CheckpointError)
        rows = list(csv.reader(content.decode(errors="replace").splitlines()))[1:]
        return Counter({(r[0], r[1]): int(r[2]) for r in rows if len(r) == 3 and r[2].isdecimal()})
    given = answers.rows if answers is not None else []
    return Counter((row["truth"], row["answer"]) for row in given if row["truth"] is not None)


def confusion_blocks(counts: Counts) -> list[Block]:
    """Return the confusion matrix, unless it has many classes, and the most frequent confusions."""
    totals, made = _totals(counts), []
    names = sorted({name for pair in counts for name in pair}, key=_natural)
    if len(names) <= _MAX_CLASSES_IN_COLOURS:
        kind = "matrix" if len(names) <= _MAX_CLASSES_IN_NUMBERS else "map"
        made.append({"kind": kind, "names": names, "cells": counts, "totals": totals})
    wrong = sorted((-images, *pair) for pair, images in counts.items() if pair[0] != pair[1])
    rows = [
        (own, answer, f"{-images:,}", share(-images / totals[own]))
        for images, own, answer in wrong[:_NUM_CONFUSIONS]
    ]
    header = ("class", "answered as", "images", "of the class")
    return [*made, table("Most frequent confusions", header, rows, names=2)] if rows else made


def _totals(counts: Counts) -> Counter[str]:
    totals: Counter[str] = Counter()
    for (label, _), images in counts.items():
        totals[label] += images
    return totals


def worst_classes(counts: Counts, answers: "Answers | None", budget: Budget) -> list[Block]:
    """Return the classes with the lowest accuracy, with misclassified images if they can be read."""
    totals = _totals(counts)
    worst = sorted(totals, key=lambda n: (counts[n, n] / (totals[n] or 1), -totals[n], _natural(n)))
    rows = []
    for name in worst[:_NUM_WORST]:
        right, total = counts[name, name], totals[name]
        if right < total:
            pictures = _wrong_pictures(name, answers, budget) if answers is not None else []
            rows.append((name, share(right / total), f"{right:,} of {total:,}", pictures or MISSING))
    header = ("class", "accuracy", "correct", "wrong answers")
    return [table("Worst classes", header, rows)] if rows else []


def _wrong_pictures(name: str, answers: "Answers", budget: Budget) -> list[Block]:
    wrong = [row for row in answers.rows if row["truth"] == name and not row["is_right"]]
    return [
        picture | {"caption": f"as {row['answer']}"}
        for row in wrong[:_NUM_WRONG]
        if (
            picture := thumbnail(
                answers.source, row["sample"], f"class {name}, answered as {row['answer']}", budget
            )
        )
    ]


def _natural(name: str) -> tuple[int, str]:
    """Return a sort key: small numbers by value, then all other names."""
    return (int(name), "") if name.isascii() and name.isdecimal() and len(name) < 10 else (10**10, name)


# Wrong answers


def wrong_answers(run: RunRecords, answers: "Answers | None", budget: Budget) -> list[Block]:
    """Return the most confident wrong answers with their images, and a list of more.

    Args:
        run: the answers that it recorded take precedence.
        answers: those computed for the page, and the images; None if there are none.
    """
    rows, total = _recorded(run), run.metrics.get("total", 0)
    if rows is None and answers is not None:
        total = len(answers.rows)
        rows = [row for row in answers.rows if not row["is_right"] and row["truth"] is not None]
    if not rows:
        return []
    rows.sort(key=lambda row: -row["probability"])
    items = []
    if answers is not None:
        for row in rows[:_NUM_EXAMPLES]:
            alt = f"{row['path']}, of class {row['truth']}"
            picture = thumbnail(answers.source, row["sample"], alt, budget)
            bars = [(row["answer"], row["probability"]), (row["truth"], row["truth_probability"])]
            bars = [(name, probability) for name, probability in bars if probability is not None]
            if picture is not None:
                items.append({"picture": picture, "label": row["truth"], "is_right": False, "bars": bars})
    listed = [
        (
            *(row[name] for name in ("path", "truth", "answer")),
            *(share(row[name]) for name in ("probability", "truth_probability")),
            row.get("is_suspect", MISSING),
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
    """Return the wrong rows of an evaluation's answers; None if they are missing or were changed."""
    file, suspects = Path(run.result.files.get("answers", "") if run.result else ""), run.folder / SUSPECTS
    try:
        if run.provenance.get("answers_sha256") != answers_digest(file):
            return None
        suspected = {row["path"] for row in read_answers(suspects)} if suspects.is_file() else set()
        rows = read_answers(file)
    except VitctlError:
        return None
    return [
        row | {"sample": n, "is_suspect": "yes" * (row["path"] in suspected)}
        for n, row in enumerate(rows)
        if not is_right(row)
    ]


# Examples and pictures


def examples(answers: "Answers", budget: Budget) -> Block:
    total, items = len(answers.rows), []
    number = min(_NUM_EXAMPLES, total)
    for row in (answers.rows[n * total // number] for n in range(number)):
        label = row["truth"]
        picture = thumbnail(answers.source, row["sample"], f"a test image of class {label}", budget)
        if picture is not None:
            shown = {"label": label, "is_right": row["is_right"], "bars": row["best"][:3]}
            items.append({"picture": picture} | shown)
    return {"kind": "examples", "items": items}


def thumbnail(source: Source, sample: int, alt: str, budget: Budget) -> Block | None:
    """Return a small JPEG of a sample, or None if it cannot be read or does not fit."""
    try:
        image = Image.fromarray(np.ascontiguousarray(decode(source.read(sample))))
    except (BadSample, OSError):
        return None
    scale = _THUMBNAIL / max(image.size)
    size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
    # Enlarge small images without blur.
    method = Image.Resampling.NEAREST if scale >= 2 else Image.Resampling.LANCZOS
    return budget.picture(encode(image.resize(size, method), "JPEG", quality=82), "image/jpeg", alt, size)


def inspect_pictures(run: Path, budget: Budget) -> tuple[list[Block], list[str]]:
    """Return the PNG files under RUN/inspect, and a line for each that cannot be shown."""
    files = [path for path in sorted((run / INSPECT).rglob("*.png")) if path.is_file()]
    pictures, problems = [], []
    for path in files[:_MAX_PICTURES]:
        name = str(path.relative_to(run))
        title = " ".join(path.stem.replace("_", " ").replace("-", " ").split()) or name
        try:
            content = read_bytes(path, _MAX_PICTURE_BYTES, error=CheckpointError)
            with Image.open(io.BytesIO(content), formats=("PNG",)) as image:
                image.thumbnail((_MAX_WIDTH, image.height))
                content = encode(image, "PNG", optimize=True)
        except (VitctlError, OSError, ValueError, Image.DecompressionBombError) as error:
            problems.append(f"{name}: {error}")
            continue
        picture = budget.picture(content, "image/png", f"{title}, drawn by vitctl inspect")
        if picture is None:
            problems.append(f"{name}: the page has no room for it")
        else:
            about = f": {_ABOUT[path.stem]}" if path.stem in _ABOUT else ""
            pictures.append(picture | {"caption": title[:1].upper() + title[1:] + about})
    if len(files) > _MAX_PICTURES:
        problems.append(f"more than {_MAX_PICTURES} pictures; the others are in {INSPECT}/")
    return pictures, problems
