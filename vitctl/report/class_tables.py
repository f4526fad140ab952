"""What a classifier answers, as blocks of the HTML report: confusions, worst classes, examples; and pictures.

Pictures are embedded in the page, within its `Budget` of bytes.
"""

import base64
import csv
import io
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from PIL import Image

from vitctl.data.images.decode import BadSample, decode
from vitctl.data.source.views import Source
from vitctl.errors import CheckpointError, VitctlError
from vitctl.report.charts import Block
from vitctl.report.result_tables import DASH, share, table
from vitctl.system.files import read_bytes

if TYPE_CHECKING:  # needs torch
    from vitctl.report.answers import Answers

CONFUSION, INSPECT = "confusion.csv", "inspect"
_MAX_CONFUSION_BYTES, _MAX_PICTURE_BYTES = 64 * 2**20, 16 * 2**20
_MAX_CLASSES_IN_NUMBERS, _MAX_CLASSES_IN_COLOURS = 12, 60  # of a confusion matrix
_NUM_CONFUSIONS, _NUM_WORST, _NUM_WRONG, _NUM_EXAMPLES = 12, 5, 4, 12
_THUMBNAIL = 112  # pixels of the longer side
_MAX_WIDTH, _MAX_PIXELS, _MAX_PICTURES = 1400, 40_000_000, 40
_KINDS = {".png": "image/png", ".svg": "image/svg+xml"}


class Count(NamedTuple):
    """The number of images of a class that were answered as a class."""

    label: str
    answer: str
    images: int


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


def read_counts(folder: Path, answers: "Answers | None") -> list[Count]:
    """Return the confusions that an evaluation counted (confusion.csv), else those of the answers."""
    if (folder / CONFUSION).is_file():
        content = read_bytes(folder / CONFUSION, _MAX_CONFUSION_BYTES, error=CheckpointError)
        rows = list(csv.reader(content.decode(errors="replace").splitlines()))[1:]
        return [Count(row[0], row[1], int(row[2])) for row in rows if len(row) == 3 and row[2].isdecimal()]
    if answers is None:
        return []
    names = answers.source.class_names
    pairs = Counter(zip(answers.labels.tolist(), answers.best[:, 0].tolist(), strict=True))
    return [Count(names[own], names[answer], n) for (own, answer), n in sorted(pairs.items()) if own >= 0]


def confusion_blocks(counts: Sequence[Count]) -> list[Block]:
    """Return the confusion matrix, unless it has many classes, and the most frequent confusions."""
    totals = _totals(counts)
    names = sorted({name for count in counts for name in (count.label, count.answer)}, key=_natural)
    made = []
    if len(names) <= _MAX_CLASSES_IN_COLOURS:
        kind = "matrix" if len(names) <= _MAX_CLASSES_IN_NUMBERS else "map"
        cells = {(label, answer): images for label, answer, images in counts}
        made.append({"kind": kind, "names": names, "cells": cells, "totals": totals})
    wrong = [count for count in counts if count.label != count.answer]
    wrong.sort(key=lambda count: (-count.images, count.label, count.answer))
    rows = [
        (own, answer, f"{images:,}", share(images / totals[own]))
        for own, answer, images in wrong[:_NUM_CONFUSIONS]
    ]
    header = ("class", "answered as", "images", "of the class")
    return [*made, table("Most frequent confusions", header, rows, names=2)] if rows else made


def _totals(counts: Sequence[Count]) -> Counter[str]:
    totals: Counter[str] = Counter()
    for label, _, images in counts:
        totals[label] += images
    return totals


def worst_classes(counts: Sequence[Count], answers: "Answers | None", budget: Budget) -> list[Block]:
    """Return the classes with the lowest accuracy, with wrongly answered images if they can be read."""
    totals, right = _totals(counts), _totals([count for count in counts if count.label == count.answer])
    worst = sorted(
        totals, key=lambda name: (right[name] / (totals[name] or 1), -totals[name], _natural(name))
    )
    rows = []
    for name in worst[:_NUM_WORST]:
        if right[name] < totals[name]:
            correct = f"{right[name]:,} of {totals[name]:,}"
            pictures = _wrong_answers(name, answers, budget) if answers is not None else []
            rows.append((name, share(right[name] / totals[name]), correct, pictures or DASH))
    header = ("class", "accuracy", "correct", "wrong answers")
    return [table("Worst classes", header, rows)] if rows else []


def _wrong_answers(name: str, answers: "Answers", budget: Budget) -> list[Block]:
    names = answers.source.class_names
    if name not in names:
        return []
    wrong = (answers.labels == names.index(name)) & ~answers.is_right
    pictures = []
    for sample in np.flatnonzero(wrong)[:_NUM_WRONG].tolist():
        answer = names[answers.best[sample, 0]]
        picture = thumbnail(answers.source, sample, f"class {name}, answered as {answer}", budget)
        if picture is not None:
            pictures.append(picture | {"caption": f"as {answer}"})
    return pictures


def _natural(name: str) -> tuple[int, str]:
    """Sort key: small numbers by value, then all other names."""
    return (int(name), "") if name.isascii() and name.isdecimal() and len(name) < 10 else (10**10, name)


# Examples and pictures


def examples(answers: "Answers", budget: Budget) -> Block:
    """Return evenly spaced images with their answers."""
    names, items, number = answers.source.class_names, [], min(_NUM_EXAMPLES, len(answers.labels))
    for sample in (n * len(answers.labels) // number for n in range(number)):
        label = names[answers.labels[sample]]
        picture = thumbnail(answers.source, sample, f"a test image of class {label}", budget)
        if picture is not None:
            best = zip(answers.best[sample][:3], answers.shares[sample].tolist(), strict=False)
            bars = [(names[answer], share) for answer, share in best]
            items.append(
                {"picture": picture, "label": label, "is_right": bool(answers.is_right[sample]), "bars": bars}
            )
    return {"kind": "examples", "items": items}


def thumbnail(source: Source, sample: int, alt: str, budget: Budget) -> Block | None:
    """Return a small JPEG of a sample, or None if it cannot be read or does not fit."""
    try:
        image = Image.fromarray(np.ascontiguousarray(decode(source.read(sample))))
    except (BadSample, OSError):
        return None
    scale = _THUMBNAIL / max(image.size)
    size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
    # Small images are enlarged without blur.
    method = Image.Resampling.NEAREST if scale >= 2 else Image.Resampling.LANCZOS
    file = io.BytesIO()
    image.resize(size, method).save(file, "JPEG", quality=82)
    return budget.picture(file.getvalue(), "image/jpeg", alt, size)


def inspect_pictures(run: Path, budget: Budget) -> tuple[list[Block], list[str]]:
    """Return the PNG and SVG files under RUN/inspect, and a line for each that cannot be shown.

    An SVG is shown as an image, in which browsers run no scripts. If both formats exist, the smaller is
    taken.
    """
    files: dict[Path, Path] = {}
    for path in sorted((run / INSPECT).rglob("*")):
        if path.suffix.lower() in _KINDS and path.is_file() and not path.is_symlink():
            other = files.get(path.with_suffix(""))
            if other is None or path.stat().st_size < other.stat().st_size:
                files[path.with_suffix("")] = path
    pictures, problems = [], []
    for path in list(files.values())[:_MAX_PICTURES]:
        name = str(path.relative_to(run))
        title = " ".join(path.stem.replace("_", " ").replace("-", " ").split()) or name
        kind = _KINDS[path.suffix.lower()]
        try:
            picture = budget.picture(_picture_bytes(path), kind, f"{title}, drawn by vitctl inspect")
        except (VitctlError, OSError, ValueError, Image.DecompressionBombError) as error:
            problems.append(f"{name}: {error}")
            continue
        if picture is None:
            problems.append(f"{name}: the page has no room for it")
        else:
            pictures.append(picture | {"caption": title[:1].upper() + title[1:]})
    if len(files) > _MAX_PICTURES:
        problems.append(f"more than {_MAX_PICTURES} pictures; the others are in {INSPECT}/")
    return pictures, problems


def _picture_bytes(path: Path) -> bytes:
    """Return the bytes of a picture, or of a smaller copy if a PNG is wider than needed."""
    content = read_bytes(path, _MAX_PICTURE_BYTES, error=CheckpointError)
    if path.suffix.lower() == ".svg":
        return content
    with Image.open(io.BytesIO(content), formats=("PNG",)) as image:
        if image.width * image.height > _MAX_PIXELS:
            raise CheckpointError(f"{image.width} x {image.height} pixels are too many")
        if image.width <= _MAX_WIDTH:
            image.load()
            return content
        smaller = image.convert("RGB").resize(
            (_MAX_WIDTH, max(1, round(image.height * _MAX_WIDTH / image.width)))
        )
    file = io.BytesIO()
    smaller.save(file, "PNG", optimize=True)
    return file.getvalue()
