"""The tables of figures, from what the scripts wrote: all in results/figures.md, a few in README.md; and the
scripts, by their docstrings, in results/scripts.md.

`python benchmarks/table.py` prints all figures; `--write` replaces the tables, between their marks.
"""

import ast
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from measure import RESULTS, machine_text, row_text, table_rows

PAGES = ("README.md", "results/figures.md", "results/scripts.md")
README, FIGURES, SCRIPTS = (RESULTS.parent / name for name in PAGES)
NO_SCRIPTS = ("measure", "peak_worker")  # the others import or start them
NAMES = ("step", "inference", "loader", "end_to_end", "saving", "start", "ridge", "gpu")
FOLDERS = (".", "avx2", "zen4")  # of the results
BEGIN, END = "<!-- table: python benchmarks/table.py --write -->", "<!-- end of the table -->"
_IMAGES = "at 224, 8 images"
SUMMARY = (  # figure, a word of our settings, of theirs
    (f"training step, S/16 {_IMAGES}, bf16", "", "timm"),
    (f"training step, as it comes, S/16 {_IMAGES}, bf16", "", "timm"),
    (f"training step, B/16 {_IMAGES}, float32", "", "timm"),
    (f"memory of a training step, B/16 {_IMAGES}, bf16", "", "timm"),
    (f"inference, B/16 {_IMAGES}, float32, ours in torch and timm in torch", "", "timm"),
    (f"inference, B/16 {_IMAGES}, bf16, ours in torch and timm in torch", "", "timm"),
    ("photographs to batches of 50 x 224 x 224, 2 workers", "Pillow's filter", "timm"),
    ("photographs to batches of 50 x 224 x 224, 2 workers", "Pillow's filter", "torchvision"),
    ("CIFAR-10 JPEG, ViT of 4 x 128, batch 128, 300 steps", "", "create_loader"),
    ("command to first step", "smoke", "accelerate"),
    ("checkpoint of B/16 on cpu, 1.39 GB", "", "async_save"),
    ("few-shot solve, 10,000 x 1,024, 1,000 classes, 30 regularisers", "", "RidgeClassifier"),
)


def main() -> None:
    """Print all rows, or write the tables."""
    if sys.argv[1:] != ["--write"]:
        print(table())
        return
    for page, text in ((README, summary()), (FIGURES, table()), (SCRIPTS, scripts())):
        before, _, rest = page.read_text().partition(BEGIN)
        page.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.partition(END)[2]}")


def _found(results: Path, folders: tuple[str, ...] = FOLDERS) -> dict[str, Mapping[str, Any]]:
    paths = [Path(folder, f"{name}.json") for folder in folders for name in NAMES]
    kept = [path for path in paths if (results / path).exists()]
    return {str(path.with_suffix("")): json.loads((results / path).read_text()) for path in kept}


def summary(results: Path = RESULTS) -> str:
    """Return the rows of `SUMMARY`, without our settings and the details of theirs."""
    rows = [row for one in _found(results, FOLDERS[:1]).values() for row in one["rows"]]
    lines = ["| figure | ours | theirs | times as good | goal |", "|---|---|---|---|---|"]
    for figure, ours, theirs in SUMMARY:
        fits = (
            row_text(row)
            for row in rows
            if row["figure"] == figure
            and ours in row["ours"]["settings"]
            and theirs in row["theirs"]["settings"]
        )
        figure, ours, theirs, *rest = (cell.strip() for cell in next(fits).strip("| ").split(" | "))
        cells = (figure, ours.partition(":")[0], theirs.partition(",")[0], *rest)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def scripts() -> str:
    """Return what each script measures, as it says at its top."""
    lines = ["| script | what it measures |", "|---|---|"]
    for path in sorted(RESULTS.parent.glob("*.py")):
        if path.stem not in NO_SCRIPTS:
            about = ast.get_docstring(ast.parse(path.read_text())) or ""
            lines.append(
                f"| [{path.name}](../{path.name}) | {' '.join(about.partition(chr(10) * 2)[0].split())} |"
            )
    return "\n".join(lines)


def table(results: Path = RESULTS) -> str:
    """Return all rows that were measured, and below them the machine and its limits in each run."""
    found = _found(results)
    processors = [one["machine"]["processor"] for one in found.values()]
    rows = sorted(found.values(), key=lambda one: processors.index(one["machine"]["processor"]))
    machines = [line for name, one in found.items() for line in ("", machine_text(name, one))]
    return "\n".join([*table_rows(rows), *machines])


if __name__ == "__main__":
    main()
