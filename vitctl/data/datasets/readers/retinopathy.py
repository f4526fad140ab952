"""Diabetic Retinopathy: photographs of the retina, in five grades."""

import csv
from functools import partial
from pathlib import Path

import numpy as np

from vitctl.data.datasets.readers.files import check_labels, file_items, need, read_lines
from vitctl.data.datasets.readers.graham import process_jpeg
from vitctl.data.writer.items import Item, Originals
from vitctl.errors import DataError

SOLUTION = (
    "https://storage.googleapis.com/kaggle-forum-message-attachments/90528/2877/retinopathy_solution.csv"
)
ARCHIVE = (
    "train.zip.*, test.zip.* (joined with cat) and trainLabels.csv.zip of the Kaggle competition "
    f"diabetic-retinopathy-detection, and {SOLUTION}"
)
CLASS_NAMES = ("no retinopathy", "mild", "moderate", "severe", "proliferative")
USAGE = {"validation": "Public", "test": "Private"}


def read(root: Path) -> dict[str, Originals]:
    """Images are treated as in the benchmark's btgraham-300 when they are read; keys are names like
    `10_left`.

    Both `validation` and `test` come from the competition's test images, by the column Usage of the solution.

    Args:
        root: holds `train/`, `test/`, `trainLabels.csv` and `retinopathy_solution.csv`.

    Raises:
        DataError: files are missing or malformed.
    """
    table = _table(need(root, "trainLabels.csv", archive=ARCHIVE), ("image", "level"))
    solution_path = need(root, "retinopathy_solution.csv", archive=ARCHIVE)
    solution = _table(solution_path, ("image", "level", "Usage"))
    splits = {"train": _split(need(root, "train", archive=ARCHIVE), table)}
    images = need(root, "test", archive=ARCHIVE)
    for split, usage in USAGE.items():
        rows = [row for row in solution if row["Usage"] == usage]
        if not rows:
            raise DataError(f"{solution_path}: no row has Usage {usage}")
        splits[split] = _split(images, rows)
    return splits


def _split(folder: Path, rows: list[dict[str, str]]) -> Originals:
    try:
        levels = np.array([int(row["level"]) for row in rows])
    except ValueError:
        raise DataError(f"{folder}: levels should be 0 to {len(CLASS_NAMES) - 1}") from None
    labels = check_labels(levels, len(CLASS_NAMES), folder).tolist()
    keys = [row["image"] for row in rows]
    items = file_items(folder, [f"{key}.jpeg" for key in keys], labels, keys)
    treated = [Item(item.key, item.label, partial(_treated, item)) for item in items]
    return Originals(treated, CLASS_NAMES, "Diabetic Retinopathy, btgraham-300")


def _treated(photograph: Item) -> bytes:
    return process_jpeg(photograph.read())


def _table(path: Path, columns: tuple[str, ...]) -> list[dict[str, str]]:
    rows = list(csv.DictReader(read_lines(path)))
    if not rows or any(row.get(name) is None for row in rows for name in columns):
        raise DataError(f"{path}: every row should have the columns {', '.join(columns)}")
    return rows
